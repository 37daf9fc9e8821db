"""What the page shows of one run or two, as data for the template, which escapes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from andon.config.identity import by_dotted_key
from andon.config.schema import UNUSED_WITH_BASE, Config
from andon.console.messages import command_line
from andon.inspection.difference import Differences
from andon.inspection.report.curves import Picture, Series, draw
from andon.inspection.report.run_view import RunView
from andon.run.summary import quoted
from andon.training.existing import go_on_with
from andon_contracts.clauses import CLAUSES

_CURVES = (
    ("loss", "Loss", "mean of an update"),
    ("accuracy", "Accuracy", "share that is predicted right"),
    ("lr", "Learning rate", ""),
    ("grad_norm", "Gradient norm", "2-norm of the whole reduced gradient"),
    ("seconds", "Step time", "seconds, with evaluations and checkpoints before it"),
)
_MOST_SCORES, _MOST_EVALUATIONS, _MOST_STORY, _MOST_CLASSES, _MOST_ROWS = 8, 60, 200, 100, 1000
_SHADES = 9

Value = str | int | float | None
"""A cell. A float is shown in four digits, with the exact value for machines; None is shown as "not known"."""


class Verdict(NamedTuple):
    """The exit code and the lines of `andon verify`; the last line sums up."""

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
    """A table whose rows begin with their names. apart: the rows in which two runs differ. more: text below it."""

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


def data_of(page: Page) -> dict[str, Any]:
    """The page by the names that the template uses. Two runs of one name are called by their paths."""
    runs, two = page.runs, len(page.runs) > 1
    names = [run.side.name if len({each.name for each in runs}) < len(runs) else run.name for run in runs]
    heads = names if two else ("value",)
    of = [f" of {name}" if two else "" for name in names]
    parting = runs[0].steps.first_difference(runs[1].steps)[0] if two else None
    scores, environments = [_last_scores(run) for run in runs], [run.environment for run in runs]
    matrices = [_matrix(run, where) for run, where in zip(runs, of, strict=True)]
    each_run = [
        {
            "name": name,
            "of": where,
            "view": run,
            "evaluations": _evaluations(run, where),
            "classes": len(matrix["rows"]) if matrix else run.matrix[1].classes if run.matrix is not None else 0,
            "story": _cut(f"What happened{where}", ("what", ""), run.story, _MOST_STORY),
            "ends": _ends(run, where),
            "commands": _commands(run, where),
            "matrix": matrix,
            "parts": _parts(run, where),
            "verdict": verdict,
        }
        for run, name, where, matrix, verdict in zip(runs, names, of, matrices, page.verdicts, strict=True)
    ]
    return {
        "runs": each_run,
        "differences": page.differences,
        "parting": parting,
        "common": not two or bool(runs[0].steps.keys() & runs[1].steps.keys()),
        "facts": _beside("At a glance", heads, map(_facts, runs)),
        "pictures": _pictures(runs, [f"{name}: " if two else "" for name in names], parting),
        "scores": _beside("Scores", heads, scores) if any(scores) else None,
        "clauses": _clauses(runs, heads),
        "environment": _beside("Where it ran", heads, environments) if any(environments) else None,
        "settings": _settings(runs, heads),
        "most_classes": _MOST_CLASSES,
    }


def _pictures(runs: Sequence[RunView], prefixes: Sequence[str], parting: int | None) -> list[Picture]:
    """The curves, with evaluations as points, and pictures of the scores that no curve has."""
    scores = dict.fromkeys(chain(*(each.scores for run in runs for each in run.evaluations)))
    others = [name for name in scores if name not in {name for name, _, _ in _CURVES}][:_MOST_SCORES]
    pictures = []
    for name, title, unit in (*_CURVES, *((name, name, "by evaluation") for name in others)):
        series = []
        for number, (run, prefix) in enumerate(zip(runs, prefixes, strict=True)):
            if name not in others:
                series.append(Series(f"{prefix}training", run.curve(name), number))
            series += [
                Series(f"{prefix}{what}", points, number, dots=kind)
                for kind, (what, points) in enumerate(run.scored(name).items(), start=1)
            ]
        pictures.append(draw(title, unit, series, parting))
    return [picture for picture in pictures if picture is not None]


def _beside(caption: str, heads: Sequence[str], found: Iterable[Mapping[str, Value]]) -> Table:
    columns = list(found)
    names = [name for name in dict.fromkeys(chain(*columns)) if any(each.get(name) is not None for each in columns)]
    rows = [[name, *(each.get(name) for each in columns)] for name in names]
    exact = [[value.hex() if isinstance(value, float) else value for value in row[1:]] for row in rows]
    apart = frozenset(at for at, row in enumerate(exact) if len(set(row)) > 1)
    return Table(caption, ("", *heads), rows, apart)


def _cut(caption: str, head: Sequence[str], rows: Sequence[Sequence[Value]], most: int = _MOST_ROWS) -> Table:
    left = len(rows) - most
    return Table(caption, head, rows[:most], more=f"{left} more are in the run's files." if left > 0 else "")


def _ends(run: RunView, of: str) -> Table | None:
    rows = [(f"rank {rank}", each.exit, each.cause, each.message) for rank, each in run.ends.items()]
    head = ("rank", "exit code", "why", "said")
    return _cut(f"How the last launch's processes ended{of}", head, rows) if rows else None


def _clauses(runs: Sequence[RunView], heads: Sequence[str]) -> Table | None:
    counts = [run.summary.contracts if run.summary is not None else {} for run in runs]
    rows: list[list[Value]] = [
        [name, *(each.get(name, 0) for each in counts), CLAUSES[name].statement if name in CLAUSES else ""]
        for name in dict.fromkeys(chain(*counts))
    ]
    head = ("clause", *heads, "what it promises")
    return Table("Evaluations by rank 0's last process", head, rows) if rows else None


def _settings(runs: Sequence[RunView], heads: Sequence[str]) -> Table | None:
    """The settings that each run read, with their defaults. What differs, or else what was changed, comes first."""
    found = []
    for run in runs:
        config = run.side.config
        unused = UNUSED_WITH_BASE if config.get("model.base") is not None else frozenset[str]()
        found.append({key: _plain(_nearer(value)) for key, value in config.items() if key not in unused})
    if not any(found):
        return None
    usual = by_dotted_key(Config())
    table = _beside("Settings", heads, found)
    rows = [[*row, _plain(usual.get(str(row[0])))] for row in table.rows]
    marked = [row for row in rows if len(set(row[1:-1] if len(runs) > 1 else row[1:])) > 1]
    rest = [row for row in rows if row not in marked]
    return Table(table.caption, (*table.head, "default"), marked + rest, frozenset(range(len(marked))))


def _nearer(value: object) -> object:
    """A path below the current folder, relative to it."""
    if isinstance(value, list):
        return [_nearer(each) for each in value]
    if isinstance(value, dict):
        return {name: _nearer(each) for name, each in value.items()}
    return value.removeprefix(f"{Path.cwd()}/") if isinstance(value, str) else value


def _facts(run: RunView) -> dict[str, Value]:
    start, steps, summary, settings = run.recorded.start, run.steps, run.summary, run.side.settings
    memory, kept = (summary.memory, summary.kept_step) if summary is not None else ({}, None)
    number = max(steps, default=0)
    last = steps[number] if steps else None
    planned = start.plan.steps if start is not None else None
    workers = steps.ran_on.replace(" workers", "").replace(" then ", ", then ")
    best = [each.name for each in run.checkpoints if each.best]
    unit = "packs" if run.side.config.get("training.packing") else "rows"
    scores = _last_scores(run)
    words = ", ".join(f"{word} {value:.4f}" for word, value in quoted(scores).items())
    made_of: dict[str, Value] = {"score": f"{words} ({scores['of']})" if words else None}
    if settings is not None:
        made_of["model"] = _plain(_nearer(settings.model.base or "embedded"))
        made_of["data"] = ", ".join(_plain(_nearer(file.path)) for file in settings.data.files) or "embedded"
    return {
        "how it ended": run.state,
        **made_of,
        "steps": f"{number} of {planned}" if planned else number,
        "violations": len(run.violations),
        "task": start.plan.task if start is not None else None,
        f"{unit} an epoch": start.plan.rows if start is not None else None,
        f"{unit} a step": start.plan.batch_size if start is not None else None,
        "workers": workers or (f"{start.world} {start.backend}" if start is not None else None),
        "training loss of the last batch": last.loss.value if last is not None and last.loss is not None else None,
        "weights after the last step": last.digests.weights if last is not None else None,
        "weights that were kept": f"{summary.weights_digest}, of step {kept}" if summary is not None and kept else None,
        "checkpoints": f"{len(run.checkpoints)}{f', the best {best[-1]}' if best else ''}",
        "seconds, last command": summary.wall_s if summary is not None else None,
        "peak memory of rank 0": _mib(memory.get("process_peak")),
        "peak memory of the fullest GPU": _mib(memory.get("peak")),
        "audit": _audit(run),
    }


def _mib(size: int | None) -> str | None:
    return f"{size / 2**20:,.0f} MiB" if size is not None else None


def _audit(run: RunView) -> str | None:
    config = run.side.config
    if not config:
        return None
    every, coverage = config.get("contracts.audit_every"), config.get("contracts.audit_coverage")
    if every == 0 or config.get("contracts.enabled") is False:
        return "off"
    often = "a hundredth of the work" if every is None else f"every {every} steps"
    counted = ""
    if run.summary is not None:
        times = run.summary.contracts.get("audit", 0)
        counted = f"; evaluated {times} times in the last part of the run" if times else "; none fell due"
    return f"{often}, {coverage} of each rank's micro-batches{counted}"


def _last_scores(run: RunView) -> dict[str, Value]:
    if run.summary is not None and run.summary.eval:
        return {"of": f"{run.summary.evaluated_on} rows", **_named_values(run.summary.eval)}
    if not run.evaluations:
        return {}
    last = run.evaluations[-1]
    return {"of": f"{last.what} rows after step {last.record.step}", "rows": last.record.rows, **last.scores}


def _named_values(found: Mapping[str, Any], prefix: str = "") -> dict[str, Value]:
    """Single values by name, those of objects by dotted name, without lists and the parts of `_parted`."""
    values: dict[str, Value] = {}
    for name, value in found.items():
        if _parted(value):
            continue
        if isinstance(value, dict):
            values |= _named_values(value, f"{prefix}{name}.")
        elif not isinstance(value, list) and value is not None:
            values[f"{prefix}{name}"] = value if isinstance(value, str | int | float) else str(value)
    return values


def _parts(run: RunView, of: str) -> list[Table]:
    """Scores of parts, as of each class: a table for each list or object of objects."""
    tables = []
    for name, found in (run.summary.eval if run.summary is not None else {}).items():
        parts = _parted(found)
        if not parts:
            continue
        labels = list(found) if isinstance(found, dict) else _labels(run, len(parts))
        values = [_named_values({key: each for key, each in part.items() if key != "label"}) for part in parts]
        columns = list(dict.fromkeys(chain(*values)))
        rows = [[label, *(each.get(column) for column in columns)] for label, each in zip(labels, values, strict=True)]
        tables.append(_cut(f"Scores: {name}{of}", (name, *columns), rows))
    return tables


def _parted(value: object) -> list[dict[str, Any]]:
    """The objects of a list or an object that holds only objects; else none."""
    each = list(value.values()) if isinstance(value, dict) else value
    return each if isinstance(each, list) and all(isinstance(part, dict) for part in each) else []


def _labels(run: RunView, count: int) -> Sequence[str]:
    labels = run.summary.labels if run.summary is not None else ()
    return labels if len(labels) == count else [str(number) for number in range(count)]


def _matrix(run: RunView, of: str) -> dict[str, Any] | None:
    """The confusion matrix of the last evaluation that has one: its count and shade, 0 to 9, for each cell."""
    if run.matrix is None or run.matrix[1].classes > _MOST_CLASSES:
        return None
    evaluated, confusion = run.matrix
    rows = [[(count, round(_SHADES * count / max(1, sum(row)))) for count in row] for row in confusion.table()]
    caption = f"Confusion matrix{of}: {evaluated.what} after step {evaluated.record.step}"
    return {"caption": caption, "labels": _labels(run, len(rows)), "rows": rows}


def _evaluations(run: RunView, of: str) -> Table | None:
    names = list(dict.fromkeys(chain(*(each.scores for each in run.evaluations))))[:_MOST_SCORES]
    rows = [
        [f"step {each.record.step}", each.what, each.record.rows, *(each.scores.get(name) for name in names)]
        for each in run.evaluations[-_MOST_EVALUATIONS:]
    ]
    left = len(run.evaluations) - len(rows)
    more = f"{left} earlier ones are drawn above, and in the ledger." if left else ""
    return Table(f"Evaluations{of}", ("after", "of", "rows", *names), rows, more=more) if rows else None


def _commands(run: RunView, of: str) -> list[tuple[str, str]]:
    folder = run.recorded.folder
    if folder is None or not folder.config.exists():
        return []
    again = command_line("andon", "train", folder.config, "--run-dir", "ANOTHER_FOLDER")
    goes_on = [] if run.state in ("finished", "early-stopping") else [(f"Go on with the run{of}", go_on_with(folder))]
    return [*goes_on, (f"Repeat the run{of}", again)]


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
