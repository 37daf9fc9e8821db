"""One run as the report shows it: its ledger, and the other files of its folder. A missing file is empty here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from andon.console.problems import InputError, Problem
from andon.inspection.difference import Side
from andon.inspection.recorded import Recorded, Steps, Stretch
from andon.inspection.report.curves import Point
from andon.inspection.show import event
from andon.launch.report import Report, path_of
from andon.metrics.confusion import Confusion, read_confusion
from andon.run.atomic import storage
from andon.run.folder import RunFolder, metrics_lines
from andon.run.summary import Summary, read_summary
from andon_contracts.record import Broken, End, Evaluation, Resume, Retraction, Saved, Start
from andon_contracts.untrusted import read_json

_MOST_RANKS = 64
_STORY = (Start, Resume, Broken, Retraction, End)


@dataclass(frozen=True)
class Evaluated:
    """Scores after some update. what: of which rows (validation, held-out)."""

    what: str
    record: Evaluation
    scores: Mapping[str, float]


@dataclass(frozen=True)
class RunView:
    """One run. summary: None if there is none, or if it is of an earlier part of the run (`stale`).

    environment: versions and machine by name. ends: how the processes of the last launch ended, by rank. seconds: from
    one step's line to the next, by step. what: the names of evaluations, by (step, rows, scores). unread: the count of
    lines of metrics that cannot be read.
    """

    side: Side
    recorded: Recorded
    summary: Summary | None = None
    stale: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    ends: Mapping[int, Report] = field(default_factory=dict)
    seconds: Mapping[int, float] = field(default_factory=dict)
    what: Mapping[tuple[Any, ...], list[str]] = field(default_factory=dict)
    unread: int = 0

    @property
    def name(self) -> str:
        """The run's own name, or the path of the ledger."""
        return self.recorded.start.run if self.recorded.start is not None else str(self.recorded.path)

    @property
    def steps(self) -> Steps:
        """The steps that count."""
        return self.recorded.trajectory

    @property
    def state(self) -> str:
        """The reason of the end, or `unfinished`."""
        last = self.recorded.records[-1] if self.recorded.records else None
        return last.reason if isinstance(last, End) else "unfinished"

    @property
    def checkpoints(self) -> list[Saved]:
        """Every checkpoint in the ledger."""
        return [record for record in self.recorded.records if isinstance(record, Saved)]

    @property
    def violations(self) -> list[Broken]:
        """Every violation in the ledger."""
        return [record for record in self.recorded.records if isinstance(record, Broken)]

    @cached_property
    def evaluations(self) -> list[Evaluated]:
        """The last of each step and kind of rows, without those of updates that were taken back."""
        names = {key: list(each) for key, each in self.what.items()}
        kept: dict[tuple[int, str, int], Evaluated] = {}
        for record in self.recorded.records:
            if isinstance(record, Retraction):
                kept = {key: each for key, each in kept.items() if key[0] <= record.step}
            elif isinstance(record, Evaluation):
                scores = {name: real.value for name, real in record.scores.items()}
                left = names.get(_key(record.step, record.rows, scores), [])
                # The same rows may be scored again under another name; a step that is done again has its name again.
                what = (left.pop(0) if len(left) > 1 else left[0]) if left else "evaluation"
                kept[record.step, what, record.rows] = Evaluated(what, record, scores)
        return list(kept.values())

    @cached_property
    def matrix(self) -> tuple[Evaluated, Confusion] | None:
        """The last evaluation that has a confusion matrix, and that. Raises `InputError` if it cannot be read."""
        folder = self.recorded.folder
        last = next((each for each in reversed(self.evaluations) if each.record.confusion is not None), None)
        if folder is None or last is None:
            return None
        return last, read_confusion(folder.confusion, last.record.confusion)

    def curve(self, name: str) -> list[Point]:
        """Numbers by step: loss, accuracy, grad_norm or lr of the ledger, or seconds."""
        if name == "seconds":
            return sorted((step, value) for step, value in self.seconds.items() if step in self.steps)
        return self.steps.curve(name)

    def scored(self, score: str) -> dict[str, list[Point]]:
        """The score of this name by step, for each kind of rows."""
        found: dict[str, list[Point]] = {}
        for each in self.evaluations:
            if score in each.scores:
                found.setdefault(each.what, []).append((each.record.step, each.scores[score]))
        return {what: sorted(points) for what, points in found.items()}

    @cached_property
    def story(self) -> list[tuple[str, str]]:
        """What happened to the run beside its steps: starts, violations, retractions, resumes and ends."""
        lines = [("ledger", f"{self.recorded.ledger}, {self.recorded.head[0]} lines")]
        done, under_way = 0, False
        ours = self.recorded.start is None or self.recorded.start.writer is None
        for record in self.recorded.records:
            if isinstance(record, Stretch):
                done = record.last.step
            elif isinstance(record, _STORY):
                if isinstance(record, Resume) and under_way and ours:
                    lines.append(("cut off", f"{_after(done)}, without a line of its end: killed, or failed"))
                parts = (line.partition(" ") for line in event(record, self.recorded))
                lines += [(kind, text) for kind, _, text in parts]
                under_way = not isinstance(record, End)
                done = record.step if isinstance(record, Resume | Retraction) else done
        if under_way:
            lines.append(("unfinished", f"{_after(done)} the ledger has no end: it goes on still, or was cut off"))
        if self.recorded.torn:
            lines.append(("torn", f"{self.recorded.torn} bytes of an unfinished last line"))
        return [(kind, text.strip()) for kind, text in lines]


