"""The data model of all reports: findings by claim and layout, their table, and their text. Needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from hashlib import sha256

from andon_contracts.legible import counted
from andon_falsify.verdict import Counterexample, Outcome, Verdict, closing_line, exit_code, merge

SCHEMA = 2
_SHOWN, _REMEDIES, _LONGEST_NAME = 3, 2, 60
"""Reasons and places in the text, whose others are counted; remedies; characters of a name."""


@dataclass(frozen=True, kw_only=True)
class Finding(Verdict):
    """The verdict on one claim at one backend, world size and accumulation (0 if no case was run).

    seed: the campaign's.
    """

    version: int
    subject: str
    subject_version: str
    backend: str
    world: int
    accumulation: int
    seed: int = 0

    @property
    def place(self) -> str:
        """`gloo, world 2, accumulation 2`, without the parts that are empty or 0."""
        layout = {"world": self.world, "accumulation": self.accumulation}
        named = [f"{name} {number}" for name, number in layout.items() if number]
        return ", ".join([self.backend, *named] if self.backend else named)


@dataclass(frozen=True)
class Expected:
    """A known defect: `claim` is expected to be falsified on `subject`. excused: it does not affect the exit code."""

    subject: str
    claim: str
    reason: str
    excused: bool = False


@dataclass(frozen=True)
class Report:
    """One campaign, or several joined.

    started: ISO 8601, UTC. versions: of Python, Andon and the libraries. machine: processor, system, build of torch.
    runs: how often a subject was run. not_selected: the claims that the budget or the user left out. statements: of the
    claims, by name. untried: backends that were requested and cannot be run here, with the reason. unfinished: why the
    campaign was not completed, or "".
    """

    started: str
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    runs: int = 0
    findings: tuple[Finding, ...] = ()
    not_selected: tuple[str, ...] = ()
    expected: tuple[Expected, ...] = ()
    statements: Mapping[str, str] = field(default_factory=dict)
    untried: Mapping[str, str] = field(default_factory=dict)
    unfinished: str = ""
    schema: int = SCHEMA

    @property
    def cells(self) -> tuple[Cell, ...]:
        """One cell for each claim and subject that were judged, in the order of the findings."""
        held: dict[tuple[str, Column], list[Finding]] = {}
        for finding in self.findings:
            held.setdefault((finding.claim, Column(finding.subject, finding.subject_version)), []).append(finding)
        known = {(each.subject, each.claim): each for each in self.expected}
        return tuple(Cell(tuple(found), known.get((subject.name, claim))) for (claim, subject), found in held.items())

    @property
    def closing_line(self) -> str:
        """`checked K of N claims, R runs, S not applicable, U unknown`."""
        return closing_line([cell.verdict for cell in self.cells], self.runs, len(self.not_selected))

    @property
    def exit_code(self) -> int:
        """1 if a claim is falsified and not excused; 2 if one is unknown, none was checked, a requested backend was not
        tried, or the campaign was cut short; 3 if an excused claim holds; otherwise 0.
        """
        cells = self.cells
        excused = [cell for cell in cells if cell.expected is not None and cell.expected.excused]
        fell = [cell for cell in excused if cell.verdict.outcome is Outcome.FALSIFIED]
        counted = [cell.verdict for cell in cells if cell not in fell]
        counted += [Verdict(cell.claim, Outcome.HOLDS, checked=max(cell.verdict.checked, 1)) for cell in fell]
        passed = any(cell.verdict.outcome is Outcome.HOLDS for cell in excused)
        return exit_code(counted) or (2 if self.untried or self.unfinished else 3 * passed)


class Mark(StrEnum):
    """The outcome of a cell, and whether it was expected."""

    FALSIFIED = "falsified"
    EXPECTED = "falsified, as expected"
    UNEXPECTED_PASS = "unexpected pass"
    UNKNOWN = "unknown"
    HOLDS = "holds"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True)
class Column:
    """A subject in one version."""

    name: str
    version: str

    @property
    def short(self) -> str:
        """The name; of a command without a name, its script and a digest: `train.py-3fa2c1`."""
        if len(self.name) <= _LONGEST_NAME:
            return self.name
        word = next((word for word in self.name.split() if word.endswith(".py")), self.name)
        return f"{word[-_LONGEST_NAME:]}-{sha256(self.name.encode(errors='backslashreplace')).hexdigest()[:6]}"

    def __str__(self) -> str:
        """`andon 0.1.0`; if the version names libraries, `hf_trainer (transformers 5.23.0)`."""
        if not self.version or self.version.startswith(f"{self.name} "):
            return self.version or self.short
        return f"{self.short} {self.version}" if self.version[0].isdecimal() else f"{self.short} ({self.version})"


@dataclass(frozen=True)
class Cell:
    """The findings on one claim and one subject. There is at least one."""

    findings: tuple[Finding, ...]
    expected: Expected | None = None

    @property
    def claim(self) -> str:
        return self.findings[0].claim

    @property
    def subject(self) -> Column:
        return Column(self.findings[0].subject, self.findings[0].subject_version)

    @cached_property
    def verdict(self) -> Verdict:
        """The findings merged over backends, world sizes and accumulation."""
        return merge(self.findings)

    @property
    def mark(self) -> Mark:
        """An expectation changes the marks of holds and falsified only."""
        expected = {Outcome.FALSIFIED: Mark.EXPECTED, Outcome.HOLDS: Mark.UNEXPECTED_PASS} if self.expected else {}
        return expected.get(self.verdict.outcome, Mark(self.verdict.outcome.value))

    @property
    def deciding(self) -> tuple[Finding, ...]:
        """The findings with the cell's outcome."""
        return tuple(finding for finding in self.findings if finding.outcome is self.verdict.outcome)

    @property
    def example(self) -> Counterexample | None:
        """The most telling counterexample: the first with an explained ratio, else with a ratio, else the first."""
        found = self.verdict.counterexamples
        return min(found, key=lambda example: (not example.equals, example.ratio is None), default=None)


