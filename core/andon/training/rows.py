"""The rows of a run, read and split; without torch, so that the command line can refuse bad data at once.

What of rows depends on the task stands in `READERS` here, and what of tensors in `training.material`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from andon.config.schema import CLASSIFICATION, MULTI_LABEL, REGRESSION, SFT, TOKEN_CLASSIFICATION, Config, Data
from andon.console.problems import InputError, Problem
from andon.data import rewriting, shell
from andon.data.conversations import conversations_in, read_conversations
from andon.data.formats import first_record
from andon.data.labels import alike, likely_separator
from andon.data.mixing import mixed
from andon.data.origins import RowSelection, stamps
from andon.data.readers import TAGS, TOKENS, read, shown_names
from andon.data.rows import DataSet, Examples, LabelSets, Tagged, Targets, TextRows, frozen_split, shared_texts
from andon.run.summary import HELD_OUT, LAST_VALIDATION
from andon.training.row_cache import kept_rows
from andon_contracts.legible import legible_line

_MOST_GROUPS, _MOST_CLASSES, _MOST_SKIPPED = 10, 30, 3


@dataclass(frozen=True)
class Rows:
    """The data sets of a run. Row ids of `train` cover training and validation; `evaluation` has its own.

    task: what is learned of a row, by its name in the configuration. train_ids: the rows of an epoch; of a row that
    stands there several times each but the first time has an id of its own (`mixing`). weights: of the files that
    `train` is read from, in order; none where it is one file, each row once.
    """

    task: str
    train: Examples
    evaluation: Examples | None
    train_ids: tuple[int, ...]
    validation_ids: tuple[int, ...]
    weights: tuple[float, ...] = ()

    @property
    def digest(self) -> str:
        """SHA-256 over both data sets, and over where each of several files begins and its weight."""
        return self._train_digest() + (self.evaluation.digest if self.evaluation is not None else "")

    def _train_digest(self) -> str:
        if not self.weights:
            return self.train.digest
        assert self.train.origins is not None
        files = list(zip(self.train.origins.sizes, self.weights, strict=True))
        return hashlib.sha256(f"{self.train.digest} {files}".encode()).hexdigest()

    def numbered_by(self, labels: Sequence[str]) -> Rows:
        """The same rows with their classes numbered in the order of `labels`; their digest stays."""
        if not isinstance(self.train, TextRows) or tuple(labels) == self.train.labels:
            return self
        evaluation = self.evaluation.numbered_by(labels) if isinstance(self.evaluation, TextRows) else None
        return replace(self, train=self.train.numbered_by(labels), evaluation=evaluation)

    def row_of(self, id_: int) -> int:
        """The row of `train` that an id of an epoch stands for."""
        return id_ % len(self.train) if self.weights else id_

    @property
    def copies(self) -> int:
        """How often the row that stands in an epoch most often stands there."""
        return max(self.train_ids, default=0) // len(self.train) + 1 if self.weights else 1

    def where(self, id_: int) -> str:
        """The file and line of an id, and the number of its copy from 2 on; empty for one file, or none."""
        origins = self.train.origins
        if not self.weights or origins is None or id_ < 0:
            return ""
        copy = id_ // len(self.train) + 1
        return f"{origins.where(self.row_of(id_))}{f', copy {copy}' if copy > 1 else ''}"

    @property
    def sources(self) -> tuple[str, ...]:
        """The file of each row of `train`, by name, where they are of several; else none."""
        origins = self.train.origins
        if origins is None or len(origins.sizes) < 2:
            return ()
        return tuple(name for name, size in zip(origins.names(), origins.sizes, strict=True) for _ in range(size))

    @property
    def trained_on(self) -> Examples:
        """The rows that are trained on, each once."""
        return self.train.subset(dict.fromkeys(map(self.row_of, self.train_ids)))

    @property
    def evaluated_on(self) -> Examples:
        """The rows of the last scores: those of their own, else the validation rows."""
        return self.evaluation if self.evaluation is not None else self.train.subset(self.validation_ids)

    @property
    def last_scores(self) -> str:
        """What the last scores of a run are of: `HELD_OUT` rows, or `LAST_VALIDATION`."""
        return HELD_OUT if self.evaluation is not None else LAST_VALIDATION

    @property
    def skipped(self) -> tuple[Problem, ...]:
        """The rows that could not be read, in order, and why."""
        read = (each.origins for each in (self.train, self.evaluation) if each is not None)
        return tuple(problem for origins in read if origins is not None for problem in origins.skipped)

    def without(self, skipped: Mapping[int, Problem]) -> Rows:
        """All but these rows of `train`. Raises `InputError` if none is left to train on, or to evaluate on."""
        if not skipped:
            return self
        train_ids = tuple(id_ for id_ in self.train_ids if self.row_of(id_) not in skipped)
        validation_ids = tuple(id_ for id_ in self.validation_ids if id_ not in skipped)
        if not train_ids or not (validation_ids or self.evaluation):
            purpose = "evaluate" if train_ids else "train"
            first = skipped[min(skipped)]
            raise InputError([Problem(self.train.source, f"no row that can be used is left to {purpose} on; {first}")])
        return replace(self, train_ids=train_ids, validation_ids=validation_ids)

    def seen_in_training(self) -> int:
        """How many rows that are evaluated on have a text that is also trained on: their scores flatter."""
        return shared_texts(self.trained_on, self.evaluated_on)


@dataclass(frozen=True)
class Reader:
    """Where the rows of a task come from.

    found: why the first record of a file that names no task is of this one; empty where it is not. read: of files;
    the labels are those of the rows that are trained on, for one that is only evaluated on. embedded: of a run that
    names none, by its seed: to train on, and never trained on; None: the task has no data of its own. example: a small
    file of the repository.
    """

    found: Callable[[Data, Mapping[str, object]], str]
    read: Callable[[Data, Sequence[Path], tuple[str, ...] | None, RowSelection], Examples]
    embedded: Callable[[int], tuple[Examples, Examples]] | None = None
    example: str = ""


def _is_named(data: Data, first: Mapping[str, object]) -> str:
    return ""


def _are_conversations(data: Data, first: Mapping[str, object]) -> str:
    named = data.text_column is not None or data.label_column is not None
    found = "" if named else conversations_in(first)
    return f"rows {'are' if found == 'conversations' else 'have'} {found}" if found else ""


def _are_label_sets(data: Data, first: Mapping[str, object]) -> str:
    if data.label_separator is not None:
        return f"labels are joined with {data.label_separator!r}"
    named = ("label", "labels") if data.label_column is None else (data.label_column,)
    return "labels are lists" if any(isinstance(first.get(name), list) for name in named) else ""


def _are_tagged(data: Data, first: Mapping[str, object]) -> str:
    names = data.text_column or TOKENS, data.label_column or TAGS
    there = all(isinstance(first.get(name), list) for name in names)
    return f"{names[0]!r} and {names[1]!r} are lists" if there else ""


def skip_notes(skipped: Sequence[Problem]) -> Iterator[str]:
    """A line for rows that cannot be used, with the first of them."""
    if skipped:
        more = f"; and {len(skipped) - _MOST_SKIPPED} more" if len(skipped) > _MOST_SKIPPED else ""
        first = "; ".join(map(str, skipped[:_MOST_SKIPPED]))
        yield f"note: rows that cannot be used and are skipped (data.bad_rows): {len(skipped)}: {first}{more}"


def notes(rows: Rows) -> Iterator[str]:
    """What a user should know of rows that can be trained on."""
    trained_on = rows.trained_on
    if rows.train.origins is not None:
        yield from rows.train.origins.notes
    yield from skip_notes(rows.skipped)
    if isinstance(rows.train, TextRows) and isinstance(trained_on, TextRows):
        yield from _label_notes(rows.train, trained_on.counts())
        yield from _line_notes(rows.train)
    if isinstance(rows.train, DataSet):
        separator = likely_separator([rows.train.labels[row.label] for row in rows.train.rows])
        if separator:
            yield (
                f"note: most labels hold {separator!r}, and each is taken as one class; to learn several labels a row: "
                f"--task multi-label --set data.label_separator='{separator}'"
            )


def _label_notes(train: TextRows[Any], counts: Sequence[int]) -> Iterator[str]:
    groups = alike(train.labels)
    for group in groups[:_MOST_GROUPS]:
        differ = "are classes of their own, and differ only in case, white space or Unicode form"
        yield f"warning: {shown_names(group)} {differ}; if they mean the same, write them alike"
    if len(groups) > _MOST_GROUPS:
        yield f"warning: {len(groups) - _MOST_GROUPS} more groups of classes are written almost alike"
    absent = [name for name, count in zip(train.labels, counts, strict=False) if not count]
    if absent:
        yield f"warning: no training row has the class {shown_names(absent)}; all its rows are held back for validation"


def _line_notes(train: TextRows[Any]) -> Iterator[str]:
    if train.origins is not None:
        places = [train.origins.where(row.id) for row in train.rows if any("\n" in text for text in row.texts)]
        tables = [place for place in places if Path(place.rpartition(":")[0]).suffix.lower() in (".csv", ".tsv")]
        if tables:
            yield f"note: {len(tables)} texts span several lines (first: {tables[0]}); is a quote left open there?"


def class_counts(rows: Rows) -> str:
    """A line that lists the classes with how often each is trained on; empty without classes."""
    train = rows.trained_on
    if not isinstance(train, TextRows) or not train.counts():
        return ""
    counts = zip(train.labels, train.counts(), strict=True)
    listed = [f"{legible_line(name if name == name.strip() else repr(name))} {count}" for name, count in counts]
    more = f" and {len(listed) - _MOST_CLASSES} more" if len(listed) > _MOST_CLASSES else ""
    return f"classes: {', '.join(listed[:_MOST_CLASSES])}{more}"


def _texts(kind: type[TextRows[Any]]) -> Callable[..., Examples]:
    def rows_of(data: Data, paths: Sequence[Path], labels: tuple[str, ...] | None, chosen: RowSelection) -> Examples:
        columns = data.model_dump(include={"text_column", "text_pair_column", "label_column", "label_separator"})
        return read(kind, *paths, **columns, labels=labels, selection=chosen)

    return rows_of


READERS: Mapping[str, Reader] = {
    CLASSIFICATION: Reader(_is_named, _texts(DataSet), shell.embedded),
    TOKEN_CLASSIFICATION: Reader(_are_tagged, _texts(Tagged), example="examples/data/tags.jsonl"),
    MULTI_LABEL: Reader(_are_label_sets, _texts(LabelSets), example="examples/data/multi_label.jsonl"),
    REGRESSION: Reader(_is_named, _texts(Targets), example="examples/data/regression.csv"),
    SFT: Reader(
        _are_conversations,
        lambda data, paths, labels, selection: read_conversations(*paths, selection=selection),
        rewriting.embedded,
    ),
}
"""By the task's name in the configuration."""


