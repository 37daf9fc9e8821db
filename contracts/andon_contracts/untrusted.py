"""Reads files that anybody may have written: only regular files of a bounded size (SECURITY.md).

A pipe blocks its reader until somebody writes, a device may give bytes without end, a sparse file claims more bytes
than there is memory, and a link may lead to a file that the owner of the folder must not read.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

MOST_JSON = 1 << 26  # bytes of the largest JSON file that Andon writes


def open_regular(path: Path, *, follow: bool = False) -> BinaryIO:
    """Open the regular file at `path` for reading, without waiting.

    follow: follow a link, for a path that the user gave. Raises `OSError` with the reason as its `strerror`: no file, a
    link, not a regular file, or a disk that fails.
    """
    # O_NONBLOCK: opening a pipe without a writer would wait for ever.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        handle = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise _refusal(path, "it is a link") from error
        raise
    except ValueError as error:  # a zero byte in a name
        raise _refusal(path, str(error)) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _refusal(path, "it is not a regular file")
    return os.fdopen(handle, "rb")


def read_regular(path: Path, most: int, *, follow: bool = False) -> bytes:
    """The bytes of the regular file at `path`.

    Raises `OSError` as `open_regular` does, and for a file of more than `most` bytes or than the machine has memory.
    """
    with open_regular(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        most = min(most, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        if size > most:
            raise _refusal(path, f"its {size} bytes are more than the {most} allowed")
        return file.read(size)


def read_json(path: Path, *, follow: bool = False) -> Any:
    """The value in the JSON file at `path`. Raises `OSError` as `read_regular`, and `ValueError` if it is not JSON."""
    try:
        return json.loads(read_regular(path, MOST_JSON, follow=follow))
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error


def _refusal(path: Path, why: str) -> OSError:
    return OSError(errno.EINVAL, why, str(path))
