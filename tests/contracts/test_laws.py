"""Pure clauses over plain values: the same verdict on every rank, the cause before its effects."""

from __future__ import annotations

import copy
import math
import pickle
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon_contracts.agree import Observation, bits_of, majority, minority
from andon_contracts.clauses import CLAUSES, Clause, Kind
from andon_contracts.laws import update as laws
from andon_contracts.laws.law import LOCKSTEP, Details, Judgement, Law, Seen, enforce
from andon_contracts.laws.update import RESTORED, Reduced, not_restored
from andon_contracts.policy import (
    argument,
    clause,
    enforced,
    ensure,
    evaluations,
    require,
    reset_evaluations,
    suspended,
)
from andon_contracts.violation import Finding, Violation, describe
from andon_contracts.watch.checks.copies import search_due

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
UPDATE, FROZEN = (LOCKSTEP, laws.ONE_UPDATE, laws.OPTIMIZERS, laws.REPLICAS), (LOCKSTEP, laws.FROZEN)


def observed(good: Values, *changes: Values, world: int = 3, step: int = STEP) -> list[Observation]:
    values = [dict(good) for _ in range(world)]
    for change, target in zip(changes, values[world - len(changes) :], strict=True):
        target.update(change)
    return [Observation(rank, step, 3, "here", value) for rank, value in enumerate(values)]


def start(observations: Sequence[Observation]) -> None:
    enforce(Judgement(laws.START, Seen(observations, None)))


def reduced(observations: Sequence[Observation], limit: float | None = 0.5) -> None:
    enforce(Judgement(laws.REDUCED, Seen(observations, Reduced(12, limit))))


def update(observations: Sequence[Observation], details: Details = MappingProxyType({})) -> None:
    enforce(Judgement(UPDATE, Seen(observations, 6, details=details)))


def base(observations: Sequence[Observation]) -> None:
    enforce(Judgement(FROZEN, Seen(observations, None)))


JUDGES: Mapping[str, tuple[Judge, Values, Sequence[Law[Any]]]] = {
    "start": (start, START, laws.START),
    "reduced": (reduced, REDUCED, laws.REDUCED),
    "update": (update, UPDATED, UPDATE),
    "base": (base, BASE, FROZEN),
}


def verdict(judge: Judge, observations: Sequence[Observation]) -> tuple[str, Finding]:
    with pytest.raises(Violation) as caught:
        judge(observations)
    return caught.value.clause, caught.value.finding


@pytest.mark.parametrize("name", JUDGES)
@pytest.mark.parametrize("world", [1, 2, 5])
def test_what_is_right_passes(name: str, world: int) -> None:
    judge, good, _ = JUDGES[name]
    reset_evaluations()
    judge(observed(good, world=world))
    assert evaluations() == Counter(law.clause for law in JUDGES[name][2])


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
    judge, good, _ = JUDGES[name]
    broken, finding = verdict(judge, observed(good, change, world=world))
    assert (broken, finding.ranks, finding.step, finding.tensor) == (clause, (world - 1,), STEP, tensor)


@pytest.mark.parametrize("name", JUDGES)
@pytest.mark.parametrize("stray", [{"step": STEP + 1}, {"sequence": 4}, {"names_match": False}, {"rank": 0}])
def test_messages_that_do_not_belong_together_are_never_compared(name: str, stray: dict[str, int]) -> None:
    judge, good, _ = JUDGES[name]
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
    judge, good, _ = JUDGES[name]
    assert verdict(judge, observed(good, change, world=2))[1].ranks == ()


