"""The one error for what the system got wrong: readable, and whole on the other side of a process boundary."""

from __future__ import annotations

import copy
import pickle

import pytest

from andon_contracts.violation import Finding, Violation, describe

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
