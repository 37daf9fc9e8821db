"""The rows of a run, read and split, or loaded from the files in which another process of this host keeps them.

Works without torch, so that the command line refuses bad data at once.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import andon.data
from andon.config.schema import CLASSIFICATION, MULTI_LABEL, REGRESSION, SFT, TOKEN_CLASSIFICATION, Config, Data
from andon.console.problems import InputError, Problem
from andon.data import rewriting, shell
from andon.data.conversations import conversations_in, read_conversations
from andon.data.draw import frozen_split, mixed
from andon.data.formats import first_record
from andon.data.labels import alike, likely_separator
from andon.data.origins import Origins, RowSelection, require_unchanged, stamps
from andon.data.readers import TAGS, TOKENS, read, shown_names
from andon.data.rows import DataSet, Examples, LabelSets, Row, Tagged, Targets, TextRows, shared_texts
from andon.run.columns import Columns, Numbers, kept, key_of
from andon.run.provenance import source_digest
from andon.run.summary import HELD_OUT, LAST_VALIDATION
from andon_contracts.legible import legible_line

_MOST_GROUPS, _MOST_CLASSES = 10, 30


@dataclass(frozen=True)
class Rows:
    """The data sets of a run. Row ids of `train` cover training and validation; `evaluation` has its own.

    task: its name in the configuration. train_ids: the rows of an epoch; further copies of a row have ids of their own
    (`mixed`). weights: of the files of `train`, in order; empty for one file with each row once.
    """

    task: str
    train: Examples
    evaluation: Examples | None
    train_ids: tuple[int, ...]
    validation_ids: tuple[int, ...]
    weights: tuple[float, ...] = ()

    @property
    def digest(self) -> str:
        """SHA-256 of both data sets, and of where each of several files begins and its weight."""
        train = self.train.digest
        if self.weights:
            assert self.train.origins is not None
            files = list(zip(self.train.origins.sizes, self.weights, strict=True))
            train = hashlib.sha256(f"{train} {files}".encode()).hexdigest()
        return train + (self.evaluation.digest if self.evaluation is not None else "")

    def numbered_by(self, labels: Sequence[str]) -> Rows:
        """The same rows with their classes numbered in the order of `labels`; the digest stays."""
        if not isinstance(self.train, TextRows) or tuple(labels) == self.train.labels:
            return self
        evaluation = self.evaluation.numbered_by(labels) if isinstance(self.evaluation, TextRows) else None
        return replace(self, train=self.train.numbered_by(labels), evaluation=evaluation)

    def row_of(self, id_: int) -> int:
        """The row of `train` that an id of an epoch stands for."""
        return id_ % len(self.train) if self.weights else id_

    @property
    def copies(self) -> int:
        """The most copies of a row in an epoch."""
        return max(self.train_ids, default=0) // len(self.train) + 1 if self.weights else 1

    def where(self, id_: int) -> str:
        """The file and line of an id, and the number of its copy from 2 on; empty for a run on one file."""
        origins, copy = self.train.origins, id_ // len(self.train) + 1
        if not self.weights or origins is None or id_ < 0:
            return ""
        return origins.where(self.row_of(id_)) + (f", copy {copy}" if copy > 1 else "")

    @property
    def sources(self) -> tuple[str, ...]:
        """The name of the file of each row of `train`, if there are several files; else empty."""
        origins = self.train.origins
        return (
            ()
            if origins is None
            else tuple(origins.with_files([""] * len(self.train)) if len(origins.sizes) > 1 else ())
        )

    @property
    def trained_on(self) -> Examples:
        """The training rows, each once."""
        return self.train.subset(dict.fromkeys(map(self.row_of, self.train_ids)))

    @property
    def evaluated_on(self) -> Examples:
        """The rows of the last scores: the evaluation rows, else the validation rows."""
        return self.evaluation if self.evaluation is not None else self.train.subset(self.validation_ids)

    @property
    def last_scores(self) -> str:
        """`HELD_OUT` if there are evaluation rows, else `LAST_VALIDATION`."""
        return HELD_OUT if self.evaluation is not None else LAST_VALIDATION

    @property
    def skipped(self) -> tuple[Problem, ...]:
        """The rows that could not be read, in order, and why."""
        read = (each.origins for each in (self.train, self.evaluation) if each is not None)
        return tuple(problem for origins in read if origins is not None for problem in origins.skipped)

    def without(self, skipped: Mapping[int, Problem]) -> Rows:
        """All but these rows of `train`. Raises `InputError` if no row is left to train on, or to evaluate on."""
        train_ids = tuple(id_ for id_ in self.train_ids if self.row_of(id_) not in skipped)
        validation_ids = tuple(id_ for id_ in self.validation_ids if id_ not in skipped)
        if skipped and (not train_ids or not (validation_ids or self.evaluation)):
            purpose = "evaluate" if train_ids else "train"
            first = skipped[min(skipped)]
            raise InputError([Problem(self.train.source, f"no row that can be used is left to {purpose} on; {first}")])
        return replace(self, train_ids=train_ids, validation_ids=validation_ids)

    def seen_in_training(self) -> int:
        """How many rows that are evaluated on have a text that is also trained on: their scores flatter."""
        return shared_texts(self.trained_on, self.evaluated_on)


def skip_notes(skipped: Sequence[Problem]) -> Iterator[str]:
    """A line about unusable rows with the first of them; nothing without such rows."""
    if skipped:
        more = f"; and {len(skipped) - 3} more" if len(skipped) > 3 else ""
        first = "; ".join(map(str, skipped[:3]))
        yield f"note: rows that cannot be used and are skipped (data.bad_rows): {len(skipped)}: {first}{more}"


def notes(rows: Rows) -> Iterator[str]:
    """What a user should know about the rows before training on them."""
    train, trained_on, origins = rows.train, rows.trained_on, rows.train.origins
    if origins is not None:
        yield from origins.notes
    yield from skip_notes(rows.skipped)
    if isinstance(train, TextRows) and isinstance(trained_on, TextRows):
        groups = alike(train.labels)
        for group in groups[:_MOST_GROUPS]:
            differ = "are classes of their own, and differ only in case, white space or Unicode form"
            yield f"warning: {shown_names(group)} {differ}; if they mean the same, write them alike"
        if len(groups) > _MOST_GROUPS:
            yield f"warning: {len(groups) - _MOST_GROUPS} more groups of classes are written almost alike"
        absent = [name for name, count in zip(train.labels, trained_on.counts(), strict=False) if not count]
        if absent:
            held = "all its rows are held back for validation"
            yield f"warning: no training row has the class {shown_names(absent)}; {held}"
        if origins is not None:
            places = [origins.where(row.id) for row in train.rows if any("\n" in text for text in row.texts)]
            tables = [place for place in places if Path(place.rpartition(":")[0]).suffix.lower() in (".csv", ".tsv")]
            if tables:
                yield f"note: {len(tables)} texts span several lines (first: {tables[0]}); is a quote left open there?"
    if isinstance(train, DataSet):
        separator = likely_separator([train.labels[row.label] for row in train.rows])
        if separator:
            yield (
                f"note: most labels hold {separator!r}, and each is taken as one class; to learn several labels a row: "
                f"--task multi-label --set data.label_separator='{separator}'"
            )


def class_counts(rows: Rows) -> str:
    """A line with the number of training rows of each class; empty without classes."""
    train = rows.trained_on
    if not isinstance(train, TextRows) or not train.counts():
        return ""
    counts = zip(train.labels, train.counts(), strict=True)
    listed = [f"{legible_line(name if name == name.strip() else repr(name))} {count}" for name, count in counts]
    more = f" and {len(listed) - _MOST_CLASSES} more" if len(listed) > _MOST_CLASSES else ""
    return f"classes: {', '.join(listed[:_MOST_CLASSES])}{more}"


_COLUMNS = {"text_column", "text_pair_column", "label_column", "label_separator"}
TEXT_TASKS: Mapping[str, type[TextRows[Any]]] = {
    CLASSIFICATION: DataSet,
    TOKEN_CLASSIFICATION: Tagged,
    MULTI_LABEL: LabelSets,
    REGRESSION: Targets,
}


def read_files(
    task: str, data: Data, paths: Sequence[Path], labels: tuple[str, ...] | None, selection: RowSelection
) -> Examples:
    """The rows of files, for a task. labels: those of the training rows, for an evaluation file, else None."""
    if task == SFT:
        return read_conversations(*paths, selection=selection)
    return read(TEXT_TASKS[task], *paths, **data.model_dump(include=_COLUMNS), labels=labels, selection=selection)


_EMBEDDED: Mapping[str, Callable[[int], tuple[Examples, Examples]]] = {
    CLASSIFICATION: shell.embedded,
    SFT: rewriting.embedded,
}
_EXAMPLES = {TOKEN_CLASSIFICATION: "tags.jsonl", MULTI_LABEL: "multi_label.jsonl", REGRESSION: "regression.csv"}
"""A file in examples/data for each task without embedded rows."""
_INFERRED: dict[str, tuple[str, str]] = {}
"""The results of `found_task` in this process."""


def found_task(config: Config) -> tuple[str, str]:
    """The task that the first row of the data implies, and the reason; classification without a reason if unclear.

    Regression is never inferred, because a number may be a class. The file is opened once in a process, and again only
    if it has changed.
    """
    if not config.data.files:
        return CLASSIFICATION, ""
    key = _inferred_from(config)
    if key not in _INFERRED:
        _INFERRED[key] = _implied_by(first_record(Path(config.data.files[0].path)) or {}, config.data)
    return _INFERRED[key]


def tell_found_task(config: Config, found: tuple[str, str]) -> None:
    """Store the result of another process, so that this process need not open the file."""
    if config.data.files:
        _INFERRED[_inferred_from(config)] = found


def _inferred_from(config: Config) -> str:
    return f"{stamps([Path(config.data.files[0].path)])} {config.data.model_dump_json()}"


def _implied_by(first: Mapping[str, object], data: Data) -> tuple[str, str]:
    names = data.text_column or TOKENS, data.label_column or TAGS
    if all(isinstance(first.get(name), list) for name in names):
        return TOKEN_CLASSIFICATION, f"{names[0]!r} and {names[1]!r} are lists"
    if data.label_separator is not None:
        return MULTI_LABEL, f"labels are joined with {data.label_separator!r}"
    named = ("label", "labels") if data.label_column is None else (data.label_column,)
    if any(isinstance(first.get(name), list) for name in named):
        return MULTI_LABEL, "labels are lists"
    found = conversations_in(first) if data.text_column is None and data.label_column is None else ""
    return (SFT, f"rows {'are' if found == 'conversations' else 'have'} {found}") if found else (CLASSIFICATION, "")


def task_of_run(config: Config) -> str:
    """The task of the configuration, else the inferred one. Raises `InputError` for a file that cannot be opened."""
    return config.task or found_task(config)[0]


def with_task(config: Config) -> Config:
    """`config` with an inferred task other than classification set, so that the run can be read without its data."""
    found = task_of_run(config)
    return config if found == CLASSIFICATION else config.model_copy(update={"task": found})


def told_of_task(config: Config) -> str:
    """A line about an inferred task and the reason; empty if the task is set, or is classification."""
    task, why = found_task(config) if config.task is None else (config.task, "")
    return f"task: {task}, as {why} in {config.data.files[0].path} (another: --task NAME)" if why else ""


def selection_of(data: Data, *, train: bool) -> RowSelection:
    """The rows to read, of training files or of an evaluation file."""
    return RowSelection(data.bad_rows == "skip", data.limit if train else None)


def data_files(config: Config) -> list[Path]:
    """The files that training and evaluation rows come from."""
    return [Path(path) for path in (*(file.path for file in config.data.files), config.data.eval) if path is not None]


def is_tokenised_as_read(config: Config) -> bool:
    """Whether the first process of each host reads and tokenises the data in one pass."""
    return bool(config.data.files) and task_of_run(config) == SFT


def cache_of(config: Config, own: Path | None) -> Path | None:
    """The folder for rows and tokens: `data.cache`, else `own`; None for embedded rows."""
    if not config.data.files:
        return None
    return own if config.data.cache is None else Path(config.data.cache)


def read_rows(
    config: Config,
    conversations: Callable[[Sequence[Path], RowSelection], Examples] | None = None,
    folder: Path | None = None,
    known: Rows | None = None,
) -> Rows:
    """The rows that `config` names, split once and for all. Raises `InputError` with all that is wrong with them.

    conversations: reads and tokenises files of conversations; None: they are read and held in memory. folder: keeps the
    rows of other files, so that the next process need not open these. known: rows that this process has read already.
    """
    train: Examples
    evaluation: Examples | None
    task, data = task_of_run(config), config.data

    def rows_of(paths: Sequence[Path], labels: tuple[str, ...] | None) -> Examples:
        selection = selection_of(data, train=labels is None)
        if conversations is not None and task == SFT:
            return conversations(paths, selection)

        def read_once() -> Examples:
            found = None if known is None else known.train if labels is None else known.evaluation
            return read_files(task, data, paths, labels, selection) if found is None else found

        if folder is None or task == SFT:
            return read_once()
        return _kept_rows(folder, task, data, paths, labels, selection, read_once)

    if data.files:
        train = rows_of([Path(file.path) for file in data.files], None)
        evaluation = rows_of([Path(data.eval)], train.labels) if data.eval is not None else None
    elif task in _EMBEDDED:
        train, evaluation = _EMBEDDED[task](config.seed)
    else:
        example = f"examples/data/{_EXAMPLES[task]}"
        what = f"task {task} needs rows: name a file with --data; a small one of the repository: {example}"
        raise InputError([Problem("data.train", what)])
    train_places, validation_places = frozen_split(len(train), data.validation_fraction, config.seed)
    ids = train.ids
    if evaluation is None and not validation_places:
        raise InputError([Problem("data", "no rows to evaluate on: name data.eval, or a data.validation_fraction > 0")])
    train_ids, validation_ids = (tuple(ids[place] for place in each) for each in (train_places, validation_places))
    weights = [file.weight for file in data.files]
    if weights in ([], [1.0]):
        return Rows(task, train, evaluation, train_ids, validation_ids)
    assert train.origins is not None
    in_epoch = mixed(train_ids, train.origins.sizes, weights, config.seed)
    return Rows(task, train, evaluation, in_epoch, validation_ids, tuple(weights))


_CODE = Path(andon.data.__file__).parent


def _kept_rows(
    folder: Path,
    task: str,
    data: Data,
    paths: Sequence[Path],
    labels: Sequence[str] | None,
    selection: RowSelection,
    read_once: Callable[[], Examples],
) -> Examples:
    """The rows of `paths` from `folder`: as JSON, with the line of each. If there are none, they are read and written.

    Waits for another process that writes them. Raises `InputError` if a file changes meanwhile.
    """
    before = stamps(paths)
    key = key_of(
        ("pyarrow",),
        code=source_digest(_CODE),
        files=before,
        task=task,
        columns=data.model_dump(include=_COLUMNS),
        selection=[selection.skip_bad, selection.limit, labels],
    )

    def make(append: Callable[[Numbers], None]) -> Mapping[str, object]:
        found = read_once()
        assert isinstance(found, TextRows)
        assert found.origins is not None
        require_unchanged(paths, before, found.origins.stamps)
        rows = json.dumps([(row.text, row.pair, row.label) for row in found.rows])
        append({"rows": array("B", rows.encode()), "lines": found.origins.lines})
        return {"labels": found.labels, "origins": found.origins.described()}

    def load(columns: Columns) -> TextRows[Any]:
        origins = Origins.of(paths, columns.said["origins"], column(columns, "lines", "q"))
        rows = tuple(
            Row(place, text, tuple(label) if isinstance(label, list) else label, pair)
            for place, (text, pair, label) in enumerate(json.loads(column(columns, "rows", "B").tobytes()))
        )
        return TEXT_TASKS[task](rows, tuple(columns.said["labels"]), origins.source, origins)

    return kept(folder, key, {"rows": "B", "lines": "q"}, make, load)


def column(columns: Columns, name: str, kind: str) -> array[int]:
    """A column, read into memory. kind: its `array` type."""
    found = array(kind)
    found.frombytes((columns.folder / name).read_bytes())
    return found


def unfit_model(config: Config) -> str:
    """A warning if the user's rows train the embedded model, which is made for the embedded rows; else empty.

    It starts from random weights: on questions to a bank it reached an accuracy of 0.56, a small pretrained encoder
    0.80.
    """
    if config.data.train is None or config.model.base is not None:
        return ""
    return (
        "warning: no --model is given: the embedded model, small and drawn at random, trains on your rows; it has seen "
        "no language. Name a pretrained one, a folder or a hub id, as in --model sentence-transformers/all-MiniLM-L6-v2"
    )


def changed_since(config: Config, rows: Rows, started: float) -> dict[str, str]:
    """By configuration key, what has changed in the data files since `rows` were read.

    Only files modified after `started` (seconds since the epoch, before they were read) are read again.
    """
    named = {"data.train": [file.path for file in config.data.files], "data.eval": [config.data.eval or ""]}

    def modified(path: str) -> bool:
        try:
            return Path(path).stat().st_ctime >= started - 1.0  # the file system's clock may be a tick late
        except OSError:
            return True

    if not any(path and modified(path) for paths in named.values() for path in paths):
        return {}
    try:
        now = read_rows(config)
    except InputError as error:
        return {key: f"can no longer be read ({error.line})" for key, paths in named.items() if any(paths)}
    pairs = {"data.train": (rows.train, now.train), "data.eval": (rows.evaluation, now.evaluation)}
    return {
        key: f"has {len(after)} rows now, and {len(before)} were read"
        for key, (before, after) in pairs.items()
        if before is not None and after is not None and before.digest != after.digest
    }
