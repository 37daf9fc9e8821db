"""The ledger of a run: hash-chained lines, one per step, from a single writer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from andon.console.problems import InputError
from andon.run.atomic import storage
from andon_contracts.record import LedgerError as LedgerError
from andon_contracts.record import LedgerFile, Record, chain, read_lines


class LedgerWriter(LedgerFile):
    """A `LedgerFile` that raises `InputError` if the disk fails or another program changed the file.

    Only the owner of the run folder may open one.
    """

    def __init__(self, path: Path) -> None:
        with storage(path):
            super().__init__(path)

    def append(self, record: Record) -> None:
        with _refusals(self.path):
            super().append(record)

    def sync(self) -> None:
        with _refusals(self.path):
            super().sync()

    def close(self) -> None:
        """Sync and close. Idempotent."""
        with storage(self.path):
            super().close()


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    try:
        with storage(path):
            yield
    except LedgerError as error:
        raise InputError.at("", str(error)) from error


def read_ledger(path: Path) -> Iterator[Record]:
    """The records of the ledger at `path`, verified as they are read, without a torn last line.

    Raises `LedgerError` at the first wrong line, and `OSError` as `open_regular`.
    """
    for record, _ in read_lines(path):
        yield record


def digested_ledger(path: Path) -> Iterator[tuple[Record, str]]:
    """As `read_ledger`, with the digest of each record's line. A checkpoint stores that of the line before it."""
    for record, raw in read_lines(path):
        yield record, chain(raw)
