"""A ledger as it was written, found by the path of a run folder or of the ledger itself (issue 3 item 6)."""

from __future__ import annotations

import gc
import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from andon.config.source import is_folder
from andon.console.messages import command_line
from andon.console.problems import InputError, Problem
from andon.run.folder import RunFolder
from andon.run.ledger import LedgerError, head_at, read_ledger
from andon_contracts.record import MAX_LINE, Record, Resume, Retraction, Start, Step
from andon_contracts.untrusted import open_regular


@dataclass(frozen=True)
class Recorded:
    """The records of one ledger in order. `folder` is the run's, None where only a ledger is at hand."""

    path: Path
    ledger: Path
    folder: RunFolder | None
    records: tuple[Record, ...]

    @property
    def name(self) -> str:
        """As messages call it."""
        return str(self.path)

    @property
    def start(self) -> Start | None:
        """The first line, where it is one of a start."""
        first = self.records[0] if self.records else None
        return first if isinstance(first, Start) else None

    @cached_property
    def trajectory(self) -> Mapping[int, Step]:
        """The steps that count, by rising number: the last record of each that was not taken back."""
        last: dict[int, Step] = {}
        numbers: list[int] = []  # a heap of those in `last`, the highest first
        for record in self.records:
            if isinstance(record, Step):
                if record.step not in last:
                    heapq.heappush(numbers, -record.step)
                last[record.step] = record
            elif isinstance(record, Retraction):
                while numbers and -numbers[0] > record.step:
                    del last[-heapq.heappop(numbers)]
        return {step: last[step] for step in sorted(last)}

    @cached_property
    def fingerprints(self) -> Mapping[int, Mapping[str, str]]:
        """By step of `trajectory`, the fingerprint of the process group that did it: its bits may depend on that.

        0 stands for the start.
        """
        found: dict[int, Mapping[str, str]] = {}
        current: Mapping[str, str] = {}
        for record in self.records:
            if isinstance(record, Start | Resume):
                current = record.fingerprint
                found.setdefault(0, current)
            elif isinstance(record, Step):
                found[record.step] = current
        return found

    @cached_property
    def head(self) -> tuple[int, str]:
        """Lines, and the digest of the last of them."""
        count = len(self.records)
        return count, head_at(self.ledger, count, follow=self.folder is None) or ""

    @property
    def torn(self) -> int:
        """Bytes of an unfinished last line, which a crash leaves."""
        whole = 0
        with open_regular(self.ledger, follow=self.folder is None) as file:
            while raw := file.readline(MAX_LINE + 1):
                whole += len(raw) if raw.endswith(b"\n") else 0
            return file.tell() - whole


def open_recorded(path: Path) -> Recorded:
    """The ledger of the run folder `path`, or the ledger that `path` is, verified line by line.

    Raises `InputError` where there is none, it cannot be read, or a line does not fit.
    """
    folder = RunFolder(path) if is_folder(path) else None
    ledger = folder.ledger if folder is not None else path
    collects = gc.isenabled()
    try:
        # Nothing of a record refers back to it: to search for cycles again and again costs a third of a long ledger.
        gc.disable()
        return Recorded(path, ledger, folder, tuple(read_ledger(ledger, follow=folder is None)))
    except FileNotFoundError:
        what = "there is no such run" if folder is None else f"holds no run: it has no {ledger.name}"
        raise InputError([Problem(str(path), what)]) from None
    except OSError as error:
        raise InputError([Problem(str(ledger), f"cannot be read: {error.strerror}")]) from error
    except LedgerError as error:
        raise InputError(
            [Problem("", f"{error}; for all that is wrong: {command_line('andon', 'verify', path)}")]
        ) from error
    finally:
        if collects:
            gc.enable()
