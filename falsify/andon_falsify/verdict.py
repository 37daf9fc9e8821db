"""Claims and verdicts. Verdicts merge in the order holds < unknown < falsified; holds needs at least one comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

Kind = Literal["trainer", "loop", "script", "ledger"]
"""What can be judged: our own trainer, anyone's training loop, a user's command, a recorded ledger."""
ExtraRun = Literal[
    "alone", "again", "cut", "cut again", "resumed", "poisoned", "random",
    "perturbed 1", "perturbed 2", "perturbed 3", "perturbed 4",
]  # fmt: skip
"""A further run that a claim compares with: on one rank, on one rank once more, killed, resumed and killed again,
resumed after the last kill, with a NaN planted, with dropout, on one rank from perturbed weights."""
TrialKind = Literal["law", "halt", "resume", "memory"]
"""How a case is run: as it is, with a NaN planted, interrupted and resumed, with its bytes counted."""
Relation = Literal["same", "part", "other"]
"""same: one law. part: the claim judges more than the clause. other: one name for two laws."""
Quantity = Literal[
    "gradient", "loss", "norm", "learning rate", "weights", "optimizer", "rows", "memory", "layout", "record", "other"
]
"""The number, or the thing, that a counterexample is about."""


class Outcome(StrEnum):
    HOLDS = "holds"
    UNKNOWN = "unknown"
    FALSIFIED = "falsified"
    NOT_APPLICABLE = "not applicable"


_GRAVITY = {Outcome.NOT_APPLICABLE: 0, Outcome.HOLDS: 1, Outcome.UNKNOWN: 2, Outcome.FALSIFIED: 3}


@dataclass(frozen=True)
class Clause:
    """A clause of the contracts, and how a claim is related to it. note: what is not obvious about that."""

    name: str
    relation: Relation = "part"
    note: str = ""


@dataclass(frozen=True)
class Claim:
    """A promise that can be falsified. The module of `andon_falsify.claims` that declares it has its `check` as well.

    version: raised when the meaning changes. order: the place in reports. subjects: the kinds of subject that it is
    judged of; statements: the statement for such a kind, where it differs. trial: the kind of trial that judges it.
    runs: the further runs that the check compares with. needs: functions of `Evidence` that give the reason why the
    claim does not apply, or "". clauses: those of the contracts that are the same law, or a part of it.
    """

    name: str
    version: int
    statement: str
    order: int = 100
    subjects: tuple[Kind, ...] = ()
    trial: TrialKind = "law"
    runs: tuple[ExtraRun, ...] = ()
    needs: tuple[Callable[[Any], str], ...] = ()
    clauses: tuple[Clause, ...] = ()
    statements: Mapping[Kind, str] = field(default_factory=dict, hash=False)

    def statement_for(self, kind: Kind) -> str:
        return self.statements.get(kind, self.statement)


@dataclass(frozen=True)
class Counterexample:
    """One observation that contradicts a claim.

    where: a position in the run ("step 3, rank 1"). ratio: seen / expected, if that is one number. equals: the ratio in
    words ("4.000 = accumulation 2 x world 2: the loss was not divided"). quantity: what the numbers are of. cause: the
    mistake, if the check that saw the whole run knows it; a smaller counterexample must have the same. repro: a command
    that shows exactly this again.
    """

    what: str
    where: str = ""
    expected: str = ""
    seen: str = ""
    ratio: float | None = None
    equals: str = ""
    seed: int | None = None
    repro: str = ""
    quantity: Quantity = "other"
    cause: str = ""

    def __str__(self) -> str:
        parts = [f"{self.where}: {self.what}" if self.where else self.what]
        if self.expected or self.seen:
            parts.append(f"expected {self.expected or 'nothing'}, seen {self.seen or 'nothing'}")
        if self.ratio is not None:
            parts.append(f"ratio {self.equals or f'{self.ratio:.3f}'}")
        if self.seed is not None:
            parts.append(f"seed {self.seed}")
        if self.repro:
            parts.append(f"repeat with: {self.repro}")
        return "; ".join(parts)


@dataclass(frozen=True)
class Verdict:
    """reasons: of every outcome but a plain holds. checked: comparisons made. worst: the largest relative error.

    remedies: what the user may do about the reasons, in whole sentences.
    """

    claim: str
    outcome: Outcome
    reasons: tuple[str, ...] = ()
    checked: int = 0
    counterexamples: tuple[Counterexample, ...] = ()
    worst: float | None = None
    remedies: tuple[str, ...] = ()

    @property
    def why(self) -> str:
        """The reasons and then the remedies; of a claim that holds, the largest relative error first."""
        error = () if self.worst is None or self.outcome is not Outcome.HOLDS else (self.worst,)
        said = "; ".join([*(f"largest relative error {each:.2e}" for each in error), *self.reasons])
        return ". ".join([said, *self.remedies])

    def __post_init__(self) -> None:
        if (self.outcome is Outcome.FALSIFIED) != bool(self.counterexamples):
            raise ValueError(f"{self.claim}: falsified and its counterexamples go together")
        if self.outcome is Outcome.HOLDS and self.checked < 1:
            raise ValueError(f"{self.claim}: nothing was compared, so nothing holds")

    def __str__(self) -> str:
        lines = [f"{self.claim}: {self.outcome.value}" + (f" ({self.why})" if self.why else "")]
        return "\n".join([*lines, *(f"  {found}" for found in self.counterexamples)])


def first_of_many(names: Sequence[object], shown: int) -> str:
    """`a, b, c and 4 more`: the first few of `names`, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"{', '.join(map(str, names[:shown]))}{more}"


