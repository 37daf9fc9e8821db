"""Checkpoints that are not what was written, and a run that goes on elsewhere (rows 35, 36 and 41 of issue 5)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from andon_falsify.nemesis.left_behind import MANIFEST, STATE, TENSORS
from andon_falsify.nemesis.protocol import Launch, Nemesis, NotStruckError, Plant, Promise, Struck
from andon_falsify.nemesis.run import Run

PLANTS = "andon_falsify.nemesis.disk_plants"
UNVERIFIED = Plant.of(f"{PLANTS}:unverified")
FORGIVEN = Plant.of(f"{PLANTS}:forgiven")
_PAGE = 4096
_END_S = 60.0
_DAMAGED = (TENSORS, STATE, MANIFEST)
"""One file of each of the newest checkpoints."""


def checkpoints(run: Run) -> list[Path]:
    """The run's checkpoints, the newest first."""
    return sorted(run.folder.glob("checkpoints/step-????????"), reverse=True)


def end_at_boundary(run: Run) -> None:
    """Ask the run to end by SIGTERM, and wait until it has. Raises `NotStruckError` where it does not."""
    run.launcher.send_signal(signal.SIGTERM)
    try:
        run.launcher.wait(_END_S)
    except subprocess.TimeoutExpired:
        raise NotStruckError("the run does not end at SIGTERM") from None


@dataclass(frozen=True, kw_only=True)
class Damaged(Nemesis):
    """A run ends; then each of its three newest checkpoints is damaged in another file, the tensors of the newest."""

    damage: Callable[[Path, Path], object]
    """Damages a file, given the same file of the checkpoint before."""
    guard: str = "the check of every byte against the manifest"
    finds: str = "healing: exit|healing: other bits"

    def heal(self, *, guarded: bool) -> Launch:
        """Without its guard whatever is in the files is believed."""
        return Launch(plants=() if guarded else (UNVERIFIED,))

    def inject(self, run: Run) -> Struck:
        """End the run by SIGTERM, and change files; they must then be others."""
        run.reach(run.draw.randrange(17, 24))
        end_at_boundary(run)
        step, changed = run.steps, []
        newest = checkpoints(run)
        for folder, before, name in zip(newest, newest[1:], _DAMAGED, strict=False):
            content = (folder / name).read_bytes()
            self.damage(folder / name, before / name)
            if (folder / name).read_bytes() == content:
                raise NotStruckError(f"{folder / name} is as it was")
            changed.append(f"{folder.name}/{name}")
        if len(changed) < len(_DAMAGED):
            raise NotStruckError(f"too few checkpoints to damage: {len(newest)}")
        return Struck(time.monotonic(), step, f"changed: {', '.join(changed)}")


def _cut(path: Path, _before: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def _flip(path: Path, _before: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 4
    path.write_bytes(data)


def _zero(path: Path, _before: Path) -> None:
    """A page in the middle of a file, or all of one that is no longer than that."""
    data = bytearray(path.read_bytes())
    start = len(data) // 2 // _PAGE * _PAGE
    length = len(data[start : start + _PAGE])
    data[start : start + _PAGE] = bytes(length)
    path.write_bytes(data)


def _mix(path: Path, before: Path) -> None:
    shutil.copyfile(before, path)


@dataclass(frozen=True, kw_only=True)
class MoreWorkers(Nemesis):
    """A run ends, and goes on with another number of workers."""

    def heal(self, *, guarded: bool) -> Launch:
        """On three instead of two; without its guard the moments are lost on the way."""
        forgets = Plant.of("andon_falsify.nemesis.guards:moments_lost")
        return Launch("3") if guarded else Launch("3", ("contracts.enabled=false",), (forgets,))

    def inject(self, run: Run) -> Struck:
        """End the run by SIGTERM."""
        run.reach(run.draw.randrange(5, 20))
        end_at_boundary(run)
        return Struck(time.monotonic(), run.steps, "ended on 2 workers, resumed on 3")


_REJECTED = ("resume: rejected", f"/{TENSORS}:", f"/{STATE}:", f"/{MANIFEST}:", "resume: from step-")
_ENDED = (75,)
_WORLD = "moments that are lost, with contracts off"
NEMESES: tuple[Nemesis, ...] = (
    Damaged(
        name="checkpoints cut short",
        numbers=(35,),
        how="100 bytes fewer of the tensors, the state and the manifest of the three newest checkpoints",
        promise=Promise(_ENDED, heal_says=_REJECTED),
        damage=_cut,
    ),
    Damaged(
        name="bits flipped in checkpoints",
        numbers=(36,),
        how="one bit of the tensors, the state and the manifest of the three newest checkpoints",
        promise=Promise(_ENDED, heal_says=_REJECTED),
        damage=_flip,
        tier="seconds",
    ),
    Damaged(
        name="pages of zeros in checkpoints",
        numbers=(36,),
        how="a page of the tensors, the state and the manifest of the three newest checkpoints",
        promise=Promise(_ENDED, heal_says=_REJECTED),
        damage=_zero,
    ),
    Damaged(
        name="files of two checkpoints mixed",
        numbers=(36,),
        how="the tensors, the state and the manifest of the three newest checkpoints from the one before each",
        promise=Promise(_ENDED, heal_says=("resume: rejected", f"/{TENSORS}:", "resume: from step-")),
        damage=_mix,
    ),
    MoreWorkers(
        name="another number of workers on resume",
        numbers=(41,),
        how="2 workers, ended by SIGTERM, resumed on 3",
        promise=Promise(_ENDED, heal_says=("resume: from step-",)),
        guard=_WORLD,
        finds="healing: other bits",
    ),
)
