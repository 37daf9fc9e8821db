"""Checkpoints: the whole state, written whole or not at all, read back before they count (clause `checkpoint-whole`).

A checkpoint is a folder `step-00000042` with `tensors.safetensors`, `state.json` and `manifest.json`. It is written
under a temporary name, its manifest last, read back and compared by name, and then renamed once. While a folder of
the same step is replaced, the old one stands beside it as `step-00000042.old-...`, which is as good as the plain name.
Nothing in it is pickled.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from andon.run.atomic import fsync_folder, json_bytes, remove, storage, temporary_beside, write_new
from andon.run.sealed import MANIFEST, STATE, TENSORS, CheckpointError, Sealing, manifest_of, read_sealed
from andon_contracts.digest import digests_by_name, hex64, join, tree_digest
from andon_contracts.laws.law import Judgement, enforce
from andon_contracts.laws.update import RESTORED, Restored
from andon_contracts.record import GENESIS

_NAME = re.compile(r"step-([0-9]{8,15})(\.old-[0-9a-f]+)?")


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


def _read_back(folder: Path, step: int) -> dict[str, int]:
    """The digests of what was written, by name. Raises `CheckpointError` where it cannot be read."""
    found = read_sealed(folder)
    if found.step != step:
        raise CheckpointError(f"the step is {found.step}")
    return digests_by_name(found.tensors)


def _require_saved(saved: Mapping[str, int], step: int, read: Callable[[], Mapping[str, int]]) -> None:
    """What `read` finds on the disk is what was saved, by name. Raises `Violation` (`checkpoint-whole`)."""
    found: Mapping[str, int] = {}
    fault = ""
    try:
        found = read()
    except CheckpointError as error:
        fault = f"what was written cannot be read back: {error}"
    enforce(Judgement(RESTORED, Restored(saved, {name: (digest,) for name, digest in found.items()}, step, fault)))


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    head: tuple[int, str] = (0, GENESIS),
) -> Path:
    """Write the checkpoint of `step` into `folder` (the run's `checkpoints`) and return its path.

    `tensors` may be on any device and of any stride; they are not changed. `state` is JSON as it comes back: string
    keys, lists, finite numbers. `head` is the head of the ledger, which is synced before. At every moment, crashes
    included, the folder holds the old checkpoint of this step or the new one, and nothing that counts is half-written.
    Raises `InputError` for a disk that refuses, `Violation` where what is read back is not what was saved, and
    `ValueError` for a state that is not strict JSON; in all cases what was there before still is.
    """
    saved = digests_by_name(tensors)
    final = folder / f"step-{step:08d}"
    temporary = temporary_beside(final)
    with storage(final):
        try:
            _write(temporary, tensors, state, Sealing(step, hex64(join(saved)), head))
            # Read from the disk before it has the name: what is not whole must not replace what is.
            _require_saved(saved, step, partial(_read_back, temporary, step))
            _put_in_place(temporary, final)
        except BaseException:
            if temporary.exists():
                remove(temporary)
            raise
    return final


def _write(folder: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any], sealing: Sealing) -> None:
    from safetensors.torch import save

    listed = json_bytes(state)
    if json.loads(listed) != dict(state):
        msg = "the state of a checkpoint must be JSON as it comes back: string keys, and lists instead of tuples"
        raise ValueError(msg)
    folder.mkdir()
    files = {TENSORS: save(_separate(tensors)), STATE: listed}
    for name, data in files.items():
        write_new(folder / name, data)
    # Last, and with the digests of the others: what has no manifest is no checkpoint.
    write_new(folder / MANIFEST, json_bytes(manifest_of(sealing, tensors, files)))
    fsync_folder(folder)


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # The format refuses tensors that overlap in memory, as tied weights or a buffer and its views do.
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        memory = plain.untyped_storage().data_ptr()
        separate[name] = plain.clone() if memory in seen else plain
        seen.add(memory)
    return separate


def _put_in_place(temporary: Path, final: Path) -> None:
    replaced = final.with_name(f"{final.name}.old-{secrets.token_hex(4)}")
    # No rename replaces a folder with files in it: the old one steps aside, under a name that counts as much.
    if os.path.lexists(final):
        final.rename(replaced)
        try:
            temporary.rename(final)
        except BaseException:
            replaced.rename(final)
            raise
    else:
        temporary.rename(final)
    fsync_folder(final.parent)
    for other in _named(final.parent, links=True).get(_step_of(final), []):
        if other != final:
            _discard(other)


def load_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`, every byte verified before it is parsed.

    Raises `CheckpointError` naming the file and the fault: missing, cut, changed, exchanged, not listed, a link.
    """
    found = read_sealed(path)
    if _NAME.fullmatch(path.name) and found.step != _step_of(path):
        raise CheckpointError(f"{path / MANIFEST}: it is of step {found.step}, the folder's name says {_step_of(path)}")
    digest = hex64(tree_digest(found.tensors))
    if digest != found.digest:
        raise CheckpointError(f"{path / TENSORS}: the tensors have digest {digest}, the manifest says {found.digest}")
    return Checkpoint(path, found.step, found.tensors, found.state, digest, found.head)


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
    """Remove all checkpoints but the `keep` latest and the one of step `best`; return what was removed.

    newest: the step that was saved last. Later ones were rejected when the run was resumed: they count for nothing,
    and stay to be looked at until they are written anew. One that is being removed first loses its name, so that a
    crash leaves no half of a checkpoint. Raises `ValueError` for `keep` < 1 and `InputError` for a disk that refuses.
    """
    if keep < 1:
        msg = f"at least one checkpoint must stay, not {keep}"
        raise ValueError(msg)
    with storage(folder, "read"):
        named = _named(folder)
    steps = [step for step in sorted(named) if newest is None or step <= newest]
    going = [path for step in steps[:-keep] if step != best for path in named[step]]
    for path in going:
        _discard(path)
    return going


def _discard(path: Path) -> None:
    with storage(path):
        # The name goes first, and on the disk: what is found by its name has all of its files.
        unnamed = temporary_beside(path)
        path.rename(unnamed)
        fsync_folder(path.parent)
        remove(unnamed)


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    if match is None:
        msg = f"{path} is not named like a checkpoint"
        raise ValueError(msg)
    return int(match[1])


def _named(folder: Path, *, links: bool = False) -> dict[int, list[Path]]:
    """The folders that are named like checkpoints, by step, the plain name before those that were replaced.

    links: and what is a link, which is no checkpoint but has the name of one.
    """
    found: dict[int, list[Path]] = {}
    for name in sorted(
        entry.name
        for entry in os.scandir(folder)
        if entry.is_dir(follow_symlinks=False) or (links and entry.is_symlink())
    ):
        if _NAME.fullmatch(name):
            found.setdefault(_step_of(Path(name)), []).append(folder / name)
    return found
