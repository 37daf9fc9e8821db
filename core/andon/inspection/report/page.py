"""What the page shows of one run or two, in its order; nothing is escaped here: the template does that."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from andon.config.identity import by_dotted_key
from andon.config.schema import UNUSED_WITH_BASE, Config
from andon.console.messages import command_line
from andon.inspection.difference import Differences
from andon.inspection.report.curves import Picture, Series, draw
from andon.inspection.report.told import Evaluated, Told
from andon.metrics.confusion import Confusion
from andon.run.summary import quoted
from andon.training.existing import go_on_with
from andon_contracts.clauses import CLAUSES

_TONES = {"finished": "good", "early-stopping": "good", "violation": "bad", "failed": "bad"}
_VERDICTS = {0: ("holds", "good"), 1: ("falsified", "bad"), 2: ("unknown", "open")}
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
"""What stands in a cell. A float is shown in four digits, with the exact value for machines; None is not known."""


@dataclass(frozen=True)
class Table:
    """A table with a name for each row. apart: the rows in which two runs differ. more: what was left out, in words."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Value]]
    apart: frozenset[int] = frozenset()
    more: str = ""

    @cached_property
    def numeric(self) -> frozenset[int]:
        """The columns that hold only numbers."""
        columns = enumerate(zip(*self.rows, strict=True))
        return frozenset(at for at, cells in columns if all(isinstance(cell, int | float) for cell in cells))


@dataclass(frozen=True)
class Verdict:
    """What `andon verify` said of a run: its exit code and lines, the last of which sums up."""

    code: int
    lines: Sequence[str]

    @property
    def word(self) -> str:
        """The verdict in a word; empty where there is none, and the lines say why."""
        return _VERDICTS.get(self.code, ("", ""))[0]

    @property
    def tone(self) -> str:
        """good, bad or open."""
        return _VERDICTS.get(self.code, ("", "open"))[1]


@dataclass(frozen=True)
class Matrix:
    """A confusion matrix: rows are the actual classes, columns the predicted ones, `shade` from 0 to 9."""

    caption: str
    labels: Sequence[str]
    rows: Sequence[Sequence[tuple[int, int]]]


