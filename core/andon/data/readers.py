"""Files of texts, labelled or not, to data, with all of a file's faults at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Generic, TypeVar

from andon.config.load import FLAGS
from andon.console.problems import InputError, Problem, ProblemList, did_you_mean, shown
from andon.data.formats import Note, Record, Table, open_table
from andon.data.labels import column_fault, label_fault, label_names, label_set_of, same_kind, target_of
from andon.data.origins import ALL_ROWS, ID_COLUMN, Origins, RowSelection
from andon.data.rows import VALUE, DataSet, Label, LabelSets, Row, Targets

Meant = TypeVar("Meant")

TEXT_COLUMNS = ("input", "text")
"""Where the text is looked for when no column is named."""
LABEL_COLUMNS = ("label",)
Columns = Mapping[str, tuple[str, ...]]
"""The parts of a row, `text`, `label` and for pairs `text_pair`, in this order: names under which each may stand."""


def read(
    *paths: str | PathLike[str],
    text_column: str | None = None,
    text_pair_column: str | None = None,
    label_column: str | None = None,
    labels: Sequence[str] | None = None,
    selection: RowSelection = ALL_ROWS,
) -> DataSet:
    """The rows of .jsonl, .json (one object a line, or an array), .csv, .tsv or .parquet files, one file after another.

    The text is in `text_column` (else `input` or `text`), a second one in `text_pair_column`, if any, the class in
    `label_column` (else `label`): integers from 0 or strings, not both. Without `labels` the classes are those found,
    integers by value and strings sorted, and there must be two at least. With `labels` (an evaluation file) each class
    must be one of them, by name.
    A row's id is its place among all rows, from 0. Rows that `selection` skips have none; `Origins.skipped` lists them.

    Raises `InputError` with every fault found, each as file:line with the offending value: a file that is missing,
    named twice, empty, a folder or not UTF-8; NUL bytes; malformed records; a missing column; empty texts; labels that
    are null, negative, fractional, of mixed types or unknown; ids that a file repeats; one class only; no rows.
    """
    columns = _columns(text_column, text_pair_column, label_column)
    return _data_set(_found(paths, columns, _class, selection), labels)


def read_targets(
    *paths: str | PathLike[str],
    text_column: str | None = None,
    text_pair_column: str | None = None,
    label_column: str | None = None,
    selection: RowSelection = ALL_ROWS,
) -> Targets:
    """The rows of files as `read` takes them, with a number for each where that has a class.

    Raises `InputError` with every fault found, as `read`, of labels those that are no finite number of fp32's range.
    """
    columns = _columns(text_column, text_pair_column, label_column)
    found = _found(paths, columns, _target, selection)
    found.problems.raise_if_any()
    return Targets(found.rows(found.labels), VALUE, found.origins.source, found.origins)


def read_label_sets(
    *paths: str | PathLike[str],
    text_column: str | None = None,
    text_pair_column: str | None = None,
    label_column: str | None = None,
    separator: str | None = None,
    labels: Sequence[str] | None = None,
    selection: RowSelection = ALL_ROWS,
) -> LabelSets:
    """The rows of files as `read` takes them, with any number of labels each, in `label_column` (else `label` or
    `labels`): a list of strings, or a string with `separator` between them.

    Without `labels` they are those found, sorted. Raises `InputError` with every fault found: labels that are neither,
    unknown ones, one that a row names twice, and files of which no row has any.
    """
    columns = _columns(text_column, text_pair_column, label_column, (*LABEL_COLUMNS, "labels"))
    found = _found(paths, columns, lambda label, typed: label_set_of(label, separator), selection)
    problems = found.problems
    problems.raise_if_any()
    names = tuple(sorted({name for each in found.labels for name in each})) if labels is None else tuple(labels)
    if not names:
        problems.add(found.origins.source, "no row has a label")
    numbers = {name: number for number, name in enumerate(names)}
    found.refuse(
        (place, f"label {shown(name)} is unknown; there are {shown_names(names)}{did_you_mean(name, names)}")
        for place, each in enumerate(found.labels)
        for name in each
        if name not in numbers
    )
    sets = (tuple(sorted(numbers[name] for name in each)) for each in found.labels)
    return LabelSets(found.rows(sets), names, found.origins.source, found.origins)


def _columns(text: str | None, pair: str | None, label: str | None, usual: tuple[str, ...] = LABEL_COLUMNS) -> Columns:
    if pair is not None and pair in (text, label):
        raise InputError([Problem("data.text_pair_column", f"{pair!r} is named for something else too")])
    second = {} if pair is None else {"text_pair": (pair,)}
    return {"text": _candidates(text, TEXT_COLUMNS), "label": _candidates(label, usual), **second}


def _class(label: object, typed: bool) -> tuple[int | str, str | None]:
    return label if isinstance(label, int | str) else "", label_fault(label, typed)


def _target(label: object, typed: bool) -> tuple[float, str | None]:
    number = target_of(label, typed)
    return (0.0, number) if isinstance(number, str) else (number, None)


def _found(
    paths: Sequence[str | PathLike[str]],
    columns: Columns,
    meant: Callable[[object, bool], tuple[Meant, str | None]],
    selection: RowSelection,
) -> _Found[Meant]:
    problems = ProblemList(skips=selection.skip_bad)
    found = _Found(problems, meant, Origins(selection.limit))
    for path in map(Path, paths):
        table = open_table(path, problems)
        if table.columns is not None:
            _chosen(columns, table.columns, f"{path}:1", problems.add)
            problems.raise_if_any()
        found.typed = found.typed and table.typed
        for record in found.origins.records(table, problems):
            found.take(table, record, columns)
    return found


def first_record(path: Path) -> Mapping[str, object] | None:
    """The fields of the first record of a file that has any, whatever they hold; None where there is none.

    Raises `InputError` for a file that cannot be opened, or has no header where it needs one.
    """
    first = next(iter(open_table(path, ProblemList()).records), None)
    return None if first is None else first.fields


@dataclass(frozen=True, slots=True)
class TextRow:
    """A text to predict, and the second one of a pair. fields: its row by column, in order; none of standard input.
    named: the columns of the text and of the second one."""

    text: str
    pair: str | None = None
    fields: Mapping[str, object] = field(default_factory=dict)
    named: tuple[str, ...] = ()


@dataclass(frozen=True)
class Texts:
    """The texts of a file, which is read again, row by row, each time `rows` is called. columns: of all of its rows."""

    columns: tuple[str, ...]
    rows: Callable[[], Iterator[TextRow]]


def read_texts(
    path: Path, *, text_column: str | None = None, text_pair_column: str | None = None, words: bool = False
) -> Texts:
    """The texts of a file of the kinds that `read` reads, in `text_column` (else `input` or `text`), and second ones.

    words: a list of words (in `tokens`, unless it is named) is a text too, with a space between them.

    The whole file is checked at once, in bounded memory. Other columns may hold anything. Raises `InputError` with
    every fault found, each as file:line.
    """
    wanted = {"text": _candidates(text_column, ("tokens", *TEXT_COLUMNS) if words else TEXT_COLUMNS)}
    wanted |= {} if text_pair_column is None else {"text_pair": (text_pair_column,)}

    def rows() -> Iterator[TextRow]:
        problems = ProblemList()
        table = open_table(path, problems)
        if table.columns is not None:
            _chosen(wanted, table.columns, f"{path}:1", problems.add)
            problems.raise_if_any()
        for record in table.records:
            where = table.place(record.line)
            chosen = _chosen(wanted, record.fields, where, problems.add)
            texts = [_joined(record.fields[name], words=words) for name in chosen]
            faults = [*filter(None, map(column_fault, chosen, texts))]
            for fault in faults:
                problems.add(where, fault)
            if texts and not faults:
                text, *pair = map(str, texts)
                yield TextRow(text, pair[0] if pair else None, record.fields, chosen)
        problems.raise_if_any()

    columns: dict[str, None] = {}
    empty = True
    for row in rows():
        columns |= dict.fromkeys(row.fields)
        empty = False
    if empty:
        raise InputError([Problem(str(path), "has no rows")])
    return Texts(tuple(columns), rows)


def _joined(text: object, *, words: bool) -> object:
    if words and isinstance(text, list) and all(isinstance(word, str) and len(word.split()) == 1 for word in text):
        return " ".join(text)
    return text


def _candidates(named: str | None, usual: tuple[str, ...]) -> tuple[str, ...]:
    return usual if named is None else (named,)


def _chosen(columns: Columns, there: Iterable[str], where: str, note: Note) -> tuple[str, ...]:
    """The column of each part of a row among those `there`; empty if one was not clear, which was noted."""
    found = [_column(what, names, tuple(there), where, note) for what, names in columns.items()]
    return tuple(map(str, found)) if None not in found else ()


def _column(what: str, names: tuple[str, ...], there: tuple[str, ...], where: str, note: Note) -> str | None:
    """The one of `names` that is `there`, or None when that was not clear and was noted."""
    matching = [name for name in names if name in there]
    if len(matching) == 1:
        return matching[0]
    if matching:
        note(where, f"has both {' and '.join(map(repr, matching))}; name one with {_naming(what)}")
        return None
    wanted = " or ".join(map(repr, names))
    hint = next(filter(None, (did_you_mean(name, there) for name in names)), "") or f"; name it with {_naming(what)}"
    note(where, f"has no column {wanted}; there are {shown_names(there)}{hint}")
    return None


def _naming(what: str) -> str:
    """How a column is named: by the flag that `train`, `eval` and `predict` have, or by its key."""
    key = f"data.{what}_column"
    return f"{FLAGS[key]} ({key})" if key in FLAGS else f"--set {key}"


def shown_names(names: Sequence[str], most: int = 12) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(map(shown, names[:most])) or "none") + rest


@dataclass
class _Found(Generic[Meant]):
    """Rows that have been read so far: where from, text, label as it is meant. typed: whether numbers are not strings
    in all files.

    meant: a label as written, and whether numbers are not strings, to what it means, and why it cannot be used.
    """

    problems: ProblemList
    meant: Callable[[object, bool], tuple[Meant, str | None]]
    origins: Origins
    typed: bool = True
    texts: list[tuple[str, ...]] = field(default_factory=list)
    labels: list[Meant] = field(default_factory=list)

    def refuse(self, faults: Iterable[tuple[int, str]]) -> None:
        """Skip the rows at these places. Raises `InputError` if bad rows are not skipped, or none is left."""
        places: set[int] = set()
        for place, fault in faults:
            self.problems.add_row(self.origins.where(place), fault)
            places.add(place)
        self.problems.raise_if_any()
        kept = [place for place in range(len(self.texts)) if place not in places]
        if not kept:
            self.problems.add(self.origins.source, f"no row can be used; {self.problems.skipped[-1]}")
            self.problems.raise_if_any()
        self.texts, self.labels = [self.texts[place] for place in kept], [self.labels[place] for place in kept]
        self.origins.keep(kept)

    def take(self, table: Table, record: Record, columns: Columns) -> None:
        where = table.place(record.line)
        chosen = _chosen(columns, record.fields, where, self.problems.add_row)
        if not chosen:
            return
        texts = {name: record.fields[name] for name in (chosen[0], *chosen[2:])}
        label, label_fault = self.meant(record.fields[chosen[1]], table.typed)
        faults = [
            *(column_fault(name, text) for name, text in texts.items()),
            label_fault,
            *(self.origins.repeated(table, record) if ID_COLUMN not in chosen else ()),
        ]
        for fault in filter(None, faults):
            self.problems.add_row(where, fault)
        if not any(faults):
            self.origins.add(record.line)
            self.texts.append(tuple(map(str, texts.values())))
            self.labels.append(label)

    def rows(self, labels: Iterable[Label]) -> tuple[Row[Label], ...]:
        pairs = zip(self.texts, labels, strict=True)
        return tuple(
            Row(place, texts[0], label, texts[1] if len(texts) > 1 else None)
            for place, (texts, label) in enumerate(pairs)
        )


def _data_set(found: _Found[int | str], labels: Sequence[str] | None) -> DataSet:
    """The rows with their classes numbered. Raises `InputError` when anything was noted."""
    origins, problems = found.origins, found.problems
    # Beside a table, in which all is text, what another file says is text too.
    if not found.typed:
        found.labels = [str(label) for label in found.labels]
    found.refuse(same_kind(found.labels, found.typed)[1])
    meant, _ = same_kind(found.labels, found.typed)
    names = label_names(meant) if labels is None else tuple(labels)
    if labels is None and len(names) < 2:
        what = f"all {len(meant)} rows have the label {names[0]!r}; a classifier needs two classes at least"
        problems.add(origins.source, what)
    numbers = {name: number for number, name in enumerate(names)}
    found.labels = [*map(str, meant)]
    found.refuse(
        (place, f"label {shown(label)} is unknown; there are {shown_names(names)}{did_you_mean(str(label), names)}")
        for place, label in enumerate(found.labels)
        if label not in numbers
    )
    return DataSet(found.rows(numbers[str(label)] for label in found.labels), names, origins.source, origins)
