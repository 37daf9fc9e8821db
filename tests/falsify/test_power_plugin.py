"""The last line of a session counts claims, and a claim that checked nothing fails it."""

from __future__ import annotations

import pytest

# Loaded before `pytester` notes which modules to forget after a run: torch cannot be loaded twice.
import andon_falsify.compliance.plugin  # noqa: F401

pytest_plugins = ("pytester",)

TESTS = """
import pytest

from andon_falsify.checkers import loss_finite, memory_within
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
    court.hold(not_applicable(memory_within.CLAIM, "no plan"))
"""


@pytest.mark.parametrize(
    ("options", "unknown"),
    [
        ([], 1),
        (["-k", "not forgets"], 0),
        # Deep: another process imports torch; what it reports is counted as here.
        pytest.param(["-n", "1"], 1, marks=pytest.mark.deep),
    ],
)
def test_a_claim_that_checked_nothing_is_unknown_and_fails(
    pytester: pytest.Pytester, options: list[str], unknown: int
) -> None:
    """Every test passed, yet the session fails; through pytest-xdist too. What was not selected is not unknown."""
    pytester.makepyfile(test_claims=TESTS)
    done = pytester.runpytest_inprocess(
        "-q", "-p", "no:cacheprovider", "-p", "andon_falsify.compliance.plugin", *options
    )
    assert f"checked 1 of 21 claims, 0 runs, 1 not applicable, {unknown} unknown" in done.outlines, done.outlines
    assert done.ret == unknown
