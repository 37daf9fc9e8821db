"""Atomic files and folders: write under a temporary name, fsync, rename, fsync the folder.

A killed writer leaves at most a temporary with a recognisable name, which the owner of the folder removes.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from andon.console.messages import InputError
from andon_contracts.record import fsync_folder as fsync_folder
from andon_contracts.record import write_all as write_all

_LEFTOVER = ".andon-tmp-"
_STORAGE = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be larger than the limit on file sizes",
    errno.EACCES: "no permission to write",
    errno.EPERM: "no permission to write",
    errno.EROFS: "the file system is read-only",
    errno.EIO: "the disk reports an input/output error",
    errno.ENOENT: "the folder is gone",
    errno.ENOTDIR: "a part of the path is not a folder",
    errno.EISDIR: "it is a folder",
    errno.EEXIST: "something else is in its place",
    errno.ENOTEMPTY: "something else is in its place",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ELOOP: "it is a chain of links",
}


@contextmanager
def storage(path: Path, doing: Literal["written", "read"] = "written") -> Iterator[None]:
    """Context manager: turn an `OSError` while `path` is written or read into an `InputError` with the reason."""
    try:
        yield
    except OSError as error:
        if error.errno is None or isinstance(error, BlockingIOError):
            raise
        reason = _STORAGE.get(error.errno, "the system refuses it")
        if doing == "written" and error.errno == errno.ENOENT and isinstance(error.filename, str | bytes):
            above = Path(os.fsdecode(error.filename)).parent
            if above.is_dir():
                reason = f"nothing of that name can be made in {above}"
        if doing == "read":
            reason = reason.replace("to write", "to read")
        raise InputError.at(path, f"cannot be {doing}: {reason} ({error.strerror})") from error


def temporary_beside(path: Path) -> Path:
    """A unique new name in the folder of `path` that `is_leftover` recognises."""
    return path.with_name(f"{path.name}{_LEFTOVER}{os.getpid()}-{secrets.token_hex(4)}")


def is_leftover(name: str) -> bool:
    """True for the name of a writer's temporary file or folder."""
    return _LEFTOVER in name


def clean_leftovers(folder: Path) -> list[str]:
    """Remove the temporaries in `folder` and return their names. Only for its owner: others may be using them."""
    with storage(folder, "read"):
        names = sorted(entry.name for entry in os.scandir(folder) if is_leftover(entry.name))
    for name in names:
        remove(folder / name)
    return names


def remove(path: Path) -> None:
    """Remove the file, link or whole folder `path`; links are not followed."""
    with storage(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def write_new(path: Path, data: bytes | Iterator[bytes | memoryview]) -> None:
    """Create `path` with `data` and the umask's permissions, and fsync it. Not atomic: `write_whole` is."""
    # Never open an existing file: it may be another writer's, or a planted link.
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for part in data if isinstance(data, Iterator) else (data,):
            write_all(handle, part)
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, data: bytes | Iterator[bytes]) -> None:
    """Atomically replace the content of `path` with `data`, or its parts: a crash leaves the old file or the new one.

    Raises `InputError` if the folder cannot be written or the disk is full; the old file then stays.
    """
    with storage(path):
        temporary = temporary_beside(path)
        try:
            write_new(temporary, data)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        # A rename survives a power cut once the folder is synced.
        fsync_folder(path.parent)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Context manager: yield a new empty folder; on exit, fsync its files and rename it to `path`.

    On an error the new folder is removed and an old one stays. A crash between the two renames loses an old folder: use
    it only for reproducible content such as an export. Raises `InputError` as `write_whole` does.
    """
    with storage(path):
        temporary, replaced = temporary_beside(path), temporary_beside(path)
        temporary.mkdir()
        try:
            yield temporary
            # Before the rename: a power cut must not leave a named folder with empty files.
            for root, _, names in os.walk(temporary):
                for name in names:
                    handle = os.open(Path(root, name), os.O_RDONLY)
                    try:
                        os.fsync(handle)
                    finally:
                        os.close(handle)
                fsync_folder(Path(root))
            exchange(temporary, path, replaced)
        except BaseException:
            if temporary.exists():
                remove(temporary)
            raise
        if os.path.lexists(replaced):
            remove(replaced)


def exchange(temporary: Path, path: Path, replaced: Path) -> None:
    """Rename the folder `temporary` to `path`, after an existing `path` to `replaced`.

    A rename cannot replace a folder with files in it, so for a moment `path` does not exist.
    """
    if os.path.lexists(path):
        path.rename(replaced)
    try:
        temporary.rename(path)
    except BaseException:
        if os.path.lexists(replaced):
            replaced.rename(path)
        raise
    fsync_folder(path.parent)


def json_bytes(value: Mapping[str, object]) -> bytes:
    """`value` as readable, strict JSON with sorted keys. Raises `ValueError` for NaN and the infinities."""
    return (json.dumps(value, sort_keys=True, indent=2, allow_nan=False, ensure_ascii=False) + "\n").encode()


def write_json(path: Path, value: Mapping[str, object]) -> None:
    write_whole(path, json_bytes(value))
