"""One rank pulls the cord, and all live ranks end, whatever they are doing; none hangs and none is left."""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import andon
from andon_contracts.violation import Violation
from tests.support.ranks import run_ranks


def _watched(*, hard_stop: bool) -> tuple[nn.Module, andon.Watch]:  # type: ignore[name-defined]
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, andon.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), hard_stop=hard_stop)


def _in_backward(model: nn.Module) -> None:
    while True:
        model(torch.ones(2, 3)).sum().backward()


def _in_a_collective(model: nn.Module) -> None:
    dist.all_reduce(torch.ones(1))


def _in_the_loader(model: nn.Module) -> None:
    threading.Event().wait()


def _work(path: str, place: Callable[[nn.Module], None]) -> None:
    model, w = _watched(hard_stop=True)
    if dist.get_rank() == 1:
        w.pull("a row that no rank may train on")
    try:
        place(model)
    except Violation as found:
        Path(path, str(dist.get_rank())).write_text(str(found))
        raise


@pytest.mark.parametrize("place", [_in_backward, _in_a_collective, _in_the_loader])
def test_all_ranks_end_wherever_they_are(place: Callable[[nn.Module], None]) -> None:
    """With `hard_stop`, ranks in backward raise and ranks that run no Python are ended: no rank has to be killed."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_ranks(3, _work, folder, place)
        errors = [outcome.error for outcome in outcomes]
        assert isinstance(errors[1], Violation)
        assert "a row that no rank may train on" in str(errors[1])
        assert not any(isinstance(error, TimeoutError) for error in errors), errors
        if place is _in_backward:
            assert {str(error) for error in errors} == {str(errors[1])}
        else:
            # Ended by the cord, or in a collective by the connection of the rank that raised.
            assert all(isinstance(errors[rank], ChildProcessError | RuntimeError) for rank in (0, 2))
    assert multiprocessing.active_children() == []


def _soft() -> str:
    model, w = _watched(hard_stop=False)
    try:
        if dist.get_rank() == 1:
            w.pull("stop")
        _in_backward(model)
    except Violation as found:
        w.close()
        return f"{found.clause} {found.step}"
    return ""


def test_without_hard_stop_ranks_that_run_python_raise_the_same() -> None:
    """The same clause and step on every rank, and no process is ended from outside."""
    assert [outcome.get() for outcome in run_ranks(3, _soft)] == ["halt-together 1"] * 3
