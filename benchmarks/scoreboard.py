"""The suite's findings on every bundled trainer: `python -m benchmarks.scoreboard --write docs/scoreboard.md`.

It runs one campaign per subject, as `andon falsify --subject NAME` does. The exit code is 1 if a verdict differs from
`andon_falsify.peers.registry`: a claim that falls without a known reason, or that should fall and holds.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from andon.run.atomic import write_whole
from andon_contracts.legible import legible
from andon_falsify.campaign.request import OURS, read_request
from andon_falsify.campaign.run import run_campaign
from andon_falsify.campaign.trial import BUDGETS
from andon_falsify.peers.registry import PEERS
from andon_falsify.report.findings import Cell, Column, Mark, Report, Table
from andon_falsify.verdict import Outcome

_INTRODUCTION = """# Scoreboard

Written by `python -m benchmarks.scoreboard --budget {budget} --write docs/scoreboard.md`; do not edit.

What the suite found of our trainer and of loops as the documentation of each library teaches them. A library does not
promise every claim: the table says what such a loop does on ragged batches and several ranks, with the versions named,
and below it what each does right.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subject", action="append", choices=[OURS, *PEERS], help="repeat for more; default: all")
    parser.add_argument("--budget", choices=list(BUDGETS), default="standard")
    parser.add_argument("--write", type=Path, help="the Markdown file to write")
    options = parser.parse_args()
    found = list(campaigns(options.subject or [OURS, *PEERS], options.budget))
    if not found:
        parser.error("none of these subjects can be judged here")
    report = joined(found)
    text = f"{_INTRODUCTION.format(budget=options.budget)}\n{scoreboard(report)}"
    print(text)
    if options.write is not None:
        write_whole(options.write, text.encode())
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
    Mark.FALSIFIED: "**falsified**",
    Mark.EXPECTED: "**falsified** (expected)",
    Mark.UNEXPECTED_PASS: "**UNEXPECTED PASS**",
    Mark.UNKNOWN: "unknown",
    Mark.HOLDS: "holds",
    Mark.NOT_APPLICABLE: "-",
}
_MOST_CHARACTERS = 400
_LEGEND = (
    "`holds`: comparisons were made and none contradicts the claim. `(expected)`: falls for a reason that is given "
    "below; should it hold one day, that is an unexpected pass, and a failure of the check. `-`: the claim says "
    "nothing about that subject. An empty cell was not judged."
)


def scoreboard(report: Report) -> str:
    table = Table(report)
    sections = {
        "Surprises": [f"- {plain(surprise)}" for surprise in surprises(report)],
        "What falls": _fallen(table),
        "What each does right": _right(table),
        "What could not be told": _open(table),
        "Where this was measured": _measured(report),
    }
    bodies = {title: "\n".join(lines).strip() for title, lines in sections.items()}
    titled = [f"## {title}\n\n{body}" for title, body in bodies.items() if body]
    return "\n\n".join([_matrix(table), _LEGEND, *titled, f"{plain(report.closing_line)}."]) + "\n"


def _matrix(table: Table) -> str:
    header = ["claim", *("<br>".join(map(plain, (each.name, each.version))) for each in table.subjects)]
    rows = [
        [f"{code(claim)} {table.version(claim)}", *(_cell(table.cell(claim, subject)) for subject in table.subjects)]
        for claim in table.claims
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *rows])


def plain(text: str) -> str:
    line = " ".join(legible(text, _MOST_CHARACTERS).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]|~#]|(?<!\w)_|_(?!\w))", r"\\\1", line)


def code(text: str) -> str:
    line = " ".join(legible(text).split()).replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}" if line else ""


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return ""
    example = cell.example
    ratio = f", ratio {example.ratio:.3f}" if example is not None and example.ratio is not None else ""
    return f"{_WORDS[cell.mark]}{ratio}"


def _fallen(table: Table) -> Iterator[str]:
    for subject in table.subjects:
        fallen = _marked(table, subject, Outcome.FALSIFIED)
        if fallen:
            yield f"### {plain(str(subject))}\n"
            for cell in fallen:
                yield from _counterexample(cell)
            yield ""


def _counterexample(cell: Cell) -> Iterator[str]:
    found = cell.example
    assert found is not None
    finding = next(each for each in cell.deciding if found in each.counterexamples)
    place = f" ({plain(finding.place)})" if finding.place else ""
    ratio = "" if found.ratio is None else f", ratio **{plain(found.equals or f'{found.ratio:.3f}')}**"
    said = f"{found.where}: {found.what}" if found.where else found.what
    if found.expected or found.seen:
        said += f"; expected {found.expected or 'nothing'}, seen {found.seen or 'nothing'}"
    yield f"- {code(cell.claim)}{place}{ratio}: {plain(said)}"
    if cell.expected is not None:
        yield f"  - expected, strictly: {plain(cell.expected.reason)}"
    if found.repro:
        yield f"  - repeat with {code(found.repro)}"


def _right(table: Table) -> Iterator[str]:
    for subject in table.subjects:
        held = _marked(table, subject, Outcome.HOLDS)
        if held:
            named = ", ".join(f"{code(cell.claim)} ({cell.verdict.checked} comparisons)" for cell in held)
            decided = len(held) + len(_marked(table, subject, Outcome.FALSIFIED))
            yield f"- **{plain(str(subject))}**, {len(held)} of {decided}: {named}"


def _open(table: Table) -> Iterator[str]:
    for subject in table.subjects:
        for cell in _marked(table, subject, Outcome.UNKNOWN):
            reasons = "; ".join(dict.fromkeys(finding.why for finding in cell.deciding if finding.why))
            yield f"- **{plain(str(subject))}** {code(cell.claim)}: {plain(reasons)}"


def _marked(table: Table, subject: Column, outcome: Outcome) -> list[Cell]:
    return [cell for cell in table.of(subject) if cell.verdict.outcome is outcome]


def _measured(report: Report) -> Iterator[str]:
    yield f"- started {plain(report.started)}"
    for name, value in {**report.versions, **report.machine}.items():
        yield f"- {plain(name)}: {plain(value)}"
    seeds = dict.fromkeys(str(finding.seed) for finding in report.findings)
    if seeds:
        yield f"- seed {', '.join(seeds)}"
    if report.not_selected:
        yield f"- not selected: {', '.join(code(name) for name in dict.fromkeys(report.not_selected))}"


if __name__ == "__main__":
    raise SystemExit(main())