def _after(step: int) -> str:
    return f"after step {step}" if step else "before its first step"


def load_run_view(side: Side) -> RunView:
    """The run or ledger of `side`.

    Raises `InputError` for a configuration, and if a file of the folder is damaged or cannot be read.
    """
    if side.recorded is None:
        raise InputError([Problem(side.name, "is a configuration; a report is of a run folder or a ledger")])
    folder, start = side.recorded.folder, side.recorded.start
    if folder is None:
        return RunView(side, side.recorded, environment=dict(start.fingerprint) if start is not None else {})
    summary = read_summary(folder.summary) if folder.summary.exists() else None
    stale = summary is not None and summary.ledger.count != side.recorded.head[0]
    seconds: dict[int, float] = {}
    what: dict[tuple[Any, ...], list[str]] = {}
    unread = 0
    if folder.metrics.exists():
        with storage(folder.metrics, "read"):
            for raw in metrics_lines(folder.metrics):
                try:
                    line = json.loads(raw)
                    if "what" in line:
                        scores = {name: float(value) for name, value in line.items() if isinstance(value, float)}
                        key = _key(int(line["step"]), int(line["rows"]), scores)
                        what.setdefault(key, []).append(str(line["what"]))
                    else:
                        seconds[int(line["step"])] = float(line["seconds"])
                except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                    unread += 1
    return RunView(
        side=side,
        recorded=side.recorded,
        summary=None if stale else summary,
        stale=stale,
        environment=_environment(folder),
        ends=_ends(folder, side.recorded),
        seconds=seconds,
        what=what,
        unread=unread,
    )


def _key(step: int, rows: int, scores: Mapping[str, float]) -> tuple[Any, ...]:
    # NaN is equal to nothing, itself included; its hex is.
    return step, rows, tuple(sorted((name, value.hex()) for name, value in scores.items()))


def _environment(folder: RunFolder) -> dict[str, str]:
    found = _object(folder.environment)
    packages = found.pop("packages", {})
    commit = _object(folder.provenance).get("commit")
    every = {**({"commit": commit} if commit else {}), **found, **(packages if isinstance(packages, dict) else {})}
    return {name: _plain(value) for name, value in every.items() if value not in (None, [], {})}


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={_plain(each)}" for name, each in value.items())
    return ", ".join(map(_plain, value)) if isinstance(value, list) else str(value)


def _object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        with storage(path, "read"):
            found = read_json(path)
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError([Problem(str(path), f"is no JSON: {error}")]) from error
    if not isinstance(found, dict):
        raise InputError([Problem(str(path), "holds no object")])
    return found


def _ends(folder: RunFolder, recorded: Recorded) -> dict[int, Report]:
    worlds = [record.world for record in recorded.records if isinstance(record, Start | Resume)]
    ranks = range(min(worlds[-1], _MOST_RANKS)) if worlds else ()
    try:
        found = {rank: Report.read(folder.path, rank) for rank in ranks if path_of(folder.path, rank).exists()}
    except ValueError as error:
        raise InputError([Problem("", str(error))]) from error
    return {rank: each for rank, each in found.items() if each is not None}
