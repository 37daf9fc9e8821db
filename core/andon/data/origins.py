"""Where rows come from: of each the file and the line, and how each of several files is called beside the others."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Self

from andon.console.problems import InputError, Problem
from andon.data.formats import Table


def short_names(paths: Sequence[str | Path]) -> tuple[str, ...]:
    """Each path in as few of its last parts as tell it from the others."""
    parts = [Path(path).absolute().parts for path in paths]
    for depth in range(1, max(map(len, parts), default=1)):
        short = ["/".join(each[-depth:]) for each in parts]
        if max(Counter(short).values()) == 1:
            return tuple(short)
    return tuple(map(str, paths))


class Origins:
    """The places of rows, which are added in order, one file after another; a row is known by its place among all."""

    def __init__(self) -> None:
        self._files: list[tuple[Path, str]] = []
        self._starts: list[int] = []
        self._lines: array[int] = array("q")
        self._before = 0

    def begin(self, table: Table) -> None:
        """The rows that are added from now on are of this file. Raises `InputError` where it was there already."""
        if any(path.resolve() == table.path.resolve() for path, _ in self._files):
            raise InputError([Problem(str(table.path), "is named twice; to have its rows twice give it the weight 2")])
        self._files.append((table.path, table.unit))
        self._starts.append(self._before + len(self._lines))

    def add(self, line: int) -> None:
        """One more row, which begins at this line of its file."""
        self._lines.append(line)

    @classmethod
    def of(cls, paths: Sequence[Path], units: Sequence[str], sizes: Sequence[int], lines: array[int]) -> Self:
        """The places of rows that were read before: of each file its unit and how many it has, of each row its line."""
        found = cls()
        found._files = list(zip(paths, units, strict=True))
        found._starts = [0, *accumulate(sizes)][: len(sizes)]
        found._lines = lines
        return found

    def taken_lines(self) -> array[int]:
        """The lines of the rows that were added since it was last asked; who asks keeps them, and not this."""
        lines = self._lines
        self._before += len(lines)
        self._lines = array("q")
        return lines

    @property
    def units(self) -> tuple[str, ...]:
        """What stands between a file's path and a line in it."""
        return tuple(unit for _, unit in self._files)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The rows of each file."""
        ends = [*self._starts[1:], self._before + len(self._lines)]
        return tuple(end - start for start, end in zip(self._starts, ends, strict=True))

    @property
    def source(self) -> str:
        """All files, as a reader is told of them."""
        return ", ".join(str(path) for path, _ in self._files)

    def where(self, row: int) -> str:
        """The file and the line of a row, as `a.jsonl:17`."""
        path, unit = self._files[self.file_of(row)]
        return f"{path}{unit}{self._lines[row]}"

    def names(self) -> tuple[str, ...]:
        """What each file is called, as `short_names` has it."""
        return short_names([path for path, _ in self._files])

    def file_of(self, row: int) -> int:
        """The place of a row's file among the files."""
        return bisect_right(self._starts, row) - 1
