"""The tables of planted faults in docs, from `tests/golden/*.json`; `benchmarks.freeze --write` writes both."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.runs import table
from falsify.power import looped
from falsify.power.looped.fault import Inside, LoopFault

Row = Mapping[str, Any]
ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
_BY = "Written by `python -m benchmarks.freeze --write`; edit nothing below this line."


def _said(row: Row) -> str:
    said = ": ".join(filter(None, (row.get("where", ""), row.get("reason", ""))))
    said += f"; ratio {row['equals']}" if row.get("equals") else ""
    return said.replace("<", "&lt;")


def _others(row: Row) -> str:
    return ", ".join(name for name in row["fallen"] if name != row["claim"])


def _killed(rows: Sequence[Row]) -> str:
    return f"{sum(not row['problems'] for row in rows)} of {len(rows)}"


def trainer(rows: Sequence[Row]) -> Iterator[str]:
    """A row for each fault: the result on its first backend, and the list of its backends."""
    backends: dict[str, list[str]] = {}
    for row in rows:
        backends.setdefault(row["fault"], []).append(row["backend"])
    first = {row["fault"]: row for row in reversed(rows)}
    lines = [
        [name, row["claim"], _said(row), row["clause"] or "-", _others(row), ", ".join(backends[name])]
        for name, row in ((name, first[name]) for name in backends)
    ]
    yield table(("fault", "claim", "counterexample", "contract", "falls too", "backends"), lines)
    yield f"{_killed(rows)} killed ({len(first)} faults)."


def loops(rows: Sequence[Row]) -> Iterator[str]:
    """A row for each fault that a claim detects, and the reason why no claim detects the others."""
    shown = [row for row in rows if "claim" in row]
    lines = [[*row["fault"].split(" ", 1), row["claim"], _said(row), _others(row)] for row in shown]
    yield table(("fault", "what", "claim", "counterexample", "falls too"), lines)
    codes = {row["fault"].split()[0] for row in shown}
    yield f"{_killed(shown)} faults killed, of {len(codes)} entries of the catalogue. No run of a loop shows:"
    yield "\n".join(f"- {row['fault']}: {row['not shown']}." for row in rows if "claim" not in row)


def watch(rows: Sequence[Row]) -> Iterator[str]:
    """A row for each fault that a watch detects, those found by `andon.watch` alone, and the reasons for the others."""
    faults = {row["fault"]: (looped.named(row["fault"]), row) for row in rows}
    seen = [(fault, fault.inside, row) for fault, row in faults.values() if isinstance(fault.inside, Inside)]
    lines = [_watched(*each) for each in sorted(seen, key=lambda each: each[0].code)]
    yield table(("fault", "what", "lines needed", "clause", "step", "by"), lines)
    codes = {fault.code for fault, _, _ in seen}
    alone = sorted({fault.code for fault, inside, _ in seen if inside.alone or not inside.lines})
    yield (
        f"By the one line alone, in one of their forms at least: {len(alone)} of {len(codes)} entries of the\n"
        f"catalogue, {', '.join(alone)}."
    )
    yield "Of the faults that claims see, these are not here:"
    yield "\n".join(f"- {row['fault']}: {row['not seen']}." for row in rows if "not seen" in row)


def _watched(fault: LoopFault, inside: Inside, row: Row) -> list[object]:
    told = ", ".join(inside.lines) or "none"
    if inside.alone:
        told += f"; none for `{inside.alone}`" + f" at {inside.alone_by}" * (inside.alone_by > inside.by)
    step = "missed" if row["step"] is None else row["step"]
    return [fault.code, fault.what, told, f"`{inside.clause}`", step, inside.by]


PAGES: Mapping[str, tuple[str, Callable[[Sequence[Row]], Iterator[str]]]] = {
    "trainer": ("mutants.md", trainer),
    "loops": ("loop-faults.md", loops),
    "watch": ("watch-faults.md", watch),
}
"""For each JSON file of `tests/golden`: its page in docs, and the function that writes its tables."""


def write(part: str) -> None:
    """Replace everything below the line `_BY` in the page of `part`."""
    page, tables = PAGES[part]
    path = ROOT / "docs" / page
    rows = json.loads((GOLDEN / f"{part}.json").read_text(encoding="utf-8"))
    above = path.read_text(encoding="utf-8").partition(_BY)[0]
    path.write_text("\n\n".join([above.rstrip(), _BY, *tables(rows)]) + "\n", encoding="utf-8")
