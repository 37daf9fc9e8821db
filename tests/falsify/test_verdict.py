"""Verdicts: nothing holds that was not checked, nothing grave is lost in merging, and the last line counts."""

from __future__ import annotations

import re
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon_falsify.checkers import CLAIMS
from andon_falsify.claims import statements
from andon_falsify.verdict import (
    Claim,
    Counterexample,
    Outcome,
    Verdict,
    closing_line,
    conclude,
    exit_code,
    judge,
    merge,
    not_applicable,
    repeatable,
    unknown,
)

CLAIM = Claim("sums-right", 1, "1 + 1 = 2")
FOUND = Counterexample("3", "step 1", "2", "3", 1.5, "1.500 = 3 / 2")
HOLDS = conclude(CLAIM, 3, [])
FALSIFIED = conclude(CLAIM, 1, [FOUND])
UNKNOWN = unknown(CLAIM, "no rows")
INAPPLICABLE = not_applicable(CLAIM, "one rank")
ALL = (HOLDS, FALSIFIED, UNKNOWN, INAPPLICABLE)
ANY = st.lists(st.sampled_from(ALL), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("checked", "found", "missing", "outcome"),
    [
        (1, [], "", Outcome.HOLDS),
        (0, [], "", Outcome.UNKNOWN),
        (5, [], "rank 1 is silent", Outcome.UNKNOWN),
        (5, [FOUND], "rank 1 is silent", Outcome.FALSIFIED),
        (0, [FOUND], "", Outcome.FALSIFIED),
    ],
)
def test_conclusions(checked: int, found: list[Counterexample], missing: str, outcome: Outcome) -> None:
    assert conclude(CLAIM, checked, found, missing).outcome is outcome


def test_a_verdict_that_contradicts_itself_cannot_be_made() -> None:
    for outcome, checked, found in (
        (Outcome.HOLDS, 0, ()),
        (Outcome.FALSIFIED, 1, ()),
        (Outcome.HOLDS, 1, (FOUND,)),
    ):
        with pytest.raises(ValueError, match=CLAIM.name):
            Verdict(CLAIM.name, outcome, "", checked, found)


@given(ANY)
def test_merging_keeps_the_gravest(verdicts: list[Verdict]) -> None:
    merged = merge(verdicts)
    outcomes = {verdict.outcome for verdict in verdicts}
    order = (Outcome.FALSIFIED, Outcome.UNKNOWN, Outcome.HOLDS, Outcome.NOT_APPLICABLE)
    assert merged.outcome is next(outcome for outcome in order if outcome in outcomes)
    assert len(merged.counterexamples) == verdicts.count(FALSIFIED)
    assert merged.checked == sum(verdict.checked for verdict in verdicts)


def test_merging_keeps_the_reasons_of_the_outcome() -> None:
    other = unknown(CLAIM, "no steps")
    assert merge([UNKNOWN, INAPPLICABLE, other, HOLDS, UNKNOWN]).why == "no rows; no steps"


def test_merging_needs_one_claim() -> None:
    for verdicts in ([], [HOLDS, unknown(Claim("other", 1, ""), "why")]):
        with pytest.raises(ValueError, match="one claim"):
            merge(verdicts)


def test_a_checker_that_throws_says_unknown() -> None:
    def broken(value: int) -> Verdict:
        raise ZeroDivisionError(f"of {value}")

    def working(value: int) -> Verdict:
        return conclude(CLAIM, value, [])

    assert judge(CLAIM, broken, 3) == unknown(CLAIM, "the checker failed: ZeroDivisionError: of 3")
    assert judge(CLAIM, working, value=3) == HOLDS


def test_the_closing_line_counts() -> None:
    assert closing_line(ALL, runs=7, not_selected=2) == "checked 2 of 6 claims, 7 runs, 1 not applicable, 1 unknown"
    assert closing_line([], runs=0) == "checked 0 of 0 claims, 0 runs, 0 not applicable, 0 unknown"


def test_exit_codes() -> None:
    expected = {(): 2, (HOLDS,): 0, (INAPPLICABLE,): 2, (UNKNOWN,): 2, (FALSIFIED,): 1}
    expected |= {(HOLDS, INAPPLICABLE): 0, (HOLDS, UNKNOWN): 2, ALL: 1}
    for verdicts, code in expected.items():
        assert {exit_code(order) for order in permutations(verdicts)} == {code}


def test_a_counterexample_reads_as_a_sentence() -> None:
    (named,) = repeatable(FALSIFIED, 42, "andon falsify --seed 42").counterexamples
    assert str(named) == (
        "step 1: 3; expected 2, seen 3; ratio 1.500 = 3 / 2; seed 42; repeat with: andon falsify --seed 42"
    )
    assert str(Counterexample("lost", seen="", expected="row 3")) == "lost; expected row 3, seen nothing"
    assert str(Counterexample("odd", seen="x", ratio=0.5)) == "odd; expected nothing, seen x; ratio 0.500"
    assert str(Counterexample("bare")) == "bare"


def test_a_seed_and_a_command_that_are_there_stay() -> None:
    own = conclude(CLAIM, 1, [Counterexample("3", seed=0, repro="own")])
    assert repeatable(own, 42, "other") == own


def test_a_verdict_lists_its_counterexamples() -> None:
    assert str(FALSIFIED).splitlines() == ["sums-right: falsified", f"  {FOUND}"]
    assert str(UNKNOWN) == "sums-right: unknown (no rows)"


def test_claims_have_names_of_their_own() -> None:
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS) == 13
    assert all(claim.version >= 1 and claim.statement.endswith(".") for claim in CLAIMS)


def test_statements_are_words_and_no_codes() -> None:
    beyond = [claim for claim in vars(statements).values() if isinstance(claim, Claim)]
    assert len(beyond) > 8
    code = r"\b(?:[A-Z]+-)*[A-Z]+-?\d+\b|\b(?:seed|issue|faults) [A-Z]?\d"
    for claim in (*CLAIMS, *beyond):
        assert re.findall(code, claim.statement) == [], claim.name
