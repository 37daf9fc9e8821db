"""HTML report on a run, or two side by side: one self-contained page without scripts, legible without colour.

`RunView` holds the ledger and the other files of a run folder; `render` makes the tables and charts of the template.
The template escapes every value. As a second defence, a content security policy allows only the page's own style. Every
chart is also a table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from andon.config.load import by_dotted_key
from andon.config.schema import UNUSED_WITH_BASE, Config
from andon.console.html import escaping, source
from andon.console.messages import InputError, command_line, reading
from andon.inspection.difference import Differences, Side
from andon.inspection.recorded import Recorded, Steps, Stretch
from andon.inspection.report.curves import HEIGHT, WIDTH, Picture, Point, Series, draw
from andon.inspection.show import event
from andon.launch.report import Report
from andon.metrics.scores import Confusion, read_confusion
from andon.run.atomic import storage, write_whole
from andon.run.folder import RunFolder, metrics_lines
from andon.run.summary import Summary, quoted, read_summary
from andon.training.existing import resume_command
from andon_contracts.clauses import CLAUSES
from andon_contracts.record import Broken, End, Evaluation, Resume, Retraction, Saved, Start
from andon_contracts.untrusted import read_json

_CURVES = (
    ("loss", "Loss", "mean over one update"),
    ("accuracy", "Accuracy", "share of correct predictions"),
    ("lr", "Learning rate", ""),
    ("grad_norm", "Gradient norm", "2-norm of the whole reduced gradient"),
    ("seconds", "Step time", "seconds, with the evaluation and checkpoint before it"),
)
_MOST_SCORES, _MOST_EVALUATIONS, _MOST_STORY, _MOST_CLASSES, _MOST_ROWS = 8, 60, 200, 100, 1000
_MOST_RANKS, _MOST_CHARACTERS, _SHADES = 64, 2000, 9

Value = str | int | float | None
"""A table cell. A float is shown with four digits and its exact value for machines; None as "unknown"."""


@dataclass(frozen=True)
class Evaluated:
    """Scores of an evaluation. what: the kind of rows (validation, held-out)."""

    what: str
    record: Evaluation
    scores: Mapping[str, float]


@dataclass(frozen=True)
class RunView:
    """One run. summary: None if missing, or older than the ledger (`stale`).

    environment: versions and machine by name. ends: reports of the last launch by rank. seconds: between the lines of
    consecutive steps, by step. what: names of evaluations by (step, rows, scores). unread: number of metrics lines that
    cannot be read.
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
        return self.recorded.start.run if self.recorded.start is not None else str(self.recorded.path)

    @property
    def steps(self) -> Steps:
        return self.recorded.trajectory

    @property
    def state(self) -> str:
        """The reason in the `End` record, or `unfinished`."""
        last = self.recorded.records[-1] if self.recorded.records else None
        return last.reason if isinstance(last, End) else "unfinished"

    @property
    def violations(self) -> list[Broken]:
        return [record for record in self.recorded.records if isinstance(record, Broken)]

    @cached_property
    def evaluations(self) -> list[Evaluated]:
        """The last evaluation of each step and kind of rows, without those of retracted steps."""
        names = {key: list(each) for key, each in self.what.items()}
        latest: dict[tuple[int, str, int], Evaluated] = {}
        for record in self.recorded.records:
            if isinstance(record, Retraction):
                latest = {key: each for key, each in latest.items() if key[0] <= record.step}
            elif isinstance(record, Evaluation):
                scores = {name: real.value for name, real in record.scores.items()}
                left = names.get(_key(record.step, record.rows, scores), [])
                # Equal scores may have several names, used in order; a repeated step has the last one again.
                what = (left.pop(0) if len(left) > 1 else left[0]) if left else "evaluation"
                latest[record.step, what, record.rows] = Evaluated(what, record, scores)
        return list(latest.values())

    @cached_property
    def matrix(self) -> tuple[Evaluated, Confusion] | None:
        """The last evaluation with a confusion matrix, and the matrix. Raises `InputError` if it cannot be read."""
        folder = self.recorded.folder
        last = next((each for each in reversed(self.evaluations) if each.record.confusion is not None), None)
        if folder is None or last is None:
            return None
        return last, read_confusion(folder.confusion, last.record.confusion)

    @cached_property
    def story(self) -> list[tuple[str, str]]:
        """(kind, text) of each event other than steps, evaluations and checkpoints, in order."""
        lines = [("ledger", f"{self.recorded.ledger}, {self.recorded.head[0]} lines")]
        done, under_way = 0, False
        ours = self.recorded.start is None or self.recorded.start.writer is None
        for record in self.recorded.records:
            after = f"after step {done}" if done else "before its first step"
            if isinstance(record, Stretch):
                done = record.last.step
            elif not isinstance(record, Evaluation | Saved):
                if isinstance(record, Resume) and under_way and ours:
                    lines.append(("cut off", f"{after}, without an end record: the process was killed or failed"))
                parts = (line.partition(" ") for line in event(record, self.recorded))
                lines += [(kind, text.strip()) for kind, _, text in parts]
                under_way = not isinstance(record, End)
                done = record.step if isinstance(record, Resume | Retraction) else done
        if under_way:
            after = f"after step {done}" if done else "before its first step"
            lines.append(("unfinished", f"{after} the ledger has no end record: the run continues, or was killed"))
        if self.recorded.torn:
            lines.append(("torn", f"{self.recorded.torn} bytes of an incomplete last line"))
        return lines


