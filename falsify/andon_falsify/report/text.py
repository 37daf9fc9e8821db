"""A report as lines of text, without its closing line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from andon_falsify.report.findings import Cell, Finding, Report
from andon_falsify.verdict import Outcome, Verdict

_SHOWN = 3
"""Reasons and places; the others are counted."""


def verdict_lines(report: Report, *, cut_short: bool = False, rest: str = "in the file of --json") -> Iterator[str]:
    """Every claim with its verdict, then the claims and backends that were left out.

    cut_short: list the claims that no trial has judged yet by name only. rest: where the other counterexamples are.
    """
    cells = report.cells
    untried = [cell for cell in cells if not any(finding.place for finding in cell.findings)] if cut_short else []
    shared = "" if cut_short else _shared_reason(cells)
    if shared:
        yield f"no claim can be judged: {shared}"
    for cell in cells:
        if cell not in untried:
            yield f"{cell.claim} v{cell.findings[0].version}: {_outcome(cell, shared)}{_expected(cell)}"
            yield from counterexample_lines(cell.verdict, rest)
    fell = [cell.expected for cell in cells if cell.verdict.outcome is Outcome.FALSIFIED]
    if any(expected is not None and not expected.excused for expected in fell):
        yield 'a known defect counts as falsified (exit code 1); --expected-failed "CLAIM: REASON" excuses it'
    if untried:
        yield f"not tried yet ({len(untried)}): {', '.join(cell.claim for cell in untried)}"
    if report.not_selected:
        yield f"not selected ({len(report.not_selected)}): {', '.join(report.not_selected)}"
    for backend, why in report.untried.items():
        yield f"nothing was run on {backend}, which was asked for: {why}"
    if report.unfinished:
        yield f"not all was tried: {report.unfinished}"


def counterexample_lines(verdict: Verdict, rest: str = "in the file of --json") -> Iterator[str]:
    """The first counterexample, which is the smallest, with the command that repeats it, and the number of the others.

    rest: where the others are.
    """
    for found in verdict.counterexamples[:1]:
        yield f"  {replace(found, seed=None, repro='')}"
        if found.repro:
            yield f"  repeat with: {found.repro}"
    if len(verdict.counterexamples) > 1:
        yield f"  and {len(verdict.counterexamples) - 1} more ({rest})"


def reasons(verdict: Verdict) -> str:
    """The first reasons, and the number of the others."""
    more = len(verdict.reasons) - _SHOWN
    counted = (f"and {more} more",) if more > 0 else ()
    return replace(verdict, reasons=(*verdict.reasons[:_SHOWN], *counted)).why


def _shared_reason(cells: Sequence[Cell]) -> str:
    """The reason for which all of several claims are unknown, if it is the same for all; it is reported once."""
    judged = [cell.verdict for cell in cells if cell.verdict.outcome is not Outcome.NOT_APPLICABLE]
    found = {reasons(verdict) for verdict in judged}
    unknown = all(verdict.outcome is Outcome.UNKNOWN for verdict in judged)
    return found.pop() if unknown and len(found) == 1 and len(judged) > 1 else ""


def _outcome(cell: Cell, shared: str) -> str:
    verdict, why = cell.verdict, reasons(cell.verdict)
    if verdict.outcome is Outcome.HOLDS:
        return f"holds ({verdict.checked} comparisons" + (f"; {why})" if why else ")")
    places = "" if verdict.outcome is Outcome.NOT_APPLICABLE else _places(cell.deciding)
    at = f" at {places}" if places else ""
    return f"{verdict.outcome.value}{at}" + (f" ({why})" if why not in ("", shared) else "")


def _places(findings: Sequence[Finding]) -> str:
    """`gloo, world 2, accumulation 1 and 2; gloo, world 3, accumulation 2`; at most three, and the number of others."""
    held: dict[str, set[int]] = {}
    for finding in findings:
        if place := replace(finding, accumulation=0).place:
            held.setdefault(place, set()).add(finding.accumulation)
    named = [
        f"{place}, accumulation {' and '.join(map(str, sorted(own)))}" if all(own) else place
        for place, own in sorted(held.items())
    ]
    more = f"; and {len(named) - _SHOWN} more places" if len(named) > _SHOWN else ""
    return "; ".join(named[:_SHOWN]) + more


def _expected(cell: Cell) -> str:
    if cell.expected is None:
        return ""
    fell = "as expected" if cell.expected.excused else "known"
    return f", {fell if cell.verdict.outcome is Outcome.FALSIFIED else 'but expected to fall'}: {cell.expected.reason}"
