"""The file of a ledger, of `andon train` and of a watch: one writer appends whole lines; readers verify them."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from andon_contracts.record import GENESIS, MAX_LINE, Record, chain, decode_line, encode
from andon_contracts.untrusted import open_regular


class LedgerError(ValueError):
    """A ledger that was changed after it was written; the message names the file and the line."""


def write_all(handle: int, data: bytes | memoryview) -> None:
    """Write all of `data`; a single `os.write` may write less."""
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


def outside_change(handle: int, path: Path, size: int) -> str:
    """What another program did to the file at `path`, to which only `handle` should append; "" if nothing.

    size: the bytes that the file should have. A write to a file that lost its name or its start (log rotation by
    `copytruncate`) succeeds, but its lines are lost.
    """
    now = os.fstat(handle)
    try:
        linked = os.path.samestat(now, path.lstat())
    except (FileNotFoundError, NotADirectoryError):
        linked = False
    if not linked:
        return "was removed, moved or replaced while the run wrote to it; its lines would be lost"
    if now.st_size == size:
        return ""
    done = f"was {'truncated' if now.st_size < size else 'written to'} by another program while the run wrote to it"
    return f"{done}: it has {now.st_size} bytes, the run left {size}; exclude it from log rotation"


class LedgerFile:
    """Appends records to the ledger at `path`, which is created if it does not exist.

    Existing lines are verified first. An unfinished last line, as a crash leaves it, is cut off; `torn` is its number
    of bytes. Raises `LedgerError`, and changes nothing, for any other damage or kind of file, and `OSError` if the disk
    refuses. There is one writer: `append`, `sync` and `close` raise `LedgerError` if another program truncated, wrote
    to or replaced the file. A pipe or a device is written to and never read.
    """

    def __init__(self, path: Path, *, exclusive: bool = False) -> None:
        """exclusive: lock the file. Raises `BlockingIOError`, and changes nothing, if another process has the lock."""
        self.path = path
        self._absolute = path.absolute()  # the process may change its working folder
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            # Lock before cutting: another process may be writing the line that looks torn.
            if exclusive:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._is_regular = stat.S_ISREG(os.fstat(self._handle).st_mode)
            self._count, self._digest, self._size, self.torn = 0, GENESIS, 0, 0
            if self._is_regular:
                for _, line in read_lines(path):
                    self._count, self._digest, self._size = self._count + 1, chain(line), self._size + len(line)
                self.torn = os.fstat(self._handle).st_size - self._size
            if self.torn:
                # Keys are sorted, so a first line begins with one of these. Some disks leave zeros after a crash.
                piece, starts = os.pread(self._handle, 16, 0), (b'{"algorithms":', b'{"backend":')
                begins = not piece.strip(b"\0") or any(start[: len(piece)] == piece[: len(start)] for start in starts)
                if not self._count and not begins:
                    raise LedgerError(f"{path}:1: not the beginning of a ledger")
                os.ftruncate(self._handle, self._size)
                os.fsync(self._handle)
            fsync_folder(path.parent)  # the name of a new file must survive a power cut as its lines do
        except BaseException:
            os.close(self._handle)
            raise

    @property
    def head(self) -> tuple[int, str]:
        """The number of lines and the digest of the last line, which checkpoints and summaries quote."""
        return self._count, self._digest

    def append(self, record: Record) -> None:
        """Write `record` as the next line; if the disk refuses (`OSError`), nothing of the line remains."""
        line = encode(record, self._count, self._digest)
        self._require_unchanged()
        try:
            write_all(self._handle, line)
            self._count, self._digest, self._size = self._count + 1, chain(line), self._size + len(line)
        except BaseException:
            if self._is_regular:
                os.ftruncate(self._handle, self._size)
            raise

    def sync(self) -> None:
        """Make all lines so far survive a power cut; required before a checkpoint quotes the head."""
        if self._is_regular:
            self._require_unchanged()
            os.fsync(self._handle)

    def _require_unchanged(self) -> None:
        if self._is_regular and (change := outside_change(self._handle, self._absolute, self._size)):
            raise LedgerError(f"{self.path}: {change}")

    def close(self) -> None:
        if self._handle >= 0:
            try:
                self.sync()
            finally:
                os.close(self._handle)
                self._handle = -1


def read_lines(path: Path, *, follow: bool = False) -> Iterator[tuple[Record, bytes]]:
    """The records of the ledger at `path` and their lines, verified as they are read, without a torn last line.

    follow: follow `path` if it is a link. Raises `LedgerError` at the first wrong line, `OSError` as `open_regular`.
    """
    count, digest = 0, GENESIS
    with open_regular(path, follow=follow) as file:
        while raw := file.readline(MAX_LINE + 1):
            if not raw.endswith(b"\n") and len(raw) <= MAX_LINE:
                return  # torn by a crash; the next writer cuts it off
            try:
                record = decode_line(raw, count, digest)
            except ValueError as error:
                raise LedgerError(f"{path}:{count + 1}: {error}") from None
            yield record, raw
            count, digest = count + 1, chain(raw)
