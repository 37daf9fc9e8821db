"""Columns of numbers that are made once and kept in a folder, for whoever needs the same again.

Each set has a folder named by the digest of all that it depends on; in it is a file for each column, of plain numbers
in the order of this machine's bytes, and `index.json` with the length and the SHA-256 of each and what else is to be
known. Whoever comes first makes it, under a lock, and it takes its name when it is whole. What is damaged, or somebody
else's, is never used: it is made again. Nothing in it is run.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from andon.console.messages import say
from andon.run.atomic import clean_leftovers, json_bytes, remove, storage, whole_folder, write_new
from andon.run.ownership import open_lock
from andon_contracts.fields import json_object
from andon_contracts.fingerprint import version_of
from andon_contracts.untrusted import open_regular, read_json

Read = TypeVar("Read")
Numbers = Mapping[str, "array[int] | array[float]"]
Make = Callable[[Callable[[Numbers], None]], Mapping[str, object]]
"""Gives further numbers of some columns to its argument, again and again, and returns what else is to be known."""

FORMAT = 1
"""Of what lies in a folder; another one is another digest."""
_INDEX, _LOCK = "index.json", ".lock"
_BYTES_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Columns:
    """Columns as they lie in files, each read once to see that it is what was written. `said`: what else is known."""

    folder: Path
    counts: Mapping[str, int]
    said: Mapping[str, Any]


def key_of(libraries: tuple[str, ...], **depends_on: object) -> str:
    """The digest of what columns depend on: what is given, the format here, and the versions of what makes them."""
    versions = {name: version_of(name) or "" for name in libraries}
    known = {"format": [FORMAT, sys.byteorder], "versions": versions, **depends_on}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def kept(folder: Path, key: str, kinds: Mapping[str, str], make: Make, read: Callable[[Columns], Read]) -> Read:
    """What `read` makes of the columns that lie under `key` in `folder`; where none do, `make` makes them first.

    Waits for another process that is making some, so it belongs before anything in which others wait only so long.
    Raises what `make` does, of which nothing stays, and `InputError` for a disk that refuses.
    """
    path = folder / key
    try:
        return _read(path, kinds, read)
    except FileNotFoundError:
        pass
    except ValueError as error:
        say(f"what is kept in {path} is not used, and made again: {error}")
    with _locked(folder):
        try:
            return _read(path, kinds, read)  # by whoever had the lock before
        except FileNotFoundError:
            pass
        except ValueError:
            remove(path)
        clean_leftovers(folder)
        with whole_folder(path) as fresh:
            _write(fresh, kinds, make)
        return _read(path, kinds, read)


def discard(folder: Path) -> None:
    """Remove a folder of columns; nothing happens where there is none. Raises `InputError` for a disk that refuses."""
    if folder.is_dir() and not folder.is_symlink():
        remove(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The kernel gives the lock back however its owner ends."""
    with storage(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = open_lock(folder / _LOCK)
    try:
        with storage(folder / _LOCK):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@dataclass
class _Writer:
    file: BinaryIO
    sha: Any
    bytes: int = 0

    def append(self, numbers: array[int] | array[float]) -> None:
        data = numbers.tobytes()
        self.file.write(data)
        self.sha.update(data)
        self.bytes += len(data)


def _write(folder: Path, kinds: Mapping[str, str], make: Make) -> None:
    with ExitStack() as stack:
        files = {name: _Writer(stack.enter_context((folder / name).open("xb")), hashlib.sha256()) for name in kinds}

        def append(numbers: Numbers) -> None:
            for name, column in numbers.items():
                files[name].append(column)

        said = dict(make(append))
    told = {name: {"bytes": file.bytes, "sha256": file.sha.hexdigest()} for name, file in files.items()}
    body = {"said": said, "files": told}
    write_new(folder / _INDEX, json_bytes(body | {"sha256": _digest(body)}))


def _digest(body: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _read(path: Path, kinds: Mapping[str, str], read: Callable[[Columns], Read]) -> Read:
    """Raises FileNotFoundError where nothing lies at `path`, `ValueError` for anything but whole columns."""
    if not os.path.lexists(path):
        raise FileNotFoundError(path)
    try:
        body = json_object(read_json(path / _INDEX), "its index")
        if body.pop("sha256", None) != _digest(body):
            raise ValueError("its index is damaged")
        files = json_object(body["files"], "files")
        counts = {name: _count(path / name, json_object(files[name], name), kind) for name, kind in kinds.items()}
        return read(Columns(path, counts, json_object(body["said"], "said")))
    except (OSError, KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _count(path: Path, told: Mapping[str, Any], kind: str) -> int:
    """How many numbers a file has; they are all read, and are what was written."""
    sha = hashlib.sha256()
    with open_regular(path) as file:
        while data := file.read(_BYTES_AT_ONCE):
            sha.update(data)
        size = file.tell()
    count, rest = divmod(size, array(kind).itemsize)
    if rest or size != told["bytes"] or sha.hexdigest() != told["sha256"]:
        raise ValueError(f"{path.name} is damaged")
    return count
