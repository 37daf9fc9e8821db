"""Contracts: predicates as contracts, the registry of clauses, the error, and the laws of saved state."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import get_args

import pytest

from andon_contracts.clauses import CLAUSES, Clause, Kind
from andon_contracts.laws.law import Judgement, settle
from andon_contracts.laws.outcome import RESTORED, Restored
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


def test_a_wrong_argument_is_a_value_error_with_the_value() -> None:
    with pytest.raises(ValueError, match="value must be even, got 3") as caught:
        halve(3)
    assert not isinstance(caught.value, Violation)


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
    assert promise.source
    assert promise.cost
    assert promise.schedule


def test_the_seeds_contracts_have_a_clause() -> None:
    """C-DP-001, C-DP-002, F-DP-001 to 006, F-HET-001 and F-HET-002 each lead to a clause of the registry."""
    known = {alias for promise in CLAUSES.values() for alias in promise.aliases}
    asked = {"C-DP-001", "C-DP-002", "F-HET-001", "F-HET-002"} | {f"F-DP-00{number}" for number in range(1, 7)}
    assert asked <= known


def test_the_registry_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        CLAUSES["finite"] = CLAUSES["samples-once"]  # type: ignore[index]


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

WHOLE = Restored({"a": 1, "b": 2}, {"b": (2, 2), "a": (1, 1)}, 7)


def test_what_is_there_as_it_was_saved_is_whole() -> None:
    settle(Judgement(RESTORED, WHOLE))
    settle(Judgement(RESTORED, Restored({}, {}, 7)))


@pytest.mark.parametrize(
    ("found", "ranks", "tensor", "seen"),
    [
        ({"a": (1, 1)}, (), "b", "b was saved and is not there"),
        ({"a": (1, 3), "b": (2, 2)}, (1,), "a", f"(with digest {1:016x}, now {3:016x})"),
        ({"a": (4, 3), "b": (2, 2)}, (), "a", f"(with digest {1:016x}, now {4:016x}, {3:016x})"),
        ({"a": (1, 1), "b": (2, 2), "": (5, 5)}, (), "", " is there and was not saved"),
    ],
)
def test_what_is_not_as_it_was_saved_is_named(
    found: Mapping[str, tuple[int, ...]], ranks: tuple[int, ...], tensor: str, seen: str
) -> None:
    with pytest.raises(Violation) as caught:
        settle(Judgement(RESTORED, replace(WHOLE, found=found)))
    assert (caught.value.clause, caught.value.step) == ("checkpoint-whole", 7)
    assert (caught.value.finding.ranks, caught.value.tensor) == (ranks, tensor)
    assert seen in caught.value.finding.seen


def test_what_cannot_be_read_or_is_heard_of_is_said_of_its_rank() -> None:
    with pytest.raises(Violation, match="checkpoint-whole broken at step 7 on rank 0: it is cut") as caught:
        settle(Judgement(RESTORED, Restored({}, {}, 7, "it is cut", (0,))))
    assert caught.value.rank == 0
    with pytest.raises(Violation, match="checkpoint-whole broken at step 7: it is cut"):
        settle(Judgement(RESTORED, replace(WHOLE, fault="it is cut")))
