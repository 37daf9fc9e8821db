"""What was measured, as lines on a terminal and as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence

from .judging import last_line, line_with
from .language import Phase, Row
from .markdown import table
from .registry import UNPLAYED

_WHAT = (
    "Each fault was brought about in a run of `andon train`, proved to have happened, and held to its promise: how the "
    "command ends, in how many seconds from the fault to the end of the last process, what it says, no process left, "
    "nothing accepted that the undisturbed run does not have. Then the run was resumed, and had to end with the bits "
    "of the undisturbed one. The same run without the fault had to end well; the last column says what the same judge "
    "found where a protection was switched off."
)
_HEADER = ("fault", "rows", "brought about by", "exit", "seconds", "what is said", "healed", "guard off")


def line(row: Row) -> str:
    """One line for a reader who waits."""
    verdict = "skip" if row.skipped or row.unplayed else "ok  " if row.good else "BAD "
    return f"{verdict} {row.nemesis.name}: {_told(row)}"


def document(rows: Sequence[Row], seed: int) -> str:
    """The whole document: what it is, the table, what was skipped, what does not hold."""
    measured = [row for row in rows if row.phase is not None]
    skipped = [f"- {row.nemesis.name}: {row.skipped}" for row in rows if row.skipped]
    unplayed = [f"- {row.nemesis.name}: {row.unplayed}" for row in rows if row.unplayed]
    broken = [f"- {row.nemesis.name}: {_told(row)}" for row in rows if not row.good and not row.unplayed]
    good = sum(row.good for row in measured)
    lines = [
        "# Faults, as they were measured",
        "",
        f"Written by `python -m falsify.nemesis --seed {seed} --table docs/nemeses.md`.",
        "",
        _WHAT,
        "",
        f"{good} of {len(measured)} are as promised, {len(skipped)} were skipped, {len(unplayed)} not played.",
        "",
        table(_HEADER, map(_cells, measured)),
    ]
    lines += ["", "## Without a nemesis", "", *[f"- row {number}: {why}" for number, why in UNPLAYED.items()]]
    lines += ["", "## Skipped on this machine", "", *skipped] if skipped else []
    lines += ["", "## Not played", "", *unplayed] if unplayed else []
    lines += ["", "## Does not hold", "", *broken] if broken else []
    return "\n".join(lines) + "\n"


def _told(row: Row) -> str:
    if row.skipped:
        return f"skipped: {row.skipped}"
    if row.unplayed:
        return row.unplayed
    phase = row.phase
    if row.failed or phase is None:
        return row.failed or "nothing was seen"
    guard = row.nemesis.guard and row.nemesis.guard.what
    parts = [phase.struck.proof, f"exit {_codes(phase)} after {phase.ending.seconds:.2f} s", _healed(phase)]
    parts += [f"WRONG: {each}" for each in row.wrong]
    parts += [f"CONTROL without the fault: {each}" for each in row.calm or ()]
    if row.doubt:
        parts.append(f"CONTROL without {guard} shows nothing: {row.doubt}")
    elif guard and not row.unguarded:
        parts.append(f"CONTROL: nothing is found wrong without {guard}")
    return "; ".join(parts)


def _cells(row: Row) -> list[str]:
    nemesis, phase = row.nemesis, row.phase
    assert phase is not None
    said = line_with(phase.ending.said, nemesis.promise.says) if nemesis.promise.says else last_line(phase.ending.said)
    found = f"SHOWS NOTHING: {row.doubt}" if row.doubt else (row.unguarded or ("NOTHING FOUND",))[0]
    off = f"{nemesis.guard.what}: {found}" if nemesis.guard else nemesis.no_guard
    within = f"{phase.ending.seconds:.1f}" if nemesis.promise.within_s < float("inf") else "to its end"
    numbers = ", ".join(map(str, nemesis.numbers))
    return [nemesis.name, numbers, nemesis.how, _codes(phase), within, said, _healed(phase), off]


def _healed(phase: Phase) -> str:
    if phase.healing is None:
        return "not resumed"
    return "same bits" if not phase.result else "OTHER BITS"


def _codes(phase: Phase) -> str:
    return " ".join(map(str, phase.ending.codes))
