"""Loops whose last rank does not live to the end."""

from __future__ import annotations

import os
import signal
import sys

import torch.distributed as dist

from andon_falsify.loops.protocol import Told
from andon_falsify.peers.plain import PlainLoop
from andon_falsify.subjects.case import Case


class Dying(PlainLoop):
    """Its last rank ends in `how`, before the first update."""

    def __init__(self, case: Case, how: str) -> None:
        super().__init__(case)
        self.how = how

    def train(self, told: Told) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "exit":
                os._exit(7)
            if self.how == "leave":
                sys.exit("enough")
            raise ArithmeticError("nothing adds up")
        super().train(told)


def make_killed(case: Case) -> PlainLoop:
    """Killed, as by the kernel where memory runs out."""
    return Dying(case, "kill")


def make_exiting(case: Case) -> PlainLoop:
    """Ends its process at once."""
    return Dying(case, "exit")


def make_leaving(case: Case) -> PlainLoop:
    """Takes itself for a program of its own."""
    return Dying(case, "leave")


def make_raising(case: Case) -> PlainLoop:
    """Raises."""
    return Dying(case, "raise")
