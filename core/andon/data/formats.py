"""JSON Lines, JSON, CSV, TSV and Parquet files: reading records with their lines and named fields, and writing.

`readers` and `conversations` interpret the fields.
"""

from __future__ import annotations

import codecs
import csv
import importlib
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from andon.config.source import require_file
from andon.console.messages import InputError, ProblemList, install_hint, reading, shown

LONGEST_LINE = 64 * 2**20
"""The line length limit in bytes."""
_RECORDS_AT_ONCE = 1024
_LINES = (".jsonl", ".json")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
Note = Callable[[str, str], None]
"""Receives a place and its fault, like `ProblemList.add` and `ProblemList.add_row`."""
Cells = Iterator[tuple[int, list[str]]]
"""(line on which the record starts, cells) of each record of a table."""
_WIDE = {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}


@dataclass(frozen=True, slots=True)
class Record:
    """line: its first line, from 1; in Parquet and JSON arrays, the row number. fields: values by column."""

    line: int
    fields: Mapping[str, object]


@dataclass(frozen=True)
class Table:
    """The records of a file. columns: None if each record has its own (JSON).

    typed: the format distinguishes numbers from strings (JSON, Parquet). unit: separator of path and line in messages.
    note: for the user, about how the file is parsed. file: the open file, closed by `close`.
    """

    path: Path
    columns: tuple[str, ...] | None
    typed: bool
    records: Iterator[Record]
    unit: str = ":"
    note: str = ""
    file: BinaryIO | None = None

    def close(self) -> None:
        if self.file is not None:
            self.file.close()

    def place(self, line: int) -> str:
        return f"{self.path}{self.unit}{line}"


_open_file: list[Table] = []
"""At most one table: the last one of `first_record`. `open_table` reuses its open file."""


def first_record(path: Path) -> Mapping[str, object] | None:
    """The fields of the first record of a file; None without records. The file stays open for `open_table`.

    Raises `InputError` if the file cannot be opened or lacks a required header.
    """
    table = open_table(path, ProblemList())
    first = next(table.records, None)
    _open_file.append(table)
    return None if first is None else first.fields


def open_table(path: Path, problems: ProblemList) -> Table:
    """Open a .jsonl, .json (one object per line, or an array), .csv, .tsv or .parquet file; faults go to `problems`.

    The caller closes the table (`contextlib.closing`). Raises `InputError` for other file suffixes, and if `path` is
    missing, a folder or empty.
    """
    kind = KINDS.get(path.suffix.lower())
    if kind is None and not path.is_dir():
        raise InputError.at(path, f"unknown kind of file {path.suffix!r}; known are {', '.join(KINDS)}")
    require_file(path)
    assert kind is not None
    with reading(path):
        cached = _open_file.pop() if _open_file else None
        file = None if cached is None else cached.file
        if file is not None and identity_of(os.fstat(file.fileno())) != identity_of(path.stat()):
            file.close()
            file = None
        file = path.open("rb") if file is None else file
    try:
        return replace(kind(path, file, problems), file=file)
    except BaseException:
        file.close()
        raise


def identity_of(status: os.stat_result) -> tuple[int, ...]:
    """Device, inode, size, mtime and ctime: a changed or replaced file has another identity."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def numbered_lines(path: Path, file: BinaryIO, note: Note) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, text with its line end) of each line of a UTF-8 file, from its start, in bounded memory.

    Drops a leading byte order mark. A line that is not UTF-8 or has a NUL byte is reported to `note`, with the offset
    of the bad byte, and skipped. Raises `InputError` for UTF-16, read errors and lines longer than `LONGEST_LINE`.
    """
    with reading(path):
        file.seek(0)
        start = file.read(3)
        if start[:2] in _WIDE:
            raise InputError.at(path, f"is {_WIDE[start[:2]]}; save it as UTF-8")
        offset, number = 3 if start == codecs.BOM_UTF8 else 0, 0
        file.seek(offset)
        while line := file.readline(LONGEST_LINE):
            number += 1
            if 0 in line:
                what = f"a NUL byte at byte {offset + line.index(0)} of the file; the file must be text in UTF-8"
                note(f"{path}:{number}", what)
            else:
                try:
                    text = line.decode("utf-8")
                except UnicodeDecodeError as error:
                    what = f"not UTF-8: byte 0x{line[error.start]:02x} at byte {offset + error.start} of the file"
                    note(f"{path}:{number}", what)
                else:
                    yield number, text
            offset += len(line)
            if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                raise InputError.at(f"{path}:{number}", f"longer than {LONGEST_LINE} bytes; nothing after it was read")


def _first_line(path: Path, file: BinaryIO) -> str:
    return next((text for _, text in numbered_lines(path, file, lambda *_: None) if text.strip()), "")


# JSON


