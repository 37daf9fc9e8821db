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
from tests.support.ranks import run_ranks

LAST = 4


class _Parting(torch.optim.SGD):
    """Moves the weights of rank 1 a little too far in update `at`."""

    at = LAST
    made = 0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        super().step()
        self.made += 1
        if self.made == self.at and dist.get_rank() == 1:
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.add_(1e-3)
        return None


def _late(
    at: int,
    work: Callable[[Watch, Callable[[int], None]], Any],
    late: Callable[[object], bool] = lambda subject: True,
    **settings: Any,
) -> Any:
    """What `work` gives, with a watch and what makes one update of a loop whose weights part in update `at`.

    late: whether this rank's device takes the updates.
    """
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
        return work(watch, step)


def _found(call: Callable[[], object]) -> tuple[str, int] | None:
    try:
        call()
    except Violation as found:
        return found.clause, found.step
    return None


def _at_the_close() -> list[tuple[str, int] | None]:
    def work(watch: Watch, step: Callable[[int], None]) -> list[tuple[str, int] | None]:
        return [*(_found(lambda n=n: step(n)) for n in range(1, LAST + 1)), _found(watch.close)]  # type: ignore[misc]

    found: list[tuple[str, int] | None] = _late(LAST, work)
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_the_last_update_is_judged_at_the_close(world: int) -> None:
    """On every rank alike, although nothing comes behind it."""
    for outcome in run_ranks(world, _at_the_close):
        assert outcome.get() == [None] * LAST + [("replicas-agree", LAST)]


def _in_between(folder: str) -> tuple[list[tuple[str, int] | None], list[int], set[str]]:
    def work(watch: Watch, step: Callable[[int], None]) -> list[tuple[str, int] | None]:
        return [_found(lambda n=n: step(n)) for n in range(1, LAST)]  # type: ignore[misc]

    found = _late(2, work, folder=folder)
    (bundle,) = Path(folder).glob("**/rank-1.json")
    kinds = {name.split()[0] for name in load_file(bundle.with_suffix(".safetensors"))}
    return found, json.loads(bundle.read_text())["ids"], kinds


def test_the_next_update_is_not_made_and_what_is_kept_is_of_the_wrong_one(tmp_path: Path) -> None:
    """The finding is of update 2, raised where update 3 would be, with its rows, and no gradients of update 3."""
    for outcome in run_ranks(2, _in_between, str(tmp_path)):
        found, ids, kinds = outcome.get()
        assert kinds == {"weights"}
        assert found == [None, None, ("replicas-agree", 2)]
        assert ids == [210, 211, 212]


def _at_a_save(path: str) -> list[tuple[str, int] | None]:
    def work(watch: Watch, step: Callable[[int], None]) -> list[tuple[str, int] | None]:
        step(1)
        return [_found(lambda: watch.saved(path))]

    found: list[tuple[str, int] | None] = _late(1, work)
    return found


def test_what_all_ranks_do_together_judges_first(tmp_path: Path) -> None:
    """A checkpoint of weights that have parted is none."""
    for outcome in run_ranks(2, _at_a_save, str(tmp_path / "checkpoint.pt")):
        assert outcome.get() == [("replicas-agree", 1)]
    assert os.listdir(tmp_path) == []


def _one_stays(within_s: float) -> tuple[str, int]:
    store = dist.distributed_c10d._get_default_store()

    def work(watch: Watch, step: Callable[[int], None]) -> tuple[str, int]:
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
        said: tuple[str, int] = _late(LAST, work)
        return said


def test_a_rank_that_closes_later_is_not_waited_for_and_nobody_is_blamed() -> None:
    """Each says of the last update that it was not compared, and why."""
    first, second = (outcome.get() for outcome in run_ranks(2, _one_stays, 0.3))
    assert "  what update 1 left was not compared: not every rank closed its watch within 0.3 s\n" in first[0]
    assert first[1] == second[1] == 0


def _mixed() -> list[tuple[str, int] | None]:
    def work(watch: Watch, step: Callable[[int], None]) -> list[tuple[str, int] | None]:
        return [_found(lambda n=n: step(n)) for n in range(1, LAST)]  # type: ignore[misc]

    found: list[tuple[str, int] | None] = _late(2, work, late=lambda subject: dist.get_rank() == 1)
    return found


def test_ranks_on_different_devices_judge_at_one_place() -> None:
    """At once, as those must that have no GPU: a rank that went on would be waited for."""
    for outcome in run_ranks(2, _mixed):
        assert outcome.get()[:2] == [None, ("replicas-agree", 2)]
