"""Why all ranks stop: a violation, or an end without one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from andon_contracts.fields import Count, Part
from andon_contracts.legible import legible, legible_line
from andon_contracts.violation import Finding, Halted, Kind, Violation

HALT = "halt-together"
_NAME = re.compile(r"[A-Za-z0-9][\w .-]{0,99}")
"""What a clause may be called: its name becomes that of a folder."""

_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
_SILENT = ("Timed out waiting", "Wait timeout", "timed out after", "Timed out after", "Socket Timeout")
_NETWORK_ERRORS = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})
_NO_MEMORY = ("can't allocate memory", "out of memory", "Cannot allocate memory")


@dataclass(frozen=True)
class Cause(Part):
    """Why all ranks stop, the same on every rank. `text` is the whole message, `rank` whose doing it is, if known."""

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
    """Whether the bundle was written when the violation was judged, on every rank."""

    @classmethod
    def of_violation(cls, error: Violation, rank: int) -> Cause:
        """The cause that `rank` sends to the others for the `error` that it raised."""
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

    def with_rows(self, *rows: tuple[str, str]) -> Cause:
        """The same with these rows (name, text) added to its message."""
        return replace(self, text="\n".join([self.text, *row_lines(rows)]))

    def checked(self, world: int) -> Cause:
        """This cause, if it can come from one of `world` ranks. Raises `ValueError` if it cannot."""
        named = (*self.ranks, *([] if self.rank is None else [self.rank]))
        if any(rank >= world for rank in named):
            raise ValueError(f"a cause names rank {max(named)} of {world}")
        if not _NAME.fullmatch(self.clause):
            raise ValueError(f"a cause names the clause {self.clause!r}")
        return self


def row_lines(rows: Sequence[tuple[str, str]]) -> list[str]:
    """The rows of a message that say something, one line each."""
    return [f"  {name:<8} {legible_line(text)}" for name, text in rows if text]


def consequence(error: BaseException) -> Literal["lost", "silent"] | None:
    """Whether an error only says that another rank is lost or silent; None if it is this rank's own.

    Gloo raises a plain `RuntimeError` for a peer that is gone, so its text has to be read; torch's own network and
    store errors have types.
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
    name, text = type(error).__name__, str(error)
    starved = isinstance(error, MemoryError) or name == "OutOfMemoryError"
    if starved or (isinstance(error, RuntimeError | OSError) and any(phrase in text for phrase in _NO_MEMORY)):
        return "out of memory"
    return "failed"


def first_line(error: BaseException) -> str:
    """The error's type and the first sentence of its text, which may quote what anybody wrote."""
    text = legible(str(error).strip().partition("\n")[0].partition(". ")[0])
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