def json_records(path: Path, file: BinaryIO, problems: ProblemList) -> Table:
    """One JSON object per line (blank lines are skipped), or one array of objects, which is loaded into memory."""

    def of_lines() -> Iterator[Record]:
        for number, line in numbered_lines(path, file, problems.add_row):
            if line.strip():
                where = f"{path}:{number}"
                for value in _values(line.rstrip("\r\n"), where, problems.add_row):
                    yield from record(number, value, where)

    def of_array() -> Iterator[Record]:
        text = "".join(line for _, line in numbered_lines(path, file, problems.add))
        for array in _values(text, str(path), problems.add):
            for number, value in enumerate(array, start=1):
                yield from record(number, value, f"{path} row {number}")

    def record(number: int, value: object, where: str) -> Iterator[Record]:
        if isinstance(value, dict):
            yield Record(number, value)
        else:
            problems.add_row(where, f"must be a JSON object, is {shown(value)}")

    array = _first_line(path, file).lstrip().startswith("[")
    return Table(path, None, True, of_array(), " row ") if array else Table(path, None, True, of_lines())


def _values(text: str, where: str, note: Note) -> list[Any]:
    try:
        return [json.loads(text, object_pairs_hook=_unique, parse_int=_integer, parse_constant=_no_constant)]
    except json.JSONDecodeError as error:
        line = error.doc.split("\n")[error.lineno - 1].strip()
        at = f"line {error.lineno}, column {error.colno}" if "\n" in text else f"column {error.colno}"
        note(where, f"malformed JSON: {error.msg} at {at} ({shown(line)})")
    except RecursionError:
        note(where, "malformed JSON: nested too deeply")
    except ValueError as error:
        note(where, f"malformed JSON: {error}")
    return []


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {name!r} is there twice")
    return fields


def _integer(digits: str) -> int:
    if len(digits) > 400:
        raise ValueError(f"an integer of {len(digits)} digits, and at most 400 are read")
    return int(digits)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


# CSV and TSV


def comma_separated(path: Path, file: BinaryIO, problems: ProblemList) -> Table:
    """CSV with a header row; quoted fields may contain delimiters, doubled quotes and line ends.

    The delimiter is a semicolon if the header has semicolons and no comma, as spreadsheets write in many locales.
    """
    plain = re.sub(r'"[^"]*"', "", _first_line(path, file))
    delimiter = ";" if ";" in plain and "," not in plain else ","
    table = _with_header(path, _delimited_records(path, file, delimiter, problems), problems)
    return replace(table, note="its fields are separated by ';'") if delimiter == ";" else table


def tabbed(path: Path, file: BinaryIO, problems: ProblemList) -> Table:
    """TSV with a header row.

    Most TSV files do not use quoting, so a stray quote in one row may pair with one in another. If every line has as
    many fields as an unquoted header, each line is a record, and only fields that are quoted as a whole are unquoted.
    Other files are parsed like CSV. Then, unless the header is quoted, a record of several lines is a fault if each of
    these lines has as many fields as the header.
    """

    def unquoted() -> Cells:
        for number, text in numbered_lines(path, file, problems.add_row):
            if text.strip(" \r\n"):
                yield number, [_unquoted(cell) for cell in text.rstrip("\r\n").split("\t")]

    lines = numbered_lines(path, file, lambda *_: None)
    every = (text.rstrip("\r\n").split("\t") for _, text in lines if text.strip(" \r\n"))
    header = next(every, [])
    quoted = header[:1] != [] and header[0].startswith('"')
    if not quoted and len(header) > 1 and all(len(cells) == len(header) for cells in every):
        return _with_header(path, unquoted(), problems)
    fields = 0 if quoted else len(header)
    return _with_header(path, _delimited_records(path, file, "\t", problems, fields), problems)


def _unquoted(cell: str) -> str:
    inner = cell[1:-1].replace('""', "")
    return cell[1:-1].replace('""', '"') if len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in inner else cell


def _with_header(path: Path, rows: Cells, problems: ProblemList) -> Table:
    skipped = len(problems.skipped)
    header = next(rows, None)
    for problem in problems.skipped[skipped:]:  # a skipped header must not be replaced by the next line
        problems.add(problem.where, problem.what)
    if header is None:
        problems.raise_if_any()
        raise InputError.at(path, "has no header row")
    columns = tuple(header[1])
    for name, count in Counter(columns).items():
        if count > 1:
            problems.add(f"{path}:{header[0]}", f"{count} columns are named {name!r}")
    problems.raise_if_any()

    def records() -> Iterator[Record]:
        for line, cells in rows:
            if len(cells) == len(columns):
                yield Record(line, dict(zip(columns, cells, strict=True)))
            else:
                what = f"has {len(cells)} fields, the header has {len(columns)}: {shown(cells)}"
                problems.add_row(f"{path}:{line}", what)

    return Table(path, columns, False, records())