_FOUND: dict[str, tuple[str, str]] = {}
"""What `found_task` said of a configuration's data."""


def found_task(config: Config) -> tuple[str, str]:
    """The task that the first row of the data is of, and why; a class, and no reason, if it is unclear.

    The file is opened once in a process, and again only if it has changed.
    """
    if not config.data.files:
        return CLASSIFICATION, ""
    key = _looked_at(config)
    if key not in _FOUND:
        first = first_record(Path(config.data.files[0].path))
        reasons = {} if first is None else {task: reader.found(config.data, first) for task, reader in READERS.items()}
        _FOUND[key] = next(((task, why) for task, why in reasons.items() if why), (CLASSIFICATION, ""))
    return _FOUND[key]


def tell_found_task(config: Config, found: tuple[str, str]) -> None:
    """Let this process know what another one found, so that it need not open the file."""
    if config.data.files:
        _FOUND[_looked_at(config)] = found


def _looked_at(config: Config) -> str:
    path = Path(config.data.files[0].path)
    return f"{stamps([path])} {config.data.model_dump_json()}"


def task_of_run(config: Config) -> str:
    """What is learned: as configured, else what the first row of the data is of; a class where it is unclear.

    Raises `InputError` for a file that cannot be opened.
    """
    return config.task or found_task(config)[0]


