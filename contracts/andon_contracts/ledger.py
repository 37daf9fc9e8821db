"""The file of a ledger: lines appended whole by one writer, verified as they are read (design, One record).

Who trains with `andon train` and who only watches write the same file; what differs is what a refusing disk means to
them, so here it is an `OSError`.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from andon_contracts.record import GENESIS, MAX_LINE, Line, Record, chain, decode_line, encode, link
from andon_contracts.untrusted import open_regular

_BEGINNING = 16


class LedgerError(ValueError):
    """A ledger that is not the one that was written; the message names the file and the line."""


def write_all(handle: int, data: bytes | memoryview) -> None:
    """Write all of `data`; a single write may take less."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def tampered(handle: int, path: Path, size: int) -> str:
    """What another program did to the file at `path`, to which only `handle` appends; empty if nothing.

    size: the bytes that the file had, or was given, so far. Lines that are written into a file without a name, or after
    the start of the file was cut off (log rotation by `copytruncate`), are lost, and no disk refuses them.
    """
    now = os.fstat(handle)
    try:
        in_place = os.path.samestat(now, path.lstat())
    except (FileNotFoundError, NotADirectoryError):
        in_place = False
    if not in_place:
        return "was removed, moved or replaced while the run wrote to it; its lines would be lost"
    if now.st_size == size:
        return ""
    done = "truncated" if now.st_size < size else "written to"
    by = "by another program while the run wrote to it"
    return f"was {done} {by}: it has {now.st_size} bytes, the run left {size}; exclude it from log rotation"


class LedgerFile:
    """Appends records to the ledger at `path`, which is created if it is not there.

    What is there is verified first. A line without its end, as a crash leaves it, is cut off; `torn` is its number of
    bytes, for the record of the resume. Raises `LedgerError` for any other damage, for a file of something else, of
    which nothing is cut off, and `OSError` for a disk that refuses. There may be one writer at a time: `append`, `sync`
    and `close` raise `LedgerError` where another program truncated, wrote to or replaced the file. What is no file of a
    disk, as a pipe or a device, is written to only.
    """

    def __init__(self, path: Path, *, alone: bool = False) -> None:
        """alone: keep every other process that asks for the same away until this one closes.

        Then raises `BlockingIOError`, and changes nothing, where another one is there first.
        """
        self.path = path
        self._place = path.absolute()  # the process may change its working folder
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            # Before anything is cut off: what looks torn may be the line that another one is writing.
            if alone:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._kept = stat.S_ISREG(os.fstat(self._handle).st_mode)
            self._count, self._digest, self._size = _scan(path) if self._kept else (0, GENESIS, 0)
            self.torn = os.fstat(self._handle).st_size - self._size if self._kept else 0
            if self.torn and not self._count and not _begins_a_ledger(os.pread(self._handle, _BEGINNING, 0)):
                raise LedgerError(f"{path}:1: not the beginning of a ledger")
            if self.torn:
                os.ftruncate(self._handle, self._size)
                os.fsync(self._handle)
            # The name of a new file has to survive a power cut as its lines do.
            fsync_folder(path.parent)
        except BaseException:
            os.close(self._handle)
            raise

    @property
    def head(self) -> tuple[int, str]:
        """The number of lines and the digest of the last one: what a checkpoint or summary quotes."""
        return self._count, self._digest

    def append(self, record: Record) -> None:
        """Write `record` as the next line, whole: on a disk that refuses (`OSError`), nothing of it stays."""
        line = encode(record, self._count, self._digest)
        self._require_alone()
        try:
            write_all(self._handle, line)
            self._count, self._digest, self._size = self._count + 1, chain(line), self._size + len(line)
        except BaseException:
            # The chain goes on from whole lines alone, also where the caller goes on after this.
            if self._kept:
                os.ftruncate(self._handle, self._size)
            raise

    def sync(self) -> None:
        """Make all lines so far survive a power cut; done before a checkpoint that quotes the head."""
        if self._kept:
            self._require_alone()
            os.fsync(self._handle)

    def _require_alone(self) -> None:
        what = tampered(self._handle, self._place, self._size) if self._kept else ""
        if what:
            raise LedgerError(f"{self.path}: {what}")

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
        try:
            self.close()
        except ValueError:
            if error is None:  # else the error that is being raised comes first
                raise


def read_lines(path: Path, *, follow: bool = False) -> Iterator[tuple[Line, bytes]]:
    """The lines of the ledger at `path` with their bytes, verified as they are read; a torn last one is left out.

    follow: where `path` is a link, those of what it leads to. Raises `LedgerError` at the first line that does not fit,
    `FileNotFoundError`, and `OSError` for what is no regular file.
    """
    count, digest = 0, GENESIS
    with open_regular(path, follow=follow) as file:
        while raw := file.readline(MAX_LINE + 1):
            # Torn: a crash leaves such a line, and whoever writes on cuts it off.
            if not raw.endswith(b"\n") and len(raw) <= MAX_LINE:
                return
            try:
                line = decode_line(raw)
                link(line, count, digest)
            except ValueError as error:
                raise LedgerError(f"{path}:{count + 1}: {error}") from None
            yield line, raw
            count, digest = count + 1, chain(raw)


def _begins_a_ledger(piece: bytes) -> bool:
    """Whether a crash may have left these first bytes of a first line: its keys are sorted. Some disks leave zeros."""
    starts = (b'{"algorithms":', b'{"backend":')
    return not piece.strip(b"\0") or any(piece[: len(start)] == start[: len(piece)] for start in starts)


def _scan(path: Path) -> tuple[int, str, int]:
    """Number of lines, digest of the last, bytes of the whole lines."""
    count, digest, size = 0, GENESIS, 0
    for _, raw in read_lines(path):
        count, digest, size = count + 1, chain(raw), size + len(raw)
    return count, digest, size
