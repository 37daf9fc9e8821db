"""A report as one HTML page without external resources, readable without scripts and without colour.

The page's content security policy allows its own script and style and nothing else. The template escapes every value,
so that the policy is a second line of defence.
"""

from __future__ import annotations

import re
from collections import Counter
from importlib import resources
from pathlib import Path

from markupsafe import Markup

from andon.console.html import escaping, source
from andon.run.atomic import write_whole
from andon_contracts.legible import counted
from andon_falsify.report.findings import Cell, Mark, Report, Table, count_marks, reasons
from andon_falsify.verdict import Outcome

_MOST_CHARACTERS = 4000
_FELL = (Mark.FALSIFIED, Mark.EXPECTED)
_MARKS = {
    Mark.FALSIFIED: ("falsified", "a counterexample was found"),
    Mark.EXPECTED: ("expected", "a counterexample was found, and the reason is known"),
    Mark.UNEXPECTED_PASS: (
        "passed",
        "expected to be falsified for a known reason, but holds: the reason is out of date",
    ),
    Mark.UNKNOWN: ("unknown", "could not be decided: the reason says why"),
    Mark.HOLDS: ("holds", "comparisons were made, and none contradicts the claim"),
    Mark.NOT_APPLICABLE: ("inapplicable", "the claim says nothing about this subject"),
}
"""The CSS class of each mark, which is also the name of its symbol, and what the mark means."""
_CLASSES = {mark: name for mark, (name, _) in _MARKS.items()}


def write_html(report: Report, path: Path) -> None:
    """Write `report` to `path`, whole or not at all. Raises `InputError` if the file cannot be written."""
    write_whole(path, render(report).encode())


def render(report: Report) -> str:
    """The page. A text longer than 4000 characters is cut, with a count of the rest; the JSON report has all of it."""
    page = _Page(report)
    style = f"{_part('style.css')}\n{_column_rules(len(page.table.subjects))}"
    script = _part("script.js")
    policy = (
        f"default-src 'none'; style-src {source(style)}; script-src {source(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    template = escaping(_part("page.html.j2"), _MOST_CHARACTERS)
    functions = {"reasons": reasons, "count_marks": count_marks}
    trusted = {"style": Markup(style), "script": Markup(script), "policy": policy}
    return template.render(page=page, report=report, classes=_CLASSES, **functions, **trusted)


def _part(name: str) -> str:
    return resources.files("andon_falsify.report.page").joinpath(name).read_text(encoding="utf-8")


class _Page:
    """What the template shows of a report, beside its fields. Nothing here is escaped: the template does that."""

    def __init__(self, report: Report) -> None:
        self.table = Table(report)
        self.marks = [(mark, count, _MARKS[mark][1]) for mark, count in count_marks(self.table.cells).items()]
        self.passed = [cell for cell in self.table.cells if cell.mark is Mark.UNEXPECTED_PASS]
        fallen = {each: [cell for cell in self.table.of(each) if cell.mark in _FELL] for each in self.table.subjects}
        self.fallen = {subject: cells for subject, cells in fallen.items() if cells}
        self.lamp = {1: "falsified", 0: "holds"}.get(report.exit_code, "unknown")
        given = Counter[str]()
        self._addresses: dict[Cell, str] = {}
        for cell in self.table.cells:
            slugs = (re.sub(r"[^a-z0-9_-]+", "-", text.lower()).strip("-") for text in (cell.claim, cell.subject.short))
            name = ".".join(slug or "unnamed" for slug in slugs)
            given[name] += 1
            self._addresses[cell] = name if given[name] == 1 else f"{name}.{given[name]}"

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
        return (
            f"{subjects[0]} breaks {broken or 'none'} of {counted(len(decided), 'claim')} that could be checked{known}"
        )

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


def _column_rules(subjects: int) -> str:
    """Style rules that depend on the number of columns: their widths, and what the boxes hide.

    The boxes are `#show-s0` for the first subject and `#show-holds` for a mark: they hide columns and cells, and rows
    of which nothing is left. A browser without `:has` shows the whole table and no boxes.
    """
    first = 30 if subjects <= 4 else 18
    widths = (
        f"@media screen {{\n  :root {{ --first: {first}rem }}\n"
        f"  .matrix {{ min-width: calc(min(var(--first), 45vw) + {8.5 * subjects}rem) }}\n"
        f"  .frame {{ max-width: {first + 20 * subjects}rem }}\n}}\n"
    )
    names = _CLASSES.values()
    rules = [f"main:has(#show-s{column}:not(:checked)) .s{column} {{ display: none }}" for column in range(subjects)]
    rules += [f"main:has(#show-{name}:not(:checked)) td.{name} > * {{ visibility: hidden }}" for name in names]
    rules.append(".matrix tbody tr { display: none }")
    shown = [
        f"main:has(#show-s{column}:checked):has(#show-{name}:checked) .matrix tbody tr:has(td.s{column}.{name})"
        for column in range(subjects)
        for name in names
    ]
    rules += [f"{', '.join(shown)} {{ display: table-row }}"] if shown else []
    inside = "\n".join(f"  {rule}" for rule in rules)
    return f"{widths}@media screen {{ @supports selector(:has(*)) {{\n{inside}\n}} }}\n"
