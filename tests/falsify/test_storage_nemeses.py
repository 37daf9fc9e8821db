"""Faults of the disk: what a power cut takes, and damage that the trainer refuses and an unguarded one believes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from andon.run.checkpoint import load_checkpoint, save_checkpoint
from andon.run.sealed import MANIFEST, STATE, TENSORS, CheckpointError
from falsify.nemesis import power_cut
from falsify.nemesis.disk import DAMAGES
from falsify.nemesis.left_behind import whole


def saved(folder: Path, step: int) -> Path:
    state = {"step": step, "words": [f"word {step} {number}" for number in range(600)]}
    return save_checkpoint(folder, step, {"w": torch.full((3000,), float(step))}, state)


@pytest.mark.parametrize("name", [TENSORS, STATE, MANIFEST])
@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_is_refused_by_file(tmp_path: Path, damage: Callable[[Path, Path], object], name: str) -> None:
    """The trainer and a reader that shares nothing with it refuse what a nemesis does to any file of a checkpoint."""
    before, path = saved(tmp_path, 1), saved(tmp_path, 2)
    damage(path / name, before / name)
    assert not whole(path)
    with pytest.raises(CheckpointError, match=rf"step-00000002/({name}|{TENSORS}):"):
        load_checkpoint(path)


LOG = """\
7 openat(AT_FDCWD</>, "{0}/new/a", O_WRONLY|O_CREAT, 0666) = 4<{0}/new/a>
7 write(4<{0}/new/a>, ""..., 6) = 6
7 fsync(4<{0}/new/a>)     = 0
7 write(5<{0}/log>, ""..., 3 <unfinished ...>
8 write(9</elsewhere/x>, ""..., 50) = 50
7 <... write resumed>) = 3
7 fsync(5<{0}/log>) = -1 EIO (Input/output error)
7 write(4<{0}/new/a>, ""..., 4) = 4
7 rename("{0}/new", "{0}/done") = 0
7 write(6<{0}/kept>, ""..., 2) = 2
7 fsync(6<{0}/kept>) = 0
"""


@pytest.mark.parametrize(("synced", "names"), [(False, True), (False, False), (True, True)])
def test_a_power_cut_takes_what_was_not_synced(tmp_path: Path, synced: bool, names: bool) -> None:
    """Bytes after a file's last fsync are cut off, under its later name too; names only where the folder was not."""
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "a").write_bytes(b"synced" + b"lost")
    (tmp_path / "log").write_bytes(b"old" + b"new")
    (tmp_path / "kept").write_bytes(b"ok")
    log = LOG.format(tmp_path) + f"7 fsync(8<{tmp_path}>) = 0\n" * synced
    proof = power_cut.cut(log.splitlines(), tmp_path, names=names)
    place = "done" if synced or not names else "new"
    assert (tmp_path / place / "a").read_bytes() == b"synced"
    assert (tmp_path / "log").read_bytes() == b"old"
    assert (tmp_path / "kept").read_bytes() == b"ok"
    assert proof == f"7 bytes of 2 files and {int(place == 'new')} names that were not synced are gone"
