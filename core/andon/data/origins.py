"""Where rows come from: the file and line of each row, and short names for the files."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Self

from andon.config.source import require_file
from andon.console.problems import InputError, Problem, ProblemList, shown
from andon.data.formats import Record, Table


@dataclass(frozen=True)
class RowSelection:
    """Which rows of files are read. skip_bad: skip unusable rows instead of refusing them. limit: stop after this many
    rows; None: read to the end of the files."""

    skip_bad: bool = False
    limit: int | None = None


ALL_ROWS = RowSelection()
ID_COLUMN = "id"
"""A column of this name must not repeat a value in a file. The rows' own ids are their positions all the same."""


def short_names(paths: Sequence[str | Path]) -> tuple[str, ...]:
    """Each path, shortened to as few of its last parts as keep the names distinct."""
    parts = [Path(path).absolute().parts for path in paths]
    for depth in range(1, max(map(len, parts), default=1)):
        short = ["/".join(each[-depth:]) for each in parts]
        if max(Counter(short).values()) == 1:
            return tuple(short)
    return tuple(map(str, paths))


Stamp = tuple[str | int, ...]


def stamps(paths: Sequence[Path]) -> list[Stamp]:
    """The path, size and times of each file, equal only for equal content. Raises `InputError` for a missing file."""
    found: list[Stamp] = []
    for path in paths:
        require_file(path)
        now = path.stat()
        found.append((str(path.absolute()), now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns))
    return found


def require_unchanged(paths: Sequence[Path], *before: Sequence[Stamp]) -> None:
    """Raise `InputError` if the stamp of a file differs from any of those `before`."""
    if any(stamps(paths) != each for each in before):
        raise InputError([Problem(", ".join(map(str, paths)), "has changed while it was read; start again")])


class Origins:
    """The file and line of each row. Rows are added in order, one file after another; a row is known by its position.

    stamps: of the files when their reading began. skipped: the rows that were left out, and why. notes: lines for the
    user about how the files were read.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.skipped: Sequence[Problem] = ()
        self.stamps: list[Stamp] = []
        self.notes = [] if limit is None else [f"note: reading at most {limit} training rows (data.limit)"]
        self._limit = limit
        self._files: list[tuple[Path, str]] = []
        self._starts: list[int] = []
        self.lines: array[int] = array("q")
        self._before = 0
        self._ids: dict[str, int] = {}

    @classmethod
    def of(
        cls,
        paths: Sequence[Path],
        units: Sequence[str],
        sizes: Sequence[int],
        lines: array[int],
        limit: int | None = None,
    ) -> Self:
        """The origins of rows that were read before. units, sizes: of each file; lines: of each row."""
        found = cls(limit)
        found._files = list(zip(paths, units, strict=True))
        found._starts = [0, *accumulate(sizes)][: len(sizes)]
        found.lines = lines
        return found

    def records(self, table: Table, problems: ProblemList) -> Iterator[Record]:
        """Begin with a file and give its records in order, up to the limit of rows. If no record becomes a row, that is
        a problem. Raises `InputError` for a file that was read before."""
        if any(path.resolve() == table.path.resolve() for path, _ in self._files):
            raise InputError([Problem(str(table.path), "is named twice; to have its rows twice give it the weight 2")])
        self._files.append((table.path, table.unit))
        self.stamps += stamps([table.path])
        self.notes += [f"note: {table.path}: {table.note}"] if table.note else []
        self._starts.append(len(self))
        self._ids = {}
        before, skipped = len(self), len(problems.skipped)
        records = iter(table.records)
        while self._limit is None or len(self) < self._limit:
            record = next(records, None)
            if record is None:
                break
            yield record
        self.skipped = problems.skipped
        if len(self) == before != self._limit and not problems:
            bad = problems.skipped[skipped:]
            why = f"none of its {len(bad)} rows can be used; {bad[0].where}: {bad[0].what}" if bad else "has no rows"
            problems.add(str(table.path), why)

    def __len__(self) -> int:
        return self._before + len(self.lines)

    def add(self, line: int) -> None:
        """Add a row that begins at this line of the current file."""
        self.lines.append(line)

    def repeated(self, table: Table, record: Record) -> list[str]:
        """A fault if an earlier record of the file has the same value in the column `id`."""
        given = record.fields.get(ID_COLUMN)
        if given is None or given == "":
            return []
        first = self._ids.setdefault(str(given), record.line)
        return [] if first == record.line else [f"id {shown(given)} is there already, at {table.place(first)}"]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, ascending, and number those from 0."""
        self._starts = [bisect_left(rows, start) for start in self._starts]
        self.lines = array("q", (self.lines[row] for row in rows))

    def pop_lines(self) -> array[int]:
        """Remove and return the lines of the rows added since the last call, so that memory stays bounded."""
        lines = self.lines
        self._before += len(lines)
        self.lines = array("q")
        return lines

    @property
    def units(self) -> tuple[str, ...]:
        """What stands between a file's path and a line in it, for each file."""
        return tuple(unit for _, unit in self._files)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of rows of each file."""
        ends = [*self._starts[1:], len(self)]
        return tuple(end - start for start, end in zip(self._starts, ends, strict=True))

    @property
    def source(self) -> str:
        return ", ".join(str(path) for path, _ in self._files)

    def where(self, row: int) -> str:
        """The file and line of a row, for example `a.jsonl:17`."""
        path, unit = self._files[self.file_of(row)]
        return f"{path}{unit}{self.lines[row]}"

    def file_of(self, row: int) -> int:
        """The position of a row's file among the files."""
        return bisect_right(self._starts, row) - 1

    def names(self) -> tuple[str, ...]:
        return short_names([path for path, _ in self._files])

    def with_files(self, sources: Sequence[str]) -> list[str]:
        """The source of each row. The rows of a file get its name if there are several files and none of its rows
        names a source."""
        found, start = [*sources], 0
        for name, size in zip(self.names(), self.sizes, strict=True):
            if len(self.sizes) > 1 and not any(sources[start : start + size]):
                found[start : start + size] = [name] * size
            start += size
        return found
