"""Readers of labelled texts, tagged words and texts to predict. All faults of the files are raised at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache, partial
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from andon.config.load import FLAGS
from andon.console.messages import InputError, Problem, ProblemList, did_you_mean, shown
from andon.data.formats import Record, Table, open_table
from andon.data.origins import ALL_ROWS, Origins, RowSelection
from andon.data.rows import (
    DataSet,
    LabelSets,
    Row,
    Tagged,
    Targets,
    TextRows,
    class_of,
    column_fault,
    label_set_of,
    same_kind,
    target_of,
    text_fault,
)

Kind = TypeVar("Kind", bound=TextRows[Any])

TEXT_COLUMNS = ("input", "text")
LABEL_COLUMNS = ("label",)
"""The default columns of texts and labels."""
TOKENS, TAGS = "tokens", "tags"
"""The default columns of words and tags."""
Columns = Mapping[str, tuple[str, ...]]
"""Candidate column names of each part: `text`, `label` and, for pairs, `text_pair`, in this order."""
Parsed = tuple[tuple[tuple[str, ...], Any], list[str]]
"""((texts, label as written), faults) of a row."""


def read(
    kind: type[Kind],
    *paths: str | PathLike[str],
    text_column: str | None = None,
    text_pair_column: str | None = None,
    label_column: str | None = None,
    label_separator: str | None = None,
    labels: Sequence[str] | None = None,
    selection: RowSelection = ALL_ROWS,
) -> Kind:
    """Read .jsonl, .json (one object per line, or an array), .csv, .tsv or .parquet files, one after another.

    The text is in `text_column` (default `input` or `text`), the second text of a pair in `text_pair_column`. The label
    is in `label_column` (default `label`). Its form depends on `kind`:
    `DataSet`: a class, an integer from 0 or a string; all of one type, at least two classes.
    `Targets`: a finite number in the range of fp32.
    `LabelSets`: a list of strings, or a string with `label_separator` between labels; default column also `labels`.
    `Tagged`: `text_column` (default `tokens`) has a list of words, `label_column` (default `tags`) one tag per word.

    labels: of the training rows, for an evaluation file (none: they could not be read, so any label is accepted); None:
    the labels of the rows, sorted (integers by value). A row's id is its position among the usable rows, from 0.
    `Origins.skipped` has the rows that `selection` skips.

    Raises `InputError` with every fault, each as file:line with the offending value: a file that is missing, named
    twice, empty, a folder or not UTF-8; NUL bytes; malformed records; missing columns; empty texts; unusable or unknown
    labels; fewer than two classes; no rows.
    """
    origins, typed, shared = Origins(selection), True, bool(labels) and not selection.own_columns
    problems = origins.problems
    columns: dict[str, tuple[str, ...]] = {}
    parse: Callable[[Table, Record], Parsed]
    if kind is Tagged:
        parse = partial(_tagged_words, text_column or TOKENS, label_column or TAGS, labels)
    else:
        if text_pair_column is not None and text_pair_column in (text_column, label_column):
            raise InputError.at("data.text_pair_column", f"{text_pair_column!r} is named for something else too")
        usual = (*LABEL_COLUMNS, "labels") if kind is LabelSets else LABEL_COLUMNS
        columns = {"text": _candidates(text_column, TEXT_COLUMNS), "label": _candidates(label_column, usual)}
        columns |= {} if text_pair_column is None else {"text_pair": (text_pair_column,)}
        value_of = {DataSet: class_of, Targets: target_of}.get(kind, partial(label_set_of, label_separator))
        parse = partial(_labelled_text, columns, value_of, origins, shared)

    def begin(table: Table) -> None:
        nonlocal typed
        _require_columns(columns, table, problems, shared)
        typed = typed and table.typed

    parsed = list(origins.read(map(Path, paths), parse, begin))

    def refuse(faults: Iterable[tuple[int, str]]) -> None:
        """Leave out the rows at these positions. Raises `InputError` if no row remains, and for training rows if bad
        rows are not skipped; for other rows, once their labels are compared with the known ones."""
        places: set[int] = set()
        for place, fault in faults:
            problems.add_row(origins.where(place), fault)
            places.add(place)
        if labels is None:
            problems.raise_if_any()
        if places:
            remaining = [place for place in range(len(parsed)) if place not in places]
            if not remaining:
                problems.raise_if_any()
                problems.add(origins.source, f"no row can be used; {problems.skipped[-1]}")
                problems.raise_if_any()
            parsed[:] = [parsed[place] for place in remaining]
            origins.keep(remaining)

    # Collect the label names, and the names of each row's labels.
    named: Sequence[Any] = [label for _, label in parsed]
    names: tuple[str, ...] = ("value",)
    if kind is DataSet:
        if not typed:  # CSV and TSV have only text, so other files' labels become text too
            named = [str(label) for label in named]
        named, odd = same_kind(named, typed)
        refuse(odd)
        if odd:
            places = {place for place, _ in odd}
            named, _ = same_kind([label for place, label in enumerate(named) if place not in places], typed)
        names = tuple(labels or map(str, sorted(set(named))))  # integers by value
        if labels is None and len(names) < 2:
            what = f"all {len(named)} rows have the label {names[0]!r}; a classifier needs two classes at least"
            problems.add(origins.source, what)
        named = [(str(label),) for label in named]
    elif kind is Targets:
        problems.raise_if_any()
    else:
        if labels is None:
            problems.raise_if_any()
        names = tuple(labels or sorted({name for each in named for name in each}))
        if not names:
            problems.add(origins.source, "no row has a label")

    # Refuse rows with unknown labels, then map the labels to numbers.
    if kind is not Targets:
        numbers = {name: number for number, name in enumerate(names)}
        hint = cache(lambda name: did_you_mean(name, names))
        unknown = [(place, name) for place, each in enumerate(named) for name in each if name not in numbers]
        known = "" if problems.skips else f"; there are {shown_names(names)}"
        refuse((place, f"label {shown(name)} is unknown{known}{hint(name) or origins.hint}") for place, name in unknown)
        places = {place for place, _ in unknown}
        named = [[numbers[name] for name in each] for place, each in enumerate(named) if place not in places]
    problems.raise_if_any()
    if kind is DataSet:
        named = [number for (number,) in named]
    elif kind is not Targets:
        named = [tuple(sorted(each) if kind is LabelSets else each) for each in named]
    rows = (
        Row(place, texts[0], label, texts[1] if len(texts) > 1 else None)
        for place, ((texts, _), label) in enumerate(zip(parsed, named, strict=True))
    )
    return kind(tuple(rows), names, origins.source, origins)


def _require_columns(columns: Columns, table: Table, problems: ProblemList, shared: bool = False) -> None:
    if table.columns is not None:
        for fault in _chosen(columns, table.columns, shared)[1]:
            problems.add(f"{table.path}:1", fault)
        problems.raise_if_any()


def _labelled_text(
    columns: Columns,
    value_of: Callable[[object, bool], tuple[Any, str | None]],
    origins: Origins,
    shared: bool,
    table: Table,
    record: Record,
) -> Parsed:
    chosen, faults = _chosen(columns, record.fields, shared)
    if faults:
        return ((), None), faults
    texts = {name: record.fields[name] for name in (chosen[0], *chosen[2:])}
    label, wrong = value_of(record.fields[chosen[1]], table.typed)
    if wrong is not None and wrong.startswith("label is "):
        wrong = f"{chosen[1]}{wrong.removeprefix('label')}"
    faults = [*filter(None, (*(column_fault(name, text) for name, text in texts.items()), wrong))]
    faults = [f"{fault}{origins.hint}" if fault.endswith(" is empty") else fault for fault in faults]
    return (tuple(map(str, texts.values())), label), faults


def _tagged_words(
    token_column: str, tag_column: str, known: Sequence[str] | None, table: Table, record: Record
) -> Parsed:
    fields, faults = record.fields, list[str]()
    for name in (token_column, tag_column):
        values = fields.get(name)
        if name not in fields:
            faults.append(f"has no column {name!r}; there are {', '.join(map(shown, fields)) or 'none'}")
        elif not isinstance(values, list):
            faults.append(f"{name} must be a list of strings, is {shown(values)}")
        elif not values:
            faults.append(f"{name} is an empty list")
        else:
            for value in values:
                fault = text_fault(value) if isinstance(value, str) else f"is a {type(value).__name__}, and no string"
                if fault is not None:
                    faults.append(f"{name}: {shown(value)} {fault}")
                    break
    if faults:
        return ((), None), faults
    words: Any = fields[token_column]
    tags: Any = fields[tag_column]
    odd = next((word for word in words if len(word.split()) != 1), None)
    if odd is not None:
        faults.append(f"{token_column}: {shown(odd)} is not one word")
    if len(words) != len(tags):
        faults.append(f"{len(words)} {token_column} and {len(tags)} {tag_column}; each word has one tag")
    if known:
        faults += [f"tag {shown(tag)} is unknown{did_you_mean(tag, known)}" for tag in tags if tag not in known]
    return ((" ".join(words),), tuple(tags)), faults


@dataclass(frozen=True, slots=True)
class TextRow:
    """A text to predict. pair: the second text of a pair.

    fields: the row's values by column, in order; empty for standard input. named: the columns of the texts.
    """

    text: str
    pair: str | None = None
    fields: Mapping[str, object] = field(default_factory=dict)
    named: tuple[str, ...] = ()


@dataclass(frozen=True)
class Texts:
    """The texts of a file. columns: the union of its rows' columns. rows: each call reads the file again. skipped: the
    faults of rows that were skipped."""

    columns: tuple[str, ...]
    rows: Callable[[], Iterator[TextRow]]
    skipped: Sequence[Problem] = ()


def read_texts(
    path: Path,
    *,
    text_column: str | None = None,
    text_pair_column: str | None = None,
    words: bool = False,
    selection: RowSelection = ALL_ROWS,
) -> Texts:
    """The texts of a file in `text_column` (default `input` or `text`), and the second texts of pairs.

    words: also accept lists of words, joined by spaces, and the default column `tokens`. Validates the whole file in
    bounded memory. Raises `InputError` with every fault, each as file:line.
    """
    wanted = {"text": _candidates(text_column, (TOKENS, *TEXT_COLUMNS) if words else TEXT_COLUMNS)}
    wanted |= {} if text_pair_column is None else {"text_pair": (text_pair_column,)}

    def joined(text: object) -> object:
        if words and isinstance(text, list) and all(isinstance(word, str) and len(word.split()) == 1 for word in text):
            return " ".join(text)
        return text

    def rows(problems: ProblemList) -> Iterator[TextRow]:
        with closing(open_table(path, problems)) as table:
            _require_columns(wanted, table, problems)
            for record in table.records:
                chosen, faults = _chosen(wanted, record.fields)
                texts = [joined(record.fields[name]) for name in chosen]
                faults += filter(None, map(column_fault, chosen, texts))
                for fault in faults:
                    hint = selection.hint if fault.endswith(" is empty") else ""
                    problems.add_row(table.place(record.line), f"{fault}{hint}")
                if not faults:
                    text, *pair = map(str, texts)
                    yield TextRow(text, pair[0] if pair else None, record.fields, chosen)
        problems.raise_if_any()

    columns: dict[str, None] = {}
    empty, first = True, ProblemList(skips=selection.skip_bad)
    for row in rows(first):
        columns |= dict.fromkeys(row.fields)
        empty = False
    if empty:
        raise InputError.at(path, f"no row can be used; {first.skipped[0]}" if first.skipped else "has no rows")
    return Texts(tuple(columns), lambda: rows(ProblemList(skips=selection.skip_bad)), first.skipped)


def _candidates(named: str | None, usual: tuple[str, ...]) -> tuple[str, ...]:
    return usual if named is None else (named,)


def _chosen(columns: Columns, present: Iterable[str], shared: bool = False) -> tuple[tuple[str, ...], list[str]]:
    """(column of each part among those present, faults); no columns if there are faults. shared: whether the options
    that name columns hold for the training files too, which have the columns."""
    names, chosen, faults = tuple(present), list[str](), list[str]()
    for part, candidates in columns.items():
        matching = [name for name in candidates if name in names]
        if len(matching) == 1:
            chosen.append(matching[0])
            continue
        key = f"data.{part}_column"
        naming = FLAGS.get(key, f"--set {key}")
        if matching:
            faults.append(f"has both {' and '.join(map(repr, matching))}; name one with {naming}")
        else:
            wanted = " or ".join(map(repr, candidates))
            hint = next(filter(None, (did_you_mean(name, names) for name in candidates)), "")
            remedy = hint or f"; name it with {naming}"
            if shared:
                remedy = f"; rename the column: {naming} covers the training file too"
            faults.append(f"has no column {wanted}; there are {shown_names(names)}{remedy}")
    return () if faults else tuple(chosen), faults


def shown_names(names: Sequence[str], most: int = 12) -> str:
    """The first `most` names in quotes, and the number of the others."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(map(shown, names[:most])) or "none") + rest
