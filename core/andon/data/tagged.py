"""Rows of words with a tag each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import ClassVar

from andon.console.problems import ProblemList, did_you_mean, shown
from andon.data.formats import Record, Table, open_table
from andon.data.labels import text_fault
from andon.data.origins import ALL_ROWS, Origins, RowSelection
from andon.data.rows import Row, TextRows

TOKENS, TAGS = "tokens", "tags"
"""The columns of words and their tags, where none are named."""


@dataclass(frozen=True)
class Tagged(TextRows[tuple[int, ...]]):
    """Rows of words: a row's text is its words with a space between, its label the number of each word's tag."""

    kind: ClassVar[str] = "token-classification"

    def said(self, row: Row[tuple[int, ...]]) -> tuple[str, ...]:
        return tuple(self.labels[tag] for tag in row.label)

    def about(self) -> str:
        return f"{len(self.labels)} tags of {sum(len(row.label) for row in self.rows)} words"

    def counts(self) -> tuple[int, ...]:
        found = Counter(number for row in self.rows for number in row.label)
        return tuple(found[number] for number in range(len(self.labels)))


def read_tagged(
    *paths: str | PathLike[str],
    token_column: str | None = None,
    tag_column: str | None = None,
    labels: Sequence[str] | None = None,
    selection: RowSelection = ALL_ROWS,
) -> Tagged:
    """The rows of JSONL or Parquet files with a list of words and a list of tags, one a word.

    Without `labels` the tags are those found, sorted. Raises `InputError` with every fault found, each as file:line:
    what is no list of strings, empty lists and words, words with white space in them, lists of different lengths,
    unknown tags, no rows.
    """
    problems, names = ProblemList(skips=selection.skip_bad), (token_column or TOKENS, tag_column or TAGS)
    found: list[tuple[list[str], list[str]]] = []
    origins = Origins(selection.limit)
    for table, record in _records(paths, origins, problems):
        faults = [fault for name in names if (fault := _list_fault(name, record.fields)) is not None]
        words, tags = (record.fields.get(name) for name in names)
        if not faults and isinstance(words, list) and isinstance(tags, list):
            odd = next((word for word in words if len(word.split()) != 1), None)
            if odd is not None:
                faults.append(f"{names[0]}: {shown(odd)} is not one word")
            if len(words) != len(tags):
                faults.append(f"{len(words)} {names[0]} and {len(tags)} {names[1]}; each word has one tag")
            known = labels if labels is not None else tags
            faults += [f"tag {shown(tag)} is unknown{did_you_mean(tag, known)}" for tag in tags if tag not in known]
            if not faults:
                found.append((words, tags))
                origins.add(record.line)
        for fault in faults:
            problems.add_row(table.place(record.line), fault)
    problems.raise_if_any()
    every = tuple(sorted({tag for _, tags in found for tag in tags})) if labels is None else tuple(labels)
    numbers = {name: number for number, name in enumerate(every)}
    rows = (
        Row(place, " ".join(words), tuple(numbers[tag] for tag in tags)) for place, (words, tags) in enumerate(found)
    )
    return Tagged(tuple(rows), every, origins.source, origins)


def _records(
    paths: Sequence[str | PathLike[str]], origins: Origins, problems: ProblemList
) -> Iterator[tuple[Table, Record]]:
    for path in map(Path, paths):
        table = open_table(path, problems)
        for record in origins.records(table, problems):
            yield table, record


def _list_fault(name: str, fields: Mapping[str, object]) -> str | None:
    if name not in fields:
        return f"has no column {name!r}; there are {', '.join(map(shown, fields)) or 'none'}"
    values = fields[name]
    if not isinstance(values, list):
        return f"{name} must be a list of strings, is {shown(values)}"
    if not values:
        return f"{name} is an empty list"
    for value in values:
        fault = text_fault(value) if isinstance(value, str) else f"is a {type(value).__name__}, and no string"
        if fault is not None:
            return f"{name}: {shown(value)} {fault}"
    return None