@dataclass(frozen=True)
class Page:
    """One run, or two side by side. verdicts: of each; None where no `andon verify` is installed."""

    runs: Sequence[Told]
    verdicts: Sequence[Verdict | None]
    differences: Differences | None = None

    def name(self, run: Told) -> str:
        """The run as the page calls it: by its path where both have one name."""
        alike = len({each.name for each in self.runs}) < len(self.runs)
        return run.side.name if alike else run.name

    @property
    def names(self) -> list[str]:
        """The runs as the page calls them."""
        return [self.name(run) for run in self.runs]

    def state(self, run: Told) -> tuple[str, str]:
        """How the run ended, and its tone: good, bad or open."""
        return run.state, _TONES.get(run.state, "open")

    @cached_property
    def parting(self) -> int | None:
        """The first step that both have with different records."""
        if len(self.runs) < 2:
            return None
        return self.runs[0].steps.first_difference(self.runs[1].steps)[0]

    @property
    def parting_words(self) -> str:
        """Where two runs part, in a sentence."""
        if self.parting is not None:
            return f"The first step that differs is step {self.parting}."
        if not self.runs[0].steps.keys() & self.runs[1].steps.keys():
            return "The runs have no step in common."
        return "Every step that both have is the same to the bit."

    @cached_property
    def facts(self) -> Table:
        """What a reader wants to know first."""
        return self._beside("At a glance", map(_facts, self.runs))

    @cached_property
    def pictures(self) -> list[Picture]:
        """The curves, with evaluations as points, and pictures of the scores that no curve has."""
        curves = [draw(title, unit, self._series(name), self.parting) for name, title, unit in _CURVES]
        scores = list(dict.fromkeys(chain(*(each.scores for run in self.runs for each in run.evaluations))))
        others = [name for name in scores if name not in {name for name, _, _ in _CURVES}][:_MOST_SCORES]
        points = [draw(name, "by evaluation", self._series(name, curve=False), self.parting) for name in others]
        return [picture for picture in (*curves, *points) if picture is not None]

    def _series(self, name: str, *, curve: bool = True) -> list[Series]:
        found = []
        for number, run in enumerate(self.runs):
            prefix = f"{self.name(run)}: " if len(self.runs) > 1 else ""
            if curve:
                found.append(Series(f"{prefix}training", run.curve(name), number))
            found += [
                Series(f"{prefix}{what}", points, number, dots=kind)
                for kind, (what, points) in enumerate(run.scored(name).items(), start=1)
            ]
        return found

    @cached_property
    def scores(self) -> Table | None:
        """The last scores of each run by name, whatever they are."""
        found = [_last_scores(run) for run in self.runs]
        return self._beside("Scores", found) if any(found) else None

    @cached_property
    def parts(self) -> list[Table]:
        """Scores of parts, of each class for one: a table for each list of named values."""
        return [table for run in self.runs for table in _parts(run, self._of(run))]

    @cached_property
    def matrices(self) -> list[Matrix]:
        """The confusion matrix of each run's last evaluation that has one, where it can be shown."""
        found = ((run, *run.matrix) for run in self.runs if run.matrix is not None)
        return [
            _matrix(run, evaluated, confusion, self._of(run))
            for run, evaluated, confusion in found
            if confusion.classes <= _MOST_CLASSES
        ]

    @cached_property
    def evaluations(self) -> list[Table]:
        """Each run's evaluations, the newest of them."""
        return [_evaluations(run, self._of(run)) for run in self.runs if run.evaluations]

    @property
    def stories(self) -> list[Table]:
        """What happened to each run."""
        return [_cut(f"What happened{self._of(run)}", ("what", ""), run.story, _MOST_STORY) for run in self.runs]

    @property
    def ends(self) -> list[Table]:
        """How the processes of each run's last launch ended."""
        head = ("rank", "exit code", "why", "said")
        return [
            _cut(
                f"How the last launch's processes ended{self._of(run)}",
                head,
                [(f"rank {rank}", each.exit, each.cause, each.message) for rank, each in run.ends.items()],
            )
            for run in self.runs
            if run.ends
        ]

    @cached_property
    def clauses(self) -> Table | None:
        """How often each clause was evaluated."""
        counts = [run.summary.contracts if run.summary is not None else {} for run in self.runs]
        if not any(counts):
            return None
        rows: list[list[Value]] = [
            [name, *(each.get(name, 0) for each in counts), CLAUSES[name].statement if name in CLAUSES else ""]
            for name in dict.fromkeys(chain(*counts))
        ]
        return Table("Evaluations by rank 0's last process", ("clause", *self._heads, "what it promises"), rows)

    @cached_property
    def environment(self) -> Table | None:
        """Versions and machine of each run."""
        found = [run.environment for run in self.runs]
        return self._beside("Where it ran", found) if any(found) else None

    @cached_property
    def settings(self) -> Table | None:
        """Every setting of each run, with its default."""
        found = [_settings(run) for run in self.runs]
        if not any(found):
            return None
        usual = by_dotted_key(Config())
        table = self._beside("Settings", found)
        rows = [[*row, _plain(usual.get(str(row[0])))] for row in table.rows]
        # Beside another run what differs is marked, else what was changed; both come first.
        marked = [row for row in rows if len(set(row[1:-1] if len(self.runs) > 1 else row[1:])) > 1]
        rest = [row for row in rows if row not in marked]
        return Table(table.caption, (*table.head, "default"), marked + rest, frozenset(range(len(marked))))

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Commands to copy, with what they do."""
        return list(chain(*(_commands(run, self._of(run)) for run in self.runs)))

    @property
    def notes(self) -> list[str]:
        """What a reader has to know of what is missing."""
        return list(chain(*(_notes(run, self._of(run)) for run in self.runs)))

    @property
    def _heads(self) -> Sequence[str]:
        return self.names if len(self.runs) > 1 else ("value",)

    def _of(self, run: Told) -> str:
        return f" of {self.name(run)}" if len(self.runs) > 1 else ""

    def _beside(self, caption: str, found: Iterable[Mapping[str, Value]]) -> Table:
        columns = list(found)
        names = [name for name in dict.fromkeys(chain(*columns)) if any(each.get(name) is not None for each in columns)]
        rows = [[name, *(each.get(name) for each in columns)] for name in names]
        exact = [[value.hex() if isinstance(value, float) else value for value in row[1:]] for row in rows]
        apart = frozenset(at for at, row in enumerate(exact) if len(set(row)) > 1)
        return Table(caption, ("", *self._heads), rows, apart)


def _settings(run: Told) -> dict[str, Value]:
    """The settings that the run read. A path below the folder in which the report is made is told from there."""
    config = run.side.config
    unused = UNUSED_WITH_BASE if config.get("model.base") is not None else frozenset[str]()
    return {key: _plain(_nearer(value)) for key, value in config.items() if key not in unused}


def _nearer(value: object) -> object:
    if isinstance(value, list):
        return [_nearer(each) for each in value]
    if isinstance(value, dict):
        return {name: _nearer(each) for name, each in value.items()}
    return value.removeprefix(f"{Path.cwd()}/") if isinstance(value, str) else value


def _facts(run: Told) -> dict[str, Value]:
    start, steps, summary = run.recorded.start, run.steps, run.summary
    memory, kept = (summary.memory, summary.kept_step) if summary is not None else ({}, None)
    last = steps[max(steps)] if steps else None
    planned = start.plan.steps if start is not None else None
    workers = run.steps.ran_on.replace(" workers", "").replace(" then ", ", then ")
    best = [each.name for each in run.checkpoints if each.best]
    unit = "packs" if run.side.config.get("training.packing") else "rows"
    return {
        "how it ended": run.state,
        **_made_of(run),
        "steps": f"{max(steps, default=0)} of {planned}" if planned else max(steps, default=0),
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


def _made_of(run: Told) -> dict[str, Value]:
    scores, config = _last_scores(run), run.side.settings
    told = ", ".join(f"{word} {value:.4f}" for word, value in quoted(scores).items())
    found: dict[str, Value] = {"score": f"{told} ({scores['of']})" if told else None}
    if config is None:
        return found
    files = ", ".join(_plain(_nearer(file.path)) for file in config.data.files)
    return {**found, "model": _plain(_nearer(config.model.base or "embedded")), "data": files or "embedded"}


def _mib(size: int | None) -> str | None:
    return f"{size / 2**20:,.0f} MiB" if size is not None else None


def _audit(run: Told) -> str | None:
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


def _last_scores(run: Told) -> dict[str, Value]:
    if run.summary is not None and run.summary.eval:
        return {"of": f"{run.summary.evaluated_on} rows", **_named_values(run.summary.eval)}
    if not run.evaluations:
        return {}
    last = run.evaluations[-1]
    of = f"{last.what} rows after step {last.record.step}"
    return {"of": of, "rows": last.record.rows, **last.scores}


def _named_values(found: Mapping[str, Any], prefix: str = "") -> dict[str, Value]:
    """Single values by name, those of objects by dotted name; parts have tables of their own, other lists none."""
    values: dict[str, Value] = {}
    for name, value in found.items():
        if _parted(value):
            continue
        if isinstance(value, dict):
            values |= _named_values(value, f"{prefix}{name}.")
        elif not isinstance(value, list) and value is not None:
            values[f"{prefix}{name}"] = value if isinstance(value, str | int | float) else str(value)
    return values


def _parts(run: Told, of: str) -> list[Table]:
    found = run.summary.eval if run.summary is not None else {}
    tables = []
    for name, told in found.items():
        parts = _parted(told)
        if not parts:
            continue
        labels = list(told) if isinstance(told, dict) else _labels(run, len(parts))
        values = [_named_values({key: each for key, each in part.items() if key != "label"}) for part in parts]
        columns = list(dict.fromkeys(chain(*values)))
        rows = [[label, *(each.get(column) for column in columns)] for label, each in zip(labels, values, strict=True)]
        tables.append(_cut(f"Scores: {name}{of}", (name, *columns), rows, _MOST_ROWS))
    return tables


def _parted(value: object) -> list[dict[str, Any]]:
    """The objects in a list or in an object that holds nothing else; none where `value` is anything else."""
    each = list(value.values()) if isinstance(value, dict) else value
    return each if isinstance(each, list) and all(isinstance(part, dict) for part in each) else []


def _labels(run: Told, count: int) -> Sequence[str]:
    labels = run.summary.labels if run.summary is not None else ()
    return labels if len(labels) == count else [str(number) for number in range(count)]


def _matrix(run: Told, evaluated: Evaluated, confusion: Confusion, of: str) -> Matrix:
    counts = confusion.table()
    totals = [max(1, sum(row)) for row in counts]
    return Matrix(
        caption=f"Confusion matrix{of}: {evaluated.what} after step {evaluated.record.step}",
        labels=_labels(run, len(counts)),
        rows=[
            [(count, round(_SHADES * count / total)) for count in row]
            for row, total in zip(counts, totals, strict=True)
        ],
    )


def _evaluations(run: Told, of: str) -> Table:
    names = list(dict.fromkeys(chain(*(each.scores for each in run.evaluations))))[:_MOST_SCORES]
    newest = run.evaluations[-_MOST_EVALUATIONS:]
    rows = [
        [f"step {each.record.step}", each.what, each.record.rows, *(each.scores.get(name) for name in names)]
        for each in newest
    ]
    left = len(run.evaluations) - len(newest)
    more = f"{left} earlier ones are drawn above, and in the ledger." if left else ""
    return Table(f"Evaluations{of}", ("after", "of", "rows", *names), rows, more=more)


def _cut(caption: str, head: Sequence[str], rows: Sequence[Sequence[Value]], most: int = _MOST_ROWS) -> Table:
    left = len(rows) - most
    return Table(caption, head, rows[:most], more=f"{left} more are in the run's files." if left > 0 else "")


def _commands(run: Told, of: str) -> list[tuple[str, str]]:
    folder = run.recorded.folder
    if folder is None or not folder.config.exists():
        return []
    again = command_line("andon", "train", folder.config, "--run-dir", "ANOTHER_FOLDER")
    done = run.state in ("finished", "early-stopping")
    goes_on = [] if done else [(f"Go on with the run{of}", go_on_with(folder))]
    return [*goes_on, (f"Repeat the run{of}", again)]


def _notes(run: Told, of: str) -> list[str]:
    found = []
    if run.recorded.folder is None:
        found.append(f"The report{of} is of a ledger alone: what a run folder has beside it is not here.")
    elif run.stale:
        found.append(f"summary.json{of} is of an earlier part of the run: its clauses and scores are left out.")
    elif run.summary is None:
        found.append(f"There is no summary.json{of} yet, so counts of clauses are not here.")
    if run.unread:
        found.append(f"{run.unread} lines of metrics.jsonl{of} could not be read and are left out.")
    if run.summary is not None:
        changed = run.summary.data_changed.items()
        found += [f"{key}{of} is not what was trained on any more: it {how}" for key, how in changed]
    many = run.matrix[1].classes if run.matrix is not None else 0
    if many > _MOST_CLASSES:
        found.append(f"The confusion matrix{of} has {many} classes, more than the {_MOST_CLASSES} that are shown.")
    return found


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
