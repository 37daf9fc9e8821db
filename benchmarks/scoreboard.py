"""The verdicts on every bundled trainer: `python -m benchmarks.scoreboard --budget quick --write`.

It runs one campaign per subject, as `andon falsify --subject NAME` does. `--write` replaces the table in
docs/findings.md. The exit code is 1 if a verdict differs from `andon_falsify.peers.registry`: a claim that falls
without a known reason, or that should fall and holds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from andon_falsify.campaign.request import OURS, read_request
from andon_falsify.campaign.run import run_campaign
from andon_falsify.campaign.trial import BUDGETS
from andon_falsify.peers.registry import PEERS
from andon_falsify.report.findings import Cell, Mark, Report, Table
from andon_falsify.verdict import Outcome

PAGE = Path(__file__).parents[1] / "docs" / "findings.md"
_BEGIN, _END = "<!-- scoreboard -->", "<!-- end -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subject", action="append", choices=[OURS, *PEERS], help="repeat for more; default: all")
    parser.add_argument("--budget", choices=list(BUDGETS), default="standard")
    parser.add_argument("--write", action="store_true", help=f"replace the table in {PAGE.name}")
    options = parser.parse_args()
    found = list(campaigns(options.subject or [OURS, *PEERS], options.budget))
    if not found:
        parser.error("none of these subjects can be judged here")
    report = joined(found)
    text = scoreboard(report)
    print(text)
    if options.write:
        above, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
        below = rest.partition(_END)[2]
        PAGE.write_text(f"{above}{_BEGIN}\n{text}\n{_END}{below}", encoding="utf-8")
    found_otherwise = list(surprises(report))
    for surprise in found_otherwise:
        print(f"unexpected: {surprise}")
    return 1 if found_otherwise else 0


def campaigns(subjects: Sequence[str], budget: str) -> Iterator[Report]:
    for name in subjects:
        if name in PEERS and PEERS[name].missing:
            print(f"skipped: {PEERS[name].missing}", flush=True)
            continue
        report = run_campaign(read_request(subject=name, budget=budget, seed="0"))
        print(f"{name}: {report.closing_line}", flush=True)
        yield report


def joined(reports: Sequence[Report]) -> Report:
    """Reports of several subjects as one, with the machine of the first. Raises `ValueError` if there are none."""
    if not reports:
        msg = "no report to join"
        raise ValueError(msg)
    versions: dict[str, dict[str, None]] = {}
    for name, value in ((name, value) for report in reports for name, value in report.versions.items()):
        versions.setdefault(name, {})[value] = None
    return Report(
        started=min(report.started for report in reports),
        versions={name: " or ".join(values) for name, values in versions.items()},
        machine=reports[0].machine,
        runs=sum(report.runs for report in reports),
        findings=tuple(finding for report in reports for finding in report.findings),
        not_selected=tuple(name for report in reports for name in report.not_selected),
        expected=tuple(each for report in reports for each in report.expected),
        statements={name: text for report in reports for name, text in report.statements.items()},
        untried={backend: why for report in reports for backend, why in report.untried.items()},
        unfinished=next((report.unfinished for report in reports if report.unfinished), ""),
    )


def surprises(report: Report) -> Iterator[str]:
    """Differences from what is expected, among the claims that were judged."""
    for cell in report.cells:
        name, outcome = cell.subject.name, cell.verdict.outcome
        if outcome is Outcome.FALSIFIED and cell.expected is None:
            yield f"{name}: {cell.claim} is falsified, and was not expected to be"
        elif outcome is not Outcome.FALSIFIED and cell.expected is not None:
            yield f"{name}: {cell.claim} is {outcome.value}, but was expected to be falsified: {cell.expected.reason}"


_WORDS = {
    Mark.FALSIFIED: "**UNKNOWN DEFECT**",
    Mark.EXPECTED: "**fails**",
    Mark.UNEXPECTED_PASS: "**UNEXPECTED PASS**",
    Mark.UNKNOWN: "unknown",
    Mark.HOLDS: "holds",
    Mark.NOT_APPLICABLE: "-",
}


def scoreboard(report: Report) -> str:
    """A table of the claims that fail for some subject, the other claims, the versions, and the reasons."""
    table = Table(report)
    marks = {claim: [table.cell(claim, subject) for subject in table.subjects] for claim in table.claims}
    held = {claim for claim, cells in marks.items() if {_mark(cell) for cell in cells} <= {"holds", "-", ""}}
    named = (part for subject in table.subjects for part in subject.version.split(", "))
    versions = dict.fromkeys(part for part in named if " " in part)  # Andon's own is a number alone
    rows = [
        ["claim", *(subject.name for subject in table.subjects)],
        ["---"] * (len(table.subjects) + 1),
        *([f"`{claim}`", *map(_mark, cells)] for claim, cells in marks.items() if claim not in held),
    ]
    return "\n".join(
        [
            *(f"| {' | '.join(row)} |" for row in rows),
            "",
            f"These claims hold wherever they apply: {', '.join(f'`{claim}`' for claim in marks if claim in held)}.",
            f"Versions: {', '.join(versions)}.",
            "",
            *_reasons(table),
        ]
    )


def _mark(cell: Cell | None) -> str:
    return "" if cell is None else _WORDS[cell.mark]


def _reasons(table: Table) -> Iterator[str]:
    """Why a claim fails, with all subjects that fail it for this reason."""
    subjects: dict[tuple[str, str], list[str]] = {}
    for subject in table.subjects:
        for cell in table.of(subject):
            if cell.verdict.outcome is Outcome.FALSIFIED and cell.expected is not None:
                subjects.setdefault((cell.claim, cell.expected.reason), []).append(subject.name)
    for (claim, reason), names in sorted(subjects.items()):
        yield f"- `{claim}` ({', '.join(names)}): {reason}."


if __name__ == "__main__":
    raise SystemExit(main())
