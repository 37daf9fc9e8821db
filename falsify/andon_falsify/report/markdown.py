"""A report as a table in Markdown, for the summary of a CI job."""

from __future__ import annotations

from pathlib import Path

from andon.run.atomic import write_whole
from andon_contracts.legible import legible_line
from andon_falsify.report.findings import Report, reasons
from andon_falsify.verdict import Outcome


def write_markdown(report: Report, path: Path) -> None:
    """Write `report` to `path`, whole or not at all. Raises `InputError` if the file cannot be written."""
    rows = ["| subject | claim | verdict | why |", "| --- | --- | --- | --- |"]
    for cell in report.cells:
        said = "" if cell.verdict.outcome is Outcome.FALSIFIED else "expected to be falsified: "  # its mark says so
        known = [] if cell.expected is None else [f"{said}{cell.expected.reason}"]
        why = [cell.example.__str__()] if cell.example is not None else [reasons(cell.verdict)]
        verdict = cell.mark.value if cell.verdict.outcome is not Outcome.HOLDS or known else "holds"
        rows.append(f"| {' | '.join(map(_cell, (cell.subject.short, cell.claim, verdict, '; '.join(known + why))))} |")
    ending = [f"incomplete: {report.unfinished}"] if report.unfinished else []
    write_whole(path, "\n".join([*rows, "", *map(legible_line, [*ending, report.closing_line]), ""]).encode())


def _cell(text: str) -> str:
    """`text` as one cell: nothing in it ends the cell, or is HTML or Markdown."""
    escaped = "".join(f"\\{each}" if each in "\\`*_{}[]<>|!#~" else each for each in text)
    return legible_line(escaped)
