"""JSON Lines, CSV, TSV and Parquet as records: a place and the fields by name. What the fields mean is no concern.

Read record by record, written as the bytes of a whole file.
"""

from __future__ import annotations

import codecs
import csv
import importlib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from andon.config.source import require_file
from andon.console.problems import InputError, Problem, ProblemList, install_hint, shown

LONGEST_LINE = 64 * 2**20
"""Bytes of one line that are read at most."""
_LONGEST_INTEGER = 400
_RECORDS = 1024
"""Records that are encoded together."""
_LINES = (".jsonl", ".json")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
Note = Callable[[str, str], None]
"""Takes a place and what is wrong there, as `ProblemList.add` and `ProblemList.add_row` do."""
_WIDE = {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}


@dataclass(frozen=True, slots=True)
class Record:
    """`line`: where it starts, from 1 (a row's number in Parquet). `fields`: values by column, in order."""

    line: int
    fields: Mapping[str, object]


@dataclass(frozen=True)
class Table:
    """The records of a file. `columns` is None where every record has its own (JSON Lines).

    `typed`: numbers are not strings (JSON, Parquet). `unit`: what a record's `line` counts, for `place`. `note`: what a
    user should know of how the file is read.
    """

    path: Path
    columns: tuple[str, ...] | None
    typed: bool
    records: Iterator[Record]
    unit: str = ":"
    note: str = ""

    def place(self, line: int) -> str:
        """Where a reader finds record `line`."""
        return f"{self.path}{self.unit}{line}"


def open_table(path: Path, problems: ProblemList) -> Table:
    """The records of a .jsonl, .json (one object a line, or an array), .csv, .tsv or .parquet file; faults go to
    `problems`.

    Raises `InputError` for another kind of file, and where `path` is no file with something in it.
    """
    opened = KINDS.get(path.suffix.lower())
    if opened is None and not path.is_dir():
        what = f"unknown kind of file {path.suffix!r}; known are {', '.join(KINDS)}"
        raise InputError([Problem(str(path), what)])
    require_file(path)
    assert opened is not None
    return opened(path, problems)


def json_records(path: Path, problems: ProblemList) -> Table:
    """One JSON object a line, blank lines aside, or one array of objects."""
    first, lines = _peeked(path)
    if first.lstrip().startswith("["):
        return Table(path, None, True, _array_records(path, lines, problems), " row ")
    return Table(path, None, True, _json_records(path, lines, problems))


Lines = Callable[[Note], Iterator[tuple[int, str]]]
"""The numbered lines of a file, once; what is wrong with a line goes to the argument."""


def _peeked(path: Path) -> tuple[str, Lines]:
    """The first line that is not blank, and all lines from the first on; the file is opened once for both."""
    early: list[tuple[str, str]] = []
    sink: list[Note] = [lambda where, what: early.append((where, what))]
    numbered = numbered_lines(path, lambda where, what: sink[0](where, what))
    head: list[tuple[int, str]] = []
    while not head or not head[-1][1].strip():
        line = next(numbered, None)
        if line is None:
            break
        head.append(line)

    def lines(note: Note) -> Iterator[tuple[int, str]]:
        sink[0] = note
        for where, what in early:
            note(where, what)
        yield from head
        yield from numbered

    return head[-1][1] if head else "", lines


def _array_records(path: Path, lines: Lines, problems: ProblemList) -> Iterator[Record]:
    """The whole array is held: only its end shows that it is one."""
    text = "".join(line for _, line in lines(problems.add))
    for array in _values(text, str(path), problems.add):
        for number, value in enumerate(array, start=1):
            yield from _record(number, value, f"{path} row {number}", problems)


def _json_records(path: Path, lines: Lines, problems: ProblemList) -> Iterator[Record]:
    for number, line in lines(problems.add_row):
        if line.strip():
            for value in _values(line.rstrip("\r\n"), f"{path}:{number}", problems.add_row):
                yield from _record(number, value, f"{path}:{number}", problems)


def _record(number: int, value: object, where: str, problems: ProblemList) -> Iterator[Record]:
    if isinstance(value, dict):
        yield Record(number, value)
    else:
        problems.add_row(where, f"must be a JSON object, is {shown(value)}")


def _values(text: str, where: str, note: Note) -> list[Any]:
    """The one value that `text` is; none, and a note, if it is no JSON."""
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
        msg = f"the key {name!r} is there twice"
        raise ValueError(msg)
    return fields


def _integer(digits: str) -> int:
    if len(digits) > _LONGEST_INTEGER:
        msg = f"an integer of {len(digits)} digits"
        raise ValueError(msg)
    return int(digits)


def _no_constant(name: str) -> NoReturn:
    msg = f"{name} is no JSON number"
    raise ValueError(msg)


