"""Pure clauses over plain values: the same verdict on every rank, the cause before its effects."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon_contracts.agree import Observation, bits_of, majority, minority
from andon_contracts.laws.law import Details, Judgement, Law, Seen, settle
from andon_contracts.laws.update import BASE as BASE_LAWS
from andon_contracts.laws.update import REDUCED as REDUCED_LAWS
from andon_contracts.laws.update import START as START_LAWS
from andon_contracts.laws.update import UPDATED as UPDATED_LAWS
from andon_contracts.laws.update import Due, Reduced
from andon_contracts.policy import evaluations, reset_evaluations
from andon_contracts.violation import Finding, Violation

STEP = 6
Values = Mapping[str, int]
Judge = Callable[[Sequence[Observation]], None]
START = {"layout": 1, "weights": 2, "config": 3}
REDUCED = {
    "gradient": 11,
    "weights": 12,
    "nonfinite": 0,
    "norm": bits_of(2.0),
    "rate": bits_of(0.1),
    "planned": bits_of(0.1),
    "clipped": bits_of(0.5),
}
UPDATED = {"weights": 13, "optimizer": 14, "updates": 6, "gradient": 11}
BASE = {"base": 15, "first base": 15}


def observed(good: Values, *changes: Values, world: int = 3, step: int = STEP) -> list[Observation]:
    values = [dict(good) for _ in range(world)]
    for change, target in zip(changes, values[world - len(changes) :], strict=True):
        target.update(change)
    return [Observation(rank, step, 3, "here", value) for rank, value in enumerate(values)]


def start(observations: Sequence[Observation]) -> None:
    settle(Judgement(START_LAWS, Seen(observations, None)))


def reduced(observations: Sequence[Observation], limit: float | None = 0.5) -> None:
    settle(Judgement(REDUCED_LAWS, Seen(observations, Reduced(12, limit))))


def update(observations: Sequence[Observation], details: Details = MappingProxyType({})) -> None:
    settle(Judgement(UPDATED_LAWS, Seen(observations, Due(6), details=details)))


def base(observations: Sequence[Observation]) -> None:
    settle(Judgement(BASE_LAWS, Seen(observations, None)))


JUDGES: Mapping[str, tuple[Judge, Values]] = {
    "start": (start, START),
    "reduced": (reduced, REDUCED),
    "update": (update, UPDATED),
    "base": (base, BASE),
}
TABLES: Mapping[str, Sequence[Law[Any]]] = {
    "start": START_LAWS,
    "reduced": REDUCED_LAWS,
    "update": UPDATED_LAWS,
    "base": BASE_LAWS,
}


def verdict(judge: Judge, observations: Sequence[Observation]) -> tuple[str, Finding]:
    with pytest.raises(Violation) as caught:
        judge(observations)
    return caught.value.clause, caught.value.finding


@pytest.mark.parametrize("name", JUDGES)
@pytest.mark.parametrize("world", [1, 2, 5])
def test_what_is_right_passes(name: str, world: int) -> None:
    judge, good = JUDGES[name]
    reset_evaluations()
    judge(observed(good, world=world))
    assert evaluations() == Counter(law.clause for law in TABLES[name])


FAULTS = [
    ("start", {"layout": 9}, "layout-equal", "layout"),
    ("start", {"config": 9}, "start-agrees", "config"),
    ("start", {"layout": 9, "weights": 9}, "layout-equal", "layout"),
    ("reduced", {"gradient": 9}, "gradients-agree", "gradient"),
    ("reduced", {"weights": 9}, "replicas-agree", "weights"),
    ("reduced", {"nonfinite": 1}, "finite", "reduced gradient"),
    ("reduced", {"norm": bits_of(math.inf)}, "finite", "reduced gradient"),
    ("reduced", {"rate": bits_of(0.2)}, "learning-rate-planned", "learning rate"),
    ("reduced", {"rate": bits_of(0.2), "planned": bits_of(0.2)}, "learning-rate-planned", "learning rate"),
    # Different weights give a different gradient, which may be NaN: the message names the weights, which are the cause.
    ("reduced", {"weights": 9, "gradient": 9, "nonfinite": 1}, "replicas-agree", "weights"),
    ("reduced", {"gradient": 9, "nonfinite": 1}, "gradients-agree", "gradient"),
    ("reduced", {"clipped": bits_of(0.4)}, "clip-once", "clipped gradient"),
    ("reduced", {"clipped": bits_of(2.0)}, "clip-once", "clipped gradient"),
    ("reduced", {"clipped": bits_of(math.nan)}, "clip-once", "clipped gradient"),
    # A rank whose norm is wrong clips by the wrong factor although it is true to itself.
    ("reduced", {"norm": bits_of(4.0), "clipped": bits_of(0.25)}, "clip-once", "clipped gradient"),
    ("update", {"weights": 9}, "replicas-agree", "weights"),
    ("update", {"optimizer": 9}, "optimizers-agree", "optimizer"),
    ("update", {"updates": 7}, "one-update", "count of updates"),
    ("update", {"weights": 9, "optimizer": 9}, "optimizers-agree", "optimizer"),
    ("update", {"weights": 9, "optimizer": 9, "updates": 7}, "one-update", "count of updates"),
    ("base", {"base": 9}, "base-frozen", "frozen weights"),
]


@pytest.mark.parametrize(("name", "change", "clause", "tensor"), FAULTS)
@pytest.mark.parametrize("world", [3, 4])
def test_the_odd_rank_is_named_and_the_cause_comes_first(
    name: str, change: Values, clause: str, tensor: str, world: int
) -> None:
    judge, good = JUDGES[name]
    broken, finding = verdict(judge, observed(good, change, world=world))
    assert (broken, finding.ranks, finding.step, finding.tensor) == (clause, (world - 1,), STEP, tensor)


@pytest.mark.parametrize("name", JUDGES)
@pytest.mark.parametrize("stray", [{"step": STEP + 1}, {"sequence": 4}, {"names_match": False}, {"rank": 0}])
def test_messages_that_do_not_belong_together_are_never_compared(name: str, stray: dict[str, int]) -> None:
    judge, good = JUDGES[name]
    observations = observed(good)
    own = {"rank": 2, "step": STEP, "sequence": 3, "point": "here", "values": dict.fromkeys(good, 99)}
    observations[2] = Observation(**{**own, **stray})  # type: ignore[arg-type]
    broken, finding = verdict(judge, observations)
    assert (broken, finding.ranks, finding.step) == ("halt-together", (2,), STEP)


def test_the_step_of_a_stray_rank_0_is_not_taken_for_the_step() -> None:
    observations = observed(BASE)
    observations[0] = Observation(0, STEP + 1, 3, "here", dict(BASE))
    broken, finding = verdict(base, observations)
    assert (broken, finding.ranks, finding.step) == ("halt-together", (0,), STEP)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("start", {"config": 9}),
        ("reduced", {"gradient": 9}),
        ("reduced", {"rate": bits_of(0.2), "planned": bits_of(0.2)}),
        ("update", {"weights": 9}),
    ],
)
def test_one_against_one_accuses_nobody(name: str, change: Values) -> None:
    judge, good = JUDGES[name]
    assert verdict(judge, observed(good, change, world=2))[1].ranks == ()


@pytest.mark.parametrize(
    ("point", "seen", "tensor"),
    [
        ("base", "a frozen weight or buffer changed", "base"),
        ("before 0", "a frozen weight changed", "frozen weights"),
        ("close", "a frozen weight changed, read once more at the close", "frozen weights"),
    ],
)
def test_what_was_frozen_is_said_by_who_looked(point: str, seen: str, tensor: str) -> None:
    said = [Observation(rank, STEP, 3, point, {"base": 15 + rank, "first base": 15}) for rank in range(3)]
    with pytest.raises(Violation) as caught:
        base(said)
    assert (caught.value.finding.seen, caught.value.tensor, caught.value.finding.ranks) == (seen, tensor, (1, 2))


def test_known_truth_names_both_of_two() -> None:
    assert verdict(base, observed(BASE, BASE | {"base": 9}, BASE | {"base": 9}, world=2))[1].ranks == (0, 1)
    assert verdict(update, observed(UPDATED, {"updates": 5}, {"updates": 5}, world=2))[1].ranks == (0, 1)
    moved = observed(REDUCED, {"weights": 9}, {"weights": 9}, world=2)
    assert verdict(reduced, moved)[1].ranks == (0, 1)


def test_weights_that_differ_before_an_update_are_said_to_be_those_before_it() -> None:
    said = observed(REDUCED, {"weights": 0})
    with pytest.raises(Violation, match=r"replicas-agree.*the weights before the update are not the same \(rank 0: "):
        settle(Judgement(REDUCED_LAWS, Seen(said, Reduced(limit=0.5))))


def test_the_second_look_names_the_tensors() -> None:
    details = {"weights": {"a": (1, 1, 1), "b": (1, 1, 2), "c": (3, 3, 4)}, "optimizer": {"exp_avg": (5, 5, 6)}}
    with pytest.raises(Violation) as caught:
        update(observed(UPDATED, {"weights": 9}), details)
    finding = caught.value.finding
    assert finding.tensor == "b"
    assert finding.details == (
        ("b", "0000000000000001 0000000000000001 0000000000000002"),
        ("c", "0000000000000003 0000000000000003 0000000000000004"),
    )
    assert "2 of 3 tensors differ" in finding.seen


@pytest.mark.parametrize(
    ("norm", "limit", "clipped", "right"),
    [
        (2.0, 0.5, 0.5, True),
        (0.3, 0.5, 0.3, True),
        (0.3, 0.5, 0.5, False),
        (2.0, None, 2.0, True),
        (2.0, None, 0.5, False),
        (0.0, 0.5, 0.0, True),
        # torch scales by limit / (norm + 1e-6): at a limit of that size this is half of it, and right.
        (1e-6, 1e-6, 0.5e-6, True),
        (1e-6, 1e-6, 1e-6, False),
        (2.0, 0.0, 0.0, True),
        # 22 roundings of 2^-24 can be there, 1e-5 cannot.
        (2.0, 0.5, 0.5 * (1 + 22 * 2.0**-24), True),
        (2.0, 0.5, 0.5 * (1 + 1e-5), False),
        # A factor of 5 steps of 2^-149 that should be 4.6 of them.
        (2.0**120, 4.6 * 2.0**-29, 5 * 2.0**-29, True),
        (2.0**120, 4.6 * 2.0**-29, 7 * 2.0**-29, False),
    ],
)
def test_one_clipping_by_hand(norm: float, limit: float | None, clipped: float, right: bool) -> None:
    observations = observed({**REDUCED, "norm": bits_of(norm), "clipped": bits_of(clipped)}, world=2)
    if right:
        reduced(observations, limit)
    else:
        with pytest.raises(Violation, match="clip-once"):
            reduced(observations, limit)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_minority_is_what_a_strict_majority_leaves(values: list[int]) -> None:
    strict = [value for value in set(values) if 2 * values.count(value) > len(values)]
    assert minority(values) == tuple(rank for rank, value in enumerate(values) if strict and value != strict[0])
    if strict:
        assert majority(values) == strict[0]
    assert values.count(majority(values)) == max(map(values.count, values))
