"""Updates that are judged before the next one, as with a GPU: none is left out, and what is told is of its own rows."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import andon
from andon_contracts.violation import Violation
from andon_contracts.watch import Watch, updates
from andon_falsify.faults.planting import patched
from tests.watch.small import answers

LAST = 4


class _Parting(torch.optim.SGD):
    """Moves the weights of rank 1 a little too far in update `at`."""

    made = 0

    def step(self, closure: Callable[[], float] | None = None) -> None:
        super().step()
        self.made += 1
        if self.made == self.at and dist.get_rank() == 1:
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.add_(1e-3)


Work = Callable[[Watch, Callable[[int], tuple[str, int] | None]], Any]


def _late(at: int, work: Work, late: Callable[[object], bool] = lambda subject: True, **settings: Any) -> Any:
    """What `work` gives, with a watch and what makes one update of a loop whose weights part in update `at`, and says
    what that raised. late: whether this rank's device takes the updates."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    wrapped = DistributedDataParallel(model)
    optimizer = _Parting(model.parameters(), lr=0.1)
    optimizer.at = at

    def step(number: int) -> None:
        ids = [100 * number + 10 * dist.get_rank() + row for row in range(3)]
        watch.batch(ids)
        wrapped(torch.randn(3, 4, generator=torch.Generator().manual_seed(ids[0]))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with ExitStack() as stack:
        patched(stack, updates, "_judged_late", late)
        watch = andon.watch(wrapped, optimizer, action="raise", **settings)
        return work(watch, lambda number: _found(lambda: step(number)))


def _found(call: Callable[[], object]) -> tuple[str, int] | None:
    try:
        call()
    except Violation as found:
        return found.clause, found.step
    return None


def _at_the_close() -> list[tuple[str, int] | None]:
    return _late(LAST, lambda watch, step: [*map(step, range(1, LAST + 1)), _found(watch.close)])


@pytest.mark.parametrize("world", [2, 3])
def test_the_last_update_is_judged_at_the_close(world: int) -> None:
    assert answers(world, _at_the_close) == [[None] * LAST + [("replicas-agree", LAST)]] * world


def _in_between(folder: str) -> tuple[list[tuple[str, int] | None], list[int], set[str]]:
    found = _late(2, lambda watch, step: [*map(step, range(1, LAST))], folder=folder)
    (bundle,) = Path(folder).glob("**/rank-1.json")
    kinds = {name.split()[0] for name in load_file(bundle.with_suffix(".safetensors"))}
    return found, json.loads(bundle.read_text())["ids"], kinds


def test_the_next_update_is_not_made_and_what_is_kept_is_of_the_wrong_one(tmp_path: Path) -> None:
    """The finding is of update 2, raised where update 3 would be, with its rows, and no gradients of update 3."""
    expected = [None, None, ("replicas-agree", 2)], [210, 211, 212], {"weights"}
    assert answers(2, _in_between, str(tmp_path)) == [expected, expected]


def _at_a_save(path: str) -> list[tuple[str, int] | None]:
    return _late(1, lambda watch, step: [step(1), _found(lambda: watch.saved(path))])


def test_what_all_ranks_do_together_judges_first(tmp_path: Path) -> None:
    """A checkpoint of weights that have parted is none."""
    assert answers(2, _at_a_save, str(tmp_path / "checkpoint.pt")) == [[None, ("replicas-agree", 1)]] * 2
    assert os.listdir(tmp_path) == []


def _one_stays(within_s: float) -> tuple[str, int]:
    store = dist.distributed_c10d._get_default_store()

    def work(watch: Watch, step: Callable[[int], object]) -> tuple[str, int]:
        step(1)
        if dist.get_rank() == 1:
            store.wait(["closed"], timedelta(seconds=60))
        with contextlib.redirect_stderr(io.StringIO()) as said:
            watch.close()
        if dist.get_rank() == 0:
            store.set("closed", "yes")
            store.wait(["closed too"], timedelta(seconds=60))
        else:
            store.set("closed too", "yes")
        return said.getvalue(), len(watch.findings)

    with ExitStack() as stack:
        patched(stack, updates, "_AT_THE_CLOSE_S", within_s)
        return _late(LAST, work)


def test_a_rank_that_closes_later_is_not_waited_for_and_nobody_is_blamed() -> None:
    (said, first), (_, second) = answers(2, _one_stays, 0.3)
    assert "  what update 1 left was not compared: not every rank closed its watch within 0.3 s\n" in said
    assert first == second == 0


def _mixed() -> list[tuple[str, int] | None]:
    return _late(2, lambda watch, step: [step(1), step(2)], late=lambda subject: dist.get_rank() == 1)


def test_ranks_on_different_devices_judge_at_one_place() -> None:
    """At once, as those must that have no GPU: a rank that went on would be waited for."""
    assert answers(2, _mixed) == [[None, ("replicas-agree", 2)]] * 2
