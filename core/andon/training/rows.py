"""The rows of a run: read from data files or loaded from this host's cache, and split.

Imports no torch, so that the command line rejects bad data at once.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import andon.data
from andon.config.schema import (
    CAUSAL,
    CLASSIFICATION,
    DPO,
    MULTI_LABEL,
    REGRESSION,
    SFT,
    TOKEN_CLASSIFICATION,
    Config,
    Data,
)
from andon.console.messages import InputError, Problem, ProblemList
from andon.data import rewriting, shell
from andon.data.conversations import PAIR, conversations_in, read_conversations
from andon.data.formats import first_record
from andon.data.origins import Origins, RowSelection, require_unchanged, stamps
from andon.data.readers import TAGS, TOKENS, read, shown_names
from andon.data.rows import (
    DataSet,
    Examples,
    LabelSets,
    Row,
    Tagged,
    Targets,
    TextRows,
    alike,
    frozen_split,
    mixed,
    shared_texts,
)
from andon.run.columns import Columns, Numbers, key_of, load_or_build
from andon.run.summary import EVALUATION, LAST_VALIDATION, source_digest
from andon_contracts.legible import counted, legible_line

_MOST_GROUPS, _MOST_CLASSES, _MANY_ROWS = 10, 30, 20


@dataclass(frozen=True)
class Rows:
    """The data sets of a run. `train` holds training rows and, without `validation`, those with `validation_ids`.
    `validation` and `evaluation` have separate row ids.

    task: its name in the configuration. train_ids: the ids of an epoch; every copy of a row has a distinct id
    (`mixed`). weights: of the files of `train`, in order; empty for one file with weight 1 and for embedded rows.
    """

    task: str
    train: Examples
    evaluation: Examples | None
    train_ids: tuple[int, ...]
    validation_ids: tuple[int, ...]
    weights: tuple[float, ...] = ()
    validation: Examples | None = None

    @property
    def digest(self) -> str:
        """SHA-256 of `train` (with `weights`, also of its files' sizes and weights; and of `validation`) and that of
        `evaluation`."""
        train = self.train.digest
        if self.weights:
            assert self.train.origins is not None
            files = list(zip(self.train.origins.sizes, self.weights, strict=True))
            train = hashlib.sha256(f"{train} {files}".encode()).hexdigest()
        if self.validation is not None:
            train = hashlib.sha256(f"{train} validated on {self.validation.digest}".encode()).hexdigest()
        return train + (self.evaluation.digest if self.evaluation is not None else "")

    def numbered_by(self, labels: Sequence[str]) -> Rows:
        """The same rows with classes numbered in the order of `labels`; the digest does not change."""
        if not isinstance(self.train, TextRows) or tuple(labels) == self.train.labels:
            return self
        held = (self.validation, self.evaluation)
        validation, evaluation = (each.numbered_by(labels) if isinstance(each, TextRows) else None for each in held)
        return replace(self, train=self.train.numbered_by(labels), validation=validation, evaluation=evaluation)

    def row_of(self, id_: int) -> int:
        """The row of `train` for an id of `train_ids`."""
        return id_ % len(self.train) if self.weights else id_

    @property
    def copies(self) -> int:
        """The maximum number of copies of a row in an epoch."""
        return max(self.train_ids, default=0) // len(self.train) + 1 if self.weights else 1

    def where(self, id_: int) -> str:
        """File and line of an id, and its copy number from 2 on; empty for embedded rows."""
        origins, copy = self.train.origins, id_ // len(self.train) + 1
        if origins is None or not 0 <= id_ < len(self.train) * self.copies:
            return ""
        return origins.where(self.row_of(id_)) + (f", copy {copy}" if copy > 1 else "")

    @property
    def sources(self) -> tuple[str, ...]:
        """The short file name of each row of `train`; empty unless there are several files."""
        origins = self.train.origins
        return () if origins is None or len(origins.sizes) == 1 else tuple(origins.with_files([""] * len(self.train)))

    @property
    def trained_on(self) -> Examples:
        return self.train.subset(dict.fromkeys(map(self.row_of, self.train_ids)))

    @property
    def evaluated_on(self) -> Examples:
        """The rows of the final scores: the evaluation rows, else the validation rows."""
        return self.evaluation or self.validation or self.train.subset(self.validation_ids)

    @property
    def last_scores(self) -> str:
        """`EVALUATION` if there are evaluation rows, else `LAST_VALIDATION`."""
        return EVALUATION if self.evaluation is not None else LAST_VALIDATION

    @property
    def skipped(self) -> tuple[Problem, ...]:
        """The faults of the rows that were skipped, in order."""
        read = (each.origins for each in (self.train, self.validation, self.evaluation) if each is not None)
        return tuple(problem for origins in read if origins is not None for problem in origins.skipped)

    def without(self, skipped: Mapping[int, Problem]) -> Rows:
        """Drop these rows of `train`. Raises `InputError` if no row remains to train on or to evaluate on."""
        train_ids = tuple(id_ for id_ in self.train_ids if self.row_of(id_) not in skipped)
        validation_ids = tuple(id_ for id_ in self.validation_ids if id_ not in skipped)
        if skipped and (not train_ids or not (validation_ids or self.validation or self.evaluation)):
            purpose = "evaluate" if train_ids else "train"
            first = skipped[min(skipped)]
            raise InputError.at(self.train.source, f"no usable row is left to {purpose} on; {first}")
        return replace(self, train_ids=train_ids, validation_ids=validation_ids)

    def seen_in_training(self) -> int:
        """The number of evaluated rows whose text is also a training text, which inflates the scores."""
        return shared_texts(self.trained_on, self.evaluated_on)


def skip_notes(
    skipped: Sequence[Problem], most: int = 3, listed: str = "", option: str = "data.bad_rows=skip"
) -> Iterator[str]:
    """Yield a line with the number of rows that `option` skipped and the first `most` faults, if there are any."""
    if skipped:
        more = f"; and {len(skipped) - most} more{listed}" if len(skipped) > most else ""
        first = "; ".join(map(str, skipped[:most]))
        yield f"note: skipped {counted(len(skipped), 'unusable row')} ({option}): {first}{more}"


def notes(rows: Rows) -> Iterator[str]:
    """Yield notes and warnings about the rows, to show before training."""
    train, trained_on, origins = rows.train, rows.trained_on, rows.train.origins
    if origins is not None:
        yield from origins.notes
    yield from skip_notes(rows.skipped, listed=" (a run lists all of them in its skipped_rows.txt)")
    if isinstance(train, TextRows) and isinstance(trained_on, TextRows):
        groups = alike(train.labels)
        for group in groups[:_MOST_GROUPS]:
            differ = "are classes of their own, and differ only in case, white space or Unicode form"
            yield f"warning: {shown_names(group)} {differ}; if they mean the same, spell them in one way"
        if len(groups) > _MOST_GROUPS:
            yield f"warning: {len(groups) - _MOST_GROUPS} more groups of classes are spelled almost the same"
        absent = [name for name, count in zip(train.labels, trained_on.counts(), strict=False) if not count]
        if absent:
            held = "all its rows are validation rows"
            yield f"warning: no training row has the class {shown_names(absent)}; {held}"
    if isinstance(train, DataSet):
        pairs = {*zip(train.fingerprints(), (row.label for row in train.rows), strict=True)}
        if texts := sum(count > 1 for count in Counter(text for text, _ in pairs).values()):
            yield f"warning: equal texts have different labels ({counted(texts, 'text')}); check duplicate rows"
        if len(train) >= _MANY_ROWS and 2 * len(train.labels) > len(train):
            yield f"warning: {len(train.labels)} classes for {len(train)} rows; is the label column the right one?"


def class_counts(rows: Rows, most: int = _MOST_CLASSES) -> str:
    """A line with the training rows of the `most` largest classes and of the smallest; empty without classes."""
    train = rows.trained_on
    if not isinstance(train, TextRows) or not train.counts():
        return ""
    counts = sorted(zip(train.counts(), train.labels, strict=True), key=lambda each: -each[0])
    listed = [f"{legible_line(name if name == name.strip() else repr(name))} {count}" for count, name in counts]
    left_out = len(listed) - most
    more = f" and {left_out} more, the rarest {listed[-1]}" if left_out > 0 else ""
    return f"classes: {', '.join(listed[:most])}{more}"


def line_breaks(rows: Rows) -> str:
    """A note on the texts in tables that have line breaks; else empty."""
    train, origins = rows.train, rows.train.origins
    if origins is None or not isinstance(train, TextRows):
        return ""
    places = [origins.where(row.id) for row in train.rows if any("\n" in text for text in row.texts)]
    tables = [place for place in places if Path(place.rpartition(":")[0]).suffix.lower() in (".csv", ".tsv")]
    found = f"{counted(len(tables), 'text')} with line breaks (first: {tables[0] if tables else ''})"
    return f"note: {found}; is a quote left open there?" if tables else ""


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
    """Read the rows of files for a task. labels: of the training rows, for an evaluation file; else None."""
    if task in CAUSAL:
        return read_conversations(*paths, selection=selection, pairs=task == DPO)
    return read(TEXT_TASKS[task], *paths, **data.model_dump(include=_COLUMNS), labels=labels, selection=selection)


_EMBEDDED: Mapping[str, Callable[[int], tuple[Examples, Examples]]] = {
    CLASSIFICATION: shell.embedded,
    SFT: rewriting.embedded,
}
_EXAMPLES = {TOKEN_CLASSIFICATION: "tags.jsonl", MULTI_LABEL: "multi_label.jsonl", REGRESSION: "regression.csv"}
_EXAMPLES |= {DPO: "preferences.jsonl"}
"""An example file in examples/data for each task without embedded rows."""
_INFERRED: dict[str, tuple[str, str]] = {}
"""Cache of `inferred_task` in this process."""


def inferred_task(config: Config) -> tuple[str, str]:
    """Infer (task, reason) from the first row of the data; (classification, "") if it is unclear.

    Regression is never inferred, because a number may be a class. The file is opened once per process, and again if it
    changes.
    """
    if not config.data.files:
        return CLASSIFICATION, ""
    key = _inferred_from(config)
    if key not in _INFERRED:
        _INFERRED[key] = _implied_by(first_record(Path(config.data.files[0].path)) or {}, config.data)
    return _INFERRED[key]


def set_inferred_task(config: Config, task_and_reason: tuple[str, str]) -> None:
    """Store the result of another process, so that this process does not open the file."""
    if config.data.files:
        _INFERRED[_inferred_from(config)] = task_and_reason


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
    if data.text_column is not None or data.label_column is not None:
        return CLASSIFICATION, ""
    if all(first.get(name) is not None for name in PAIR):
        return DPO, "rows have 'chosen' and 'rejected'"
    source = conversations_in(first)
    return (SFT, f"rows {'are' if source == 'conversations' else 'have'} {source}") if source else (CLASSIFICATION, "")


def task_of_run(config: Config) -> str:
    """The configured task, else the inferred one. Raises `InputError` if the data file cannot be opened."""
    return config.task or inferred_task(config)[0]


def with_task(config: Config) -> Config:
    """`config` with the inferred task set (except classification), so that the run can be loaded without its data."""
    task = task_of_run(config)
    return config if task == CLASSIFICATION else config.model_copy(update={"task": task})


def task_notice(config: Config) -> str:
    """A line that reports an inferred task and the reason; empty if the task is configured or is classification."""
    task, why = inferred_task(config) if config.task is None else (config.task, "")
    return f"task: {task}, as {why} in {config.data.files[0].path} (another: --task NAME)" if why else ""


def selection_of(data: Data, *, train: bool, bad_rows: str | None = None) -> RowSelection:
    """The rows to read of the training files (train), else of another file. bad_rows: the option of a command on a
    run, whose file has columns of its own; None: as the setting says."""
    if bad_rows not in (None, "refuse", "skip"):
        raise InputError.at("--bad-rows", f"{bad_rows!r} is not one of refuse, skip")
    option = "--set data.bad_rows=skip" if bad_rows is None else "--bad-rows skip"
    skips, limit = (bad_rows or data.bad_rows) == "skip", data.limit if train else None
    return RowSelection(skips, limit, option, own_columns=train or bad_rows is not None)


def data_files(config: Config) -> list[Path]:
    data = config.data
    return [
        Path(path) for path in (*(file.path for file in data.files), data.validation, data.eval) if path is not None
    ]


def is_tokenised_as_read(config: Config) -> bool:
    """Whether one process per host reads and tokenises the data in one pass (conversations in files)."""
    return bool(config.data.files) and task_of_run(config) in CAUSAL


def cache_of(config: Config, own: Path | None) -> Path | None:
    """The cache folder for rows and tokens: `data.cache`, else `own`; None for embedded rows."""
    if not config.data.files:
        return None
    return own if config.data.cache is None else Path(config.data.cache)


def read_rows(
    config: Config,
    conversations: Callable[[Sequence[Path], RowSelection], Examples] | None = None,
    folder: Path | None = None,
    known: Rows | None = None,
) -> Rows:
    """Read and split the rows that `config` names. Raises `InputError` with every fault of the data.

    conversations: function that reads and tokenises files of conversations; None: hold them in memory. folder: cache
    for the rows of other tasks' files. known: rows that this process has already read.
    """
    train: Examples
    held: dict[str, Examples] = {}
    task, data = task_of_run(config), config.data

    def rows_of(paths: Sequence[Path], labels: tuple[str, ...] | None, name: str) -> Examples:
        selection = selection_of(data, train=labels is None)
        if conversations is not None and task in CAUSAL:
            return conversations(paths, selection)

        def read_once() -> Examples:
            rows = None if known is None else getattr(known, name)
            return read_files(task, data, paths, labels, selection) if rows is None else rows

        if folder is None or task in CAUSAL:
            return read_once()
        return _cached_rows(folder, task, data, paths, labels, selection, read_once)

    if data.files:
        problems, labels = ProblemList(), tuple[str, ...]()
        paths = [Path(file.path) for file in data.files]
        with problems.collecting():
            train = rows_of(paths, None, "train")
            labels = train.labels
        others = {name: path for name, path in (("validation", data.validation), ("evaluation", data.eval)) if path}
        if others and problems and task not in CAUSAL:
            with suppress(InputError):  # the classes of the usable rows, to check the other files too
                labels = read_files(task, data, paths, None, RowSelection(True, data.limit)).labels
        for name, path in others.items():
            with problems.collecting():
                held[name] = rows_of([Path(path)], labels, name)
        problems.raise_if_any()
    elif task in _EMBEDDED:
        train, held["evaluation"] = _EMBEDDED[task](config.seed)
    else:
        example = f"examples/data/{_EXAMPLES[task]}"
        what = f"task {task} needs rows: name a file with --data; an example is {example}"
        raise InputError.at("data.train", what)
    fraction = 0.0 if "validation" in held else data.validation_fraction
    train_places, validation_places = frozen_split(len(train), fraction, config.seed)
    ids = train.ids
    if not (held or validation_places):
        raise InputError.at("data", "no rows to evaluate on: name data.eval, or a data.validation_fraction > 0")
    train_ids, validation_ids = (tuple(ids[place] for place in each) for each in (train_places, validation_places))
    weights = [file.weight for file in data.files]
    if weights in ([], [1.0]):
        weights = []
    else:
        assert train.origins is not None
        train_ids = mixed(train_ids, train.origins.sizes, weights, config.seed)
    held_out = held.get("evaluation")
    return Rows(task, train, held_out, train_ids, validation_ids, tuple(weights), held.get("validation"))


_CODE = Path(andon.data.__file__).parent


def _cached_rows(
    folder: Path,
    task: str,
    data: Data,
    paths: Sequence[Path],
    labels: Sequence[str] | None,
    selection: RowSelection,
    read_once: Callable[[], Examples],
) -> Examples:
    """Load the rows of `paths` from the cache in `folder`, or read them and write it. Blocks while another process
    writes it. Raises `InputError` if a file changes while it is read."""
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
        data_set = read_once()
        assert isinstance(data_set, TextRows)
        assert data_set.origins is not None
        require_unchanged(paths, before, data_set.origins.stamps)
        rows = json.dumps([(row.text, row.pair, row.label) for row in data_set.rows])
        append({"rows": array("B", rows.encode()), "lines": data_set.origins.lines})
        return {"labels": data_set.labels, "origins": data_set.origins.described()}

    def load(columns: Columns) -> TextRows[Any]:
        origins = Origins.of(paths, columns.said["origins"], column(columns, "lines", "q"))
        rows = tuple(
            Row(place, text, tuple(label) if isinstance(label, list) else label, pair)
            for place, (text, pair, label) in enumerate(json.loads(column(columns, "rows", "B").tobytes()))
        )
        return TEXT_TASKS[task](rows, tuple(columns.said["labels"]), origins.source, origins)

    return load_or_build(folder, key, {"rows": "B", "lines": "q"}, make, load)


def column(columns: Columns, name: str, kind: str) -> array[int]:
    """Load a column into memory. kind: its `array` type code."""
    values = array(kind)
    values.frombytes((columns.folder / name).read_bytes())
    return values


def unfit_model(config: Config) -> str:
    """A warning if the embedded model, with random weights, would be trained on the user's rows; else empty."""
    if config.data.train is None or config.model.base is not None:
        return ""
    return (
        "warning: --model is not set, so a tiny model with random weights is trained, which has seen no text before. "
        "Name a folder or a hub id of a pretrained model, for example --model sentence-transformers/all-MiniLM-L6-v2"
    )
