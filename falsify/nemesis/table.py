"""The measurements, as lines on a terminal and as a Markdown document."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .judging import codes_of, line_with
from .language import Guard, Phase, Row

_WHAT = (
    "Each fault was caused in a run of `andon train` and proved to have happened. The promise was checked: how the "
    "command ends, in how many seconds from the fault to the end of the last process, what it says, no process left, "
    "nothing accepted that the undisturbed run does not have. Then the run was resumed, and had to end with the bits "
    "of the undisturbed one. The same run without the fault had to end well; the last column says what the same judge "
    "found with a protection switched off."
)
_HEADER = ("fault", "caused by", "exit", "seconds", "what is said", "healed", "guard off")


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


def document(rows: Sequence[Row], seed: int) -> str:
    sections = {
        "Skipped on this machine": [f"- {row.nemesis.name}: {row.skipped}" for row in rows if row.skipped],
        "Does not hold": [f"- {row.nemesis.name}: {_details(row)}" for row in rows if not row.good],
    }
    lines = [
        "# Faults, as they were measured",
        "",
        f"Written by `python -m falsify.nemesis --seed {seed} --table docs/nemeses.md`.",
        "",
        _WHAT,
        "",
        f"{summary(rows)}.",
        "",
        table(_HEADER, [_cells(row, row.phase) for row in rows if row.phase is not None]),
    ]
    for title, found in sections.items():
        lines += ["", f"## {title}", "", *found] if found else []
    return "\n".join(lines) + "\n"


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


def _cells(row: Row, phase: Phase) -> list[str]:
    nemesis = row.nemesis
    output = line_with(phase.ending.output, nemesis.promise.says)
    found = f"SHOWS NOTHING: {row.doubt}" if row.doubt else (row.unguarded or ("NOTHING FOUND",))[0]
    off = nemesis.guard if isinstance(nemesis.guard, str) else f"{nemesis.guard.what}: {found}"
    within = f"{phase.ending.seconds:.1f}" if nemesis.promise.within_s < float("inf") else "to its end"
    return [nemesis.name, nemesis.how, codes_of(phase.ending), within, output, _healed(phase), off]


def _healed(phase: Phase) -> str:
    if phase.healing is None:
        return "not resumed"
    return "same bits" if not phase.result else "OTHER BITS"
