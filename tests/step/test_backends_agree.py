"""The same bits on every backend and any number of workers: ragged rows and dropout, clipped or not, either optimizer.

This is the cheap test of that promise; one run of the command and the claim same-everywhere show it end to end.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from andon.backend.base import GroupBackend, InlineBackend
from andon.config.schema import Optimizer
from tests.support.ranks import run_ranks
from tests.support.toy import CPU, Settings, run

pytestmark = pytest.mark.xdist_group("step_backends_agree")
WORLDS = (1, 2, 3, 4)
SETTINGS = {
    "adamw-clipped-m8": Settings(8, clip_norm=0.2),
    "adamw-clipped-m5": Settings(5, clip_norm=0.2),
    "sgd-m8": Settings(8, optimizer=Optimizer(name="sgd", momentum=0.9)),
    "sgd-m5": Settings(5, optimizer=Optimizer(name="sgd")),
    # Fewer micro-batches than ranks: some ranks have nothing to compute and still take part.
    "adamw-m2": Settings(2),
}
Records = Mapping[str, list[Mapping[str, object]]]


def _run_all() -> Records:
    backend = GroupBackend("gloo", CPU)
    return {name: run(backend, settings) for name, settings in SETTINGS.items()}


@pytest.fixture(scope="module")
def expected() -> Records:
    torch.set_num_threads(1)
    return {name: run(InlineBackend([CPU]), settings) for name, settings in SETTINGS.items()}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("world", WORLDS)
def test_replicas_in_one_process_give_one_result(world: int, name: str, expected: Records) -> None:
    assert run(InlineBackend([CPU] * world), SETTINGS[name]) == expected[name]


@pytest.mark.parametrize("world", WORLDS)
def test_processes_give_the_same_result(world: int, expected: Records) -> None:
    for outcome in run_ranks(world, _run_all):
        assert outcome.get() == expected


def test_the_result_depends_on_what_defines_it(expected: Records) -> None:
    finals = [str(records[-1]["state"]) for records in expected.values()]
    assert len(set(finals)) == len(finals)


def test_another_seed_gives_other_masks() -> None:
    losses = {run(InlineBackend([CPU]), Settings(8, sizes=(10,), seed=seed))[0]["loss"] for seed in range(4)}
    assert len(losses) == 4
