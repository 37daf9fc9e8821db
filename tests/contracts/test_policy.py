"""How a predicate becomes a contract: on, counted, with one switch, and never by accident something less."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
from andon_contracts.violation import Finding, Violation

ROOT = Path(__file__).parents[2]


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
    """What a user got wrong is a `ValueError`, and never a violation."""
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
    """Without a mark there would be no name, no count and icontract's own error: refused where it is written."""

    def unmarked(value: int) -> bool:
        return value > 0

    for decorate in (require, ensure):
        with pytest.raises(TypeError, match="unmarked is not marked"):
            decorate(unmarked)


def test_a_clause_that_is_not_registered_is_refused() -> None:
    with pytest.raises(KeyError, match="no-such-clause"):
        clause("no-such-clause", _explain_finite)


_OPTIMISED = """
from tests.contracts.test_policy import halve
assert False, "under -O this is not executed"
for value in (-2, 3):
    try:
        print(halve(value))
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_contracts_stay_on_under_optimisation() -> None:
    """`python -O` removes assertions and would switch icontract off; our clauses stay."""
    done = subprocess.run(
        [sys.executable, "-O", "-c", _OPTIMISED], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "Violation finite broken at step 3 on rank 1: -1 from -2",
        "ValueError value must be even, got 3",
    ]