def with_task(config: Config) -> Config:
    """`config` with its task named where that is not a class for each row, so that the run can be read without data."""
    found = task_of_run(config)
    return config if found == CLASSIFICATION else config.model_copy(update={"task": found})


def selection_of(data: Data, *, train: bool) -> RowSelection:
    """Which rows of files are read: to train on, or only to evaluate on."""
    return RowSelection(data.bad_rows == "skip", data.limit if train else None)


def told_of_task(config: Config) -> str:
    """A line that says which task was taken where none is named, and why; empty for what was always taken, a class."""
    task, why = found_task(config) if config.task is None else (config.task, "")
    return f"task: {task}, as {why} in {config.data.files[0].path} (another: --task NAME)" if why else ""


def is_tokenised_as_read(config: Config) -> bool:
    """Whether the first process of each host reads the data, and makes its tokens in the same pass."""
    return bool(config.data.files) and task_of_run(config) == SFT


def cache_of(config: Config, own: Path | None) -> Path | None:
    """Where what is made of rows is kept: the folder that `config` names, else `own`; nowhere for embedded rows."""
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

    conversations: reads files of conversations without holding them; None: all rows are held. folder: keeps the rows of
    other files, so that the next process need not open these. known: what was read already.
    """
    train: Examples
    evaluation: Examples | None
    task = task_of_run(config)
    reader = READERS[task]
    files = config.data.files
    if not files:
        if reader.embedded is None:
            what = f"task {task} needs rows: name a file with --data; a small one of the repository: {reader.example}"
            raise InputError([Problem("data.train", what)])
        train, evaluation = reader.embedded(config.seed)
    else:

        def rows_of(paths: Sequence[Path], labels: tuple[str, ...] | None) -> Examples:
            selection = selection_of(config.data, train=labels is None)
            if conversations is not None and task == SFT:
                return conversations(paths, selection)

            def read() -> Examples:
                found = None if known is None else known.train if labels is None else known.evaluation
                return reader.read(config.data, paths, labels, selection) if found is None else found

            if folder is None or task == SFT:
                return read()
            return kept_rows(folder, config.data, task, paths, labels, selection, read)

        train = rows_of([Path(file.path) for file in files], None)
        there = config.data.eval
        evaluation = rows_of([Path(there)], train.labels) if there is not None else None
    train_places, validation_places = frozen_split(len(train), config.data.validation_fraction, config.seed)
    ids = train.ids
    if evaluation is None and not validation_places:
        raise InputError([Problem("data", "no rows to evaluate on: name data.eval, or a data.validation_fraction > 0")])
    train_ids, validation_ids = (tuple(ids[place] for place in each) for each in (train_places, validation_places))
    weights = [file.weight for file in files]
    if weights in ([], [1.0]):
        return Rows(task, train, evaluation, train_ids, validation_ids)
    assert train.origins is not None
    in_epoch = mixed(train_ids, train.origins.sizes, weights, config.seed)
    return Rows(task, train, evaluation, in_epoch, validation_ids, tuple(weights))


def unfit_model(config: Config) -> str:
    """A warning where rows of the user's own train the embedded model, which is made for the embedded rows; else empty.

    It is drawn at random and has seen no language: on questions to a bank it came to an accuracy of 0.56, where a
    small pretrained encoder comes to 0.80.
    """
    if config.data.train is None or config.model.base is not None:
        return ""
    return (
        "warning: no --model is given: the embedded model, small and drawn at random, trains on your rows; it has seen "
        "no language. Name a pretrained one, a folder or a hub id, as in --model sentence-transformers/all-MiniLM-L6-v2"
    )


def changed_since(config: Config, rows: Rows, started: float) -> dict[str, str]:
    """What of the data is no longer what `rows` were read from: the key of the configuration, and what is there now.

    Only files that were touched after `started` (seconds since the epoch, before they were read) are read again.
    """
    named = {"data.train": [file.path for file in config.data.files], "data.eval": [config.data.eval or ""]}
    if not any(path and _touched(Path(path), started) for paths in named.values() for path in paths):
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


def _touched(path: Path, started: float) -> bool:
    try:
        return path.stat().st_ctime >= started - 1.0  # the file system's clock may be a tick behind
    except OSError:
        return True