def comma_separated(path: Path, problems: ProblemList) -> Table:
    """CSV with a header row; quoted fields may hold delimiters, doubled quotes and line ends.

    Fields are separated by a semicolon if the header has those and no comma, as spreadsheets of many countries write
    them.
    """
    header, lines = _peeked(path)
    plain = re.sub(r'"[^"]*"', "", header)
    delimiter = ";" if ";" in plain and "," not in plain else ","
    table = _with_header(path, _delimited_records(path, lines, delimiter, problems), problems)
    return replace(table, note="its fields are separated by ';'") if delimiter == ";" else table


def tabbed(path: Path, problems: ProblemList) -> Table:
    """TSV with a header row.

    Most TSV files quote nothing, and a quotation may open in one row and close in another. So if every line has the
    header's number of fields and the header is not quoted, each line is a record, and only a field that is wholly in
    quotes loses them. Other files are read as CSV is. There, unless the header is quoted, a record that spans several
    lines is refused if each of these lines looks like a record of its own.
    """
    texts = (text for _, text in numbered_lines(path, ProblemList().add))
    lines = (text.rstrip("\r\n").split("\t") for text in texts if text.strip(" \r\n"))
    header = next(lines, [])
    quoted = header[:1] != [] and header[0].startswith('"')
    if not quoted and len(header) > 1 and all(len(cells) == len(header) for cells in lines):
        return _with_header(path, _tabbed_records(path, problems), problems)
    again = partial(numbered_lines, path)
    return _with_header(path, _delimited_records(path, again, "\t", problems, 0 if quoted else len(header)), problems)


def _tabbed_records(path: Path, problems: ProblemList) -> Iterator[tuple[int, list[str]]]:
    for number, text in numbered_lines(path, problems.add_row):
        if text.strip(" \r\n"):
            yield number, [_unquoted(cell) for cell in text.rstrip("\r\n").split("\t")]


def _unquoted(cell: str) -> str:
    inner = cell[1:-1].replace('""', "")
    return cell[1:-1].replace('""', '"') if len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in inner else cell


def _with_header(path: Path, records: Iterator[tuple[int, list[str]]], problems: ProblemList) -> Table:
    skipped = len(problems.skipped)
    header = next(records, None)
    for problem in problems.skipped[skipped:]:  # the next line must not become the header
        problems.add(problem.where, problem.what)
    if header is None:
        problems.raise_if_any()
        raise InputError([Problem(str(path), "has no header row")])
    columns = tuple(header[1])
    for name, count in Counter(columns).items():
        if count > 1:
            problems.add(f"{path}:{header[0]}", f"{count} columns are named {name!r}")
    problems.raise_if_any()
    return Table(path, columns, False, _named(path, columns, records, problems))


def _delimited_records(
    path: Path, source: Lines, delimiter: str, problems: ProblemList, fields: int = 0
) -> Iterator[tuple[int, list[str]]]:
    """(line on which it starts, cells) of each record that is not blank.

    fields: refuse a record of several lines if each has so many fields by itself; 0: never.
    """
    last = whole = 0

    def lines() -> Iterator[str]:
        nonlocal last, whole
        for number, text in source(problems.add_row):
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


def _named(
    path: Path, columns: Sequence[str], records: Iterator[tuple[int, list[str]]], problems: ProblemList
) -> Iterator[Record]:
    for line, cells in records:
        if len(cells) == len(columns):
            yield Record(line, dict(zip(columns, cells, strict=True)))
        else:
            problems.add_row(
                f"{path}:{line}", f"has {len(cells)} fields, the header has {len(columns)}: {shown(cells)}"
            )


def parquet(path: Path) -> Table:
    """A Parquet file, in batches. Raises `InputError` when pyarrow is missing or the file is not Parquet."""
    arrow, arrow_parquet = _arrow(path, "reading")
    try:
        file = arrow_parquet.ParquetFile(path)
    except (arrow.ArrowException, OSError) as error:
        raise InputError([Problem(str(path), f"is no Parquet file: {error}")]) from error
    return Table(
        path, tuple(file.schema_arrow.names), True, _parquet_records(path, file, arrow.ArrowException), " row "
    )


def _parquet_records(path: Path, file: Any, refused: type[Exception]) -> Iterator[Record]:
    """The rows in order. Pages are decoded here, so damage past the footer shows only now (`InputError`)."""
    number = 0
    batches = file.iter_batches(batch_size=1024)
    while True:
        try:
            rows = next(batches).to_pylist()
        except StopIteration:
            return
        except (refused, OSError, ValueError) as error:
            what = f"is damaged after row {number}: {str(error).strip()}"
            raise InputError([Problem(str(path), what)]) from error
        for fields in rows:
            number += 1
            yield Record(number, fields)


