"""Where rows come from: of each the file and the line, and how each of several files is called beside the others."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter
from pathlib import Path

from andon.console.problems import InputError, Problem
from andon.data.formats import Table


class Origins:
    """The places of rows, which are added in order, one file after another; a row is known by its place among all."""

    def __init__(self) -> None:
        self._files: list[tuple[Path, str]] = []
        self._starts: list[int] = []
        self._lines: array[int] = array("q")

    def begin(self, table: Table) -> None:
        """The rows that are added from now on are of this file. Raises `InputError` where it was there already."""
        if any(path.resolve() == table.path.resolve() for path, _ in self._files):
            raise InputError([Problem(str(table.path), "is named twice; to have its rows twice give it the weight 2")])
        self._files.append((table.path, table.unit))
        self._starts.append(len(self._lines))

    def add(self, line: int) -> None:
        """One more row, which begins at this line of its file."""
        self._lines.append(line)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The rows of each file."""
        ends = [*self._starts[1:], len(self._lines)]
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
        """What each file is called, in as few parts of its path as tell it from the others."""
        parts = [path.absolute().parts for path, _ in self._files]
        for depth in range(1, max(map(len, parts), default=1)):
            short = ["/".join(each[-depth:]) for each in parts]
            if max(Counter(short).values()) == 1:
                return tuple(short)
        return tuple(str(path) for path, _ in self._files)

    def file_of(self, row: int) -> int:
        """The place of a row's file among the files."""
        return bisect_right(self._starts, row) - 1
