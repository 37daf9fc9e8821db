"""A campaign's report: findings merged and counted, and the lines that are printed of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from andon_falsify.campaign.findings import Finding, Report, joined
from andon_falsify.campaign.wording import verdict_lines
from andon_falsify.cli.attempt import show
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


SMALLEST = Counterexample(
    "off the law", "step 1", "1", "4", 4.0, "4.000 = accumulation 2 x world 2", 7, "andon falsify 1"
)
LARGER = replace(SMALLEST, where="step 9", repro="andon falsify 2")


def fallen(world: int, accumulation: int, *found: Counterexample, why: str = "") -> Finding:
    return Finding("sum", 2, "x", "", "gloo", world, accumulation, Outcome.FALSIFIED, why, 5, found)


def lines(*findings: Finding) -> list[str]:
    return list(verdict_lines(Report("2026-01-02T03:04:05+00:00", findings=findings)))


def test_one_counterexample_stands_for_all() -> None:
    assert lines(fallen(2, 1, SMALLEST, LARGER), fallen(3, 2, LARGER), fallen(2, 2, LARGER)) == [
        "sum v2: falsified at gloo, world 2, accumulation 1 and 2; gloo, world 3, accumulation 2",
        "  step 1: off the law; expected 1, seen 4; ratio 4.000 = accumulation 2 x world 2",
        "  repeat with: andon falsify 1",
        "  and 3 more (in the file of --json)",
    ]


@pytest.mark.parametrize(
    ("option", "rest"), [("--json", "in the file of --json"), ("--html", "--json FILE writes them")]
)
def test_a_file_that_was_not_asked_for_is_not_pointed_at(
    option: str, rest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report("2026-01-02T03:04:05+00:00", findings=(fallen(2, 1, SMALLEST, LARGER),))
    show(report, {option: Path("r")})
    assert f"  and 1 more ({rest})" in capsys.readouterr().out.splitlines()


def test_what_is_alone_is_not_counted() -> None:
    plain = Counterexample("off the law")
    assert lines(fallen(2, 1, plain, why="same forward, not independent; 3 more counterexamples")) == [
        "sum v2: falsified at gloo, world 2, accumulation 1 (same forward, not independent)",
        "  off the law",
    ]


def test_places_beyond_three_are_counted() -> None:
    (first, *_) = lines(*(fallen(world, 1, SMALLEST) for world in range(2, 7)))
    assert first.endswith("gloo, world 4, accumulation 1; and 2 more places")


def test_what_keeps_all_claims_from_being_judged_is_said_once() -> None:
    why = "rank 0: no model"
    first = Finding("sum", 2, "x", "", "gloo", 2, 1, Outcome.UNKNOWN, why, 0, ())
    second = replace(first, claim="mean")
    assert lines(first, second) == [
        "no claim can be judged: rank 0: no model",
        "sum v2: unknown at gloo, world 2, accumulation 1",
        "mean v2: unknown at gloo, world 2, accumulation 1",
    ]
    assert "(rank 0: no model)" in lines(first, replace(second, why="another"))[0]
    assert "(rank 0: no model)" in lines(first)[0]
