"""A report in the words and addresses of the page. Nothing here is escaped: the template does that."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property

from andon_falsify.campaign.findings import Finding, Report
from andon_falsify.report.cells import Cell, Column, Mark, Table, count_marks, tabulate
from andon_falsify.report.page.curve import Curve, draw
from andon_falsify.verdict import Counterexample, Outcome

_OPEN, _MOST, _LONGEST_NAME = 3, 30, 60
_FELL = (Mark.FALSIFIED, Mark.EXPECTED)
_MEANINGS = {
    Mark.FALSIFIED: "a counterexample was found",
    Mark.EXPECTED: "a counterexample was found, and the reason is known",
    Mark.PASSED: "was to be falsified for a known reason and holds: the reason is out of date",
    Mark.UNKNOWN: "nothing could be inferred",
    Mark.HOLDS: "comparisons were made and none contradicts it",
    Mark.NOT_APPLICABLE: "the claim says nothing about this subject",
}


class Page:
    """What the template asks for."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.table: Table = tabulate(report)

    @cached_property
    def _addresses(self) -> Mapping[tuple[str, Column], str]:
        given: dict[str, int] = {}
        return {
            (cell.claim, cell.subject): _unique(f"{_slug(cell.claim)}.{_slug(cell.subject.name)}", given)
            for cell in self.table.cells
        }

    def address(self, cell: Cell) -> str:
        """The part of the page's address that opens a cell; unique, and the same for the same report."""
        return self._addresses[cell.claim, cell.subject]

    @property
    def headline(self) -> str:
        """What a reader takes away if he reads one line."""
        subjects = self.table.subjects
        fallen = [subject for subject in subjects if any(cell.mark in _FELL for cell in self.table.of(subject))]
        if not subjects:
            return "Nothing was judged"
        if len(subjects) > 1:
            return f"{len(fallen) or 'None'} of {len(subjects)} subjects break{'s' * (len(fallen) < 2)} a claim"
        cells = self.table.of(subjects[0])
        decided = [cell for cell in cells if cell.outcome in (Outcome.HOLDS, Outcome.FALSIFIED)]
        broken = sum(cell.mark in _FELL for cell in decided)
        expected = sum(cell.mark is Mark.EXPECTED for cell in decided)
        known = f", {'all' if expected == broken else expected} of them as expected" if expected else ""
        known = ", as expected" if expected == broken == 1 else known
        name = _short(str(subjects[0]))
        return f"{name} breaks {broken or 'none'} of {_number(len(decided), 'claim')} that could be checked{known}"

    @property
    def lamp(self) -> str:
        """The lamp that is lit: falsified, unknown or holds."""
        return {1: "falsified", 0: "holds"}.get(self.report.exit_code, "unknown")

    @property
    def seeds(self) -> str:
        """The seeds of all findings."""
        return ", ".join(dict.fromkeys(str(finding.seed) for finding in self.report.findings))

    @property
    def fallen(self) -> dict[Column, list[Cell]]:
        """The cells with a counterexample, by subject."""
        found = {
            subject: [cell for cell in self.table.of(subject) if cell.mark in _FELL] for subject in self.table.subjects
        }
        return {subject: cells for subject, cells in found.items() if cells}

    @property
    def passed(self) -> list[Cell]:
        """The cells that were expected to fall and hold."""
        return [cell for cell in self.table.cells if cell.mark is Mark.PASSED]

    @property
    def marks(self) -> list[tuple[Mark, str, int, str]]:
        """Each mark that occurs, with its class, the number of its cells and its meaning."""
        counts = count_marks(self.table.cells)
        return [(mark, CLASSES[mark], count, _MEANINGS[mark]) for mark, count in counts.items()]

    @property
    def left_out(self) -> tuple[str, ...]:
        """The claims that were not selected, each once."""
        return tuple(dict.fromkeys(self.report.not_selected))

    def tally(self, subject: Column) -> list[tuple[Mark, str, int]]:
        """The marks of a column."""
        return [(mark, CLASSES[mark], count) for mark, count in count_marks(self.table.of(subject)).items()]

    def css(self, cell: Cell) -> str:
        """The class of a cell's mark."""
        return CLASSES[cell.mark]

    def mark_class(self, finding: Finding) -> str:
        """The class of a single finding."""
        return CLASSES[Mark(finding.outcome.value)]

    def statement(self, claim: str) -> str:
        """What the claim says, where the report has it."""
        return self.report.statements.get(claim, "")

    def gist(self, cell: Cell) -> str:
        """The second line of a cell: the ratio of what fell, else at how many places."""
        example = cell.example
        if example is not None and example.ratio is not None:
            return f"ratio {example.ratio:.3f}" if 0.001 <= abs(example.ratio) < 1e6 else f"ratio {example.ratio:.3g}"
        if cell.outcome is Outcome.NOT_APPLICABLE:
            return ""
        some = len(cell.deciding)
        return _number(some, "place") if some == cell.applicable else f"{some} of {_number(cell.applicable, 'place')}"

    def lead(self, cell: Cell) -> str:
        """The counterexample of a cell in a few words: what a ratio equals, else what was seen."""
        example = cell.example
        if example is None:
            return ""
        return f"ratio {example.equals}" if example.equals else example.what

    def picture(self, finding: Finding) -> Curve | None:
        """The curve of a finding, where it has one."""
        return draw(finding)

    def open(self, finding: Finding) -> tuple[Counterexample, ...]:
        """The counterexamples that are shown at once."""
        return finding.counterexamples[:_OPEN]

    def folded(self, finding: Finding) -> tuple[Counterexample, ...]:
        """Those that are shown when asked for."""
        return finding.counterexamples[_OPEN:_MOST]

    def withheld(self, finding: Finding) -> int:
        """How many are in the JSON report only."""
        return max(0, len(finding.counterexamples) - _MOST)


def _short(name: str) -> str:
    """A long command as the script in it, or as its beginning: the headline has room for a line."""
    scripts = [word for word in name.split() if word.endswith(".py")]
    return name if len(name) <= _LONGEST_NAME else scripts[0] if scripts else f"{name[:_LONGEST_NAME]}..."


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9_-]+", "-", text.lower()).strip("-") or "unnamed"


def _unique(name: str, given: dict[str, int]) -> str:
    given[name] = given.get(name, 0) + 1
    return name if given[name] == 1 else f"{name}.{given[name]}"


def _number(count: int, name: str) -> str:
    return f"{count} {name}{'s' * (count != 1)}"


CLASSES = {
    Mark.FALSIFIED: "falsified",
    Mark.EXPECTED: "expected",
    Mark.PASSED: "passed",
    Mark.UNKNOWN: "unknown",
    Mark.HOLDS: "holds",
    Mark.NOT_APPLICABLE: "inapplicable",
}
"""The class, and the symbol, of each mark."""


_FEW = 4


def width_rule(subjects: int) -> str:
    """Columns stay wide enough to be read and narrow enough to be compared; statements have what room is left."""
    first = 30 if subjects <= _FEW else 18
    return (
        f"@media screen {{\n  :root {{ --first: {first}rem }}\n"
        f"  .matrix {{ min-width: calc(min(var(--first), 45vw) + {8.5 * subjects}rem) }}\n"
        f"  .frame {{ max-width: {first + 20 * subjects}rem }}\n}}\n"
    )


def filter_rules(subjects: int) -> str:
    """Columns whose box is not ticked are hidden, cells of such marks too, and rows of which nothing is left.

    The boxes are `#show-s0` for the first subject and `#show-holds` for a mark. A browser that does not know `:has`
    shows the whole table and no boxes.
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
