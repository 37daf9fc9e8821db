"""Files that may be from anybody: opened only where they are regular files of a bounded size (SECURITY.md).

To open a pipe is to wait for who writes to it, a device may give bytes for ever, a file with holes claims more bytes
than there is memory, and a link leads to a file that whoever made the folder was never allowed to read.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

MOST_JSON = 1 << 26
"""Bytes of a JSON file that one of ours may have."""


def open_regular(path: Path, *, follow: bool = False) -> BinaryIO:
    """The regular file at `path`, open for reading; nothing is waited for.

    follow: open what a link leads to, as where a user named the path himself. Raises `OSError` with the reason as its
    `strerror`: none there, a link, no regular file, or a disk that fails.
    """
    # To open a pipe that nobody writes to would wait for good.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        handle = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise _refused(path, "it is a link") from error
        raise
    except ValueError as error:  # a zero byte in a name
        raise _refused(path, str(error)) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _refused(path, "it is not a regular file")
    return os.fdopen(handle, "rb")


def read_regular(path: Path, most: int, *, follow: bool = False) -> bytes:
    """The bytes of the regular file at `path`, read once.

    Raises `OSError` as `open_regular` does, and for one of more than `most` bytes or than the machine has memory.
    """
    with open_regular(path, follow=follow) as file:
        found = os.fstat(file.fileno())
        most = min(most, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        if found.st_size > most:
            raise _refused(path, f"its {found.st_size} bytes are more than the {most} allowed")
        return file.read(found.st_size)


def read_lines(path: Path, most: int) -> Iterator[bytes]:
    """The lines of the regular file at `path`. One of more than `most` bytes, or without an end, is the last, and cut.

    A file of holes claims terabytes of one line. Raises `OSError` as `open_regular` does.
    """
    with open_regular(path) as file:
        while line := file.readline(most):
            yield line
            if not line.endswith(b"\n"):
                return


def read_json(path: Path, most: int = MOST_JSON, *, follow: bool = False) -> Any:
    """What the JSON file at `path` holds. Raises as `read_regular` does, and `ValueError` where it is none."""
    data = read_regular(path, most, follow=follow)
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error


def _refused(path: Path, why: str) -> OSError:
    return OSError(errno.EINVAL, why, str(path))
