"""The data model of reports: merged by subject and claim, counted in the last line."""

from __future__ import annotations

import pytest

from andon_falsify.campaign.findings import Finding, Report, joined
from andon_falsify.report.document import from_plain, to_plain
from andon_falsify.verdict import Counterexample, Outcome

FALLEN = Counterexample("off", "step 1", "1", "4", 4.0, "4.000 = accumulation 2 x world 2", 7, "andon falsify")


def finding(claim: str = "gradient-law", outcome: Outcome = Outcome.HOLDS, **changes: object) -> Finding:
    found = (FALLEN,) if outcome is Outcome.FALSIFIED else ()
    plain: dict[str, object] = {"checked": 3, "counterexamples": found, "seed": 7, "why": "because"}
    return Finding(claim, 1, "mine", "1.0", "gloo", 2, 2, outcome, **(plain | changes))  # type: ignore[arg-type]


def report(*findings: Finding, **changes: object) -> Report:
    plain: dict[str, object] = {
        "versions": {"torch": "2.13.0"},
        "machine": {"cpu": "x"},
        "findings": findings,
        "runs": 5,
    }
    return Report("2026-01-01T00:00:00+00:00", **(plain | changes))  # type: ignore[arg-type]


def test_claims_are_counted_once_a_subject() -> None:
    several = report(
        finding(),
        finding(outcome=Outcome.UNKNOWN),
        finding("replicas-agree"),
        finding("memory-budget", Outcome.NOT_APPLICABLE),
        not_selected=("schedule", "resume-equal"),
    )
    assert several.closing_line == "checked 1 of 5 claims, 5 runs, 1 not applicable, 1 unknown"
    assert several.exit_code == 2


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ([Outcome.HOLDS], 0),
        ([Outcome.HOLDS, Outcome.NOT_APPLICABLE], 0),
        ([Outcome.NOT_APPLICABLE], 2),
        ([Outcome.HOLDS, Outcome.UNKNOWN], 2),
        ([Outcome.UNKNOWN, Outcome.FALSIFIED], 1),
    ],
)
def test_exit_codes(outcomes: list[Outcome], code: int) -> None:
    found = [finding(str(place), outcome) for place, outcome in enumerate(outcomes)]
    expected = {("mine", each.claim): "known" for each in found}
    assert report(*found, expected=expected).exit_code == code


@pytest.mark.parametrize(
    ("excused", "other", "unfinished", "code"),
    [
        (Outcome.FALSIFIED, Outcome.HOLDS, "", 0),
        (Outcome.FALSIFIED, Outcome.NOT_APPLICABLE, "", 0),
        (Outcome.FALSIFIED, Outcome.UNKNOWN, "", 2),
        (Outcome.FALSIFIED, Outcome.FALSIFIED, "", 1),
        (Outcome.HOLDS, Outcome.HOLDS, "", 2),
        (Outcome.UNKNOWN, Outcome.HOLDS, "", 2),
        (Outcome.FALSIFIED, Outcome.HOLDS, "interrupted", 2),
        (Outcome.FALSIFIED, Outcome.FALSIFIED, "interrupted", 1),
    ],
)
def test_what_is_excused_fails_nothing_but_by_holding(
    excused: Outcome, other: Outcome, unfinished: str, code: int
) -> None:
    found = report(finding("a", excused), finding("b", other), excused=("a",), unfinished=unfinished)
    assert (found.exit_code, from_plain(to_plain(found), "file").exit_code) == (code, code)


def test_a_surprise_is_a_fall_unannounced_or_one_that_did_not_happen() -> None:
    whole = report(
        finding("fell", Outcome.FALSIFIED),
        finding("announced", Outcome.FALSIFIED),
        finding("held"),
        finding("stood"),
        expected={("mine", "announced"): "known", ("mine", "stood"): "mended?", ("other", "x"): "not judged"},
    )
    assert [text.partition(",")[0] for text in whole.surprises] == [
        "mine: fell is falsified",
        "mine: stood is holds",
    ]


def test_reports_of_several_subjects_are_joined() -> None:
    other = report(finding(), versions={"torch": "2.14.0"}, runs=2)
    both = joined([report(finding()), other])
    assert (both.runs, both.versions["torch"], len(both.findings)) == (7, "2.13.0 or 2.14.0", 2)
    with pytest.raises(ValueError, match="no report to join"):
        joined([])
