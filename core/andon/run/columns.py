"""A disk cache for columns of numbers, which are computed once and then reused.

Each set of columns has a folder named by the digest of its inputs. It holds a file for each column, of raw numbers in
this machine's byte order, and `index.json` with the size and SHA-256 of each file and further facts. The first process
that needs a set writes it under a lock and then renames the folder. A damaged set is computed again. Nothing in it is
executed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
from array import array
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from andon.console.messages import say
from andon.run.atomic import clean_leftovers, json_bytes, remove, storage, whole_folder, write_new
from andon.run.folder import open_lock
from andon_contracts.fields import json_object
from andon_contracts.fingerprint import version_of
from andon_contracts.untrusted import open_regular, read_json

if TYPE_CHECKING:
    from io import BufferedReader

Read = TypeVar("Read")
Numbers = Mapping[str, "array[int] | array[float]"]
Make = Callable[[Callable[[Numbers], None]], Mapping[str, object]]
"""Calls its argument with further numbers of some columns, repeatedly, and returns the other facts."""

FORMAT = 1
"""The version of a folder's format; part of its digest."""
_INDEX, _LOCK = "index.json", ".lock"


@dataclass(frozen=True)
class Columns:
    """Verified columns in files, with the number of values in each. `said`: the other facts. `digest`: of the files."""

    folder: Path
    counts: Mapping[str, int]
    said: Mapping[str, Any]
    digest: str


def key_of(libraries: tuple[str, ...], **depends_on: object) -> str:
    """The digest of the inputs of columns: the arguments, the format, and the versions of the libraries."""
    versions = {name: version_of(name) or "" for name in libraries}
    return _digest({"format": [FORMAT, sys.byteorder], "versions": versions, **depends_on})


def load_or_build(
    folder: Path, key: str, kinds: Mapping[str, str], make: Make, read: Callable[[Columns], Read]
) -> Read:
    """The result of `read` on the columns under `key` in `folder`, which `make` computes first if necessary.

    Waits for another process that computes some, so call it before other ranks wait for this one with a timeout. Raises
    the errors of `make`, after removing its files, and `InputError` if the disk fails.
    """
    path = folder / key
    try:
        return _read(path, kinds, read)
    except FileNotFoundError:
        pass
    except ValueError as error:
        say(f"the cache in {path} cannot be used and is built again: {error}")
    with storage(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = open_lock(folder / _LOCK)
    try:
        with storage(folder / _LOCK):
            fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            return _read(path, kinds, read)  # computed by the previous owner of the lock
        except FileNotFoundError:
            pass
        except ValueError:
            remove(path)
        clean_leftovers(folder)
        with whole_folder(path) as fresh:
            _write(fresh, kinds, make)
        return _read(path, kinds, read)
    finally:
        os.close(handle)


def load_if_there(folder: Path, key: str, kinds: Mapping[str, str], read: Callable[[Columns], Read]) -> Read | None:
    """The result of `read` on the columns under `key` in `folder`; None if they are missing or damaged."""
    try:
        return _read(folder / key, kinds, read)
    except (FileNotFoundError, ValueError):
        return None


def discard(folder: Path) -> None:
    """Remove a folder of columns, if it exists. Raises `InputError` if the disk fails."""
    if folder.is_dir() and not folder.is_symlink():
        remove(folder)


def _write(folder: Path, kinds: Mapping[str, str], make: Make) -> None:
    with ExitStack() as stack:
        files = {name: stack.enter_context((folder / name).open("xb")) for name in kinds}
        sums = {name: hashlib.sha256() for name in kinds}

        def append(numbers: Numbers) -> None:
            for name, column in numbers.items():
                files[name].write(column)
                sums[name].update(column)

        facts = dict(make(append))
        listed = {name: {"bytes": file.tell(), "sha256": sums[name].hexdigest()} for name, file in files.items()}
    body = {"said": facts, "files": listed}
    write_new(folder / _INDEX, json_bytes(body | {"sha256": _digest(body)}))


def _digest(body: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _read(path: Path, kinds: Mapping[str, str], read: Callable[[Columns], Read]) -> Read:
    if not os.path.lexists(path):
        raise FileNotFoundError(path)
    try:
        body = json_object(read_json(path / _INDEX), "its index")
        if body.pop("sha256", None) != _digest(body):
            raise ValueError("its index is damaged")
        files, counts = json_object(body["files"], "files"), {}
        for name, kind in kinds.items():
            listed = json_object(files[name], name)
            with open_regular(path / name) as file:
                sha = hashlib.file_digest(cast("BufferedReader", file), "sha256").hexdigest()
                size = file.tell()
            counts[name], rest = divmod(size, array(kind).itemsize)
            if rest or size != listed["bytes"] or sha != listed["sha256"]:
                raise ValueError(f"{name} is damaged")
        return read(Columns(path, counts, json_object(body["said"], "said"), _digest(files)))
    except (OSError, KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
