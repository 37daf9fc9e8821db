"""A run that was killed on its way from the last step to its summary: what it has written is not written twice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from andon.config.load import load_config
from andon.console.exits import Exit
from andon.run.folder import RunFolder
from andon.run.ledger import LedgerWriter, read_ledger
from andon.training.run import train
from andon_contracts.fields import Real
from andon_contracts.record import Broken, End, Evaluation, Record
from andon_contracts.violation import Violation
from tests.training.runs import Runs, outcome, records, summary


def go_on(runs: Runs, folder: Path, *more: str, workers: int = 1) -> Exit:
    """Resume in this process."""
    flags = {"run.dir": str(folder), "run.backend": "threads", "run.resume": "auto", "run.workers": workers}
    return train(load_config(None, runs.overrides(*more), flags), RunFolder(folder), lambda: False)


def cut(folder: Path, lines: int) -> None:
    """Leave the run as a kill does before its last `lines` lines of the ledger and its summary were written."""
    run = RunFolder(folder)
    run.summary.unlink()
    kept = run.ledger.read_bytes().splitlines(True)
    run.ledger.write_bytes(b"".join(kept[: len(kept) - lines]))


def scored(folder: Path) -> list[dict[str, Any]]:
    """What the metrics say of the last scores."""
    lines = map(json.loads, RunFolder(folder).metrics.read_text().splitlines())
    return [line for line in lines if line.get("what") == "last validation"]


def without_counts(folder: Path) -> dict[str, Any]:
    """The summary but for what tells of one process: its time, its memory, how often it evaluated each clause."""
    return {name: value for name, value in summary(folder).items() if name not in ("wall_s", "contracts", "memory")}


@pytest.mark.parametrize("workers", [1, 3])
def test_only_the_summary_lacks(runs: Runs, whole: Path, copy: Path, workers: int) -> None:
    """The ledger stays as it is to the byte, wherever the run goes on, and the summary is what it would have been."""
    before = RunFolder(copy).ledger.read_bytes()
    cut(copy, 0)
    assert go_on(runs, copy, workers=workers) == Exit.OK
    assert RunFolder(copy).ledger.read_bytes() == before
    assert without_counts(copy) == without_counts(whole)
    assert scored(copy) == scored(whole)
    assert len(scored(copy)) == 1


@pytest.mark.parametrize(("lines", "kinds"), [(1, ["eval", "resume", "end"]), (2, ["resume", "eval", "end"])])
def test_each_line_of_the_end_is_written_once(
    runs: Runs, whole: Path, copy: Path, lines: int, kinds: list[str]
) -> None:
    cut(copy, lines)
    assert go_on(runs, copy) == Exit.OK
    found = list(read_ledger(RunFolder(copy).ledger))
    assert [record.kind for record in found][-len(kinds) :] == kinds
    assert [records(copy, kind) for kind in ("eval", "end")] == [records(whole, kind) for kind in ("eval", "end")]
    assert outcome(copy) == outcome(whole)
    assert summary(copy)["ledger"]["count"] == len(found)
    assert len(scored(copy)) == 1


@pytest.mark.parametrize("kind", [Evaluation, End])
def test_other_scores_than_before_are_a_violation(runs: Runs, copy: Path, kind: type[Evaluation | End]) -> None:
    cut(copy, 0)
    forge(copy, kind)
    with pytest.raises(Violation, match="resume-exact broken at step 12") as caught:
        go_on(runs, copy)
    assert ("scores: " in str(caught.value)) == (kind is Evaluation)
    assert summary(copy)["violations"] == 1
    assert isinstance(list(read_ledger(RunFolder(copy).ledger))[-2], Broken)


def forge(folder: Path, kind: type[Evaluation | End]) -> None:
    """Other last scores, or another last loss, in a chain that fits."""
    ledger = RunFolder(folder).ledger
    found = list(read_ledger(ledger))
    last = max(place for place, record in enumerate(found) if isinstance(record, kind))
    found[last] = changed(found[last])
    ledger.unlink()
    with LedgerWriter(ledger) as writer:
        for record in found:
            writer.append(record)


def changed(record: Record) -> Record:
    """The record with another number in it."""
    if isinstance(record, Evaluation):
        return replace(record, scores={**record.scores, "loss": Real.of(2 * record.scores["loss"].value)})
    if isinstance(record, End) and record.final_loss is not None:
        return replace(record, final_loss=Real.of(2 * record.final_loss.value))
    raise AssertionError(record)
