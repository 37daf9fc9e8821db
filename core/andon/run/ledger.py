"""The ledger of a run: one line a step, whole and linked, by one writer (design, One record; issue 3 item 6)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from andon.console.problems import InputError, Problem
from andon.run.atomic import storage
from andon_contracts.record import LedgerError, LedgerFile, Record, chain, read_lines

__all__ = ["LedgerError", "LedgerWriter", "digested_ledger", "read_ledger"]


class LedgerWriter(LedgerFile):
    """A `LedgerFile` that raises `InputError` for a disk that refuses and for a file that another program changed.

    Only the owner of the run folder may hold one.
    """

    def __init__(self, path: Path) -> None:
        with storage(path):
            super().__init__(path)

    def append(self, record: Record) -> None:
        """Write `record` as the next line, whole: on a disk that refuses, nothing of it stays (`InputError`)."""
        with storage(self.path), _alone():
            super().append(record)

    def sync(self) -> None:
        """Make all lines so far survive a power cut; done before anything that quotes the head."""
        with storage(self.path), _alone():
            super().sync()

    def close(self) -> None:
        """Sync and close; more than once is harmless."""
        with storage(self.path):
            super().close()


@contextmanager
def _alone() -> Iterator[None]:
    try:
        yield
    except LedgerError as error:
        raise InputError([Problem("", str(error))]) from error


def read_ledger(path: Path, *, follow: bool = False) -> Iterator[Record]:
    """The records of the ledger at `path`, verified as they are read; a torn last line is left out.

    follow: where `path` is a link, those of what it leads to. Raises `LedgerError` at the first line that does not fit,
    and `OSError` where there is none or no regular file.
    """
    for record, _ in read_lines(path, follow=follow):
        yield record


def digested_ledger(path: Path) -> Iterator[tuple[Record, str]]:
    """As `read_ledger`, each record with the digest of its line: what a checkpoint quotes of the line before it."""
    for record, raw in read_lines(path):
        yield record, chain(raw)
