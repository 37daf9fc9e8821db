"""All checks of a step in one call: what it finds is what each check finds alone, and it is counted."""

from __future__ import annotations

import pytest

from andon_contracts.agree import Observation, bits_of
from andon_contracts.clauses import CLAUSES
from andon_contracts.policy import evaluations, reset_evaluations
from andon_contracts.told_clauses import name_ratio
from andon_contracts.violation import Violation
from andon_contracts.watch.judging import AFTER, BEFORE, Check, Verdicts
from andon_contracts.watch.settings import Settings

RIGHT = {
    "change": 0,
    "layout": 5,
    "hyperparameters": 6,
    "rate": bits_of(0.1),
    "planned": bits_of(0.1),
    "ungrouped": 0,
    "modes": 7,
    "buffers": 8,
    "nonfinite": 0,
    "repaired": 0,
    "collectives": 9,
    "strided": 0,
    "weights": 10,
    "gradient": 11,
    "norm": bits_of(2.0),
    "clipped": bits_of(2.0),
    "limit": bits_of(float("inf")),
    "stale": 0,
    "missing": 0,
    "scale": 0,
    "base": 12,
    "first base": 12,
    "rows": 0,
    "with content": 0,
    "loss sum": 0,
    "loss rows": 0,
    "reports": 0,
    "reported": 0,
    "optimizer": 13,
    "updates": 4,
    "unmoved": 0,
} | {f"stream {index}{must}": 0 for index in range(4) for must in ("", " must")}

WRONG: dict[str, list[tuple[str, int]]] = {
    "parameters-kept": [("change", 1), ("layout", 4)],
    "modes-agree": [("modes", 0)],
    "hyperparameters-agree": [("hyperparameters", 0)],
    "learning-rate-planned": [("planned", bits_of(0.2))],
    "groups-planned": [("ungrouped", 1)],
    "scaler-agrees": [("scale", 1)],
    "buffers-agree": [("buffers", 1)],
    "finite": [("nonfinite", 1), ("norm", bits_of(float("nan")))],
    "base-frozen": [("base", 0)],
    "replicas-agree": [("weights", 0)],
    "gradient-fresh": [("stale", 1)],
    "gradient-present": [("missing", 1)],
    "collectives-agree": [("collectives", 0), ("strided", 1)],
    "gradients-agree": [("gradient", 0)],
    "clip-once": [("limit", bits_of(1.0))],
    "optimizers-agree": [("optimizer", 0), ("updates", 5)],
    "update-applied": [("unmoved", 1)],
}
"""For each clause, values of the second rank that break it and, but for those named below, nothing else."""
ALL = frozenset(CLAUSES)


def _seen(**of_the_second: int) -> tuple[Observation, ...]:
    return tuple(Observation(rank, 3, 9, "here", {**RIGHT, **(of_the_second if rank else {})}) for rank in range(2))


def _verdicts(live: frozenset[str] = ALL) -> Verdicts:
    return Verdicts(Settings(action=lambda _: None), 0, ["a", "b"], live)


def _alone(checks: tuple[Check, ...], observations: tuple[Observation, ...]) -> list[str]:
    broken = []
    for check in checks:
        try:
            check.judge(observations, {}, ["a", "b"])
        except Violation as found:
            broken.append(found.clause)
    return broken


@pytest.mark.parametrize("checks", [BEFORE, AFTER], ids=["before", "after"])
def test_what_is_right_holds_and_each_clause_is_counted(checks: tuple[Check, ...]) -> None:
    """One call evaluates every live clause once: counted by the watch, and by the policy for each of its tests."""
    verdicts = _verdicts()
    reset_evaluations()
    assert verdicts.quick(checks)(_seen())
    wanted: dict[str, int] = {}
    for check in checks:
        wanted[check.clause] = wanted.get(check.clause, 0) + 1
    assert dict(verdicts.evaluations) == wanted
    assert evaluations() == wanted


CASES = [(clause, name, value) for clause, values in WRONG.items() for name, value in values]


@pytest.mark.parametrize(("clause", "name", "value"), CASES, ids=[f"{clause}, {name}" for clause, name, _ in CASES])
def test_each_clause_can_fail_in_the_one_call(clause: str, name: str, value: int) -> None:
    """One wrong value is enough; the call says so, counts nothing, and the clause alone is what judges it."""
    checks = next(checks for checks in (BEFORE, AFTER) if clause in {check.clause for check in checks})
    verdicts = _verdicts()
    observations = _seen(**{name: value})
    assert clause in _alone(checks, observations)
    assert not verdicts.quick(checks)(observations)
    assert not verdicts.evaluations


def test_every_clause_of_a_step_is_among_the_cases() -> None:
    """No clause joins a step without a case here that breaks it; two that need several values have tests of their own.

    `halt-together` is broken by a message of another step, in the test below.
    """
    named = {check.clause for check in (*BEFORE, *AFTER)}
    assert named - set(WRONG) == {"halt-together", "loss-reported", "randomness-declared"}


def test_ranks_at_different_steps_do_not_hold() -> None:
    """Whether the messages belong together is asked first."""
    here, there = _seen()
    late = Observation(1, 4, there.sequence, there.point, there.values)
    assert not _verdicts().quick(AFTER)((here, late))


def test_a_clause_that_is_not_live_is_neither_asked_nor_counted() -> None:
    """What cannot be observed here does not hold, and does not break."""
    verdicts = _verdicts(ALL - {"modes-agree"})
    assert verdicts.quick(BEFORE)(_seen(modes=0))
    assert "modes-agree" not in verdicts.evaluations


@pytest.mark.parametrize(
    ("ratio", "world", "micro_batches", "said"),
    [
        (2.0, 2, 1, " = world size 2"),
        (2.0, 2, 2, " = world size 2 or accumulation 2"),
        (0.5, 2, 1, " = 1 / world size 2 or 1 of 2 micro-batches"),
        (0.5, 3, 1, " = 1 of 2 micro-batches"),
        (2 / 3, 2, 2, " = 2 of 3 micro-batches"),
        (0.7312, 2, 1, ""),
        (float("nan"), 2, 1, ""),
    ],
)
def test_a_factor_is_named_with_everything_that_gives_it(
    ratio: float, world: int, micro_batches: int, said: str
) -> None:
    """One of two micro-batches, divided as two, looks as one of two ranks does: neither is said with certainty."""
    assert name_ratio(ratio, world, micro_batches) == said
