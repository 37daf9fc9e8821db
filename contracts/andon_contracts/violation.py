"""The one error for what the system, not the user, got wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["violation", "failed", "out of memory", "died", "hangs", "left"]
"""What stopped the ranks. failed: a rank raised an error. died: its process ended without a report. hangs: it is
stopped, or the others waited too long for it. left: it closed its watch while the others continued."""

OTHER_SHAPES = "have not the same shapes on all ranks"
NOT_SEEN_REDUCED = "nothing was seen to reduce their gradients"
"""Findings with these words have no usual cause."""


@dataclass(frozen=True)
class Finding:
    """What a broken clause found: plain values, equal on every rank that judged the same input.

    ranks: the culprits; empty: not known. tensor: the name of the tensor or value. step: the number of the update, from
    1; 0: outside a step, as at start-up. likely: the usual cause, if it says more than the registry does.
    """

    seen: str
    step: int = 0
    ranks: tuple[int, ...] = ()
    tensor: str = ""
    details: tuple[tuple[str, str], ...] = ()
    likely: str = ""


class Violation(RuntimeError):
    """A contract was broken by a bug, by hardware or by a fault. Wrong arguments of a user raise `ValueError` instead.

    A `RuntimeError` and not icontract's `AssertionError`, so that `except AssertionError` cannot swallow it. All
    arguments but the message have defaults, so that it can be pickled. bundle: the folder of the bundle, or "".
    """

    def __init__(
        self, message: str, *, clause: str = "", finding: Finding | None = None, cause: Kind = "violation",
        bundle: str = "",
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.clause = clause
        self.cause = cause
        self.bundle = bundle
        self.finding = finding if finding is not None else Finding(seen=message)

    @classmethod
    def of(cls, clause: str, finding: Finding) -> Violation:
        """The violation of `clause`, a name in the registry."""
        return cls(describe(clause, finding), clause=clause, finding=finding)

    @property
    def step(self) -> int:
        """The number of the update; 0 outside a step."""
        return self.finding.step

    @property
    def rank(self) -> int | None:
        """The culprit, if it is known and a single rank."""
        return self.finding.ranks[0] if len(self.finding.ranks) == 1 else None

    @property
    def tensor(self) -> str:
        """The name of the tensor or value; empty if it is not a single one."""
        return self.finding.tensor


class Halted(Violation):
    """All ranks stop because of one rank, without a broken contract. `cause` says what happened to that rank."""


# The names under which users know them, in tracebacks too.
Violation.__module__ = Halted.__module__ = "andon"


def named_ranks(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 0, 2`."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def describe(clause: str, finding: Finding) -> str:
    """One readable line: clause, step, rank, tensor, what was found."""
    step = f" at step {finding.step}" if finding.step else ""
    ranks = f" on {named_ranks(finding.ranks)}" if finding.ranks else ""
    tensor = f" in {finding.tensor}" if finding.tensor else ""
    return f"{clause} broken{step}{ranks}{tensor}: {finding.seen}"
