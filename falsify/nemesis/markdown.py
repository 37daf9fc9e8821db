"""Markdown tables: the one way in which this package and the benchmarks write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table, without a line end after its last line; a text's own line ends and bars are no table's."""
    return "\n".join(map(_line, (header, ["---"] * len(header), *rows)))


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(" ".join(str(each).split()).replace("|", "\\|") for each in cells) + " |"
