"""The one error for what the system, not the user, got wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["violation", "failed", "out of memory", "died", "hangs", "left"]
"""What stopped the ranks. `failed` is an error that a rank raised, `died` a process that ended without a word, `hangs`
one that is stopped or that the others waited for in vain, `left` one that closed its watch while the others went on."""

OTHER_SHAPES = "have not the same shapes on all ranks"
"""What a finding says of tensors that no element of can be compared; no cause of it is usual."""
NOT_SEEN_REDUCED = "nothing was seen to reduce their gradients"
"""What a finding says of weights that part where that may be right; no cause of it is usual."""


@dataclass(frozen=True)
class Finding:
    """What a broken clause saw: plain values only, equal on every rank that judged the same input.

    `ranks` are the culprits (empty: not known), `tensor` the name of the tensor or value, `step` the number of the
    update (1 is the first; 0: outside a step, as at start-up). `likely` is the usual cause of what was seen, if it says
    more than the one that the registry gives for the clause.
    """

    seen: str
    step: int = 0
    ranks: tuple[int, ...] = ()
    tensor: str = ""
    details: tuple[tuple[str, str], ...] = ()
    likely: str = ""


class Violation(RuntimeError):
    """A contract was broken: by a bug, by hardware, by a fault. Never by what a user typed (that is a `ValueError`).

    A `RuntimeError` and not icontract's `AssertionError`, so that `except AssertionError` cannot swallow it. All
    arguments but the message have defaults, so it survives pickling with its attributes. `bundle` is the folder of the
    bundle, if there is one.
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
        """The violation of `clause` (a name in the registry) by what `finding` says."""
        return cls(describe(clause, finding), clause=clause, finding=finding)

    @property
    def step(self) -> int:
        """The update at which it was found; 0 outside a step."""
        return self.finding.step

    @property
    def rank(self) -> int | None:
        """The one culprit, where there is exactly one."""
        return self.finding.ranks[0] if len(self.finding.ranks) == 1 else None

    @property
    def tensor(self) -> str:
        """The tensor or value at which it was found; empty where it is no single one."""
        return self.finding.tensor


class Halted(Violation):
    """All ranks stop because one of them failed, ran out of memory, died, hangs or left: no contract of the loop broke.

    `cause` says which of these it was; `clause` is `halt-together`.
    """


# The names under which users know them, in tracebacks too.
Violation.__module__ = Halted.__module__ = "andon"


def named_ranks(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 0, 2`."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def describe(clause: str, finding: Finding) -> str:
    """One readable line: clause, step, rank, tensor, what was seen."""
    parts = [f"{clause} broken"]
    if finding.step:
        parts.append(f"at step {finding.step}")
    if finding.ranks:
        parts.append(f"on {named_ranks(finding.ranks)}")
    if finding.tensor:
        parts.append(f"in {finding.tensor}")
    return f"{' '.join(parts)}: {finding.seen}"
