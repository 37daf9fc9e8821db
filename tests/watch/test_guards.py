"""A thread that guards a watched loop ends by an error of its own: all ranks halt for that, or all say so."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import andon
from andon_contracts.violation import Halted
from tests.support.ranks import run_ranks

PATIENCE_S = 30.0


def _fail(*_: object, **__: object) -> None:
    raise LookupError("nobody foresaw this")


def _break_link(w: andon.Watch) -> None:  # type: ignore[name-defined]
    w._cord._link._progress = _fail


def _break_cord(w: andon.Watch) -> None:  # type: ignore[name-defined]
    w._cord._monitor._look = _fail


GUARDS = {"andon-halt-link": _break_link, "andon-cord": _break_cord}
WORDS = (
    "rank 1 of 2 is unguarded at step 1, before its forward pass, which is no violation: "
    "its thread {}, which guards it, ended by an error of its own (LookupError: nobody foresaw this)."
)


def _lose(action: str, wound: Callable[..., None], folder: str) -> str:
    """Rank 1 loses a guard while both sleep; with `warn` both go on, once both have said so."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = [Path(folder, f"said-{rank}") for rank in range(2)]
    os.dup2(os.open(said[dist.get_rank()], os.O_WRONLY | os.O_CREAT), 2)
    with andon.watch(model, optimizer, action=action) as w:
        dist.barrier()
        if dist.get_rank() == 1:
            wound(w)
        if action != "warn":
            threading.Event().wait()
        deadline, pause = time.monotonic() + PATIENCE_S, threading.Event()
        while not all(path.exists() and "is unguarded" in path.read_text() for path in said):
            assert time.monotonic() < deadline, [path.read_text() for path in said]
            pause.wait(0.05)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    return "trained on"


@pytest.mark.parametrize("guard", GUARDS)
def test_all_ranks_halt_where_one_is_no_longer_guarded(guard: str) -> None:
    """Asleep as they are, they raise the same error, which names the thread and why it ended."""
    with tempfile.TemporaryDirectory() as folder:
        errors = [outcome.error for outcome in run_ranks(2, _lose, "raise", GUARDS[guard], folder)]
    for error in errors:
        assert type(error) is Halted, errors
        assert (error.cause, error.rank, error.step) == ("failed", 1, 1)
        assert str(error).partition("\n")[0] == WORDS.format(guard)


@pytest.mark.parametrize("guard", GUARDS)
def test_all_ranks_say_so_where_a_watch_only_warns(guard: str) -> None:
    """Each rank has one line of it, and trains on."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_ranks(2, _lose, "warn", GUARDS[guard], folder)
        assert [outcome.get() for outcome in outcomes] == ["trained on"] * 2
        for rank in range(2):
            assert Path(folder, f"said-{rank}").read_text().count("andon: " + WORDS.format(guard)) == 1
