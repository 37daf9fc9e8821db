"""Checkpoints: whole or not at all at every point of a crash, read back by name, damage named by file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from andon.console.messages import InputError
from andon.run import atomic, checkpoint
from andon.run.atomic import clean_leftovers, is_leftover, json_bytes
from andon.run.checkpoint import MANIFEST, STATE, TENSORS, CheckpointError, load_checkpoint, save_checkpoint
from andon_contracts.digest import hex64, tree_digest
from andon_contracts.policy import evaluations
from andon_contracts.violation import Violation
from tests.run.crash import Mode, every_failure

FLAT = torch.randn(64, generator=torch.Generator().manual_seed(1))
TREE = {
    "adapter.a": FLAT[:12].view(3, 4),
    "adapter.b": FLAT[12:24].view(3, 4).t(),
    "tied": FLAT[:12].view(3, 4),
    "moment": torch.tensor([float("nan"), -0.0, float("inf")]),
    "half": torch.arange(5, dtype=torch.bfloat16),
    "step": torch.tensor(7),
    "mask": torch.tensor([True, False]),
    "empty": torch.empty(0, 3),
}
STATE_OF: dict[str, Any] = {"epoch": 1, "lr": 0.1, "order": [3, 1], "name": "\u00e9"}


def saved(folder: Path, step: int, value: float = 0.0) -> Path:
    return save_checkpoint(folder, step, {"w": torch.full((3,), value)}, {"value": value})


def value_of(found: checkpoint.Checkpoint | None) -> float | None:
    if found is None:
        return None
    assert found.tensors["w"].tolist() == [found.state["value"]] * 3
    return float(found.state["value"])


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    before = evaluations().get("checkpoint-whole", 0)
    path = save_checkpoint(tmp_path, 42, TREE, STATE_OF, head=(9, "ab" * 8))
    assert evaluations()["checkpoint-whole"] == before + 1
    assert path == tmp_path / "step-00000042"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    found = load_checkpoint(path)
    assert (found.step, found.state, found.head) == (42, STATE_OF, (9, "ab" * 8))
    assert found.digest == hex64(tree_digest(TREE)) == hex64(tree_digest(found.tensors))
    assert {n: (t.dtype, t.shape) for n, t in found.tensors.items()} == {n: (t.dtype, t.shape) for n, t in TREE.items()}
    assert str(path / TENSORS) in Path("/proc/self/maps").read_text()  # so ranks of a host share the memory
    checkpoint.remove(path)
    assert hex64(tree_digest(found.tensors)) == found.digest
    found.tensors["adapter.a"].zero_()
    assert found.tensors["tied"].any()


def test_permissions_are_the_umasks(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = saved(tmp_path, 1)
    finally:
        os.umask(before)
    assert {p.stat().st_mode & 0o777 for p in path.iterdir()} == {0o640}


@pytest.mark.parametrize("mode", ["kill", "power cut", "disk full"])
@pytest.mark.parametrize("step", [1, 2], ids=["same step", "next step"])
def test_a_save_that_fails_leaves_old_or_new(tmp_path: Path, mode: Mode, step: int) -> None:
    def check(folder: Path, finished: bool, error: Exception | None) -> None:
        if mode == "disk full":
            assert finished or isinstance(error, InputError)
            assert error is None or "the disk is full" in str(error)
            assert (folder / "step-00000001").is_dir()
        else:
            assert error is None
        found, rejected = checkpoint.newest_valid(folder)
        assert rejected == []
        assert value_of(found) in ((2.0,) if finished else (1.0, 2.0))
        clean_leftovers(folder)
        saved(folder, step, 3.0)
        assert value_of(checkpoint.newest_valid(folder)[0]) == 3.0
        assert not any(".old-" in p.name or is_leftover(p.name) for p in folder.iterdir())

    def save(folder: Path) -> None:
        saved(folder, step, 2.0)

    assert every_failure(tmp_path, lambda folder: saved(folder, 1, 1.0), save, mode, check) >= 12


@pytest.mark.parametrize("mode", ["kill", "power cut", "disk full"])
def test_a_crash_while_pruning_keeps_what_is_kept(tmp_path: Path, mode: Mode) -> None:
    def prepare(folder: Path) -> None:
        for step in (1, 2, 3, 4):
            saved(folder, step, float(step))

    def check(folder: Path, finished: bool, error: Exception | None) -> None:
        assert error is None or (mode == "disk full" and isinstance(error, InputError))
        steps = [load_checkpoint(p).step for p in sorted(folder.iterdir()) if not is_leftover(p.name)]
        assert {1, 4} <= set(steps)
        if finished:
            assert steps == [1, 4]
        clean_leftovers(folder)
        checkpoint.prune(folder, keep=1, best=1)
        assert sorted(p.name for p in folder.iterdir()) == ["step-00000001", "step-00000004"]

    assert every_failure(tmp_path, prepare, lambda f: checkpoint.prune(f, keep=1, best=1), mode, check) >= 10


def test_prune_keeps_the_latest_and_the_best(tmp_path: Path) -> None:
    for step in (5, 100, 20, 3):
        saved(tmp_path, step)
    assert [p.name for p in checkpoint.prune(tmp_path, keep=2, best=3)] == ["step-00000005"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000020", "step-00000100"]
    assert [p.name for p in checkpoint.prune(tmp_path, keep=1, newest=20)] == ["step-00000003"]  # 100 was rejected
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000020", "step-00000100"]


def test_a_link_in_the_place_of_a_checkpoint_is_rejected_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    save_checkpoint(folder, 1, {"w": torch.ones(1)}, {})
    (folder / "step-00000001").rename(tmp_path / "elsewhere")
    (folder / "step-00000001").symlink_to(tmp_path / "elsewhere")
    (folder / "step-00000002").symlink_to(tmp_path / "nowhere")
    found, rejected = checkpoint.newest_valid(folder)
    assert found is None
    assert ["step-00000002" in rejected[0], "step-00000001" in rejected[1]] == [True, True]
    for step in (1, 2):
        save_checkpoint(folder, step, {"w": torch.zeros(1)}, {})
    assert sorted(path.name for path in folder.iterdir() if not path.is_symlink()) == ["step-00000001", "step-00000002"]
    assert len(list(folder.iterdir())) == 2
    assert (tmp_path / "elsewhere" / "manifest.json").exists()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def link_elsewhere(path: Path) -> None:
    copy = path.parent.parent / f"copy-{path.name}"
    path.rename(copy)
    path.symlink_to(copy)


def replaced_by(path: Path, make: Callable[[Path], None]) -> None:
    path.unlink()
    make(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b" "),
    "bit at the start": lambda path: flip(path, 0),
    "bit at the end": lambda path: flip(path, path.stat().st_size - 3),
    "missing": lambda path: path.unlink(),
    "a link": link_elsewhere,
    "a folder": lambda path: replaced_by(path, Path.mkdir),
    "a pipe": lambda path: replaced_by(path, os.mkfifo),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [TENSORS, STATE, MANIFEST])
def test_damage_is_named_and_the_older_one_taken(tmp_path: Path, name: str, damage: str) -> None:
    saved(tmp_path, 1, 1.0)
    path = saved(tmp_path, 2, 2.0)
    DAMAGES[damage](path / name)
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(path)
    found, rejected = checkpoint.newest_valid(tmp_path)
    assert value_of(found) == 1.0
    assert len(rejected) == 1
    assert str(path / name) in rejected[0]


def test_a_renamed_or_foreign_folder_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    other = path.rename(tmp_path / "step-00000009")
    with pytest.raises(CheckpointError, match=r"of step 1, the folder's name says 9"):
        load_checkpoint(other)
    path = other.rename(path)
    (path / "extra.bin").touch()
    with pytest.raises(CheckpointError, match=r"extra.bin: no checkpoint has such a file"):
        load_checkpoint(path)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(CheckpointError, match="link: it is a link, not the folder"):
        load_checkpoint(tmp_path / "link")
    with pytest.raises(CheckpointError, match="No such file"):
        load_checkpoint(tmp_path / "none")
    assert checkpoint.newest_valid(tmp_path / "none") == (None, [])


def resealed(path: Path, changes: Mapping[str, object], tensors: bytes | None = None) -> None:
    """Change a checkpoint and make its sizes and hashes agree again, as an attacker would."""
    manifest = json.loads((path / MANIFEST).read_bytes()) | dict(changes)
    del manifest["sha256"]
    if tensors is not None:
        (path / TENSORS).write_bytes(tensors)
        manifest["files"][TENSORS] = {"bytes": len(tensors), "sha256": checkpoint._sha256(tensors)}
    (path / MANIFEST).write_bytes(json_bytes(manifest | {"sha256": checkpoint._sha256(json_bytes(manifest))}))


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (save({"w": torch.zeros(3), "x": torch.zeros(1)}), "tensor x is not listed"),
        (save({"v": torch.zeros(3)}), "tensor v is not listed"),
        (save({}), "tensor w is missing"),
        (save({"w": torch.zeros(1, 3)}), "tensor w is"),
        (save({"w": torch.zeros(3, dtype=torch.int32)}), "tensor w is"),
        (save({"w": torch.ones(3)}), "the tensors have digest"),
        (bytes(8), TENSORS),
        ((8).to_bytes(8, "little") + b"[[[[[[[[", TENSORS),
        ((1 << 62).to_bytes(8, "little") + b"{}" + bytes(40), f"{TENSORS}: .*header"),
        ((60).to_bytes(8, "little") + b"{}" + bytes(40), f"{TENSORS}: .*header"),
    ],
    ids=range(10),
)
def test_other_tensors_under_sound_hashes_are_refused(tmp_path: Path, tensors: bytes, says: str) -> None:
    path = saved(tmp_path, 1)
    resealed(path, {}, tensors=tensors)
    with pytest.raises(CheckpointError, match=says):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "manifest",
    [
        *({"version": 2}, {"step": "1"}, {"step": True}, {"files": {}}),
        *({"tensors": []}, {"ledger": 1}, {"digest": None}),
        *("NaN", '{"version": NaN}', "[" * 100_000, '{"\\ud800": 1, "version": 1}', "[]"),
    ],
)
def test_a_manifest_of_another_form_is_refused_by_name(tmp_path: Path, manifest: dict[str, object] | str) -> None:
    path = saved(tmp_path, 1)
    if isinstance(manifest, str):
        (path / MANIFEST).write_text(manifest)
    else:
        resealed(path, manifest)
    with pytest.raises(CheckpointError, match=MANIFEST):
        load_checkpoint(path)


@pytest.mark.parametrize("state", [{"x": float("nan")}, {"x": (1, 2)}, {"x": {1: 2}}, {"x": object()}])
def test_a_state_that_would_come_back_changed_is_refused(tmp_path: Path, state: dict[str, object]) -> None:
    with pytest.raises((ValueError, TypeError)):
        save_checkpoint(tmp_path, 1, {}, state)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["tensor", "file"])
def test_what_is_not_read_back_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    saved(tmp_path, 1, 1.0)
    real = atomic.write_new

    def lying(path: Path, data: bytes | Iterator[bytes | memoryview]) -> None:
        real(path, data)
        if damage == "file" and path.name == STATE:
            flip(path, 3)

    monkeypatch.setattr(checkpoint, "write_new", lying)
    if damage == "tensor":
        monkeypatch.setattr(checkpoint, "bytes_of", lambda tensor, of=checkpoint.bytes_of: of(tensor + 1))
    with pytest.raises(Violation, match="checkpoint-whole broken at step 2") as caught:
        saved(tmp_path, 2, 2.0)
    assert caught.value.tensor == ("w" if damage == "tensor" else "")
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert value_of(checkpoint.newest_valid(tmp_path)[0]) == 1.0
