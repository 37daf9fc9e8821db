"""The ledger of a run: one line a step, whole and linked, by one writer (design, One record; issue 3 item 6)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from andon.run.atomic import fsync_folder, storage, write_all
from andon_contracts.record import GENESIS, MAX_LINE, Line, Record, Step, chain, decode_line, encode, link

_REPEATED = ("epoch", "position", "ids", "count", "lr", "loss", "grad_norm", "correct", "digests")


class LedgerError(ValueError):
    """A ledger that is not the one that was written; the message names the file and the line."""


class LedgerWriter:
    """Appends records to the ledger at `path`, which is created if it is not there.

    What is there is verified first. A line without its end, as a crash leaves it, is cut off; `torn` is its number of
    bytes, for the record of the resume. Raises `LedgerError` for any other damage and `InputError` for a disk that
    refuses. Only the owner of the run folder may hold one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with storage(path):
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                self._count, self._digest, self._size = _scan(path)
                self.torn = os.fstat(self._handle).st_size - self._size
                if self.torn:
                    os.ftruncate(self._handle, self._size)
                    os.fsync(self._handle)
                fsync_folder(path.parent)
            except BaseException:
                os.close(self._handle)
                raise

    @property
    def head(self) -> tuple[int, str]:
        """The number of lines and the digest of the last one: what a checkpoint or summary quotes."""
        return self._count, self._digest

    def append(self, record: Record) -> None:
        """Write `record` as the next line, whole: on a disk that refuses, nothing of it stays (`InputError`)."""
        line = encode(record, self._count, self._digest)
        with storage(self._path):
            try:
                write_all(self._handle, line)
                self._count, self._digest, self._size = self._count + 1, chain(line), self._size + len(line)
            except BaseException:
                os.ftruncate(self._handle, self._size)
                raise

    def sync(self) -> None:
        """Make all lines so far survive a power cut; done before a checkpoint that quotes the head."""
        with storage(self._path):
            os.fsync(self._handle)

    def close(self) -> None:
        """Sync and close; more than once is harmless."""
        if self._handle >= 0:
            try:
                self.sync()
            finally:
                os.close(self._handle)
                self._handle = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_ledger(path: Path) -> Iterator[Record]:
    """The records of the ledger at `path`, verified as they are read; a torn last line is left out.

    Raises `LedgerError` at the first line that does not fit, and `FileNotFoundError`.
    """
    for line, _ in _verified(path):
        yield line.record


def head_at(path: Path, count: int) -> str | None:
    """The digest of line `count` (from 1; 0: the digest before the first), or None where the ledger is shorter.

    A checkpoint quotes the head that the ledger had: another digest here means that the two do not belong together.
    """
    if count == 0:
        return GENESIS
    for line, raw in _verified(path):
        if line.seq + 1 == count:
            return chain(raw)
    return None


def same_again(old: Step, new: Step) -> tuple[str, ...]:
    """What differs between two records of one step, as `name: old, now new`; empty where the step was repeated exactly.

    Where it ran (world size, backend, which rank did what) may differ; rows, learning rate, loss, norm, counts and
    digests may not (clause `resume-exact`).
    """
    return tuple(
        f"{name}: {_short(getattr(old, name))}, now {_short(getattr(new, name))}"
        for name in _REPEATED
        if getattr(old, name) != getattr(new, name)
    )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 300 else text[:297] + "..."


def _scan(path: Path) -> tuple[int, str, int]:
    """Number of lines, digest of the last, bytes of the whole lines."""
    count, digest, size = 0, GENESIS, 0
    for _, raw in _verified(path):
        count, digest, size = count + 1, chain(raw), size + len(raw)
    return count, digest, size


def _verified(path: Path) -> Iterator[tuple[Line, bytes]]:
    count, digest = 0, GENESIS
    with path.open("rb") as file:
        while raw := file.readline(MAX_LINE + 1):
            if not raw.endswith(b"\n") and len(raw) <= MAX_LINE:
                return
            try:
                line = decode_line(raw)
                link(line, count, digest)
            except ValueError as error:
                raise LedgerError(f"{path}:{count + 1}: {error}") from None
            yield line, raw
            count, digest = count + 1, chain(raw)
