"""Conversations that are read when they are asked for: of each no more is held than some twenty bytes.

A survey is one pass over files that finds all that is wrong with them, and notes of each row where it stands, its
source, and what tells its text from others. What is read later is held to the digest of that pass.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from andon.console.problems import InputError, Problem
from andon.data.conversations import Conversation, Form, Reading, WithoutClasses, add_form, add_row, asked, last_answer
from andon.data.origins import ALL_ROWS, Origins, RowSelection
from andon.data.rows import fingerprint

COLUMNS = {"lines": "q", "sources": "i", "texts": "Q"}
"""Numbers of each row, by their kind as `array` names it: its line; the place of its source among the names of all, -1
for none; the fingerprint of what is asked in it."""
_ROWS_AT_ONCE = 4096


def survey(
    paths: Sequence[Path], append: Callable[[Mapping[str, array[int]]], None], selection: RowSelection = ALL_ROWS
) -> dict[str, object]:
    """Read the files once, and give `append` further rows of all columns; what else is known of them, for JSON.

    Raises `InputError` with every fault found, as `read_conversations` does.
    """
    reading, sha = Reading(selection), hashlib.sha256()
    names: dict[str, int] = {}
    waiting = _empty()
    for number, row in enumerate(reading.rows(paths)):
        if number == 0:
            add_form(sha, _form(reading))
        add_row(sha, row)
        waiting["sources"].append(names.setdefault(row.source, len(names)) if row.source else -1)
        waiting["texts"].append(fingerprint(asked(_form(reading), row)))
        if len(waiting["texts"]) == _ROWS_AT_ONCE:
            append(waiting | {"lines": reading.origins.taken_lines()})
            waiting = _empty()
    append(waiting | {"lines": reading.origins.taken_lines()})
    return {
        "form": _form(reading),
        "digest": sha.hexdigest(),
        "sizes": list(reading.origins.sizes),
        "units": list(reading.origins.units),
        "names": list(names),
        "skipped": [[problem.where, problem.what] for problem in reading.problems.skipped],
    }


def _form(reading: Reading) -> Form:
    assert reading.form is not None
    return reading.form


def _empty() -> dict[str, array[int]]:
    return {name: array(kind) for name, kind in COLUMNS.items() if name != "lines"}


@dataclass(frozen=True)
class SurveyedConversations(WithoutClasses):
    """The rows of files, as a survey of them left `columns` and `said`. `chosen`: the ids of a part; None: all."""

    paths: tuple[Path, ...]
    columns: Mapping[str, array[int]]
    said: Mapping[str, Any]
    selection: RowSelection = ALL_ROWS
    chosen: tuple[int, ...] | None = None

    @cached_property
    def origins(self) -> Origins:
        """Where each row came from."""
        found = Origins.of(
            self.paths, self.said["units"], self.said["sizes"], self.columns["lines"], self.selection.limit
        )
        found.skipped = [Problem(where, what) for where, what in self.said["skipped"]]
        return found

    @property
    def form(self) -> Form:
        """The one form of all rows."""
        form: Form = self.said["form"]
        return form

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the form and every message in order, of all rows: as `ConversationSet` has it."""
        return str(self.said["digest"])

    @property
    def source(self) -> str:
        """All files, as a reader is told of them."""
        return self.origins.source

    @property
    def ids(self) -> tuple[int, ...]:
        """The rows' ids, in order."""
        return tuple(range(len(self.columns["texts"]))) if self.chosen is None else self.chosen

    def __len__(self) -> int:
        return len(self.columns["texts"]) if self.chosen is None else len(self.chosen)

    @property
    def rows(self) -> Iterator[Conversation]:
        """All rows, read again, one after another. Raises `InputError` at the end where they are no longer the same."""
        reading, sha = Reading(self.selection), hashlib.sha256()
        add_form(sha, self.form)
        for row in reading.rows(self.paths):
            add_row(sha, row)
            yield row
        if sha.hexdigest() != self.digest:
            raise InputError([Problem(self.source, "has changed while it was read; start again")])

    def subset(self, ids: Iterable[int]) -> Self:
        """The rows with these ids, in the order of `ids`; they keep their ids. Raises KeyError for an id not here."""
        chosen, here = tuple(ids), {*self.ids}
        missing = next((id_ for id_ in chosen if id_ not in here), None)
        if missing is not None:
            raise KeyError(missing)
        return replace(self, chosen=chosen)

    @cached_property
    def _of_files(self) -> tuple[str, ...]:
        """The source of the rows of each file that name none: the file, where it is of several and none of its rows
        names one."""
        found, start = [], 0
        for name, size in zip(self.origins.names(), self.said["sizes"], strict=True):
            named = any(place >= 0 for place in self.columns["sources"][start : start + size])
            found.append("" if named or len(self.paths) == 1 else name)
            start += size
        return tuple(found)

    def source_of(self, id_: int) -> str:
        """What the column `source` says of a row, else its file; empty where there is neither."""
        place = self.columns["sources"][id_]
        return str(self.said["names"][place]) if place >= 0 else self._of_files[self.origins.file_of(id_)]

    def texts(self) -> tuple[str, ...]:
        """What a model is asked by each row, in order; for which all are read again."""
        wanted = {*self.ids}
        found = {row.id: asked(self.form, row) for row in self.rows if row.id in wanted}
        return tuple(found[id_] for id_ in self.ids)

    def fingerprints(self) -> tuple[int, ...]:
        """A number for each row's text, in order."""
        return tuple(self.columns["texts"][id_] for id_ in self.ids)

    def told(self, id_: int) -> tuple[str, str] | None:
        """A row's last answer and what is before it; None for an id not here. All up to it are read again."""
        row = next((row for row in self.rows if row.id == id_), None) if id_ in {*self.ids} else None
        return None if row is None else (last_answer(row), asked(self.form, row))