def load_run_view(side: Side) -> RunView:
    """Load what the page shows of the run or ledger `side`.

    Raises `InputError` for a configuration, and if a file of the folder is damaged or cannot be read.
    """
    if side.recorded is None:
        raise InputError.at(side.name, "is a configuration; a report needs a run folder or a ledger")
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
    worlds = [record.world for record in side.recorded.records if isinstance(record, Start | Resume)]
    try:
        reports = {
            rank: Report.read(folder.path, rank) for rank in range(min(worlds[-1] if worlds else 0, _MOST_RANKS))
        }
    except ValueError as error:
        raise InputError.at("", str(error)) from error
    ends = {rank: report for rank, report in reports.items() if report is not None}
    current = None if stale else summary
    return RunView(side, side.recorded, current, stale, _environment(folder), ends, seconds, what, unread)


def _key(step: int, rows: int, scores: Mapping[str, float]) -> tuple[Any, ...]:
    # As hex, since NaN does not equal itself.
    return step, rows, tuple(sorted((name, value.hex()) for name, value in scores.items()))


def _environment(folder: RunFolder) -> dict[str, str]:
    content = _object(folder.environment)
    packages = content.pop("packages", {})
    every = {"commit": _object(folder.provenance).get("commit") or None, **content}
    every |= packages if isinstance(packages, dict) else {}
    return {name: _flat(value) for name, value in every.items() if value not in (None, [], {})}


