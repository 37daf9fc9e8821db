"""Files that say who has a run folder. A lock on one is held by an open file, so that the kernel releases it with its
owner, however that ends; what stands in it is for readers.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from andon.console.problems import InputError, Problem
from andon.run.atomic import json_bytes, storage, write_all

OWNER_LIMIT = 4096
"""Bytes that are read of such a file."""


def open_lock(file: Path) -> int:
    """A descriptor of the file, which is created where it is not there; a link is not followed."""
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)


def take(handle: int, file: Path, run: Path) -> None:
    """Lock the open file for this process alone.

    Raises `InputError` that names `run` where another has it, or has removed the file meanwhile: a lock on a file
    without a name keeps nobody out.
    """
    try:
        with storage(file):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            there = _is_at(handle, file)
    except BlockingIOError:
        raise InputError([Problem(str(run), f"is being written by {_owner(handle)}")]) from None
    if not there:
        raise InputError([Problem(str(run), "was just discarded by the process that had it; try again")])


def sign(handle: int, file: Path) -> None:
    """Write who this process is into the file that it has taken. Raises `InputError` where the disk refuses."""
    now = datetime.now(UTC).replace(microsecond=0)
    owner = {"andon_run": 1, "pid": os.getpid(), "host": socket.gethostname(), "since": now.isoformat()}
    data = json_bytes(owner)
    with storage(file):
        # Written over, then cut: at no moment is the mark of a run gone from its folder.
        write_all(handle, data)
        os.ftruncate(handle, len(data))


@contextmanager
def claimed(run: Path, file: Path) -> Iterator[None]:
    """Be the one command that trains in `run`, from before its ranks are there until after all of them have ended.

    The writer's own lock is rank 0's, and free while ranks start and end; this one is not. Nothing of it stays, nor
    the folder where it was made for this and is empty, whatever a signal's handler raises meanwhile. Raises
    `InputError` where another command has it.
    """
    with storage(run):
        made = not run.exists()
    handle = None
    try:
        with storage(run):
            run.mkdir(parents=True, exist_ok=True)
            handle = open_lock(file)
        take(handle, file, run)
        with suppress(InputError):  # a disk that is full is found by what needs it
            sign(handle, file)
        yield
    finally:
        if handle is not None:
            os.close(handle)
        with suppress(OSError):
            _remove_unclaimed(file)
        if made:
            with suppress(OSError):  # it stays where anything is in it
                run.rmdir()


def _remove_unclaimed(file: Path) -> None:
    """Remove a claim that nobody holds; another command's, which came first or since, stays (`BlockingIOError`)."""
    handle = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(handle, file):
            file.unlink()
    finally:
        os.close(handle)


def refuse_claimed(run: Path, file: Path) -> None:
    """Raise `InputError` where a command has claimed the folder; to be asked by ranks that belong to no command."""
    with storage(file, "read"):
        try:
            handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return
    try:
        with storage(file, "read"):
            # Shared: ranks that ask at the same time do not keep each other out.
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError([Problem(str(run), f"is being written by {_owner(handle)}")]) from None
    finally:
        os.close(handle)


def _is_at(handle: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), file.lstat())
    except FileNotFoundError:
        return False


def _owner(handle: int) -> str:
    try:
        found: Any = json.loads(os.pread(handle, OWNER_LIMIT, 0))
    except (ValueError, RecursionError):
        found = {}
    if not isinstance(found, dict) or "pid" not in found:
        return "another process, which has just started"
    return f"process {found['pid']} on {found.get('host')} since {found.get('since')}; wait for it or end it"
