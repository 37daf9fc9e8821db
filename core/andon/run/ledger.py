"""The ledger of a run: one line a step, whole and linked, by one writer (design, One record; issue 3 item 6)."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from andon.console.problems import InputError, Problem
from andon.run.atomic import storage
from andon_contracts.ledger import LedgerError, LedgerFile, read_lines
from andon_contracts.record import GENESIS, Record, Step, chain

__all__ = [
    "CAUSAL",
    "REPEATED",
    "LedgerError",
    "LedgerWriter",
    "differing",
    "digested_ledger",
    "head_at",
    "read_ledger",
    "same_again",
    "value_of",
]

REPEATED = ("epoch", "position", "ids", "count", "lr", "loss", "grad_norm", "correct", "digests")
"""What a step that is done again has as before. Where it ran (world size, backend, who did what) may differ."""
CAUSAL = ("epoch", "ids", "count", "content", "lr", "loss", "correct", "gradient", "grad_norm", "weights", "optimizer")
"""The same with each digest by itself, causes before their effects; the position goes with the ids."""


class LedgerWriter(LedgerFile):
    """A `LedgerFile` whose refusing disk is an `InputError`. Only the owner of the run folder may hold one.

    Lines that go to a file without a name are lost, and no disk refuses them: a ledger that was removed, moved or
    replaced while it is written to is an `InputError` too.
    """

    def __init__(self, path: Path) -> None:
        with storage(path):
            super().__init__(path)

    def append(self, record: Record) -> None:
        """Write `record` as the next line, whole: on a disk that refuses, nothing of it stays (`InputError`)."""
        with storage(self.path):
            self._require_in_place()
            super().append(record)

    def sync(self) -> None:
        """Make all lines so far survive a power cut; done before a checkpoint that quotes the head."""
        with storage(self.path):
            self._require_in_place()
            super().sync()

    def close(self) -> None:
        """Sync and close; more than once is harmless."""
        with storage(self.path):
            super().close()

    def _require_in_place(self) -> None:
        written = os.fstat(self._handle)
        if not stat.S_ISREG(written.st_mode):
            return
        try:
            in_place = os.path.samestat(written, self.path.lstat())
        except (FileNotFoundError, NotADirectoryError):
            in_place = False
        if not in_place:
            what = "was removed, moved or replaced while the run wrote to it; its lines would be lost"
            raise InputError([Problem(str(self.path), what)])


def read_ledger(path: Path) -> Iterator[Record]:
    """The records of the ledger at `path`, verified as they are read; a torn last line is left out.

    Raises `LedgerError` at the first line that does not fit, and `FileNotFoundError`.
    """
    for line, _ in read_lines(path):
        yield line.record


def digested_ledger(path: Path) -> Iterator[tuple[Record, str]]:
    """As `read_ledger`, each record with the digest of its line: what a checkpoint quotes of the line before it."""
    for line, raw in read_lines(path):
        yield line.record, chain(raw)


def head_at(path: Path, count: int) -> str | None:
    """The digest of line `count` (from 1; 0: the digest before the first), or None where the ledger is shorter.

    A checkpoint quotes the head that the ledger had: another digest here means that the two do not belong together.
    """
    if count == 0:
        return GENESIS
    for line, raw in read_lines(path):
        if line.seq + 1 == count:
            return chain(raw)
    return None


def same_again(old: Step, new: Step) -> tuple[str, ...]:
    """`name: old, now new` for each field that differs between two records of one step; empty where it was repeated.

    The clause `resume-exact` allows none.
    """
    return tuple(
        f"{name}: {_short(getattr(old, name))}, now {_short(getattr(new, name))}"
        for name in REPEATED
        if getattr(old, name) != getattr(new, name)
    )


def differing(record: Step, twin: Step) -> tuple[str, ...]:
    """The fields of `CAUSAL` that differ between two records of one step."""
    return tuple(name for name in CAUSAL if value_of(record, name) != value_of(twin, name))


def value_of(record: Step, name: str) -> object:
    """A field of `record`, or one of its digests."""
    return getattr(record, name) if hasattr(record, name) else getattr(record.digests, name)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 300 else text[:297] + "..."
