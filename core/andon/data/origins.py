"""The file and line of each row, and short names of the files."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Self, TypeVar

from andon.config.source import require_file
from andon.console.messages import InputError, Problem, ProblemList
from andon.data.formats import Record, Table, identity_of, open_table

Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class RowSelection:
    """Which rows of files to read. skip_bad: skip unusable rows instead of raising. limit: stop after this many usable
    rows; None: no limit. option: of the command, to skip unusable rows. own_columns: False if the options that name
    columns hold for the training files too."""

    skip_bad: bool = False
    limit: int | None = None
    option: str = ""
    own_columns: bool = True

    @property
    def hint(self) -> str:
        return "" if self.skip_bad or not self.option else f"; to skip such rows: {self.option}"


ALL_ROWS = RowSelection()


def short_names(paths: Sequence[str | Path]) -> tuple[str, ...]:
    """The paths, shortened to the smallest number of trailing parts that keeps them distinct."""
    parts = [Path(path).absolute().parts for path in paths]
    for depth in range(1, max(map(len, parts), default=1)):
        short = ["/".join(each[-depth:]) for each in parts]
        if max(Counter(short).values()) == 1:
            return tuple(short)
    return tuple(map(str, paths))


Stamp = list[str | int]


def stamps(paths: Sequence[Path]) -> list[Stamp]:
    """[path, *`identity_of`] of each file, which changes with its content. Raises `InputError` for a missing file."""
    result: list[Stamp] = []
    for path in paths:
        require_file(path)
        result.append([str(path.absolute()), *identity_of(path.stat())])
    return result


def require_unchanged(paths: Sequence[Path], *before: Sequence[Stamp]) -> None:
    """Raise `InputError` if the current stamps of `paths` differ from any list of stamps in `before`."""
    if any(stamps(paths) != each for each in before):
        raise InputError.at(", ".join(map(str, paths)), "has changed while it was read; start again")


class Origins:
    """The file and line of each row, by its position. Rows are added in order, one file after another.

    stamps: of the files when reading began. problems: their faults. skipped: the faults of skipped rows. notes: lines
    for the user about how the files were read.
    """

    def __init__(self, selection: RowSelection = ALL_ROWS) -> None:
        self.hint = selection.hint
        self.problems, self._limit = ProblemList(skips=selection.skip_bad), selection.limit
        self.skipped: Sequence[Problem] = self.problems.skipped
        self.stamps: list[Stamp] = []
        most = f"note: reading at most {self._limit} training rows (data.limit)"
        self.notes = [] if self._limit is None else [most]
        self._files: list[tuple[Path, str]] = []
        self._starts: list[int] = []
        self.lines: array[int] = array("q")

    @classmethod
    def of(cls, paths: Sequence[Path], description: Mapping[str, Any], lines: array[int]) -> Self:
        """Restore origins from `described()` and the line of each row."""
        origins = cls()
        origins._files = list(zip(paths, description["units"], strict=True))
        origins._starts = [0, *accumulate(description["sizes"])][: len(paths)]
        origins.lines, origins.notes = lines, list(description["notes"])
        origins.skipped = [Problem(where, what) for where, what in description["skipped"]]
        return origins

    def described(self) -> dict[str, object]:
        """Everything except `lines`, as JSON values."""
        return {
            "units": [unit for _, unit in self._files],
            "sizes": list(self.sizes),
            "notes": self.notes,
            "skipped": [[problem.where, problem.what] for problem in self.skipped],
        }

    def read(
        self,
        paths: Iterable[Path],
        parse: Callable[[Table, Record], tuple[Parsed, list[str]]],
        begin: Callable[[Table], None] = lambda table: None,
    ) -> Iterator[Parsed]:
        """Yield the usable rows of files in order, up to the limit. A file without usable rows is a problem.

        parse: returns a record's row and its faults. begin: called with each file once it is open. Raises `InputError`
        for a file that is named twice.
        """
        problems = self.problems
        for path in paths:
            with closing(open_table(path, problems)) as table:
                begin(table)
                if any(path.resolve() == other.resolve() for other, _ in self._files):
                    raise InputError.at(path, "is named twice; to have its rows twice give it the weight 2")
                self._files.append((path, table.unit))
                self.stamps += stamps([path])
                self.notes += [f"note: {path}: {table.note}"] if table.note else []
                self._starts.append(len(self))
                before, skipped = len(self), len(problems.skipped)
                while self._limit is None or len(self) < self._limit:
                    record = next(table.records, None)
                    if record is None:
                        break
                    row, faults = parse(table, record)
                    for fault in faults:
                        problems.add_row(table.place(record.line), fault)
                    if not faults:
                        self.lines.append(record.line)
                        yield row
                if len(self) == before != self._limit and not problems:
                    bad = problems.skipped[skipped:]
                    what = f"none of its {len(bad)} rows can be used; {bad[0]}" if bad else "has no rows"
                    problems.add(str(path), what)

    def __len__(self) -> int:
        return len(self.lines)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only the rows at these ascending positions and renumber them from 0."""
        self._starts = [bisect_left(rows, start) for start in self._starts]
        self.lines = array("q", (self.lines[row] for row in rows))

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
        """The index of a row's file."""
        return bisect_right(self._starts, row) - 1

    def names(self) -> tuple[str, ...]:
        return short_names([path for path, _ in self._files])

    def with_files(self, sources: Sequence[str]) -> list[str]:
        """`sources`, one per row. With several files, the rows of a file without any source get the file's name."""
        result, start = [*sources], 0
        for name, size in zip(self.names(), self.sizes, strict=True):
            if len(self.sizes) > 1 and not any(sources[start : start + size]):
                result[start : start + size] = [name] * size
            start += size
        return result
