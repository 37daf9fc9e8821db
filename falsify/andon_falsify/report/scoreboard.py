"""A report as Markdown: claims by subjects, what falls and why, and what each subject does right. Only what was judged.

An expectation that a claim falls is strict: where the claim holds, the table says so, and `Report.surprises` has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from andon_contracts.legible import legible
from andon_falsify.campaign.findings import Report
from andon_falsify.report.cells import Cell, Column, Mark, Table, tabulate
from andon_falsify.verdict import Outcome

_WORDS = {
    Mark.FALSIFIED: "**falsified**",
    Mark.EXPECTED: "**falsified** (expected)",
    Mark.PASSED: "**UNEXPECTED PASS**",
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
    """The table with its sections, as Markdown without a title. It ends with the closing line."""
    table = tabulate(report)
    sections = [
        scoreboard_table(report),
        _LEGEND,
        _section("Surprises", [_bullet(plain(surprise)) for surprise in report.surprises]),
        _section("What falls", _fallen(table)),
        _section("What each does right", _right(table)),
        _section("What could not be told", _open(table)),
        _section("Where this was measured", _measured(report)),
        f"{plain(report.closing_line)}.",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def scoreboard_table(report: Report) -> str:
    """Claims as rows, subjects with their versions as columns."""
    table = tabulate(report)
    header = ["claim", *("<br>".join(map(plain, (each.name, each.version))) for each in table.subjects)]
    rows = [
        [f"{code(claim)} {table.version(claim)}", *(_cell(table.cell(claim, subject)) for subject in table.subjects)]
        for claim in table.claims
    ]
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plain(text: str) -> str:
    """`text` as one line of Markdown that shows it as it is."""
    line = " ".join(legible(text, _MOST_CHARACTERS).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]|~#]|(?<!\w)_|_(?!\w))", r"\\\1", line)


def code(text: str) -> str:
    """`text` as one line of code; a bar is escaped, so that it may stand in a table."""
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


def _section(title: str, lines: Iterable[str]) -> str:
    body = "\n".join(lines).strip()
    return f"## {title}\n\n{body}" if body else ""


def _bullet(text: str) -> str:
    return f"- {text}"


def _fallen(table: Table) -> Iterator[str]:
    """Of each cell that fell the counterexample that says most, why it was expected, and how to see it again."""
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
    yield _bullet(f"{code(cell.claim)}{place}{ratio}: {plain(said)}")
    if cell.reason is not None:
        yield f"  - expected, strictly: {plain(cell.reason)}"
    if found.repro:
        yield f"  - repeat with {code(found.repro)}"


def _right(table: Table) -> Iterator[str]:
    for subject in table.subjects:
        held = _marked(table, subject, Outcome.HOLDS)
        if held:
            named = ", ".join(f"{code(cell.claim)} ({cell.checked} comparisons)" for cell in held)
            decided = len(held) + len(_marked(table, subject, Outcome.FALSIFIED))
            yield _bullet(f"**{plain(str(subject))}**, {len(held)} of {decided}: {named}")


def _open(table: Table) -> Iterator[str]:
    for subject in table.subjects:
        for cell in _marked(table, subject, Outcome.UNKNOWN):
            reasons = "; ".join(dict.fromkeys(finding.why for finding in cell.deciding if finding.why))
            yield _bullet(f"**{plain(str(subject))}** {code(cell.claim)}: {plain(reasons)}")


def _marked(table: Table, subject: Column, outcome: Outcome) -> list[Cell]:
    return [cell for cell in table.of(subject) if cell.outcome is outcome]


def _measured(report: Report) -> Iterator[str]:
    yield _bullet(f"started {plain(report.started)}")
    for name, value in {**report.versions, **report.machine}.items():
        yield _bullet(f"{plain(name)}: {plain(value)}")
    seeds = dict.fromkeys(str(finding.seed) for finding in report.findings)
    if seeds:
        yield _bullet(f"seed {', '.join(seeds)}")
    if report.not_selected:
        yield _bullet(f"not selected: {', '.join(code(name) for name in dict.fromkeys(report.not_selected))}")
