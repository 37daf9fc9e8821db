"""The scoreboard says what was judged and nothing else, and an expectation that no longer holds is not overlooked."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from andon_falsify.report.cells import Column, tabulate
from andon_falsify.report.document import write_json
from andon_falsify.report.scoreboard import code, plain, scoreboard, scoreboard_table
from tests.falsify.reports import NASTY, RATIO, REASON, campaign, finding, hostile


def cells(markdown: str) -> list[list[str]]:
    """The rows of the first table in `markdown`, as a reader splits them: at bars that are not escaped."""
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def sections(markdown: str) -> dict[str, list[str]]:
    """The lines under each heading."""
    parts = re.split(r"^## (.+)$", markdown, flags=re.MULTILINE)
    return {title: body.strip().splitlines() for title, body in zip(parts[1::2], parts[2::2], strict=True)}


def test_the_table_has_what_was_judged() -> None:
    """Subjects with their versions as columns, claims as rows; what was not judged is empty, and - does not apply."""
    assert cells(scoreboard_table(campaign())) == [
        ["claim", "andon<br>1.0", "hf_trainer<br>5.23.0", "ddp<br>1.0"],
        ["---"] * 4,
        ["`replicas-agree` v1", "holds", "holds", "holds"],
        ["`samples-once` v1", "holds", "**falsified**", "holds"],
        ["`gradient-law` v1", "holds", "**falsified** (expected), ratio 4.000", "**falsified**, ratio 1.250"],
        ["`losses-close` v1", "holds", "unknown", "**UNEXPECTED PASS**"],
        ["`resume-equal` v1", "holds", "-", ""],
    ]


def test_what_falls_has_its_counterexample_and_its_reason() -> None:
    """The ratio, what it equals, where, how to see it again, and why it was expected; nothing else falls."""
    fallen = sections(scoreboard(campaign()))["What falls"]
    assert [line for line in fallen if line.startswith("### ")] == ["### hf_trainer 5.23.0", "### ddp 1.0"]
    assert [line.split()[1] for line in fallen if line.startswith("- ")] == [
        "`samples-once`",
        "`gradient-law`",
        "`gradient-law`",
    ]
    gradient = fallen.index(next(line for line in fallen if "4.000" in line))
    assert fallen[gradient].startswith(
        "- `gradient-law` (gloo, world 2, accumulation 2), ratio **4.000 = accumulation 2 x world 2**: step 1: 29 of 29"
    )
    assert fallen[gradient].endswith(f"; expected relative error &lt;= 2e-06, seen {RATIO.seen}")
    assert fallen[gradient + 1 : gradient + 3] == [
        f"  - expected, strictly: {REASON}",
        f"  - repeat with `{RATIO.repro}`",
    ]


def test_what_each_does_right_is_said_too() -> None:
    """With the comparisons behind it: 12 at each place."""
    held = ("replicas-agree", "samples-once", "losses-close")
    right = sections(scoreboard(campaign()))["What each does right"]
    assert right[1:] == [
        "- **hf_trainer 5.23.0**, 1 of 3: `replicas-agree` (12 comparisons)",
        "- **ddp 1.0**, 3 of 4: " + ", ".join(f"`{name}` (12 comparisons)" for name in held),
    ]
    assert "`gradient-law` (36 comparisons)" in right[0]


def test_a_surprise_leads_and_its_absence_is_not_mentioned() -> None:
    """An unexpected pass and an unannounced fall stand before everything else; without one there is no section."""
    found = sections(scoreboard(campaign()))
    assert next(iter(found)) == "Surprises"
    assert len(found["Surprises"]) == len(campaign().surprises) == 3
    expected = {("hf_trainer", "gradient-law"): "x", ("hf_trainer", "samples-once"): "y", ("ddp", "gradient-law"): "z"}
    assert "Surprises" not in sections(scoreboard(replace(campaign(), expected=expected)))


def test_the_measurement_is_named() -> None:
    """Start, machine, versions, seed and what was left out; the last line counts."""
    text = scoreboard(campaign())
    measured = "\n".join(sections(text)["Where this was measured"])
    for said in ("2026-01-02T03:04:05", "cpu: a processor", "transformers: 5.23.0", "seed 7", "`memory-budget`"):
        assert said in measured
    assert text.endswith(f"\n{campaign().closing_line}.\n")


def test_no_text_breaks_the_table_or_becomes_markup() -> None:
    """Bars, backticks, tags and newlines in names stay in their cell, as text."""
    text = scoreboard(hostile(NASTY))
    text.encode("utf-8")
    assert {len(row) for row in cells(text)} == {3}
    without_code = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", text)
    assert "<" not in without_code.replace("<br>", "")
    assert [line for line in text.splitlines() if re.match("##? ", line)] == [f"## {title}" for title in sections(text)]


def test_the_command_fails_where_a_verdict_was_not_expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected pass and an unannounced fall end it with 1; with every fall expected it ends with 0."""
    command = pytest.importorskip("benchmarks.scoreboard", reason="benchmarks/ is in the checkout only")
    right = {("hf_trainer", "gradient-law"): REASON, ("hf_trainer", "samples-once"): "y", ("ddp", "gradient-law"): "z"}
    strict = right | {("ddp", "losses-close"): "each rank reports its own loss"}
    for expected, code_ in ((right, 0), (strict, 1), ({}, 1)):
        write_json(replace(campaign(), expected=expected), tmp_path / "r.json")
        written = tmp_path / "scoreboard.md"
        monkeypatch.setattr("sys.argv", ["scoreboard", "--from", str(tmp_path / "r.json"), "--write", str(written)])
        assert command.main() == code_
        assert cells(written.read_text(encoding="utf-8"))[0] == cells(scoreboard_table(campaign()))[0]


def test_a_subject_is_named_once() -> None:
    """A version that names its library is not said to be one of the subject's own name."""
    assert str(Column("andon", "0.1.0")) == "andon 0.1.0"
    assert str(Column("accelerate", "accelerate 1.15.0")) == "accelerate 1.15.0"
    assert str(Column("hf_trainer", "transformers 5.23.0")) == "hf_trainer (transformers 5.23.0)"
    assert str(Column("mine:make", "")) == "mine:make"


def test_what_most_subjects_are_judged_on_comes_first() -> None:
    """Rows that are full stand above those that are not."""
    found = (finding("own", "andon"), finding("both", "andon"), finding("both", "ddp"), finding("last", "ddp"))
    assert tabulate(replace(campaign(), findings=found)).claims == ("both", "own", "last")


def test_text_and_code_of_markdown() -> None:
    """What would be emphasis, a link or the end of a code span is shown as it is."""
    assert plain("a_b *c* _d_ [e](f)\ng") == r"a_b \*c\* \_d\_ \[e\](f) g"
    assert code("a") == "`a`"
    assert code("a`b") == "``a`b``"
    assert code("`a|") == r"`` `a\| ``"
