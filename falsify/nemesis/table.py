"""The measurements as lines on a terminal, and the Markdown table of other programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .judging import codes_of
from .language import Guard, Phase, Row


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table, without a final line end. Line ends and bars in cells are escaped."""

    def line(cells: Sequence[object]) -> str:
        return "| " + " | ".join(" ".join(str(each).split()).replace("|", "\\|") for each in cells) + " |"

    return "\n".join(map(line, (header, ["---"] * len(header), *rows)))


def line(row: Row) -> str:
    verdict = "skip" if row.skipped else "ok  " if row.good else "BAD "
    return f"{verdict} {row.nemesis.name}: {_details(row)}"


def summary(rows: Sequence[Row]) -> str:
    skipped = sum(bool(row.skipped) for row in rows)
    return f"{sum(row.good for row in rows) - skipped} of {len(rows) - skipped} are as promised, {skipped} were skipped"


def _details(row: Row) -> str:
    if row.skipped:
        return f"skipped: {row.skipped}"
    phase = row.phase
    if row.failed or phase is None:
        return row.failed or "nothing was seen"
    guard = row.nemesis.guard
    parts = [phase.struck.proof, f"exit {codes_of(phase.ending)} after {phase.ending.seconds:.2f} s", _healed(phase)]
    parts += [f"WRONG: {each}" for each in row.wrong]
    parts += [f"CONTROL without the fault: {each}" for each in row.without_fault or ()]
    if isinstance(guard, Guard) and (row.doubt or not row.unguarded):
        parts.append(f"CONTROL without {guard.what} shows nothing: {row.doubt or 'nothing is found wrong'}")
    return "; ".join(parts)


def _healed(phase: Phase) -> str:
    if phase.healing is None:
        return "not resumed"
    return "same bits" if not phase.result else "OTHER BITS"