def _flat(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={_flat(each)}" for name, each in value.items())
    return ", ".join(map(_flat, value)) if isinstance(value, list) else str(value)


def _object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    with reading(path, "is not JSON"):
        content = read_json(path)
    if not isinstance(content, dict):
        raise InputError.at(path, "is JSON, but not an object")
    return content


class Verdict(NamedTuple):
    """Exit code and lines of `andon verify`; the last line is the summary."""

    code: int
    lines: Sequence[str]


@dataclass(frozen=True)
class Page:
    """One run, or two side by side. verdicts: one for each run; None if `andon verify` is not installed."""

    runs: Sequence[RunView]
    verdicts: Sequence[Verdict | None]
    differences: Differences | None = None


@dataclass(frozen=True)
class Table:
    """Each row begins with its name. apart: indices of rows in which two runs differ. more: text below the table."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Value]]
    apart: frozenset[int] = frozenset()
    more: str = ""

    @property
    def numeric(self) -> frozenset[int]:
        """The columns that hold only numbers."""
        columns = enumerate(zip(*self.rows, strict=True))
        return frozenset(at for at, cells in columns if all(isinstance(cell, int | float) for cell in cells))


def write_page(page: Page, path: Path) -> None:
    """Write `page` to `path` atomically. Raises `InputError` if that fails."""
    write_whole(path, render(page).encode())


def render(page: Page) -> str:
    """The page as HTML. A text longer than 2000 characters is cut, with a count of the rest.

    Two runs with the same name are shown by path.
    """
    parts = resources.files(__package__)
    style, template = (parts.joinpath(name).read_text(encoding="utf-8") for name in ("style.css", "page.html.j2"))
    runs, two = page.runs, len(page.runs) > 1
    names = [run.side.name if len({each.name for each in runs}) < len(runs) else run.name for run in runs]
    heads = names if two else ("value",)
    parting = runs[0].steps.first_difference(runs[1].steps)[0] if two else None
    scores, environments = [_last_scores(run) for run in runs], [run.environment for run in runs]
    counts = [run.summary.contracts if run.summary is not None else {} for run in runs]
    clauses: list[list[Value]] = [
        [name, *(each.get(name, 0) for each in counts), CLAUSES[name].statement if name in CLAUSES else ""]
        for name in dict.fromkeys(chain(*counts))
    ]
    return escaping(template, _MOST_CHARACTERS).render(
        policy=f"default-src 'none'; style-src {source(style)}; base-uri 'none'; form-action 'none'",
        style=Markup(style),
        width=WIDTH,
        height=HEIGHT,
        runs=[
            _sections(run, name, f" of {name}" if two else "") | {"verdict": verdict}
            for run, name, verdict in zip(runs, names, page.verdicts, strict=True)
        ],
        differences=page.differences,
        parting=parting,
        common=not two or bool(runs[0].steps.keys() & runs[1].steps.keys()),
        facts=_beside("At a glance", heads, map(_facts, runs)),
        pictures=_pictures(runs, [f"{name}: " if two else "" for name in names], parting),
        scores=_beside("Scores", heads, scores) if any(scores) else None,
        clauses=Table("Evaluations in rank 0's last process", ("clause", *heads, "what it promises"), clauses),
        environment=_beside("Where it ran", heads, environments) if any(environments) else None,
        settings=_settings(runs, heads),
        most_classes=_MOST_CLASSES,
    )


def _sections(run: RunView, name: str, of: str) -> dict[str, Any]:
    ends = [(f"rank {rank}", end.exit, end.cause, end.message) for rank, end in run.ends.items()]
    scored = list(dict.fromkeys(chain(*(each.scores for each in run.evaluations))))[:_MOST_SCORES]
    evaluations = [
        [f"step {each.record.step}", each.what, each.record.rows, *(each.scores.get(score) for score in scored)]
        for each in run.evaluations[-_MOST_EVALUATIONS:]
    ]
    left = len(run.evaluations) - len(evaluations)
    earlier = f"{left} earlier ones are in the curves above and in the ledger." if left else ""
    commands, folder = [], run.recorded.folder
    if folder is not None and folder.config.exists():
        if run.state not in ("finished", "early-stopping"):
            commands.append((f"Continue the run{of}", resume_command(folder)))
        again = command_line("andon", "train", folder.config, "--run-dir", "ANOTHER_FOLDER")
        commands.append((f"Repeat the run{of}", again))
    classes, matrix = 0, None
    if run.matrix is not None:
        evaluated, confusion = run.matrix
        classes = confusion.classes
        if classes <= _MOST_CLASSES:
            rows = [[(count, round(_SHADES * count / max(1, sum(row)))) for count in row] for row in confusion.table()]
            caption = f"Confusion matrix{of}: {evaluated.what} after step {evaluated.record.step}"
            matrix = {"caption": caption, "labels": _labels(run, len(rows)), "rows": rows}
    return {
        "name": name,
        "of": of,
        "view": run,
        "evaluations": Table(f"Evaluations{of}", ("after", "of", "rows", *scored), evaluations, more=earlier),
        "classes": classes,
        "story": _cut(f"What happened{of}", ("what", ""), run.story, _MOST_STORY),
        "ends": _cut(f"How the last launch's processes ended{of}", ("rank", "exit code", "cause", "message"), ends),
        "commands": commands,
        "matrix": matrix,
        "parts": _parts(run, of),
    }


def _pictures(runs: Sequence[RunView], prefixes: Sequence[str], parting: int | None) -> list[Picture]:
    scores = dict.fromkeys(chain(*(each.scores for run in runs for each in run.evaluations)))
    others = [name for name in scores if name not in {name for name, _, _ in _CURVES}][:_MOST_SCORES]
    pictures = []
    for name, title, unit in (*_CURVES, *((name, name, "by evaluation") for name in others)):
        series = []
        for number, (run, prefix) in enumerate(zip(runs, prefixes, strict=True)):
            if name == "seconds":
                points = sorted((step, value) for step, value in run.seconds.items() if step in run.steps)
                series.append(Series(f"{prefix}training", points, number))
            elif name not in others:
                series.append(Series(f"{prefix}training", run.steps.curve(name), number))
            scored: dict[str, list[Point]] = {}
            for each in run.evaluations:
                if name in each.scores:
                    scored.setdefault(each.what, []).append((each.record.step, each.scores[name]))
            for kind, (what, points) in enumerate(scored.items(), start=1):
                series.append(Series(f"{prefix}{what}", sorted(points), number, dots=kind))
        pictures.append(draw(title, unit, series, parting))
    return [picture for picture in pictures if picture is not None]


def _beside(caption: str, heads: Sequence[str], maps: Iterable[Mapping[str, Value]]) -> Table:
    columns = list(maps)
    names = [name for name in dict.fromkeys(chain(*columns)) if any(each.get(name) is not None for each in columns)]
    rows = [[name, *(each.get(name) for each in columns)] for name in names]
    exact = [[value.hex() if isinstance(value, float) else value for value in row[1:]] for row in rows]
    return Table(caption, ("", *heads), rows, frozenset(at for at, row in enumerate(exact) if len(set(row)) > 1))


def _cut(caption: str, head: Sequence[str], rows: Sequence[Sequence[Value]], most: int = _MOST_ROWS) -> Table:
    left = len(rows) - most
    return Table(caption, head, rows[:most], more=f"{left} more are in the run's files." if left > 0 else "")


def _settings(runs: Sequence[RunView], heads: Sequence[str]) -> Table | None:
    settings = []
    for run in runs:
        config = run.side.config
        unused = UNUSED_WITH_BASE if config.get("model.base") is not None else frozenset[str]()
        settings.append({key: _plain(_nearer(value)) for key, value in config.items() if key not in unused})
    if not any(settings):
        return None
    usual = by_dotted_key(Config())
    table = _beside("Settings", heads, settings)
    rows = [[*row, _plain(usual.get(str(row[0])))] for row in table.rows]
    marked = [row for row in rows if len(set(row[1:-1] if len(runs) > 1 else row[1:])) > 1]
    rest = [row for row in rows if row not in marked]
    return Table(table.caption, (*table.head, "default"), marked + rest, frozenset(range(len(marked))))


def _nearer(value: object) -> object:
    if isinstance(value, list):
        return [_nearer(each) for each in value]
    if isinstance(value, dict):
        return {name: _nearer(each) for name, each in value.items()}
    return value.removeprefix(f"{Path.cwd()}/") if isinstance(value, str) else value


def _facts(run: RunView) -> dict[str, Value]:
    start, steps, summary, settings = run.recorded.start, run.steps, run.summary, run.side.settings
    memory, step = (summary.memory, summary.kept_step) if summary is not None else ({}, None)
    number = max(steps, default=0)
    last = steps[number] if steps else None
    workers = steps.ran_on.replace(" workers", "").replace(" worker", "").replace(" then ", ", then ")
    saved = [record for record in run.recorded.records if isinstance(record, Saved)]
    best = [record.name for record in saved if record.best]
    unit = "packs" if run.side.config.get("training.packing") else "rows"
    scores = _last_scores(run)
    words = ", ".join(f"{word} {value:.4f}" for word, value in quoted(scores).items())
    made_of: dict[str, Value] = {"score": f"{words} ({scores['of']})" if words else None}
    if settings is not None:
        made_of["model"] = _plain(_nearer(settings.model.base or "embedded"))
        made_of["data"] = ", ".join(_plain(_nearer(file.path)) for file in settings.data.files) or "embedded"
    peaks = {name: memory.get(key) for name, key in (("rank 0", "process_peak"), ("the fullest GPU", "peak"))}
    return {
        "how it ended": run.state,
        **made_of,
        "steps": f"{number} of {start.plan.steps}" if start is not None and start.plan.steps else number,
        "violations": len(run.violations),
        "task": start.plan.task if start is not None else None,
        f"{unit} an epoch": start.plan.rows if start is not None else None,
        f"{unit} a step": start.plan.batch_size if start is not None else None,
        "workers": workers or (f"{start.world} {start.backend}" if start is not None else None),
        "training loss of the last batch": last.loss.value if last is not None and last.loss is not None else None,
        "weights after the last step": last.digests.weights if last is not None else None,
        "weights of the result": f"{summary.weights_digest}, of step {step}" if summary is not None and step else None,
        "checkpoints": f"{len(saved)}{f', the best {best[-1]}' if best else ''}",
        "seconds, last command": summary.wall_s if summary is not None else None,
        **{f"peak memory of {name}": f"{size / 2**20:,.0f} MiB" if size else None for name, size in peaks.items()},
        "audit": _audit(run),
    }


def _audit(run: RunView) -> str | None:
    config = run.side.config
    if not config:
        return None
    every, coverage = config.get("contracts.audit_every"), config.get("contracts.audit_coverage")
    if every == 0 or config.get("contracts.enabled") is False:
        return "off"
    often = "about 1 % of the work" if every is None else f"every {every} steps"
    times = run.summary.contracts.get("audit", 0) if run.summary is not None else 0
    counted = f"; evaluated {times} times in the last part of the run" if times else "; none was due"
    return f"{often}, {coverage} of each rank's micro-batches{counted if run.summary is not None else ''}"


def _last_scores(run: RunView) -> dict[str, Value]:
    if run.summary is not None and run.summary.eval:
        return {"of": f"{run.summary.evaluated_on} rows", **_named_values(run.summary.eval)}
    if not run.evaluations:
        return {}
    last = run.evaluations[-1]
    return {"of": f"{last.what} rows after step {last.record.step}", "rows": last.record.rows, **last.scores}


def _named_values(content: Mapping[str, Any], prefix: str = "") -> dict[str, Value]:
    values: dict[str, Value] = {}
    for name, value in content.items():
        if _parted(value):
            continue
        if isinstance(value, dict):
            values |= _named_values(value, f"{prefix}{name}.")
        elif not isinstance(value, list) and value is not None:
            values[f"{prefix}{name}"] = value if isinstance(value, str | int | float) else str(value)
    return values


def _parts(run: RunView, of: str) -> list[Table]:
    tables = []
    for name, content in (run.summary.eval if run.summary is not None else {}).items():
        parts = _parted(content)
        if not parts:
            continue
        labels = list(content) if isinstance(content, dict) else _labels(run, len(parts))
        values = [_named_values({key: each for key, each in part.items() if key != "label"}) for part in parts]
        columns = list(dict.fromkeys(chain(*values)))
        rows = [[label, *(each.get(column) for column in columns)] for label, each in zip(labels, values, strict=True)]
        tables.append(_cut(f"Scores: {name}{of}", (name, *columns), rows))
    return tables


def _parted(value: object) -> list[dict[str, Any]]:
    each = list(value.values()) if isinstance(value, dict) else value
    return each if isinstance(each, list) and all(isinstance(part, dict) for part in each) else []


def _labels(run: RunView, count: int) -> Sequence[str]:
    labels = run.summary.labels if run.summary is not None else ()
    return labels if len(labels) == count else [str(number) for number in range(count)]


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
