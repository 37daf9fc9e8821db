"""Checkpoints of the whole state, written atomically and verified before they count (clause `checkpoint-whole`).

A checkpoint is a folder `step-00000042` with `tensors.safetensors`, `state.json` and `manifest.json`. It is written
under a temporary name, its manifest last, read back and compared tensor by tensor, and then renamed. While a checkpoint
of the same step is replaced, the old one is `step-00000042.old-...`, which loading accepts too. Nothing in it is
pickled. Writing and verifying need the memory of one tensor, whatever the size of the state.
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
from andon_contracts.laws.update import RESTORED, not_restored
from andon_contracts.record import GENESIS
from andon_contracts.untrusted import MOST_JSON, open_regular, read_regular
from andon_contracts.violation import Finding

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
    """The state after `step` updates, as read from disk. `digest` is the `tree_digest` of `tensors` as 16 hex digits.

    `tensors` are maps of the file, of which the ranks of a host share the memory. They outlive its removal, but show
    what is written into it later; a file that gets shorter ends the process.
    `head` is the head of the ledger when it was saved: the number of lines and the digest of the last.
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
    """The file that is written last: size and SHA-256 of the others, and dtype and shape of each tensor by name.

    The file also holds `sha256`, the digest of all other keys, so that the manifest verifies its own bytes too.
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

    tensors: on any device, of any stride, overlapping or not; they are not changed. state: must survive a JSON round
    trip: string keys, lists, finite numbers. head: the head of the ledger, which the caller has synced. Even if the
    process dies, `folder` holds the old checkpoint of this step or the new one, and half-written ones do not count.
    Raises `InputError` if the disk fails, `Violation` if the values read back differ from those saved, and `ValueError`
    for a state that is not strict JSON; the old checkpoint then stays.
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
            # Last, with the other files' digests: a folder without a manifest does not count.
            write_new(temporary / MANIFEST, json_bytes(body | {"sha256": _sha256(json_bytes(body))}))
            fsync_folder(temporary)
            # Verified before the rename: a damaged folder must not replace a sound one.
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
    """The parts of a file in the safetensors format: the header, then the bytes of one tensor after the other.

    The library's `save` builds the whole file in memory. Its `save_file` makes the file readable only by its owner and
    hides disk errors. kinds: dtype and shape by name. data: returns a tensor's bytes, called as they are written.
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
    """The row-major bytes of `tensor`, copied only if it is on another device or not contiguous."""
    plain = tensor.detach().cpu().contiguous()
    # A contiguous tensor of one element may have any stride, and `view` rejects some.
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
    try:
        manifest, _, digests = _read(folder, tensor_digest)
        if manifest.step != step:
            raise CheckpointError(f"the step is {manifest.step}")
        found = not_restored(saved, {name: (digest,) for name, digest in digests.items()}, step, {})
    except CheckpointError as error:
        found = Finding(f"what was written cannot be read back: {error}", step)
    enforce(Judgement(RESTORED, found))


def _put_in_place(temporary: Path, final: Path) -> None:
    # The old one gets a name that loading accepts, in case the process dies between the two renames.
    exchange(temporary, final, final.with_name(f"{final.name}.old-{secrets.token_hex(4)}"))
    for other in _named(final.parent, links=True).get(_step_of(final), []):
        if other != final:
            _discard(other)


def load_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`, every byte verified before it is parsed.

    Raises `CheckpointError` naming the file and the fault: missing, truncated, changed, swapped, not listed, a link.
    """
    manifest, state, tensors = _read(path, lambda tensor: tensor)
    if _NAME.fullmatch(path.name) and manifest.step != _step_of(path):
        what = f"it is of step {manifest.step}, the folder's name says {_step_of(path)}"
        raise CheckpointError(f"{path / MANIFEST}: {what}")
    digest, head = hex64(tree_digest(tensors)), (manifest.ledger.count, manifest.ledger.digest)
    if digest != manifest.digest:
        what = f"the tensors have digest {digest}, the manifest says {manifest.digest}"
        raise CheckpointError(f"{path / TENSORS}: {what}")
    return Checkpoint(path, manifest.step, tensors, state, digest, head)


def _read(folder: Path, use: Callable[[Tensor], Read]) -> tuple[Manifest, dict[str, Any], dict[str, Read]]:
    """The manifest, the state, and the result of `use` for each mapped tensor by name. Raises `CheckpointError` naming
    the file and the fault."""
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
    path, results = folder / TENSORS, dict[str, Read]()
    try:
        with safe_open(path, framework="pt") as opened:
            kinds = {}
            for name in sorted(opened.keys()):
                tensor = opened.get_tensor(name)
                kinds[name], results[name] = _kind(tensor), use(tensor)
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    for name in sorted(kinds.keys() ^ manifest.tensors.keys()):
        raise CheckpointError(f"{path}: tensor {name} is {'not listed' if name in kinds else 'missing'}")
    for name, listed in manifest.tensors.items():
        if kinds[name] != listed:
            raise CheckpointError(f"{path}: tensor {name} is {kinds[name]}, the manifest says {listed}")
    return manifest, _json_object(folder / STATE, _MOST_STATE)[0], results


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
        value = json.loads(data)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value, data


def _read_manifest(path: Path) -> Manifest:
    body, data = _json_object(path, MOST_JSON)
    if body.get("version") != VERSION:
        raise CheckpointError(f"{path}: version {body.get('version')!r} is not {VERSION}")
    own = body.pop("sha256", None)
    try:
        whole = own == _sha256(json_bytes(body)) and data == json_bytes(body | {"sha256": own})
    except ValueError:
        whole = False
    if not whole:
        raise CheckpointError(f"{path}: its SHA-256 is not its own; its bytes were changed")
    try:
        manifest = Manifest.from_json(body)
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
    files, named = (MANIFEST, STATE, TENSORS), _named(folder)
    return sorted(step for step, paths in named.items() if all((paths[0] / name).is_file() for name in files))


def newest_valid(folder: Path, before: float = math.inf) -> tuple[Checkpoint | None, list[str]]:
    """The valid checkpoint of the latest step below `before` in `folder`, and for each later one why it was rejected.

    Raises `InputError` if the folder cannot be read: a run must not start over because its disk fails.
    """
    rejected, named = list[str](), _named(folder, links=True)
    for step in sorted((step for step in named if step < before), reverse=True):
        for path in named[step]:
            try:
                return load_checkpoint(path), rejected
            except CheckpointError as error:
                rejected.append(str(error))
    return None, rejected


def prune(folder: Path, keep: int, best: int | None = None, newest: int | None = None) -> list[Path]:
    """Remove all checkpoints but the `keep` latest and the one of step `best`; return the removed paths.

    newest: the step that was saved last. Later ones were rejected on resume: they do not count, and stay for inspection
    until they are overwritten. Raises `InputError` if the disk fails.
    """
    named = _named(folder)
    steps = [step for step in sorted(named) if newest is None or step <= newest]
    going = [path for step in steps[:-keep] if step != best for path in named[step]]
    for path in going:
        _discard(path)
    return going


def _discard(path: Path) -> None:
    with storage(path):
        # Rename and sync first, so that every folder with a checkpoint's name has all of its files.
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
    """The folders named like checkpoints, by step, replaced ones last. links: include links, which are never valid."""
    by_step: dict[int, list[Path]] = {}
    with storage(folder, "read"):
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name) if folder.is_dir() else ():
            wanted = entry.is_dir(follow_symlinks=False) or (links and entry.is_symlink())
            if wanted and (match := _NAME.fullmatch(entry.name)):
                by_step.setdefault(int(match[1]), []).append(folder / entry.name)
    return by_step
