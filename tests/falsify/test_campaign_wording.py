"""A campaign in lines: one for each verdict, the smallest counterexample, its command, and how many more there are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from andon_falsify.campaign.findings import Finding, Report
from andon_falsify.campaign.wording import verdict_lines
from andon_falsify.cli.attempt import show
from andon_falsify.verdict import Counterexample, Outcome

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
