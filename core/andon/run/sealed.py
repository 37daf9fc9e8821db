"""The files of one checkpoint and their manifest: written with it, and read only where every byte agrees with it."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from andon.run.atomic import json_bytes
from andon_contracts.untrusted import read_regular

TENSORS = "tensors.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
VERSION = 1
_LIMITS = {MANIFEST: 1 << 26, STATE: 1 << 28, TENSORS: 1 << 42}
_FILE = {"bytes": int, "sha256": str}
_SHAPE = {
    "version": int,
    "step": int,
    "digest": str,
    "ledger": {"count": int, "digest": str},
    "files": {TENSORS: _FILE, STATE: _FILE},
    "tensors": dict,
}
_HEADER_LIMIT = 1 << 26


class CheckpointError(ValueError):
    """A checkpoint that is not the one that was written; the message names the file and the fault."""


@dataclass(frozen=True)
class Sealing:
    """A manifest's account of the whole: step, `tree_digest` of the tensors, head of the ledger (count, digest)."""

    step: int
    digest: str
    head: tuple[int, str]


@dataclass(frozen=True)
class Sealed(Sealing):
    """The verified content of a checkpoint folder."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]


def manifest_of(sealing: Sealing, tensors: Mapping[str, Tensor], files: Mapping[str, bytes]) -> dict[str, object]:
    """The manifest: version, `sealing`, size and SHA-256 of each file, dtype and shape of each tensor by name.

    `sha256` is that of the manifest itself without this key, so that it guards its own bytes too.
    """
    body: dict[str, object] = {
        "version": VERSION,
        "step": sealing.step,
        "digest": sealing.digest,
        "ledger": {"count": sealing.head[0], "digest": sealing.head[1]},
        "files": {name: {"bytes": len(data), "sha256": _sha256(data)} for name, data in files.items()},
        "tensors": {name: _kind(tensor) for name, tensor in tensors.items()},
    }
    return body | {"sha256": _sha256(json_bytes(body))}


def read_sealed(folder: Path) -> Sealed:
    """The content of the checkpoint `folder`. Raises `CheckpointError` naming the file and the fault."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    _check_names(folder)
    manifest = _read_manifest(folder / MANIFEST)
    content = {name: _read_listed(folder / name, manifest["files"][name]) for name in (TENSORS, STATE)}
    _check_header(folder / TENSORS, content[TENSORS])
    try:
        tensors = load(content[TENSORS])
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{folder / TENSORS}: {error}") from error
    _check_kinds(folder / TENSORS, tensors, manifest["tensors"])
    state = _json_object(folder / STATE, content[STATE])
    head = manifest["ledger"]["count"], manifest["ledger"]["digest"]
    return Sealed(manifest["step"], manifest["digest"], head, tensors, state)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _kind(tensor: Tensor) -> dict[str, object]:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _check_names(folder: Path) -> None:
    try:
        mode = folder.lstat().st_mode
        if not stat.S_ISDIR(mode):
            kind = "a link, not the folder that was saved" if stat.S_ISLNK(mode) else "not a folder"
            raise CheckpointError(f"{folder}: it is {kind}")
        names = {entry.name for entry in os.scandir(folder)}
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}") from error
    for name in (MANIFEST, STATE, TENSORS):
        if name not in names:
            raise CheckpointError(f"{folder / name}: it is missing")
    for name in sorted(names - {MANIFEST, STATE, TENSORS}):
        raise CheckpointError(f"{folder / name}: no checkpoint has such a file")


def _read_regular(path: Path, size: int | None) -> bytes:
    try:
        data = read_regular(path, _LIMITS[path.name] if size is None else min(size, _LIMITS[path.name]))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if size is not None and len(data) != size:
        raise CheckpointError(f"{path}: it has {len(data)} bytes, the manifest says {size}")
    return data


def _read_listed(path: Path, listed: Mapping[str, Any]) -> bytes:
    data = _read_regular(path, listed["bytes"])
    if _sha256(data) != listed["sha256"]:
        raise CheckpointError(f"{path}: its SHA-256 is not the manifest's; its bytes were changed or exchanged")
    return data


def _json_object(path: Path, data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return found


def _read_manifest(path: Path) -> dict[str, Any]:
    data = _read_regular(path, None)
    found = _json_object(path, data)
    if found.get("version") != VERSION:
        raise CheckpointError(f"{path}: version {found.get('version')!r} is not {VERSION}")
    own = found.pop("sha256", None)
    try:
        whole = own == _sha256(json_bytes(found)) and data == json_bytes(found | {"sha256": own})
    except ValueError:
        whole = False
    if not whole:
        raise CheckpointError(f"{path}: its SHA-256 is not its own; its bytes were changed")
    if not _is_shaped_like(found, _SHAPE):
        raise CheckpointError(f"{path}: it does not list step, digest, ledger, files and tensors as a manifest does")
    return found


def _is_shaped_like(found: Any, shape: Any) -> bool:
    """Whether `found` is of the type `shape`, or an object with exactly the keys of `shape`, each shaped like there."""
    if isinstance(shape, dict):
        same = isinstance(found, dict) and found.keys() == shape.keys()
        return same and all(_is_shaped_like(found[name], inner) for name, inner in shape.items())
    return type(found) is shape


def _check_header(path: Path, data: bytes) -> None:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, _HEADER_LIMIT):
        raise CheckpointError(f"{path}: its header claims {length} bytes of {len(data)}")


def _check_kinds(path: Path, tensors: Mapping[str, Tensor], listed: Mapping[str, Any]) -> None:
    for name in sorted(set(tensors) ^ set(listed)):
        raise CheckpointError(f"{path}: tensor {name} is {'not listed' if name in tensors else 'missing'}")
    for name, tensor in tensors.items():
        if _kind(tensor) != listed[name]:
            raise CheckpointError(f"{path}: tensor {name} is {_kind(tensor)}, the manifest says {listed[name]}")
