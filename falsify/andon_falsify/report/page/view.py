"""The texts, addresses and style rules of the page. Nothing here is escaped: the template does that."""

from __future__ import annotations

import re
from collections import Counter
from functools import cached_property

from andon_contracts.legible import counted
from andon_falsify.report.findings import Cell, Mark, Report, Table, count_marks
from andon_falsify.verdict import Outcome

_LONGEST_NAME = 60
_FELL = (Mark.FALSIFIED, Mark.EXPECTED)
_MEANINGS = {
    Mark.FALSIFIED: "a counterexample was found",
    Mark.EXPECTED: "a counterexample was found, and the reason is known",
    Mark.UNEXPECTED_PASS: "was to be falsified for a known reason and holds: the reason is out of date",
    Mark.UNKNOWN: "nothing could be inferred",
    Mark.HOLDS: "comparisons were made and none contradicts it",
    Mark.NOT_APPLICABLE: "the claim says nothing about this subject",
}
CLASSES = {
    Mark.FALSIFIED: "falsified",
    Mark.EXPECTED: "expected",
    Mark.UNEXPECTED_PASS: "passed",
    Mark.UNKNOWN: "unknown",
    Mark.HOLDS: "holds",
    Mark.NOT_APPLICABLE: "inapplicable",
}
"""The CSS class, and the symbol, of each mark."""


class Page:
    """What the template shows of a report, beside its fields."""

    def __init__(self, report: Report) -> None:
        self.table = Table(report)
        self.marks = [(mark, count, _MEANINGS[mark]) for mark, count in count_marks(self.table.cells).items()]
        self.passed = [cell for cell in self.table.cells if cell.mark is Mark.UNEXPECTED_PASS]
        fallen = {each: [cell for cell in self.table.of(each) if cell.mark in _FELL] for each in self.table.subjects}
        self.fallen = {subject: cells for subject, cells in fallen.items() if cells}
        self.lamp = {1: "falsified", 0: "holds"}.get(report.exit_code, "unknown")

    @cached_property
    def _addresses(self) -> dict[Cell, str]:
        given = Counter[str]()
        addresses = {}
        for cell in self.table.cells:
            name = f"{_slug(cell.claim)}.{_slug(cell.subject.name)}"
            given[name] += 1
            addresses[cell] = name if given[name] == 1 else f"{name}.{given[name]}"
        return addresses

    def address(self, cell: Cell) -> str:
        """The fragment of the page's address that opens a cell; unique, and the same for the same report."""
        return self._addresses[cell]

    @property
    def headline(self) -> str:
        """The result in one line."""
        subjects = self.table.subjects
        if not subjects:
            return "Nothing was judged"
        if len(subjects) > 1:
            fallen = len(self.fallen)
            return f"{fallen or 'None'} of {len(subjects)} subjects break{'s' * (fallen < 2)} a claim"
        decided = [cell for cell in self.table.cells if cell.verdict.outcome in (Outcome.HOLDS, Outcome.FALSIFIED)]
        broken = sum(cell.mark in _FELL for cell in decided)
        expected = sum(cell.mark is Mark.EXPECTED for cell in decided)
        known = f", {'all' if expected == broken else expected} of them as expected" if expected else ""
        known = ", as expected" if expected == broken == 1 else known
        name = _short(str(subjects[0]))
        return f"{name} breaks {broken or 'none'} of {counted(len(decided), 'claim')} that could be checked{known}"

    def gist(self, cell: Cell) -> str:
        """The second line of a cell: the ratio of a counterexample, else the number of places."""
        example = cell.example
        if example is not None and example.ratio is not None:
            return f"ratio {example.ratio:.3f}" if 0.001 <= abs(example.ratio) < 1e6 else f"ratio {example.ratio:.3g}"
        if cell.verdict.outcome is Outcome.NOT_APPLICABLE:
            return ""
        applicable = sum(finding.outcome is not Outcome.NOT_APPLICABLE for finding in cell.findings)
        some, all_ = len(cell.deciding), counted(applicable, "place")
        return all_ if some == applicable else f"{some} of {all_}"

    def lead(self, cell: Cell) -> str:
        """The counterexample of a cell in short: its ratio, else what was seen."""
        example = cell.example
        if example is None:
            return ""
        return f"ratio {example.equals}" if example.equals else example.what


def _short(name: str) -> str:
    """A long command as the script in it, or its beginning."""
    scripts = [word for word in name.split() if word.endswith(".py")]
    return name if len(name) <= _LONGEST_NAME else scripts[0] if scripts else f"{name[:_LONGEST_NAME]}..."


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9_-]+", "-", text.lower()).strip("-") or "unnamed"


def width_rule(subjects: int) -> str:
    """Columns have a minimum width; the claims' statements get more room if there are few subjects."""
    first = 30 if subjects <= 4 else 18
    return (
        f"@media screen {{\n  :root {{ --first: {first}rem }}\n"
        f"  .matrix {{ min-width: calc(min(var(--first), 45vw) + {8.5 * subjects}rem) }}\n"
        f"  .frame {{ max-width: {first + 20 * subjects}rem }}\n}}\n"
    )


def filter_rules(subjects: int) -> str:
    """Hide columns and cells whose box is not ticked, and rows of which nothing is left.

    The boxes are `#show-s0` for the first subject and `#show-holds` for a mark. A browser without `:has` shows the
    whole table and no boxes.
    """
    rules = [f"main:has(#show-s{column}:not(:checked)) .s{column} {{ display: none }}" for column in range(subjects)]
    rules += [
        f"main:has(#show-{name}:not(:checked)) td.{name} > * {{ visibility: hidden }}" for name in CLASSES.values()
    ]
    rules.append(".matrix tbody tr { display: none }")
    shown = [
        f"main:has(#show-s{column}:checked):has(#show-{name}:checked) .matrix tbody tr:has(td.s{column}.{name})"
        for column in range(subjects)
        for name in CLASSES.values()
    ]
    if shown:
        rules.append(f"{', '.join(shown)} {{ display: table-row }}")
    inside = "\n".join(f"  {rule}" for rule in rules)
    return f"@media screen {{ @supports selector(:has(*)) {{\n{inside}\n}} }}\n"
