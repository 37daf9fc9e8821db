"""The last line of a session counts claims, and a claim that checked nothing fails it."""

from __future__ import annotations

import pytest

# Loaded before `pytester` notes which modules to forget after a run: torch cannot be loaded twice.
import andon_falsify.compliance.plugin  # noqa: F401

pytest_plugins = ("pytester",)

TESTS = """
from __future__ import annotations

import pytest

from andon_falsify.checkers import loss_finite, schedule
from andon_falsify.history import read_lines
from andon_falsify.verdict import not_applicable


@pytest.mark.claim("schedule")
def test_forgets_to_hold(court):
    pass


@pytest.mark.claim("loss-finite")
def test_holds(court):
    line = b'{"v":1,"kind":"step","step":1,"loss":1.0,"grad_norm":1.0}\\n'
    court.hold(loss_finite.check(read_lines([line], "it")))


@pytest.mark.claim("memory-budget")
def test_does_not_apply(court):
    from andon_falsify.checkers import memory_within

    court.hold(not_applicable(memory_within.CLAIM, "no plan"))
"""


@pytest.mark.parametrize(
    ("options", "code", "line"),
    [
        ([], 1, "checked 1 of 21 claims, 0 runs, 1 not applicable, 1 unknown"),
        (["-k", "not forgets"], 0, "checked 1 of 21 claims, 0 runs, 1 not applicable, 0 unknown"),
        (["-n", "1"], 1, "checked 1 of 21 claims, 0 runs, 1 not applicable, 1 unknown"),
    ],
)
def test_a_claim_that_checked_nothing_is_unknown_and_fails(
    pytester: pytest.Pytester, options: list[str], code: int, line: str
) -> None:
    """Every test passed, yet the session fails; through pytest-xdist too. What was not selected is not unknown."""
    pytester.makepyfile(test_claims=TESTS)
    done = pytester.runpytest_inprocess(
        "-q", "-p", "no:cacheprovider", "-p", "andon_falsify.compliance.plugin", *options
    )
    assert line in done.outlines, done.outlines
    assert done.ret == code
