"""Verdicts with counterexamples, how they merge, and the closing line that counts what was checked.

The rules are Jepsen's and Elle's: verdicts merge in the order holds < unknown < falsified, a checker that throws says
unknown, and one that inferred nothing may not say holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ParamSpec

Parameters = ParamSpec("Parameters")


class Outcome(StrEnum):
    """What can be said of a claim."""

    HOLDS = "holds"
    UNKNOWN = "unknown"
    FALSIFIED = "falsified"
    NOT_APPLICABLE = "not applicable"


_GRAVITY = {Outcome.NOT_APPLICABLE: 0, Outcome.HOLDS: 1, Outcome.UNKNOWN: 2, Outcome.FALSIFIED: 3}


@dataclass(frozen=True)
class Claim:
    """A promise that can be falsified: its name in words, its version (raised when its meaning changes), its text.

    source: where else it is promised, or seen broken, by the names that are used there; of no use to a reader.
    """

    name: str
    version: int
    statement: str
    source: str = ""


@dataclass(frozen=True)
class Counterexample:
    """One observation that contradicts a claim.

    `where` is a place in the history ("step 3, rank 1"); `ratio` is seen / expected where that is one number, and
    `equals` says what it is ("4.000 = accumulation 2 x world 2"); `repro` is a command that shows exactly this again.
    """

    what: str
    where: str = ""
    expected: str = ""
    seen: str = ""
    ratio: float | None = None
    equals: str = ""
    seed: int | None = None
    repro: str = ""

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
    """What was found of one claim. `checked` counts the comparisons made; `why` explains all but a plain holds."""

    claim: str
    outcome: Outcome
    why: str = ""
    checked: int = 0
    counterexamples: tuple[Counterexample, ...] = ()

    def __post_init__(self) -> None:
        if (self.outcome is Outcome.FALSIFIED) != bool(self.counterexamples):
            msg = f"{self.claim}: falsified and its counterexamples go together"
            raise ValueError(msg)
        if self.outcome is Outcome.HOLDS and self.checked < 1:
            msg = f"{self.claim}: nothing was compared, so nothing holds"
            raise ValueError(msg)

    def __str__(self) -> str:
        lines = [f"{self.claim}: {self.outcome.value}" + (f" ({self.why})" if self.why else "")]
        return "\n".join([*lines, *(f"  {found}" for found in self.counterexamples)])


def first_of_many(names: Sequence[object], shown: int) -> str:
    """`a, b, c and 4 more`: the first few of `names`, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"{', '.join(map(str, names[:shown]))}{more}"


def conclude(claim: Claim, checked: int, found: Sequence[Counterexample], missing: str = "", note: str = "") -> Verdict:
    """The verdict of a checker that made `checked` comparisons and found `found`.

    A counterexample falsifies, whatever else is missing. Without one, `missing` (what could not be observed) or no
    comparison at all is unknown. `note` is said with holds.
    """
    if found:
        return Verdict(claim.name, Outcome.FALSIFIED, note, checked, tuple(found))
    if missing or not checked:
        return Verdict(claim.name, Outcome.UNKNOWN, missing or "nothing to compare was recorded", checked)
    return Verdict(claim.name, Outcome.HOLDS, note, checked)


def not_applicable(claim: Claim, why: str) -> Verdict:
    """The claim says nothing about this subject, for the reason `why`."""
    return Verdict(claim.name, Outcome.NOT_APPLICABLE, why)


def unknown(claim: Claim, why: str) -> Verdict:
    """Nothing could be inferred, for the reason `why`."""
    return Verdict(claim.name, Outcome.UNKNOWN, why)


def judge(
    claim: Claim, checker: Callable[Parameters, Verdict], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Verdict:
    """`checker(*args, **kwargs)`; what it throws makes the claim unknown, with the error named."""
    try:
        return checker(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 -- whatever a checker throws is a verdict of its own: unknown
        return unknown(claim, f"the checker failed: {type(error).__name__}: {error}")


def merge(verdicts: Iterable[Verdict]) -> Verdict:
    """One verdict for one claim over several cases: the gravest outcome, all counterexamples, all comparisons.

    Not applicable yields to any other. Raises `ValueError` for no verdicts or for those of different claims.
    """
    held = tuple(verdicts)
    if len({verdict.claim for verdict in held}) != 1:
        msg = "merge needs at least one verdict, all of one claim"
        raise ValueError(msg)
    gravest = max(held, key=lambda verdict: _GRAVITY[verdict.outcome])
    reasons = dict.fromkeys(verdict.why for verdict in held if verdict.outcome is gravest.outcome and verdict.why)
    return Verdict(
        gravest.claim,
        gravest.outcome,
        "; ".join(reasons),
        sum(verdict.checked for verdict in held),
        tuple(found for verdict in held for found in verdict.counterexamples),
    )


def repeatable(verdict: Verdict, seed: int | None, repro: str) -> Verdict:
    """`verdict` with the seed and the command that repeats it in each counterexample that has none."""
    named = tuple(
        replace(found, seed=seed if found.seed is None else found.seed, repro=found.repro or repro)
        for found in verdict.counterexamples
    )
    return replace(verdict, counterexamples=named)


def closing_line(verdicts: Sequence[Verdict], runs: int, not_selected: int = 0) -> str:
    """`checked K of N claims, R runs, S not applicable, U unknown`: K hold or are falsified, N is every claim there is.

    `not_selected` claims (left out by a budget) are counted in N and are not unknown.
    """
    checked, inapplicable, open_ = (
        sum(verdict.outcome in outcomes for verdict in verdicts)
        for outcomes in ((Outcome.HOLDS, Outcome.FALSIFIED), (Outcome.NOT_APPLICABLE,), (Outcome.UNKNOWN,))
    )
    total = len(verdicts) + not_selected
    tried = f"{runs} run{'s' * (runs != 1)}"
    return f"checked {checked} of {total} claims, {tried}, {inapplicable} not applicable, {open_} unknown"


def exit_code(verdicts: Iterable[Verdict]) -> int:
    """1 if any claim is falsified; else 2 if any is unknown or none was checked; else 0 (issue 4)."""
    outcomes = {verdict.outcome for verdict in verdicts}
    if Outcome.FALSIFIED in outcomes:
        return 1
    return 2 if Outcome.UNKNOWN in outcomes or Outcome.HOLDS not in outcomes else 0