def _delimited_records(path: Path, file: BinaryIO, delimiter: str, problems: ProblemList, fields: int = 0) -> Cells:
    """Yield the nonblank records. fields: report a multi-line record of lines with so many fields; 0: never."""
    last = whole = 0

    def lines() -> Iterator[str]:
        nonlocal last, whole
        for number, text in numbered_lines(path, file, problems.add_row):
            last = number
            whole += text.count(delimiter) + 1 == fields
            yield text

    usual_limit = csv.field_size_limit()
    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    while True:
        start, whole = last + 1, 0
        csv.field_size_limit(LONGEST_LINE)
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            problems.add(f"{path}:{start}", f"malformed: {error} (a quote inside a quoted field is doubled)")
            continue
        finally:
            csv.field_size_limit(usual_limit)
        if last > start and whole == last - start + 1:
            what = f"a quote opens here and closes on line {last}, and the lines between look like rows"
            problems.add(f"{path}:{start}", f"{what}; quote the header too if they are one row, or write JSON Lines")
        elif cells:
            yield start, cells


# Parquet


def parquet(path: Path, file: BinaryIO, problems: ProblemList) -> Table:
    """A Parquet file, read in batches. Raises `InputError` without pyarrow, and if the file is not Parquet.

    Pages are decoded lazily, so damaged pages raise `InputError` while records are read.
    """
    arrow, arrow_parquet = _arrow(path, "reading")
    try:
        opened = arrow_parquet.ParquetFile(file)
    except (arrow.ArrowException, OSError) as error:
        raise InputError.at(path, f"is not a Parquet file: {error}") from error

    def records() -> Iterator[Record]:
        number = 0
        batches = opened.iter_batches(batch_size=_RECORDS_AT_ONCE)
        while True:
            try:
                rows = next(batches).to_pylist()
            except StopIteration:
                return
            except (arrow.ArrowException, OSError, ValueError) as error:
                raise InputError.at(path, f"is damaged after row {number}: {str(error).strip()}") from error
            for fields in rows:
                number += 1
                yield Record(number, fields)

    return Table(path, tuple(opened.schema_arrow.names), True, records(), " row ")


def _arrow(path: Path, doing: str) -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise InputError.at(path, f"{doing} Parquet needs pyarrow; {install_hint('parquet')}") from error


KINDS: dict[str, Callable[[Path, BinaryIO, ProblemList], Table]] = {
    ".jsonl": json_records,
    ".json": json_records,
    ".csv": comma_separated,
    ".tsv": tabbed,
    ".parquet": parquet,
}


# Writing


def is_table(path: Path) -> bool:
    """Whether the file suffix means a table with columns (CSV, TSV, Parquet) instead of JSON objects."""
    return path.suffix.lower() not in _LINES


def require_kind(path: Path) -> None:
    """Raise `InputError` for an unknown file suffix, or for Parquet without pyarrow."""
    known = (*_LINES, *_DELIMITERS, ".parquet")
    if path.suffix.lower() not in known:
        raise InputError.at(path, f"unknown kind of file {path.suffix!r}; written are {', '.join(known)}")
    if path.suffix.lower() == ".parquet":
        _arrow(path, "writing")


def encoded(path: Path, records: Iterable[Mapping[str, object]]) -> Iterator[bytes]:
    """Encode `records`, which all have the same keys, in the format of `path`'s suffix. Yields chunks of bytes.

    A mapping as a value becomes an object in JSON, and columns `KEY_NAME` in a table. Parquet is built in memory, the
    other formats use bounded memory. Raises `InputError` for an unknown suffix, for Parquet without pyarrow, and for
    values that Parquet cannot represent.
    """
    require_kind(path)
    remaining = iter(records)
    if path.suffix.lower() == ".parquet":
        arrow, arrow_parquet = _arrow(path, "writing")
        try:
            sink = arrow.BufferOutputStream()
            arrow_parquet.write_table(arrow.Table.from_pylist([_flat(record) for record in remaining]), sink)
        except arrow.ArrowException as error:
            raise InputError.at(path, f"Parquet cannot hold this: {error}") from error
        yield bytes(sink.getvalue())
        return
    header = is_table(path)
    while part := list(islice(remaining, _RECORDS_AT_ONCE)):
        if not is_table(path):
            yield "".join(json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in part).encode()
            continue
        rows = [_flat(record) for record in part]
        buffer = io.StringIO()
        # Quote all texts: by default the writer does not quote carriage returns, which readers treat as line ends.
        delimiter = _DELIMITERS[path.suffix.lower()]
        table = csv.writer(buffer, delimiter=delimiter, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
        if header:
            table.writerow(rows[0])
        table.writerows(
            [json.dumps(each, ensure_ascii=False) if isinstance(each, list | bool) else each for each in row.values()]
            for row in rows
        )
        header = False
        yield buffer.getvalue().encode()


def _flat(record: Mapping[str, object]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in record.items():
        flat |= {f"{key}_{name}": each for name, each in value.items()} if isinstance(value, Mapping) else {key: value}
    return flat
