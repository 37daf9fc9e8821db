"""In-memory rows passed to `andon.train`: written as JSON Lines, so that a run reads them like any other file.

A row is a mapping of columns to values. Rows come from any iterable of such mappings (a list, a generator, a
`datasets.Dataset`) or from `to_dict(orient="records")` of a pandas frame. Neither library is imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from andon.config.schema import Config
from andon.console.messages import InputError, ProblemList, shown
from andon.data.formats import KINDS
from andon.run.atomic import storage, write_whole
from andon.run.folder import RunFolder

_MISSING = ("NAType", "NaTType")
"""Names of the types of pandas' missing values, besides NaN."""


@dataclass(frozen=True)
class RowFiles:
    """Rows written to files in the temporary `folder`. written: each file by the name of its argument."""

    folder: Path
    written: dict[str, Path] = field(default_factory=dict)

    def files_of(self, data: object, name: str) -> object:
        """The value of `data.train` for `data`: a list of files, each optionally with a weight, else one file
        (`path_of`). A string counts as a file only if it has the suffix of a data file: it may be a row by mistake."""

        def is_file(item: object) -> bool:
            if isinstance(item, Mapping):
                return {"path"} <= item.keys() <= {"path", "weight"} and isinstance(item["path"], str | PathLike)
            return isinstance(item, PathLike) or (isinstance(item, str) and Path(item).suffix.lower() in KINDS)

        if isinstance(data, list | tuple) and data and all(map(is_file, data)):
            return [
                {**each, "path": os.fspath(each["path"])} if isinstance(each, Mapping) else os.fspath(each)
                for each in data
            ]
        return self.path_of(data, name)

    def path_of(self, data: object, name: str) -> str:
        """`data` as a string if it is a path, else the path of a new file with its rows (`write_rows`)."""
        if isinstance(data, str | PathLike):
            return os.fspath(data)
        path = self.folder / f"{name}.jsonl"
        write_rows(data, path, name)
        self.written[name] = path
        return str(path)

    def named(self, text: str) -> str:
        """Replace, in the message `text`, lines of written files by name[i] and their paths by the name."""
        for name, path in self.written.items():
            lines = re.compile(rf"{re.escape(str(path))}:(\d+)")
            numbered = partial(lambda name, line: f"{name}[{int(line[1]) - 1}]", name)
            text = lines.sub(numbered, text).replace(str(path), name)
        return text


def write_rows(data: object, path: Path, name: str) -> None:
    """Write the rows in `data` to `path`, one JSON object per line, so that `name`[i] is line i + 1.

    Values that JSON lacks are converted: arrays to lists, dates to ISO 8601, missing values to null. Raises
    `InputError` with every fault, each at `name`[i]: no rows, a row that is not a mapping, values of other types.
    """
    problems, count = ProblemList(), 0
    with path.open("x", encoding="utf-8") as file:
        for place, row in enumerate(_rows(data, name)):
            count += 1
            if isinstance(row, Mapping):
                file.write(_line(row, f"{name}[{place}]", problems))
            else:
                problems.add(f"{name}[{place}]", f"must be a mapping of columns to values, is {shown(row)}")
    if not count:
        problems.add(name, "has no rows")
    problems.raise_if_any()


def kept(config: Config, folder: RunFolder, given: Mapping[str, Path]) -> Config:
    """Copy the files `given`, by key of `config.data`, into the run folder for later resumes. Returns the new config.

    File names contain a digest of the content, so copies never overwrite each other. Raises `InputError` if the folder
    cannot be written.
    """
    files = {}
    with folder.open_for_writing():
        with storage(folder.rows):
            folder.rows.mkdir(exist_ok=True)
        for key, path in given.items():
            data = path.read_bytes()
            target = folder.rows / f"{key}-{hashlib.sha256(data).hexdigest()[:16]}.jsonl"
            write_whole(target, data)
            files[key] = str(target)
    return config.model_copy(update={"data": config.data.model_copy(update=files)})


def _rows(data: Any, name: str) -> Iterable[object]:
    if isinstance(data, Mapping):
        what = f"must be rows, as in [{{'text': ..., 'label': ...}}], or one split of several; is {shown(data)}"
        raise InputError.at(name, what)
    if callable(getattr(data, "to_dict", None)):
        try:
            return _as_integers([*data.to_dict(orient="records")])
        except TypeError:
            pass  # a `to_dict` without `orient`: iterate over `data` instead
    if not isinstance(data, Iterable):
        raise InputError.at(name, f"must be a path, or rows, each a mapping of columns; is {shown(data)}")
    return data


def _as_integers(records: list[Any]) -> list[Any]:
    if not all(isinstance(row, Mapping) for row in records):
        return records
    for column in {column for row in records for column in row}:
        values = [row.get(column) for row in records]
        numbers = [value for value in values if isinstance(value, float)]
        present = [number for number in numbers if number == number]
        if len(numbers) == len(values) > len(present) and all(number.is_integer() for number in present):
            records = [
                {**row, column: int(value) if value == value else None}
                for row, value in zip(records, numbers, strict=True)
            ]
    return records


def _line(row: Mapping[Any, object], where: str, problems: ProblemList) -> str:
    fields = []
    for column, value in row.items():
        try:
            fields.append(f"{json.dumps(str(column))}: {json.dumps(_plain(value), default=_plain, allow_nan=False)}")
        except (TypeError, ValueError, RecursionError):
            kind = type(value).__name__
            problems.add(where, f"{column} is of type {kind}, which JSON does not have; convert or drop it")
    return "{" + ", ".join(fields) + "}\n"


def _plain(value: Any) -> Any:
    if type(value).__name__ in _MISSING:
        return None
    if hasattr(value, "tolist"):  # arrays and scalars of numpy, torch and others
        value = value.tolist()
    elif hasattr(value, "isoformat"):
        return value.isoformat()
    return None if isinstance(value, float) and value != value else value
