"""The run folder: its layout, its state, its one writer, and the one command that trains in it.

A lock belongs to an open file (flock), so the kernel releases it however its owner ends. The text in a lock is only for
readers.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Any, Self

from andon.console.messages import InputError, Problem
from andon.run.atomic import clean_leftovers, is_leftover, json_bytes, remove, storage, write_all
from andon_contracts.record import MAX_LINE
from andon_contracts.untrusted import MOST_JSON, open_regular

REPORTS = "reports"
"""The folder of the ranks' end reports. Under torchrun it may exist before the run folder has an owner."""
RUNS = Path("runs")
"""The default parent of run folders, in the working folder."""
_OWNER_LIMIT = 4096


class State(Enum):
    EMPTY = "empty"
    """Nothing, or an empty folder: a run may start here."""
    UNFINISHED = "unfinished"
    """A run that has not ended: it can be resumed, or is being written."""
    FINISHED = "finished"
    """A run that reached its end."""
    FOREIGN = "foreign"
    """Files that are not a run's: never written to."""


class RunFolder:
    """The paths of the files of the run at `path`. The constructor does not access the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.environment = path / "environment.json"
        self.provenance = path / "provenance.json"
        self.ledger = path / "ledger.jsonl"
        self.metrics = path / "metrics.jsonl"
        """One line of JSON per logged step or evaluation."""
        self.events = path / "tensorboard"
        self.checkpoints = path / "checkpoints"
        self.confusion = path / "confusion"
        """The folder of confusion matrices, one file each (`metrics/confusion`)."""
        self.adapter = path / "adapter"
        """The PEFT adapter, or the whole model of a run without one."""
        self.rows = path / "rows"
        """The rows that the caller passed as Python objects."""
        self.tokens = path / "tokens"
        """The tokenised rows; only until the run is finished, and only if tokenising takes long."""
        self.skipped = path / "skipped_rows.txt"
        """The rows that were skipped, one per line (`data.bad_rows`)."""
        self.summary = path / "summary.json"
        """The outcome of the run; written last."""
        self.lock = path / ".lock"
        """The lock of the one writer; it also marks the folder as a run's."""
        self._claim = path / ".launch"

    def state(self) -> State:
        """The state of the folder. Raises `InputError` if it cannot be read."""
        try:
            self._refuse_no_files()
            names = self.names()
        except FileNotFoundError:
            return State.EMPTY
        except NotADirectoryError:
            what = "is a file" if self.path.is_file() else "a part of the path is a file"
            raise InputError.at(self.path, f"{what}; name a folder for the run") from None
        except OSError as error:
            raise InputError.at(self.path, f"cannot be read: {error.strerror}") from error
        ours = (self.lock.name, self._claim.name, REPORTS, self.tokens.name)
        if all(name in ours or is_leftover(name) for name in names):
            return State.EMPTY
        signed = "andon_run" in _json_object(_head(self.lock, _OWNER_LIMIT))
        if not (signed or _starts_a_ledger(self.ledger)):
            return State.FOREIGN
        finished = _json_object(_head(self.summary, MOST_JSON)).get("finished") is True
        return State.FINISHED if finished else State.UNFINISHED

    def begun(self) -> bool:
        """Whether a run has written data that another run must not overwrite.

        That is a line of its ledger, a checkpoint, or, if its ledger was truncated, a line of its metrics.
        """
        saved = self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
        return saved or _starts_a_ledger(self.ledger) or bool(_head(self.metrics, 1))

    def names(self) -> frozenset[str]:
        with suppress(FileNotFoundError, NotADirectoryError):
            return frozenset(os.listdir(self.path))
        return frozenset()

    def discard_unbegun(self, *, before: frozenset[str] | None) -> None:
        """Remove the files of a run that ended before it began (lock, configuration, reports, empty folders).

        Does nothing if a run has begun, or another process owns the folder. before: `names` before the run, which stay;
        None: the folder did not exist, so it is removed if empty.
        """
        if not self.lock.is_file() or self.state() is State.FOREIGN or self.begun():
            return
        handle = os.open(self.lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self.begun():  # by another process, between the first check and the lock
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
    def open_for_writing(self) -> Iterator[Self]:
        """Context manager: own the folder, which is created if necessary and cleaned of temporaries.

        Call `state` inside. Raises `InputError` if another live process owns it (naming its pid), if it holds foreign
        files or a link, which may lead out of it, or if it cannot be written.
        """
        if self.state() is State.FOREIGN:
            raise InputError.at(self.path, "is not a run folder of Andon; name a new or an empty folder")
        with storage(self.path, "read"):
            links = [name for name in sorted(self.names()) if (self.path / name).is_symlink()]
        if links:
            what = "is a symbolic link, which may lead out of the run's folder; replace it with the file itself"
            raise InputError([Problem(str(self.path / name), what) for name in links])
        with storage(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            handle = open_lock(self.lock)
        try:
            self._take(handle, self.lock)
            _sign(handle, self.lock)
            clean_leftovers(self.path)
            with storage(self.checkpoints):
                self.checkpoints.mkdir(exist_ok=True)
                clean_leftovers(self.checkpoints)
            yield self
        finally:
            with suppress(OSError):  # the lock is released even if closing fails
                os.close(handle)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Context manager: claim the folder for one training command, from before its ranks start until all have ended.

        The writer's lock belongs to rank 0 and is free while ranks start and end. On exit the claim is removed, and the
        folder too if it was created here and is empty, even if a signal handler raises. Raises `InputError` if another
        command holds the claim.
        """
        with storage(self.path):
            created = not self.path.exists()
        handle = None
        try:
            with storage(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                handle = open_lock(self._claim)
            self._take(handle, self._claim)
            with suppress(InputError):  # a full disk is reported by the next write
                _sign(handle, self._claim)
            yield
        finally:
            if handle is not None:
                os.close(handle)
            with suppress(OSError):
                _remove_unclaimed(self._claim)
            if created:
                with suppress(OSError):  # it stays if anything is in it
                    self.path.rmdir()

    def refuse_claimed(self) -> None:
        """Raise `InputError` if a command has claimed the folder; for ranks that no command of ours started."""
        with storage(self._claim, "read"):
            try:
                handle = os.open(self._claim, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                return
        try:
            with storage(self._claim, "read"):
                self._lock(handle, fcntl.LOCK_SH)  # shared: ranks that check at the same time do not block each other
        finally:
            os.close(handle)

    def _take(self, handle: int, file: Path) -> None:
        with storage(file):
            self._lock(handle, fcntl.LOCK_EX)
            current = _is_at(handle, file)
        if not current:  # others now lock another file of this name
            raise InputError.at(self.path, "was just removed by the command that used it; try again")

    def _lock(self, handle: int, how: int) -> None:
        try:
            fcntl.flock(handle, how | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError.at(self.path, f"is being written by {_owner(handle)}") from None

    def _refuse_no_files(self) -> None:
        ours = {self.config, self.environment, self.metrics, self.ledger, self.provenance, self.summary, self.lock}
        names = {path.name for path in (*ours, self._claim)}
        entries = [each for each in os.scandir(self.path) if each.name in names]
        what = "is not a regular file, but a folder, a pipe or a device"
        if wrong := [each.name for each in entries if not (each.is_file() or each.is_symlink())]:
            raise InputError([Problem(str(self.path / name), what) for name in wrong])


def open_lock(file: Path) -> int:
    """A descriptor of `file`, which is created if it does not exist. Links are not followed."""
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)


def _sign(handle: int, file: Path) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    data = json_bytes({"andon_run": 1, "pid": os.getpid(), "host": socket.gethostname(), "since": now.isoformat()})
    with storage(file):
        # Overwritten, then truncated: the folder is recognisable as a run's at every moment.
        write_all(handle, data)
        os.ftruncate(handle, len(data))


def _owner(handle: int) -> str:
    owner = _json_object(os.pread(handle, _OWNER_LIMIT, 0))
    if "pid" not in owner:
        return "another process, which has just started"
    return f"process {owner['pid']} on {owner.get('host')} since {owner.get('since')}; wait for it or end it"


def _is_at(handle: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), file.lstat())
    except FileNotFoundError:
        return False


def _remove_unclaimed(file: Path) -> None:
    handle = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(handle, file):
            file.unlink()
    finally:
        os.close(handle)


def new_folder(base: Path = RUNS, now: datetime | None = None) -> Path:
    """Create a folder under `base`, named by the time (UTC) to the second, and by a number if that is taken.

    Safe for concurrent processes. Raises `InputError` if none can be created.
    """
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%d-%H%M%S")
    with storage(base):
        base.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = base / (stamp if number == 1 else f"{stamp}-{number}")
        with storage(path), suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError


def metrics_lines(path: Path) -> Iterator[bytes]:
    """The lines of the metrics at `path`, up to and including a torn or overlong one. Raises as `open_regular`."""
    with open_regular(path) as file:
        while line := file.readline(MAX_LINE):
            yield line
            if not line.endswith(b"\n"):
                return


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _head(path: Path, limit: int) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(limit)
    except OSError as error:
        if error.errno == errno.EIO:  # it may be a run: neither start over nor call it foreign
            raise InputError.at(path, f"cannot be read: {error.strerror}") from error
        return b""


def _starts_a_ledger(ledger: Path) -> bool:
    first, end, _ = _head(ledger, 1 << 20).partition(b"\n")
    return bool(end) and {"v", "kind", "seq", "prev"} <= _json_object(first).keys()