def is_table(path: Path) -> bool:
    """Whether a file of this ending has columns, and not an object for each row."""
    return path.suffix.lower() not in _LINES


def encoded(path: Path, records: Iterable[Mapping[str, object]]) -> Iterator[bytes]:
    """The parts of a file of the kind that the ending of `path` says, of `records` that all have the same keys.

    A mapping among the values is an object in JSON; in a table each of its values has a column `KEY_NAME`. Parquet is
    built in memory, the other kinds in bounded memory. Raises `InputError` for another ending, without pyarrow for
    Parquet, and for what Parquet cannot hold.
    """
    require_kind(path)
    waiting = iter(records)
    if path.suffix.lower() == ".parquet":
        yield _as_parquet(path, [_flat(record) for record in waiting])
        return
    header = is_table(path)
    while part := list(islice(waiting, _RECORDS)):
        if not is_table(path):
            yield "".join(json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in part).encode()
            continue
        rows = [_flat(record) for record in part]
        held = io.StringIO()
        # All texts in quotes: by itself the writer puts none around a carriage return, at which readers break a line.
        delimiter = _DELIMITERS[path.suffix.lower()]
        table = csv.writer(held, delimiter=delimiter, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
        if header:
            table.writerow(rows[0])
        table.writerows(
            [json.dumps(each, ensure_ascii=False) if isinstance(each, list) else each for each in row.values()]
            for row in rows
        )
        header = False
        yield held.getvalue().encode()


def require_kind(path: Path) -> None:
    """Raise `InputError` unless the ending of `path` is that of a kind of file that can be written here."""
    known = (*_LINES, *_DELIMITERS, ".parquet")
    if path.suffix.lower() not in known:
        raise InputError([Problem(str(path), f"unknown kind of file {path.suffix!r}; written are {', '.join(known)}")])
    if path.suffix.lower() == ".parquet":
        _arrow(path, "writing")


def _flat(record: Mapping[str, object]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in record.items():
        flat |= {f"{key}_{name}": each for name, each in value.items()} if isinstance(value, Mapping) else {key: value}
    return flat


def _as_parquet(path: Path, rows: Sequence[Mapping[str, object]]) -> bytes:
    arrow, arrow_parquet = _arrow(path, "writing")
    try:
        table = arrow.Table.from_pylist(rows)
        sink = arrow.BufferOutputStream()
        arrow_parquet.write_table(table, sink)
    except arrow.ArrowException as error:
        raise InputError([Problem(str(path), f"Parquet cannot hold this: {error}")]) from error
    return bytes(sink.getvalue())


def _arrow(path: Path, doing: str) -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        what = f"{doing} Parquet needs pyarrow; {install_hint('parquet')}"
        raise InputError([Problem(str(path), what)]) from error


def numbered_lines(path: Path, note: Note) -> Iterator[tuple[int, str]]:
    """(number from 1, text with its line end) of each line of a UTF-8 file, in bounded memory.

    A byte order mark at the start is dropped. A line that is not UTF-8 (its first bad byte is named by its offset in
    the file) or that holds a NUL byte is noted and left out. Raises `InputError` where reading cannot go on, as after a
    line that is longer than `LONGEST_LINE`.
    """
    try:
        with path.open("rb") as file:
            start = file.read(3)
            if start[:2] in _WIDE:
                raise InputError([Problem(str(path), f"is {_WIDE[start[:2]]}; save it as UTF-8")])
            offset = 3 if start == codecs.BOM_UTF8 else 0
            file.seek(offset)
            number = 0
            while line := file.readline(LONGEST_LINE):
                number += 1
                text = _decoded(line, f"{path}:{number}", offset, note)
                if text is not None:
                    yield number, text
                offset += len(line)
                if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                    what = f"longer than {LONGEST_LINE} bytes; nothing after it was read"
                    raise InputError([Problem(f"{path}:{number}", what)])
    except OSError as error:
        raise InputError([Problem(str(path), f"cannot be read: {error.strerror or error}")]) from error


def _decoded(line: bytes, where: str, offset: int, note: Note) -> str | None:
    nul = line.find(0)
    if nul >= 0:
        note(where, f"a NUL byte at byte {offset + nul} of the file; the file must be text in UTF-8")
        return None
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = line[error.start]
        note(where, f"not UTF-8: byte 0x{byte:02x} at byte {offset + error.start} of the file")
        return None


KINDS: dict[str, Callable[[Path, ProblemList], Table]] = {
    ".jsonl": json_records,
    ".json": json_records,
    ".csv": comma_separated,
    ".tsv": tabbed,
    ".parquet": lambda path, _: parquet(path),
}
