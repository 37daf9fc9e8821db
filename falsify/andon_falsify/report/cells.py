"""A report as a table: one cell for each claim and subject that were judged, and how it stands to what was expected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from andon_falsify.campaign.findings import Finding, Report
from andon_falsify.verdict import Counterexample, Outcome, merge


class Mark(StrEnum):
    """How a cell is read: its outcome, and for the claims that were expected to fall whether they did."""

    FALSIFIED = "falsified"
    EXPECTED = "falsified, as expected"
    PASSED = "unexpected pass"
    UNKNOWN = "unknown"
    HOLDS = "holds"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True)
class Column:
    """Whose column it is. One subject in two versions is two columns."""

    name: str
    version: str

    def __str__(self) -> str:
        """`andon 0.1.0`, and where the version names libraries `hf_trainer (transformers 5.23.0)`."""
        if not self.version or self.version.startswith(f"{self.name} "):
            return self.version or self.name
        return f"{self.name} {self.version}" if self.version[0].isdecimal() else f"{self.name} ({self.version})"


@dataclass(frozen=True)
class Cell:
    """The findings of one claim on one subject, in the order of the report.

    reason: why it is expected to fall. excused: whether it then fails nothing.
    """

    claim: str
    version: int
    subject: Column
    findings: tuple[Finding, ...]
    reason: str | None
    excused: bool = False

    @cached_property
    def outcome(self) -> Outcome:
        """The gravest outcome of the findings."""
        return merge(finding.verdict for finding in self.findings).outcome

    @property
    def mark(self) -> Mark:
        """An expectation says nothing of a claim that stayed unknown or does not apply."""
        if self.reason is not None:
            if self.outcome is Outcome.FALSIFIED:
                return Mark.EXPECTED
            if self.outcome is Outcome.HOLDS:
                return Mark.PASSED
        return Mark(self.outcome.value)

    @property
    def deciding(self) -> tuple[Finding, ...]:
        """The findings that have the cell's outcome."""
        return tuple(finding for finding in self.findings if finding.outcome is self.outcome)

    @property
    def applicable(self) -> int:
        """At how many places the claim applies."""
        return sum(finding.outcome is not Outcome.NOT_APPLICABLE for finding in self.findings)

    @property
    def checked(self) -> int:
        """Comparisons made at all places."""
        return sum(finding.checked for finding in self.findings)

    @property
    def example(self) -> Counterexample | None:
        """The counterexample that says most: the first whose ratio is explained, else one with a ratio, else any."""
        found = [example for finding in self.findings for example in finding.counterexamples]
        return min(found, key=lambda example: (not example.equals, example.ratio is None), default=None)


@dataclass(frozen=True)
class Table:
    """The cells of a report. Subjects are in the order of the report, and so are claims that as many were judged on."""

    subjects: tuple[Column, ...]
    claims: tuple[str, ...]
    cells: tuple[Cell, ...]

    @cached_property
    def _by_place(self) -> dict[tuple[str, Column], Cell]:
        return {(cell.claim, cell.subject): cell for cell in self.cells}

    def cell(self, claim: str, subject: Column) -> Cell | None:
        """The cell at a row and column; None where that claim was not judged on that subject."""
        return self._by_place.get((claim, subject))

    def of(self, subject: Column) -> tuple[Cell, ...]:
        """The cells of a column, from the top."""
        return tuple(cell for claim in self.claims if (cell := self.cell(claim, subject)))

    def version(self, claim: str) -> str:
        """The versions of a claim among the findings, as `v1`."""
        numbers = {finding.version for cell in self.cells if cell.claim == claim for finding in cell.findings}
        return " and ".join(f"v{number}" for number in sorted(numbers))


def count_marks(cells: Iterable[Cell]) -> dict[Mark, int]:
    """How many cells have each mark, in the order of `Mark`, without those that none has."""
    counted = Counter(cell.mark for cell in cells)
    return {mark: counted[mark] for mark in Mark if counted[mark]}


def tabulate(report: Report) -> Table:
    """The cells of `report`."""
    held: dict[tuple[str, Column], list[Finding]] = {}
    for finding in report.findings:
        held.setdefault((finding.claim, Column(finding.subject, finding.subject_version)), []).append(finding)
    cells = tuple(
        Cell(
            claim,
            found[0].version,
            subject,
            tuple(found),
            report.expected.get((subject.name, claim)),
            claim in report.excused,
        )
        for (claim, subject), found in held.items()
    )
    judged = Counter(cell.claim for cell in cells)
    return Table(
        tuple(dict.fromkeys(cell.subject for cell in cells)),
        tuple(sorted(judged, key=lambda each: -judged[each])),
        cells,
    )
