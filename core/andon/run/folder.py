"""The run folder: its layout, whose it is, and its one writer (issue 2 item 8)."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

from andon.console.problems import InputError, Problem
from andon.run.atomic import clean_leftovers, is_leftover, remove, storage
from andon.run.ownership import OWNER_LIMIT, claimed, open_lock, refuse_claimed, sign, take
from andon_contracts.record import MAX_LINE
from andon_contracts.untrusted import MOST_JSON, open_regular

REPORTS = "reports"
"""Where ranks say how they ended; under torchrun it may be there before the folder has an owner."""
RUNS = Path("runs")
"""Where runs lie whose folder nobody names, in the working folder."""
_LOCK, _CLAIM, _TOKENS = ".lock", ".launch", "tokens"


class State(Enum):
    """The kinds of things at the path of a run folder."""

    EMPTY = "empty"
    """Nothing, or an empty folder: a run may start here."""
    UNFINISHED = "unfinished"
    """A run that has not ended: it may be resumed, or is being written."""
    FINISHED = "finished"
    """A run that reached its end."""
    FOREIGN = "foreign"
    """Something that is no run: never written to."""


@dataclass(frozen=True)
class RunFolder:
    """Where the files of the run at `path` are. Making one touches nothing."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def environment(self) -> Path:
        """Versions, machine and flags."""
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        """One line of JSON per logged step or evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """The folder of event files for TensorBoard."""
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def confusion(self) -> Path:
        """The folder of confusion matrices, a file each (`metrics/confusion`)."""
        return self.path / "confusion"

    @property
    def adapter(self) -> Path:
        """The PEFT adapter, or the whole model where there is none."""
        return self.path / "adapter"

    @property
    def ledger(self) -> Path:
        """One line per step."""
        return self.path / "ledger.jsonl"

    @property
    def provenance(self) -> Path:
        """Commit, configuration, data and base-model digests, versions."""
        return self.path / "provenance.json"

    @property
    def rows(self) -> Path:
        """The folder of rows that were no file of the user's; there only where some were not."""
        return self.path / "rows"

    @property
    def tokens(self) -> Path:
        """The folder of the rows as tokens; there only while the run is not finished, and where rows take long."""
        return self.path / _TOKENS

    @property
    def skipped(self) -> Path:
        """The rows that were not used, a line each (`data.bad_rows`)."""
        return self.path / "skipped_rows.txt"

    @property
    def summary(self) -> Path:
        """Outcome of the run; written last."""
        return self.path / "summary.json"

    @property
    def lock(self) -> Path:
        """The lock of the one writer; it also marks the folder as a run's."""
        return self.path / _LOCK

    def state(self) -> State:
        """The state of what stands here. Raises `InputError` where it cannot be read."""
        try:
            self._refuse_no_files()
            names = self.names()
        except FileNotFoundError:
            return State.EMPTY
        except NotADirectoryError:
            what = "is a file" if self.path.is_file() else "a part of the path is a file"
            raise InputError([Problem(str(self.path), f"{what}; name a folder for the run")]) from None
        except OSError as error:
            raise InputError([Problem(str(self.path), f"cannot be read: {error.strerror}")]) from error
        if all(name in (_LOCK, _CLAIM, REPORTS, _TOKENS) or is_leftover(name) for name in names):
            return State.EMPTY
        signed = "andon_run" in _json_object(_head(self.lock, OWNER_LIMIT))
        if not (signed or _starts_a_ledger(self.ledger)):
            return State.FOREIGN
        finished = _json_object(_head(self.summary, MOST_JSON)).get("finished") is True
        return State.FINISHED if finished else State.UNFINISHED

    def begun(self) -> bool:
        """Whether a run has left anything here that another must not write over.

        That is a line of its ledger, a checkpoint, or a line of its metrics, where its ledger was truncated.
        """
        saved = self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
        return saved or _starts_a_ledger(self.ledger) or bool(_head(self.metrics, 1))

    def names(self) -> frozenset[str]:
        """The names in the folder; none where there is no folder."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return frozenset(os.listdir(self.path))
        return frozenset()

    def discard_unbegun(self, *, before: frozenset[str] | None) -> None:
        """Remove what a run left that ended before it began (its lock, empty folders, what it started from).

        Nothing happens where a run has begun, or another process owns the folder. before: what stood in the folder then
        (`names`), and stays; None: there was no folder, so that none stays where it is empty.
        """
        if not self.lock.is_file() or self.state() is State.FOREIGN or self.begun():
            return
        handle = os.open(self.lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self.begun():  # by another process, between the first look and the lock
                return
            clean_leftovers(self.path)
            started = (self.config, self.environment, self.provenance, self.metrics, self.ledger, self.path / REPORTS)
            for path in (*started, self.skipped, self.rows, self.tokens, self.checkpoints, self.lock):
                if path.exists() and path.name not in (before or ()):
                    remove(path)
            if before is None and not any(self.path.iterdir()):
                self.path.rmdir()
        except BlockingIOError:
            return
        finally:
            os.close(handle)

    @contextmanager
    def open_for_writing(self) -> Iterator[RunFolder]:
        """Own the folder for the time of the context; it is created if it is not there, and cleaned of temporaries.

        The kernel releases the lock when the owner ends, however it ends. Ask for `state` inside. Raises `InputError`
        for a folder that another live process owns (naming its pid), that holds something else, or a link, which may
        lead out of it, or that cannot be written.
        """
        if self.state() is State.FOREIGN:
            raise InputError([Problem(str(self.path), "holds something that is no run; name a new or an empty folder")])
        self._refuse_links()
        with storage(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            handle = open_lock(self.lock)
        try:
            take(handle, self.lock, self.path)
            sign(handle, self.lock)
            clean_leftovers(self.path)
            with storage(self.checkpoints):
                self.checkpoints.mkdir(exist_ok=True)
                clean_leftovers(self.checkpoints)
            yield self
        finally:
            with suppress(OSError):  # the lock is released however the disk answers
                os.close(handle)

    def _refuse_no_files(self) -> None:
        """Raise `InputError` for a folder where a file belongs, and for a pipe, which would keep a reader waiting."""
        ours = {self.config, self.environment, self.metrics, self.ledger, self.provenance, self.summary, self.lock}
        names = {_CLAIM, *(path.name for path in ours)}
        there = [each for each in os.scandir(self.path) if each.name in names]
        found = [each.name for each in there if not (each.is_file() or each.is_symlink())]
        if found:
            raise InputError(
                [Problem(str(self.path / name), "is no file, but a folder, a pipe or a device") for name in found]
            )

    def _refuse_links(self) -> None:
        with storage(self.path, "read"):
            links = [name for name in sorted(self.names()) if (self.path / name).is_symlink()]
        if links:
            what = "is a link, which may lead out of the run's folder; put what it leads to in its place"
            raise InputError([Problem(str(self.path / name), what) for name in links])

    def claimed(self) -> AbstractContextManager[None]:
        """Be the one command that trains here: see `ownership.claimed`. The one writer is rank 0, in its own time."""
        return claimed(self.path, self.path / _CLAIM)

    def refuse_claimed(self) -> None:
        """Raise `InputError` where a command has claimed the folder."""
        refuse_claimed(self.path, self.path / _CLAIM)


def new_folder(base: Path = RUNS, now: datetime | None = None) -> Path:
    """A new empty folder under `base`, named by the time (UTC) to the second; later ones of a second count.

    It is this process's alone: making it fails for all others. Raises `InputError` where none can be made.
    """
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%d-%H%M%S")
    with storage(base):
        base.mkdir(parents=True, exist_ok=True)
    path, number = base / stamp, 1
    while not _made(path):
        number += 1
        path = base / f"{stamp}-{number}"
    return path


def _made(path: Path) -> bool:
    with storage(path):
        try:
            path.mkdir()
        except FileExistsError:
            return False
    return True


def metrics_lines(path: Path) -> Iterator[bytes]:
    """The lines of the metrics at `path`, up to a torn or overlong one. Raises `OSError` as `open_regular` does."""
    with open_regular(path) as file:
        while line := file.readline(MAX_LINE):
            yield line
            if not line.endswith(b"\n"):
                return


def _json_object(data: bytes) -> dict[str, object]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _head(path: Path, limit: int) -> bytes:
    """The first `limit` bytes of a file; nothing where there is none. Raises `InputError` where the disk fails."""
    try:
        with open_regular(path) as file:
            return file.read(limit)
    except OSError as error:
        if error.errno == errno.EIO:  # what cannot be read may be a run: it is neither begun anew nor called foreign
            raise InputError([Problem(str(path), f"cannot be read: {error.strerror}")]) from error
        return b""


def _starts_a_ledger(ledger: Path) -> bool:
    first, end, _ = _head(ledger, 1 << 20).partition(b"\n")
    start = _json_object(first)
    return bool(end) and {"v", "kind", "seq", "prev"} <= start.keys()
