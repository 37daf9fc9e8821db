"""Checkpoints: the whole state, written whole or not at all, and verified before it counts (clause `checkpoint-whole`).

A checkpoint is a folder `step-00000042` with `tensors.safetensors`, `state.json` and `manifest.json`. It is written
under a temporary name, its manifest last, read back and compared by name, and then renamed once. While a checkpoint of
the same step is replaced, the old one is kept beside it as `step-00000042.old-...`, which loading accepts too.
Nothing in it is pickled. To write and to verify takes the memory of one tensor, whatever the size of the state.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from andon.run.atomic import exchange, fsync_folder, json_bytes, remove, storage, temporary_beside, write_new
from andon.run.summary import Head
from andon_contracts.act import NAMES
from andon_contracts.digest import digests_by_name, hex64, join, tensor_digest, tree_digest
from andon_contracts.fields import Part
from andon_contracts.laws.law import Judgement, enforce
from andon_contracts.laws.update import RESTORED, Restored
from andon_contracts.record import GENESIS
from andon_contracts.untrusted import MOST_JSON, open_regular, read_regular

if TYPE_CHECKING:
    from io import BufferedReader

TENSORS = "tensors.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
VERSION = 1
_MOST_STATE = 1 << 28
_NAME = re.compile(r"step-([0-9]{8,15})(\.old-[0-9a-f]+)?")

Read = TypeVar("Read")


class CheckpointError(ValueError):
    """A checkpoint that is damaged or was changed. The message names the file and the fault."""


@dataclass(frozen=True)
class Checkpoint:
    """The state after `step` updates, as it was read. `digest` is the `tree_digest` of `tensors` as 16 digits.

    `head` is the head that the ledger had: its number of lines and the digest of the last.
    """

    path: Path
    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    digest: str
    head: tuple[int, str]


@dataclass(frozen=True)
class _File(Part):
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest(Part):
    """The file that is written last: what the others hold, and the dtype and shape of each tensor by name.

    In the file `sha256` is added, that of all other keys, so that the manifest guards its own bytes too.
    """

    version: int
    step: int
    digest: str
    ledger: Head
    files: Mapping[str, _File]
    tensors: Mapping[str, Any]


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    head: tuple[int, str] = (0, GENESIS),
) -> Path:
    """Write the checkpoint of `step` into `folder` (the run's `checkpoints`) and return its path.

    tensors: on any device, of any stride, overlapping or not; they are not changed. state: JSON as it comes back:
    string keys, lists, finite numbers. head: the head of the ledger, which is synced before. At every moment, also if
    the process dies, `folder` holds the old checkpoint of this step or the new one, and nothing half-written counts.
    Raises `InputError` if the disk refuses, `Violation` if other values are read back than were saved, and `ValueError`
    for a state that is not strict JSON; what was there before then stays.
    """
    listed = json_bytes(state)
    if json.loads(listed) != dict(state):
        msg = "the state of a checkpoint must be JSON as it comes back: string keys, and lists instead of tuples"
        raise ValueError(msg)
    saved = digests_by_name(tensors)
    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    final = folder / f"step-{step:08d}"
    temporary = temporary_beside(final)
    with storage(final):
        try:
            temporary.mkdir()
            parts = safetensors_parts(kinds, lambda name: bytes_of(tensors[name]))
            files = {TENSORS: _write(temporary / TENSORS, parts), STATE: _write(temporary / STATE, [listed])}
            listing = {name: _kind(tensor) for name, tensor in tensors.items()}
            manifest = Manifest(VERSION, step, hex64(join(saved)), Head(*head), files, listing)
            body = manifest.to_json()
            # Last, with the digests of the others: a folder without a manifest does not count.
            write_new(temporary / MANIFEST, json_bytes(body | {"sha256": _sha256(json_bytes(body))}))
            fsync_folder(temporary)
            # Verified on the disk before it gets its name: a damaged folder must not replace a sound one.
            _require_saved(temporary, saved, step)
            _put_in_place(temporary, final)
        except BaseException:
            if temporary.exists():
                remove(temporary)
            raise
    return final


def safetensors_parts(
    kinds: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    data: Callable[[str], memoryview],
    metadata: Mapping[str, str] | None = None,
) -> Iterator[bytes | memoryview]:
    """The parts of a file in the safetensors format: its header, and the bytes of one tensor after the other.

    The library's `save` builds the whole file in memory; its `save_file` makes it readable by its owner alone and hides
    the error of a disk. kinds: dtype and shape by name. data: the bytes of a tensor, called when they are written.
    """
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    ordered = sorted(kinds, key=lambda name: (-kinds[name][0].itemsize, name))  # aligns every tensor
    first = 0
    for name in ordered:
        dtype, shape = kinds[name]
        offsets = [first, first := first + math.prod(shape) * dtype.itemsize]
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    yield from map(data, ordered)


def bytes_of(tensor: Tensor) -> memoryview:
    """The row-major bytes of `tensor`; a copy of them only if it is on another device or not contiguous."""
    plain = tensor.detach().cpu().contiguous()
    # A contiguous tensor of one element may have any stride, with which `view` refuses it.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data


def _write(path: Path, parts: Iterable[bytes | memoryview]) -> _File:
    sha = hashlib.sha256()

    def hashed() -> Iterator[bytes | memoryview]:
        for part in parts:
            sha.update(part)
            yield part

    write_new(path, hashed())
    return _File(path.stat().st_size, sha.hexdigest())


def _require_saved(folder: Path, saved: Mapping[str, int], step: int) -> None:
    """The disk holds what was saved, tensor by tensor. Raises `Violation` (`checkpoint-whole`)."""
    found: Mapping[str, int] = {}
    fault = ""
    try:
        manifest, _, found = _read(folder, tensor_digest)
        if manifest.step != step:
            fault = f"what was written cannot be read back: the step is {manifest.step}"
    except CheckpointError as error:
        fault = f"what was written cannot be read back: {error}"
    enforce(Judgement(RESTORED, Restored(saved, {name: (digest,) for name, digest in found.items()}, step, fault)))


def _put_in_place(temporary: Path, final: Path) -> None:
    # The old one steps aside under a name that counts as much, in case the process dies between the two renames.
    exchange(temporary, final, final.with_name(f"{final.name}.old-{secrets.token_hex(4)}"))
    for other in _named(final.parent, links=True).get(_step_of(final), []):
        if other != final:
            _discard(other)


def load_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`, every byte verified before it is parsed.

    Raises `CheckpointError` naming the file and the fault: missing, cut, changed, exchanged, not listed, a link.
    """
    manifest, state, tensors = _read(path, torch.clone)  # not mapped: the file may change later
    if _NAME.fullmatch(path.name) and manifest.step != _step_of(path):
        what = f"it is of step {manifest.step}, the folder's name says {_step_of(path)}"
        raise CheckpointError(f"{path / MANIFEST}: {what}")
    digest, head = hex64(tree_digest(tensors)), (manifest.ledger.count, manifest.ledger.digest)
    if digest != manifest.digest:
        what = f"the tensors have digest {digest}, the manifest says {manifest.digest}"
        raise CheckpointError(f"{path / TENSORS}: {what}")
    return Checkpoint(path, manifest.step, tensors, state, digest, head)


def _read(folder: Path, use: Callable[[Tensor], Read]) -> tuple[Manifest, dict[str, Any], dict[str, Read]]:
    """The manifest, the state, and by name the result of `use` for each tensor, which is mapped only meanwhile.

    Raises `CheckpointError` naming the file and the fault.
    """
    from safetensors import SafetensorError, safe_open

    try:
        mode = folder.lstat().st_mode
        if not stat.S_ISDIR(mode):
            kind = "a link, not the folder that was saved" if stat.S_ISLNK(mode) else "not a folder"
            raise CheckpointError(f"{folder}: it is {kind}")
        names = set(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}") from error
    for name in sorted(names ^ {MANIFEST, STATE, TENSORS}):
        what = "no checkpoint has such a file" if name in names else "it is missing"
        raise CheckpointError(f"{folder / name}: {what}")
    manifest = _read_manifest(folder / MANIFEST)
    for name in (TENSORS, STATE):
        _require_listed(folder / name, manifest.files[name])
    path, found = folder / TENSORS, dict[str, Read]()
    try:
        with safe_open(path, framework="pt") as opened:
            kinds = {}
            for name in sorted(opened.keys()):
                tensor = opened.get_tensor(name)
                kinds[name], found[name] = _kind(tensor), use(tensor)
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    for name in sorted(kinds.keys() ^ manifest.tensors.keys()):
        raise CheckpointError(f"{path}: tensor {name} is {'not listed' if name in kinds else 'missing'}")
    for name, listed in manifest.tensors.items():
        if kinds[name] != listed:
            raise CheckpointError(f"{path}: tensor {name} is {kinds[name]}, the manifest says {listed}")
    return manifest, _json_object(folder / STATE, _MOST_STATE)[0], found


def _require_listed(path: Path, listed: _File) -> None:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != listed.bytes:
                raise CheckpointError(f"{path}: it has {size} bytes, the manifest says {listed.bytes}")
            sha = hashlib.file_digest(cast("BufferedReader", file), "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if sha != listed.sha256:
        raise CheckpointError(f"{path}: its SHA-256 is not the manifest's; its bytes were changed or exchanged")


def _json_object(path: Path, most: int) -> tuple[dict[str, Any], bytes]:
    try:
        data = read_regular(path, most)
        found = json.loads(data)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return found, data


def _read_manifest(path: Path) -> Manifest:
    found, data = _json_object(path, MOST_JSON)
    if found.get("version") != VERSION:
        raise CheckpointError(f"{path}: version {found.get('version')!r} is not {VERSION}")
    own = found.pop("sha256", None)
    try:
        whole = own == _sha256(json_bytes(found)) and data == json_bytes(found | {"sha256": own})
    except ValueError:
        whole = False
    if not whole:
        raise CheckpointError(f"{path}: its SHA-256 is not its own; its bytes were changed")
    try:
        manifest = Manifest.from_json(found)
        if manifest.files.keys() != {TENSORS, STATE}:
            raise ValueError("it lists other files")
    except ValueError as error:
        what = "it does not list step, digest, ledger, files and tensors as a manifest does"
        raise CheckpointError(f"{path}: {what}") from error
    return manifest


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _kind(tensor: Tensor) -> dict[str, object]:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def saved_steps(folder: Path) -> list[int]:
    """The steps of the complete checkpoints in `folder`, in order. Raises `InputError` if it cannot be read."""
    with storage(folder, "read"):
        named = _named(folder) if folder.is_dir() else {}
    files = MANIFEST, STATE, TENSORS
    return sorted(step for step, paths in named.items() if all((paths[0] / name).is_file() for name in files))


def newest_valid(folder: Path, before: float = math.inf) -> tuple[Checkpoint | None, list[str]]:
    """The valid checkpoint of the latest step below `before` in `folder`, and for each later one why it was rejected.

    Raises `InputError` for a folder that cannot be read: a run must not begin anew because its disk fails.
    """
    rejected: list[str] = []
    with storage(folder, "read"):
        named = _named(folder, links=True) if folder.is_dir() else {}
    for step in sorted((step for step in named if step < before), reverse=True):
        for path in named[step]:
            try:
                return load_checkpoint(path), rejected
            except CheckpointError as error:
                rejected.append(str(error))
    return None, rejected


def prune(folder: Path, keep: int, best: int | None = None, newest: int | None = None) -> list[Path]:
    """Remove all checkpoints but the `keep` latest and the one of step `best`; return the removed paths.

    newest: the step that was saved last. Later ones were rejected when the run was resumed: they do not count, and stay
    for the user to look at until they are written anew. Raises `InputError` if the disk refuses.
    """
    with storage(folder, "read"):
        named = _named(folder)
    steps = [step for step in sorted(named) if newest is None or step <= newest]
    going = [path for step in steps[:-keep] if step != best for path in named[step]]
    for path in going:
        _discard(path)
    return going


def _discard(path: Path) -> None:
    with storage(path):
        # The name goes first, and on the disk: a folder with the name of a checkpoint has all of its files.
        unnamed = temporary_beside(path)
        path.rename(unnamed)
        fsync_folder(path.parent)
        remove(unnamed)


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is not named like a checkpoint")
    return int(match[1])


def _named(folder: Path, *, links: bool = False) -> dict[int, list[Path]]:
    """The folders that are named like checkpoints, by step, the plain name before those that were replaced.

    links: include links, which are never valid but have the name of a checkpoint.
    """
    found: dict[int, list[Path]] = {}
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        wanted = entry.is_dir(follow_symlinks=False) or (links and entry.is_symlink())
        if wanted and (match := _NAME.fullmatch(entry.name)):
            found.setdefault(int(match[1]), []).append(folder / entry.name)
    return found
