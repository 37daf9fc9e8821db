"""How a watch ends: in an `except` block, in a forked child, and what it says of evaluations until then."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import andon
from tests.watch.clean import ignore
from tests.watch.small import answers, clauses, loss_of, net, sgd


def _exhausted(step: Callable[[], None]) -> None:
    rows = iter(range(2))
    while True:
        next(rows)
        step()


@pytest.mark.parametrize(("error", "found"), [(StopIteration, ["updates-planned"]), (KeyboardInterrupt, [])])
def test_a_watch_that_is_closed_after_the_last_batch_has_finished(error: type[BaseException], found: list[str]) -> None:
    """A loop may end by `except StopIteration: w.close()`. One that an error ended made fewer updates rightly."""
    model = net()
    optimizer = sgd(model)
    watch = andon.watch(model, optimizer, action=ignore, updates=3)

    def step() -> None:
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    try:
        _exhausted(step)
    except StopIteration:
        try:
            raise error
        except error:
            watch.close()
    assert clauses(watch) == found


def test_a_watch_that_is_opened_for_a_second_try_finishes() -> None:
    """The error that the loop handles when it opens the watch is not the end of the watch."""
    model = net()
    try:
        raise RuntimeError("the first try")
    except RuntimeError:
        watch = andon.watch(model, sgd(model), action=ignore, updates=1)
        watch.close()
    assert clauses(watch) == ["updates-planned"]


FORKING = """
import os, sys, torch, andon
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
w = andon.watch(model, optimizer, ledger=sys.argv[1])
if os.fork() == 0:
    sys.exit(0)
os.wait()
model(torch.ones(1, 3)).sum().backward()
optimizer.step()
"""


def test_a_forked_child_that_ends_does_not_end_the_watch_of_its_parent(tmp_path: Path) -> None:
    """The child wrote an end line into the parent's ledger, whose chain was then broken."""
    path = tmp_path / "ledger.jsonl"
    done = subprocess.run([sys.executable, "-c", FORKING, path], capture_output=True, text=True, check=True)
    assert done.stderr.count("clauses were checked") == 1
    kinds = [line.split('"kind":"')[1].split('"')[0] for line in path.read_text().splitlines()]
    assert kinds == ["start", "step", "end"]


def _evaluated_in_training_mode(broadcast: bool) -> list[str]:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    wrapped = DistributedDataParallel(model, broadcast_buffers=broadcast)
    with andon.watch(wrapped, sgd(wrapped), action=ignore) as watch, torch.no_grad():
        answered = wrapped(torch.eye(3)).argmax(-1)
        watch.evaluated([3 * dist.get_rank() + row for row in range(3)], answered, answered)
    return clauses(watch)


@pytest.mark.parametrize("broadcast", [True, False])
def test_an_evaluation_in_training_mode_is_seen_whoever_shares_the_buffers(broadcast: bool) -> None:
    """DDP that is told not to share buffers is watched in its forward passes too."""
    assert answers(2, _evaluated_in_training_mode, broadcast) == [["evaluation-once"]] * 2


class _OnlyAtOnce(Tensor):
    """Elements of a GPU, each of which would be waited for."""

    def __int__(self) -> int:
        raise AssertionError("read one by one")


def test_predictions_on_a_device_are_copied_at_once() -> None:
    model = net()
    with andon.watch(model, sgd(model), action=ignore) as watch:
        predictions = torch.tensor([1, 0, 1]).as_subclass(_OnlyAtOnce)
        watch.evaluated([0, 1, 2], predictions, [1, 0, 1], {"accuracy": 1.0})
    assert clauses(watch) == []
