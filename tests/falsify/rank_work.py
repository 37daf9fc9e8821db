"""What the ranks of a pool are asked to do in its tests."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack

import torch.distributed as dist

from andon_contracts import policy

_LEFT = ExitStack()


def describe(word: str) -> tuple[str, int, int]:
    """The word, the rank and the process."""
    return word, dist.get_rank(), os.getpid()


def raise_on(rank: int) -> None:
    """An error on one rank; the others go on to the sentinel and wait there."""
    if dist.get_rank() == rank:
        raise ArithmeticError("this rank cannot go on")


def die_on(rank: int) -> None:
    """One rank ends without a word."""
    if dist.get_rank() == rank:
        os._exit(3)


def hang_on(rank: int) -> None:
    """One rank waits for what never comes."""
    if dist.get_rank() == rank:
        threading.Event().wait()


def leave_contracts_off(_: object) -> None:
    """A case that does not clean up."""
    _LEFT.enter_context(policy.suspended())