class Table:
    """The cells of a report. Claims that were judged on more subjects come first."""

    def __init__(self, report: Report) -> None:
        self.cells = report.cells
        self.subjects = tuple(dict.fromkeys(cell.subject for cell in self.cells))
        judged = Counter(cell.claim for cell in self.cells)
        self.claims = tuple(sorted(judged, key=lambda claim: -judged[claim]))
        self._by_place = {(cell.claim, cell.subject): cell for cell in self.cells}

    def cell(self, claim: str, subject: Column) -> Cell | None:
        """None if the claim was not judged on that subject."""
        return self._by_place.get((claim, subject))

    def of(self, subject: Column) -> tuple[Cell, ...]:
        return tuple(cell for claim in self.claims if (cell := self.cell(claim, subject)))

    def version(self, claim: str) -> str:
        """The versions of the claim among the findings: `v1`."""
        numbers = {finding.version for cell in self.cells if cell.claim == claim for finding in cell.findings}
        return " and ".join(f"v{number}" for number in sorted(numbers))


def count_marks(cells: Iterable[Cell]) -> dict[Mark, int]:
    """How many cells have each mark, in the order of `Mark`, without zeros."""
    counted = Counter(cell.mark for cell in cells)
    return {mark: counted[mark] for mark in Mark if counted[mark]}


def verdict_lines(report: Report, *, cut_short: bool = False, rest: str = "in the file of --json") -> Iterator[str]:
    """Every claim with its verdict, then the claims and backends that were left out.

    cut_short: list the claims that no trial has judged yet by name only. rest: where the other counterexamples are.
    """
    cells = report.cells
    several = len({cell.subject for cell in cells}) > 1
    untried = [cell for cell in cells if not any(finding.place for finding in cell.findings)] if cut_short else []
    judged = [cell for cell in cells if cell.verdict.outcome is not Outcome.NOT_APPLICABLE]
    open_ = [cell.claim for cell in judged if cell.verdict.outcome is Outcome.UNKNOWN]
    causes = {reasons(cell.verdict) for cell in judged}
    if shared := not cut_short and len(open_) == len(judged) > len(causes) == 1:
        places = _places(judged[0].deciding)
        yield f"no claim can be judged{f' at {places}' if places else ''}: {causes.pop()}"
        yield f"unknown ({len(open_)}): {', '.join(open_)}"
    for cell in cells:
        if cell not in untried and not (shared and cell.verdict.outcome is Outcome.UNKNOWN):
            of = f"{cell.subject.short}: " if several else ""
            yield f"{of}{cell.claim} v{cell.findings[0].version}: {_outcome(cell)}{_expected(cell)}"
            yield from counterexample_lines(cell.verdict, rest)
    fell = [cell.expected for cell in cells if cell.verdict.outcome is Outcome.FALSIFIED]
    if any(expected is not None and not expected.excused for expected in fell):
        yield 'a known defect counts as falsified (exit code 1); --expected-failed "CLAIM: REASON" excuses it'
    if untried:
        yield f"not tried yet ({len(untried)}): {', '.join(cell.claim for cell in untried)}"
    if report.not_selected:
        yield f"not selected ({len(report.not_selected)}): {', '.join(report.not_selected)}"
    for backend, why in report.untried.items():
        yield f"skipped {backend}: {why}"
    if report.unfinished:
        yield f"incomplete: {report.unfinished}"


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
    """The first reasons, of a claim that holds only one, and the number of the others; then the remedies."""
    most = 1 if verdict.outcome is Outcome.HOLDS else _SHOWN
    more = len(verdict.reasons) - most
    counted = (f"and {more} more",) if more > 0 else ()
    return replace(verdict, reasons=(*verdict.reasons[:most], *counted), remedies=verdict.remedies[:_REMEDIES]).why


def _outcome(cell: Cell) -> str:
    verdict, why = cell.verdict, reasons(cell.verdict)
    if verdict.outcome is Outcome.HOLDS:
        return f"holds ({counted(verdict.checked, 'comparison')}" + (f"; {why})" if why else ")")
    places = "" if verdict.outcome is Outcome.NOT_APPLICABLE else _places(cell.deciding)
    at = f" at {places}" if places else ""
    return f"{verdict.outcome.value}{at}" + (f" ({why})" if why else "")


def _places(findings: Sequence[Finding]) -> str:
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
    if cell.verdict.outcome is Outcome.FALSIFIED:
        return f", {'as expected' if cell.expected.excused else 'known'}: {cell.expected.reason}"
    passed = cell.expected.excused and cell.verdict.outcome is Outcome.HOLDS
    remedy = "; expect it no longer (exit code 3)" if passed else ""
    return f", but expected to be falsified: {cell.expected.reason}{remedy}"
