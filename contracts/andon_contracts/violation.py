"""`Violation`, the error for faults of the system instead of the user, and `Cause`, why all ranks stop."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from andon_contracts.fields import Count, Part
from andon_contracts.legible import legible, legible_line

Kind = Literal["violation", "failed", "out of memory", "died", "hangs", "left"]
"""What stopped the ranks. failed: a rank raised an error. died: its process ended without a report. hangs: it is
stopped, or the others waited too long for it. left: it closed its watch while the others continued."""

HALT = "halt-together"
_NAME = re.compile(r"[A-Za-z0-9][\w .-]{0,99}")
"""The form of a clause's name, which becomes the name of a folder."""

_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
_SILENT = ("Timed out waiting", "Wait timeout", "timed out after", "Timed out after", "Socket Timeout")
_NETWORK_ERRORS = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})
_NO_MEMORY = ("can't allocate memory", "out of memory", "Cannot allocate memory")


@dataclass(frozen=True)
class Finding:
    """What a broken clause found: plain values, equal on every rank that judged the same input.

    ranks: the culprits; empty: not known. tensor: the name of the tensor or value. step: the number of the update, from
    1; 0: outside a step, as at start-up. likely: the usual cause, "" for none; None: the one in the registry.
    suspicion: a right loop can look like this.
    """

    seen: str
    step: int = 0
    ranks: tuple[int, ...] = ()
    tensor: str = ""
    details: tuple[tuple[str, str], ...] = ()
    likely: str | None = None
    suspicion: bool = False


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


# Tracebacks show the names that users import.
Violation.__module__ = Halted.__module__ = "andon"


def named_ranks(ranks: Iterable[int]) -> str:
    """`rank 1`, or `ranks 0, 2` in ascending order."""
    ordered = sorted(ranks)
    return f"rank{'s' * (len(ordered) != 1)} {', '.join(map(str, ordered))}"


def explain_command(place: Path) -> str:
    """The command that explains the bundle at `place`."""
    return f"andon explain {shlex.quote(str(place))}"


def describe(clause: str, finding: Finding) -> str:
    """One readable line: clause, step, ranks, tensor and finding."""
    step = f" at step {finding.step}" if finding.step else ""
    ranks = f" on {named_ranks(finding.ranks)}" if finding.ranks else ""
    tensor = f" in {finding.tensor}" if finding.tensor else ""
    return f"{clause} {'suspected' if finding.suspicion else 'broken'}{step}{ranks}{tensor}: {finding.seen}"


@dataclass(frozen=True)
class Cause(Part):
    """Why all ranks stop, the same on every rank.

    text: the whole message. rank: the rank that causes the stop, if known. written: whether every rank wrote its bundle
    when the violation was judged.
    """

    kind: Kind
    text: str
    rank: Count | None = None
    step: Count = 0
    clause: str = HALT
    seen: str = ""
    tensor: str = ""
    ranks: tuple[Count, ...] = ()
    bundle: str = ""
    written: bool = False

    @classmethod
    def of_violation(cls, error: Violation, rank: int) -> Cause:
        """The cause that `rank` publishes for `error`."""
        found = error.finding
        return cls(
            error.cause, str(error), rank, found.step, error.clause or HALT, found.seen, found.tensor, found.ranks,
            error.bundle, written=bool(error.bundle),
        )  # fmt: skip

    def violation(self) -> Violation:
        """The error that every live rank raises."""
        ranks = self.ranks or (() if self.rank is None else (self.rank,))
        finding = Finding(self.seen or self.text.partition("\n")[0], self.step, ranks, self.tensor)
        kind = Violation if self.kind == "violation" else Halted
        return kind(self.text, clause=self.clause, finding=finding, cause=self.kind, bundle=self.bundle)

    def text_for(self, rank: int) -> str:
        """What torch's launcher shows of `rank`: a violation in full of the rank that published it only."""
        return self.text.partition("\n")[0] if self.kind == "violation" and self.rank not in (None, rank) else self.text

    def with_rows(self, *rows: tuple[str, str]) -> Cause:
        """A copy with these rows (name, text) added to its message."""
        return replace(self, text="\n".join([self.text, *row_lines(rows)]))

    def checked(self, world: int) -> Cause:
        """This cause. Raises `ValueError` if it cannot come from one of `world` ranks."""
        highest = max([*self.ranks, self.rank or 0])
        if highest >= world:
            raise ValueError(f"a cause names rank {highest} of {world}")
        if not _NAME.fullmatch(self.clause):
            raise ValueError(f"a cause names the clause {self.clause!r}")
        return self


def row_lines(rows: Sequence[tuple[str, str]]) -> list[str]:
    """The rows (name, text) of a message, one line each, without those that have no text."""
    return [f"  {name:<8} {legible_line(text)}" for name, text in rows if text]


def consequence(error: BaseException) -> Literal["lost", "silent"] | None:
    """Whether an error only reports that another rank is lost or silent; None if it is this rank's own error.

    Gloo raises a plain `RuntimeError` for a lost peer, so only its text tells. Torch's network and store errors have
    types.
    """
    from_gloo = type(error) is RuntimeError and "gloo" in str(error)
    if type(error).__name__ not in _NETWORK_ERRORS and not from_gloo:
        return None
    text = str(error)
    if any(phrase in text for phrase in _SILENT):
        return "silent"
    return "lost" if any(phrase in text for phrase in _LOST) or not from_gloo else None


def kind_of(error: BaseException) -> Kind:
    """The kind of an error that is not a consequence of another rank's end."""
    if isinstance(error, Violation):
        return error.cause
    no_memory = isinstance(error, RuntimeError | OSError) and any(phrase in str(error) for phrase in _NO_MEMORY)
    if no_memory or isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out of memory"
    return "failed"


def first_line(error: BaseException) -> str:
    """The error's type and the first sentence of its text, made legible, because it may quote any bytes."""
    text = legible(str(error).strip().partition("\n")[0].partition(". ")[0])
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
