"""A watch says nothing of a loop that is right but what docs/watch-reference.md announces, and it did look.

The loops of `blind*` were written without sight of the watch: each is first shown to train what one process would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.watch.blind import LOOPS, weights_of
from tests.watch.clean import Seen
from tests.watch.clean_kinds import KINDS, installed, run_kinds

STEPS = 18  # more than the 16 windows after which a parameter without a gradient is reported
PROVED = 20
"""The steps of the proof without a watch: loops that bring weights together now and then end on such a step."""
PER_START = 6
DEADLINE_S = 150.0


def _parts(names: Sequence[str], *marks: pytest.MarkDecorator) -> list[Any]:
    starts = range(0, len(names), PER_START)
    return [pytest.param(names[first : first + PER_START], id=names[first], marks=marks) for first in starts]


def _of(weight: str) -> list[str]:
    return [name for name, kind in KINDS.items() if kind.weight == weight and not name.startswith("blind: ")]


def _check(names: Sequence[str]) -> None:
    for outcome in run_ranks(2, run_kinds, names, STEPS, deadline_s=DEADLINE_S):
        seen: dict[str, Seen] = outcome.get()
        assert {name: one.violations for name, one in seen.items() if one.violations} == {}
        suspected = {name: {said.partition(" ")[0] for said in one.suspicions} for name, one in seen.items()}
        assert suspected == {name: KINDS[name].suspected for name in names}
        assert [name for name, one in seen.items() if one.evaluations <= 10 * STEPS / 2] == []


BLIND = [f"blind: {name}" for name in LOOPS]


# Deep: further optimizers, reductions, wrappers, layers and courses, of which the default run has the usual ones.
@pytest.mark.parametrize("names", [*_parts(_of("light")), *_parts(BLIND), *_parts(_of("many"), pytest.mark.deep)])
def test_right_loops_raise_nothing(names: list[str]) -> None:
    """No violation on any rank, no suspicion that is not announced, and more than ten clauses at each update."""
    _check(names)


# Deep: they load the libraries of others, or compile; the examples run the Trainer of transformers in every run.
@pytest.mark.deep
@pytest.mark.parametrize("name", _of("heavy"))
def test_a_right_loop_with_the_help_of_others_raises_nothing(name: str) -> None:
    """The same of loops that others drive, or compile."""
    if not installed(KINDS[name]):
        pytest.skip(f"needs {', '.join(KINDS[name].needs)}")
    _check([name])


@pytest.mark.parametrize("names", _parts(list(LOOPS)))
def test_two_ranks_train_what_one_process_trains(names: list[str]) -> None:
    """Each blind loop is right: its weights are those of one process over the global batch, to the rounding."""
    (alone,) = (outcome.get() for outcome in run_ranks(1, weights_of, names, PROVED, deadline_s=DEADLINE_S))
    for outcome in run_ranks(2, weights_of, names, PROVED, deadline_s=DEADLINE_S):
        for name, weights in outcome.get().items():
            apart = sum(float((a - b).square().sum()) for a, b in zip(weights, alone[name], strict=True)) ** 0.5
            size = sum(float(p.square().sum()) for p in alone[name]) ** 0.5
            assert apart <= 1e-5 * size, f"{name}: {apart / size:.2g}"