def conclude(
    claim: Claim,
    checked: int,
    found: Sequence[Counterexample],
    missing: str = "",
    note: str = "",
    worst: float | None = None,
) -> Verdict:
    """The verdict of a check that made `checked` comparisons and found `found`, which falsifies whatever is missing.

    Else `missing` (what could not be observed) or no comparison is unknown. note: a reason of holds and falsified.
    """
    noted = (note,) if note else ()
    if found:
        return Verdict(claim.name, Outcome.FALSIFIED, noted, checked, tuple(found), worst)
    if missing or not checked:
        missing = missing or "nothing to compare was recorded"
        return Verdict(claim.name, Outcome.UNKNOWN, (missing,), checked, worst=worst)
    return Verdict(claim.name, Outcome.HOLDS, noted, checked, worst=worst)


def not_applicable(claim: Claim, why: str) -> Verdict:
    return Verdict(claim.name, Outcome.NOT_APPLICABLE, (why,))


def unknown(claim: Claim, why: str, checked: int = 0, remedy: str = "") -> Verdict:
    return Verdict(claim.name, Outcome.UNKNOWN, (why,), checked, remedies=(remedy,) if remedy else ())


def merge(verdicts: Iterable[Verdict]) -> Verdict:
    """One verdict for one claim over several cases: the gravest outcome, all counterexamples, all comparisons."""
    held = tuple(verdicts)
    if len({verdict.claim for verdict in held}) != 1:
        raise ValueError("merge needs at least one verdict, all of one claim")
    gravest = max(held, key=lambda verdict: _GRAVITY[verdict.outcome])
    alike = [verdict for verdict in held if verdict.outcome is gravest.outcome]
    return Verdict(
        gravest.claim,
        gravest.outcome,
        tuple(dict.fromkeys(reason for verdict in alike for reason in verdict.reasons)),
        sum(verdict.checked for verdict in held),
        tuple(found for verdict in held for found in verdict.counterexamples),
        max((verdict.worst for verdict in held if verdict.worst is not None), default=None),
        tuple(dict.fromkeys(remedy for verdict in alike for remedy in verdict.remedies)),
    )


def closing_line(verdicts: Sequence[Verdict], runs: int, not_selected: int = 0) -> str:
    """`checked K of N claims, R runs, S not applicable, U unknown`. N includes claims that a budget left out."""
    checked, inapplicable, open_ = (
        sum(verdict.outcome in outcomes for verdict in verdicts)
        for outcomes in ((Outcome.HOLDS, Outcome.FALSIFIED), (Outcome.NOT_APPLICABLE,), (Outcome.UNKNOWN,))
    )
    total = len(verdicts) + not_selected
    tried = f"{runs} run{'s' * (runs != 1)}"
    return f"checked {checked} of {total} claims, {tried}, {inapplicable} not applicable, {open_} unknown"


def exit_code(verdicts: Iterable[Verdict]) -> int:
    """1 if any claim is falsified; else 2 if any is unknown or none was checked; else 0."""
    outcomes = {verdict.outcome for verdict in verdicts}
    if Outcome.FALSIFIED in outcomes:
        return 1
    return 2 if Outcome.UNKNOWN in outcomes or Outcome.HOLDS not in outcomes else 0
