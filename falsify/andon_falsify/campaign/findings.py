"""What a campaign found: one finding for each claim, subject, backend, world size and accumulation. Plain values.

It is the one data model of all reports (`report.document` has it as JSON), and needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from andon_falsify.verdict import Counterexample, Outcome, Verdict, closing_line, exit_code, merge

SCHEMA = 1


@dataclass(frozen=True)
class Finding:
    """What was found of one claim at one place.

    world, accumulation: of the cases behind it, 0 where the claim says nothing of ranks. checked: comparisons made.
    seed: the campaign's. curve: what is best seen as a picture, one number an update; empty where nothing is.
    curve_name: what its numbers are ("gradient / law"). curve_law: what each should be, where that is one number.
    """

    claim: str
    version: int
    subject: str
    subject_version: str
    backend: str
    world: int
    accumulation: int
    outcome: Outcome
    why: str = ""
    checked: int = 0
    counterexamples: tuple[Counterexample, ...] = ()
    seed: int = 0
    curve: tuple[float, ...] = ()
    curve_name: str = ""
    curve_law: float | None = None

    def __post_init__(self) -> None:
        _ = self.verdict  # what is no verdict is no finding

    @property
    def verdict(self) -> Verdict:
        """The finding without its place. Raises `ValueError` for one that contradicts itself."""
        return Verdict(self.claim, self.outcome, (self.why,) if self.why else (), self.checked, self.counterexamples)

    @property
    def place(self) -> str:
        """`gloo, world 2, accumulation 2`, as far as it is known."""
        layout = {"world": self.world, "accumulation": self.accumulation}
        named = [f"{name} {number}" for name, number in layout.items() if number]
        return ", ".join([self.backend, *named] if self.backend else named)


@dataclass(frozen=True)
class Report:
    """A whole campaign, or several.

    started: ISO 8601, UTC. versions: of every library that matters, by name. machine: fingerprint by name (cpu, torch).
    runs: cases that were run. not_selected: claims that the budget or the user left out, by name.
    expected: the claims that are known to fall, by (subject, claim), each with its reason.
    statements: what each claim says, by its name, for those who read the report without the code.
    excused: of the claims that are expected to fall, by name, those that fail nothing when they do.
    untried: the backends that were named by hand and on which nothing could be run here, each with the reason.
    unfinished: why there is more to be tried than was, "" where there is not.
    """

    started: str
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    runs: int = 0
    not_selected: tuple[str, ...] = ()
    expected: Mapping[tuple[str, str], str] = field(default_factory=dict)
    excused: tuple[str, ...] = ()
    statements: Mapping[str, str] = field(default_factory=dict)
    untried: Mapping[str, str] = field(default_factory=dict)
    unfinished: str = ""
    schema: int = SCHEMA

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """One verdict for each subject and claim: findings merged over backends, world sizes and accumulation."""
        held: dict[tuple[str, str], list[Verdict]] = {}
        for finding in self.findings:
            held.setdefault((finding.subject, finding.claim), []).append(finding.verdict)
        return tuple(merge(found) for found in held.values())

    @property
    def closing_line(self) -> str:
        """`checked K of N claims, R runs, S not applicable, U unknown`."""
        return closing_line(self.verdicts, self.runs, len(self.not_selected))

    @property
    def exit_code(self) -> int:
        """1 if any claim is falsified that is not excused; else 2 if any is unknown, none was checked, or none where it
        was asked for, an excused one holds, or there is more to be tried; else 0.
        """
        counted, passed = [], False
        for (_, claim), verdict in zip(self.outcomes(), self.verdicts, strict=True):
            if claim in self.excused and verdict.outcome is Outcome.FALSIFIED:
                verdict = Verdict(claim, Outcome.HOLDS, checked=max(verdict.checked, 1))
            elif claim in self.excused:
                passed = passed or verdict.outcome is Outcome.HOLDS
            counted.append(verdict)
        return exit_code(counted) or (2 if self.untried or self.unfinished or passed else 0)

    @property
    def surprises(self) -> tuple[str, ...]:
        """Where verdicts differ from `expected`: a claim that fell unannounced, or was to fall and did not.

        An expectation about a subject or claim that was not judged is no surprise.
        """
        found = []
        for (subject, claim), outcome in self.outcomes().items():
            reason = self.expected.get((subject, claim))
            if outcome is Outcome.FALSIFIED and reason is None:
                found.append(f"{subject}: {claim} is falsified, and was not expected to be")
            elif outcome is not Outcome.FALSIFIED and reason is not None:
                found.append(f"{subject}: {claim} is {outcome.value}, but was expected to be falsified: {reason}")
        return tuple(found)

    def outcomes(self) -> dict[tuple[str, str], Outcome]:
        """The merged outcome by (subject, claim)."""
        pairs = dict.fromkeys((finding.subject, finding.claim) for finding in self.findings)
        return dict(zip(pairs, (verdict.outcome for verdict in self.verdicts), strict=True))


def joined(reports: Sequence[Report]) -> Report:
    """Reports of several subjects as one. The first one's start and machine stand. Raises `ValueError` for none."""
    if not reports:
        msg = "no report to join"
        raise ValueError(msg)
    first = reports[0]
    return Report(
        started=min(report.started for report in reports),
        versions=_united(report.versions for report in reports),
        machine=first.machine,
        findings=tuple(finding for report in reports for finding in report.findings),
        runs=sum(report.runs for report in reports),
        not_selected=tuple(name for report in reports for name in report.not_selected),
        expected={key: reason for report in reports for key, reason in report.expected.items()},
        excused=tuple(dict.fromkeys(name for report in reports for name in report.excused)),
        statements={name: text for report in reports for name, text in report.statements.items()},
        untried={backend: why for report in reports for backend, why in report.untried.items()},
        unfinished=next((report.unfinished for report in reports if report.unfinished), ""),
    )


def _united(mappings: Iterable[Mapping[str, str]]) -> dict[str, str]:
    held: dict[str, dict[str, None]] = {}
    for mapping in mappings:
        for name, value in mapping.items():
            held.setdefault(name, {})[value] = None
    return {name: " or ".join(values) for name, values in held.items()}
