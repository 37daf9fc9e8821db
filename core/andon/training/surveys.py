"""Files of conversations that are surveyed once: what was found of them is kept by the digest of their bytes."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import andon.data
from andon.config.source import require_file
from andon.console.problems import InputError, Problem
from andon.data.conversations import Form
from andon.data.origins import ALL_ROWS, RowSelection
from andon.data.surveyed import COLUMNS, SurveyedConversations, survey
from andon.run.atomic import storage
from andon.run.columns import Columns, Numbers, found, kept, key_of
from andon.run.provenance import source_digest

_CODE = Path(andon.data.__file__).parent
_BYTES_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Surveys:
    """Where surveys are kept, if anywhere, and whether others may be put there."""

    folder: Path | None
    writes: bool

    def of(self, paths: Sequence[Path], selection: RowSelection = ALL_ROWS) -> SurveyedConversations:
        """The rows of these files, read where they are not known.

        Raises `InputError` with all that is wrong with them, and for files that change meanwhile.
        """
        there = tuple(paths)
        if self.folder is None:
            return _in_memory(there, selection)
        before = _bytes_of(there)
        # pyarrow reads Parquet, and nothing else here depends on a library. Skipped rows are listed by path.
        chosen = [selection.limit, *map(str, there if selection.skip_bad else ())]
        key = key_of(("pyarrow",), code=source_digest(_CODE), files=before, selection=chosen)

        def make(append: Callable[[Numbers], None]) -> Mapping[str, object]:
            said = survey(there, append, selection)
            if _bytes_of(there) != before:
                raise InputError([Problem(", ".join(map(str, there)), "has changed while it was read; start again")])
            return said

        def read(columns: Columns) -> SurveyedConversations:
            return _read(there, columns, selection)

        if self.writes:
            return kept(self.folder, key, COLUMNS, make, read)
        known = found(self.folder, key, COLUMNS, read)
        return _in_memory(there, selection) if known is None else known


def _in_memory(paths: tuple[Path, ...], selection: RowSelection) -> SurveyedConversations:
    columns = {name: array(kind) for name, kind in COLUMNS.items()}

    def append(numbers: Mapping[str, array[int]]) -> None:
        for name, column in columns.items():
            column.extend(numbers[name])

    return SurveyedConversations(paths, columns, survey(paths, append, selection), selection)


def _bytes_of(paths: Sequence[Path]) -> list[tuple[str, str]]:
    told = []
    for path in paths:
        require_file(path)
        sha = hashlib.sha256()
        with storage(path, "read"), path.open("rb") as file:
            while data := file.read(_BYTES_AT_ONCE):
                sha.update(data)
        told.append((path.suffix.lower(), sha.hexdigest()))
    return told


def _read(paths: tuple[Path, ...], columns: Columns, selection: RowSelection) -> SurveyedConversations:
    numbers: dict[str, array[int]] = {}
    for name, count in columns.counts.items():
        numbers[name] = array(COLUMNS[name])
        with (columns.folder / name).open("rb") as file:
            numbers[name].fromfile(file, count)
    said = columns.said
    rows = sum(said["sizes"])
    if said["form"] not in get_args(Form) or not len(said["sizes"]) == len(said["units"]) == len(paths):
        raise ValueError("its index is not of these files")
    if not rows or any(count != rows for count in columns.counts.values()):
        raise ValueError(f"its columns have {columns.counts} numbers, and not {rows}")
    return SurveyedConversations(paths, numbers, said, selection)