@pytest.mark.parametrize(
    ("point", "seen", "tensor"),
    [
        ("base", "a frozen weight or buffer changed", "base"),
        ("before 0", "a frozen weight changed", "frozen weights"),
        ("close", "a frozen weight changed, as reading it again at the close showed", "frozen weights"),
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
        enforce(Judgement(laws.REDUCED, Seen(said, Reduced(limit=0.5))))


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


# Contracts: predicates as contracts, the registry of clauses, the error, and the laws of saved state.


def _explain_finite(result: int, value: int) -> Finding:
    return Finding(seen=f"{result} from {value}", step=3, ranks=(1,))


@clause("finite", _explain_finite)
def _positive(result: int, value: int) -> bool:
    return result > 0


def _explain_even(value: int) -> str:
    return f"value must be even, got {value}"


@argument(_explain_even)
def _even(value: int) -> bool:
    return value % 2 == 0


@require(_even)
@ensure(_positive)
def halve(value: int) -> int:
    return value // 2


def test_a_promise_that_holds_is_silent_and_counted() -> None:
    reset_evaluations()
    assert halve(4) == 2
    assert halve(value=6) == 3
    assert evaluations() == {"finite": 2}
    reset_evaluations()
    assert evaluations() == {}


def test_a_broken_promise_is_a_violation_with_its_finding() -> None:
    reset_evaluations()
    with pytest.raises(Violation) as caught:
        halve(-2)
    assert str(caught.value) == "finite broken at step 3 on rank 1: -1 from -2"
    assert (caught.value.clause, caught.value.step, caught.value.rank) == ("finite", 3, 1)
    assert evaluations() == {"finite": 1}


def test_the_switch_turns_clauses_off_and_on_again() -> None:
    reset_evaluations()
    with suspended():
        with pytest.raises(ValueError, match="even"), suspended():
            halve(3)
        assert not enforced()
        assert halve(-2) == -1
    assert enforced()
    assert evaluations() == {}
    with pytest.raises(Violation):
        halve(-2)


def test_a_predicate_that_is_not_marked_is_refused() -> None:
    """Without a mark a contract would have no name and no count, and would raise icontract's own error."""

    def unmarked(value: int) -> bool:
        return value > 0

    for decorate in (require, ensure):
        with pytest.raises(TypeError, match="unmarked is not marked"):
            decorate(unmarked)


def test_a_clause_that_is_not_registered_is_refused() -> None:
    with pytest.raises(KeyError, match="no-such-clause"):
        clause("no-such-clause", _explain_finite)


_OPTIMISED = """
from andon_contracts.policy import argument, clause, ensure, require
from andon_contracts.violation import Finding

even = argument(lambda value: f"value must be even, got {value}")(lambda value: value % 2 == 0)
said = clause("finite", lambda result, value: Finding(f"{result} from {value}", 3, (1,)))
positive = said(lambda result, value: result > 0)

@require(even)
@ensure(positive)
def halve(value):
    return value // 2

assert False, "under -O this is not executed"
for value in (-2, 3):
    try:
        print(halve(value))
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_contracts_stay_on_under_optimisation() -> None:
    done = subprocess.run([sys.executable, "-O", "-c", _OPTIMISED], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "Violation finite broken at step 3 on rank 1: -1 from -2",
        "ValueError value must be even, got 3",
    ]


# The registry of clauses.


@pytest.mark.parametrize("promise", CLAUSES.values(), ids=CLAUSES.keys())
def test_a_clause_says_all_that_it_must(promise: Clause) -> None:
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", promise.name)
    assert len(set(promise.aliases)) == len(promise.aliases)
    assert promise.kind in get_args(Kind)
    assert promise.statement.endswith(".")
    assert promise.remedy.endswith(".")
    assert promise.schedule
    assert promise.likely


def test_the_clause_of_copies_names_the_updates_at_which_they_are_looked_at() -> None:
    named = re.findall(r"[\d,]*\d", CLAUSES["copies-agree"].schedule)
    assert [int(each.replace(",", "")) for each in named] == [update for update in range(10_000) if search_due(update)]


def test_the_seeds_contracts_have_a_clause() -> None:
    """C-DP-001, C-DP-002, F-DP-001 to 006, F-HET-001 and F-HET-002 each lead to a clause of the registry."""
    known = {alias for promise in CLAUSES.values() for alias in promise.aliases}
    asked = {"C-DP-001", "C-DP-002", "F-HET-001", "F-HET-002"} | {f"F-DP-00{number}" for number in range(1, 7)}
    assert asked <= known


# The error.

FINDING = Finding(seen="nan", step=7, ranks=(2,), tensor="lora.A", details=(("lora.A", "00ff 00fe"),))


@pytest.mark.parametrize(
    ("finding", "message"),
    [
        (FINDING, "finite broken at step 7 on rank 2 in lora.A: nan"),
        (Finding("nan", 7, (0, 2)), "finite broken at step 7 on ranks 0, 2: nan"),
        (Finding("nan", tensor="loss"), "finite broken in loss: nan"),
        (Finding("nan"), "finite broken: nan"),
    ],
)
def test_the_line_names_what_is_known_and_nothing_else(finding: Finding, message: str) -> None:
    assert describe("finite", finding) == message
    assert str(Violation.of("finite", finding)) == message


@pytest.mark.parametrize("duplicate", [lambda v: pickle.loads(pickle.dumps(v)), copy.copy, copy.deepcopy])
def test_it_survives_pickling_and_copying(duplicate: object) -> None:
    class Local(Violation):
        pass

    globals()["Local"] = Local
    Local.__qualname__ = "Local"
    for kind in (Violation, Local):
        sent = kind.of("finite", FINDING)
        sent.add_note("on rank 2")
        arrived = duplicate(sent)  # type: ignore[operator]
        assert type(arrived) is kind
        assert (str(arrived), arrived.clause, arrived.finding) == (str(sent), "finite", FINDING)
        assert (arrived.step, arrived.rank, arrived.tensor, arrived.__notes__) == (7, 2, "lora.A", ["on rank 2"])
    del globals()["Local"]


def test_one_culprit_or_none() -> None:
    assert Violation.of("finite", Finding("x", ranks=(0,))).rank == 0
    assert Violation.of("finite", Finding("x", ranks=(0, 1))).rank is None
    assert Violation.of("finite", Finding("x")).rank is None


def test_it_is_no_assertion_error_and_no_value_error() -> None:
    assert issubclass(Violation, RuntimeError)
    assert not issubclass(Violation, AssertionError | ValueError)


def test_a_bare_message_is_its_own_finding() -> None:
    assert Violation("odd").finding == Finding(seen="odd")


# The laws of saved state.

SAVED = {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("found", "ranks", "tensor", "seen"),
    [
        ({"a": (1, 1)}, (), "b", "b was saved but is missing now"),
        ({"a": (1, 3), "b": (2, 2)}, (1,), "a", f"(digest {1:016x}, now {3:016x})"),
        ({"a": (4, 3), "b": (2, 2)}, (), "a", f"(digest {1:016x}, now {4:016x}, {3:016x})"),
        ({"a": (1, 1), "b": (2, 2), "": (5, 5)}, (), "", " exists now but was not saved"),
    ],
)
def test_what_is_not_as_it_was_saved_is_named(
    found: Mapping[str, tuple[int, ...]], ranks: tuple[int, ...], tensor: str, seen: str
) -> None:
    with pytest.raises(Violation) as caught:
        enforce(Judgement(RESTORED, not_restored(SAVED, found, 7, {})))
    assert (caught.value.clause, caught.value.step) == ("checkpoint-whole", 7)
    assert (caught.value.finding.ranks, caught.value.tensor) == (ranks, tensor)
    assert seen in caught.value.finding.seen
