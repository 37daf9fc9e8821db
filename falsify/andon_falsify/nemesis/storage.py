"""Disks that fill, and folders that go (rows 4, 34, 39 and 40 of the catalogue of issue 5)."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from andon_falsify.nemesis.damaged import FORGIVEN, PLANTS, UNVERIFIED
from andon_falsify.nemesis.planting import first_strike
from andon_falsify.nemesis.protocol import Launch, Nemesis, NotStruckError, Plant, Promise, Struck
from andon_falsify.nemesis.run import Run

_PAGE = 4096
_END_S = 60.0


@dataclass(frozen=True, kw_only=True)
class KilledSaving(Nemesis):
    """Rank 0 is killed while it saves; what it had written lies there under a temporary name."""

    at: int = 14

    def launch(self, *, guarded: bool) -> Launch:
        """Without its guard it writes under the final name."""
        plant = "dies_while_saving" if guarded else "saves_in_place"
        return Launch(plants=(Plant.of(f"{PLANTS}:{plant}", step=self.at),))

    def heal(self, *, guarded: bool) -> Launch:
        """Without its guard half a checkpoint is believed to be one."""
        return Launch(plants=() if guarded else (UNVERIFIED,))

    def inject(self, run: Run) -> Struck:
        """Wait for the rank to die; its leftover must be there."""
        run.launcher.wait(_END_S)
        struck = first_strike(run.scratch)
        if struck is None or not list(run.folder.glob("checkpoints/*")):
            raise NotStruckError(f"no rank died while it saved: {run.said()[-300:]}")
        left = [path.name for path in run.folder.glob("checkpoints/*.andon-tmp-*")]
        return Struck(struck.at, struck.step, f"{struck.proof}; left over: {', '.join(left) or 'nothing'}")


@dataclass(frozen=True, kw_only=True)
class FullDisk(Nemesis):
    """The run lives on a small file system of its own, which is filled while it trains.

    spare: bytes that are left free: enough for lines, too little for a checkpoint. 0: the run ends.
    """

    spare: int = 0
    size: str = "8m"

    def needs(self) -> str | None:
        """A mount needs root."""
        with tempfile.TemporaryDirectory() as place:
            done = _mounted(Path(place), self.size)
            if done.returncode == 0:
                subprocess.run(["umount", place], check=True)
                return None
        return f"no tmpfs can be mounted: {done.stderr.strip()}"

    def prepare(self, run: Run) -> None:
        """Put the run's folder on a file system of its own."""
        disk = run.scratch / "disk"
        disk.mkdir()
        done = _mounted(disk, self.size)
        if done.returncode:
            raise NotStruckError(f"no tmpfs: {done.stderr.strip()}")
        run.folder = disk / "run"

    def calm_key(self) -> object:
        """On a file system of this size."""
        return FullDisk, self.calm(), self.size

    def launch(self, *, guarded: bool) -> Launch:
        """Going on must be asked for; without its guard the run stops, or does not hear of the disk at all."""
        if self.spare:
            return Launch(settings=("run.on_save_error=continue",) if guarded else ())
        return Launch(plants=() if guarded else (FORGIVEN,))

    def inject(self, run: Run) -> Struck:
        """Fill the file system; where the run is to go on, make room again once it has."""
        run.reach(run.draw.randrange(5, 12))
        step, at = run.steps, time.monotonic()
        filler = run.folder.parent / "filler"
        proof = _fill(filler, self.spare)
        if self.spare:
            said = ("going on without it", "the disk is full")
            run.wait_for(lambda: any(each in run.said() for each in said) or run.over(), "said")
            filler.unlink()
        return Struck(at, step, proof)

    def undo(self, run: Run) -> None:
        """Make room."""
        (run.folder.parent / "filler").unlink(missing_ok=True)

    def release(self, run: Run) -> None:
        """Take the file system away."""
        disk = run.scratch / "disk"
        if disk.is_mount():
            subprocess.run(["umount", "-l", str(disk)], check=True)


def _mounted(place: Path, size: str) -> subprocess.CompletedProcess[str]:
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _fill(filler: Path, spare: int) -> str:
    """Write until nothing more fits, then give back `spare` bytes; how much there is then."""
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(_PAGE))
        except OSError as error:
            file.truncate(max(0, file.tell() - spare))
            return f"{error.strerror}: {filler.stat().st_size} bytes of filler, {spare} left"


@dataclass(frozen=True, kw_only=True)
class GoneFolder(Nemesis):
    """A folder of the run is removed while it trains. `which`: below the run's folder, or that itself."""

    which: str
    guard: str = "a checkpoint that cannot be written ends the run"
    finds: str = "exit 0 instead of 2"

    def launch(self, *, guarded: bool) -> Launch:
        """Without its guard errors of the disk are passed over."""
        return Launch(plants=() if guarded else (FORGIVEN,))

    def inject(self, run: Run) -> Struck:
        """Remove it."""
        run.reach(run.draw.randrange(5, 12))
        step, at = run.steps, time.monotonic()
        folder = run.folder / self.which
        gone = folder.with_name("removed")
        folder.rename(gone)
        shutil.rmtree(gone)
        return Struck(at, step, f"{self.which or 'run'} folder removed")


@dataclass(frozen=True, kw_only=True)
class ReadOnlyFolder(Nemesis):
    """The folder of checkpoints can no longer be written to."""

    guard: str = "a checkpoint that cannot be written ends the run"
    finds: str = "exit 0 instead of 2"

    def needs(self) -> str | None:
        """Permissions bind everybody but root; for root there is the immutable attribute of a file system."""
        with tempfile.TemporaryDirectory() as place:
            try:
                _forbid(Path(place))
                (Path(place) / "file").touch()
            except (OSError, subprocess.CalledProcessError) as error:
                return None if isinstance(error, PermissionError) else f"chattr does not work here: {error}"
            finally:
                _allow(Path(place))
        return "this user may write to a folder that is read-only"

    def launch(self, *, guarded: bool) -> Launch:
        """Without its guard errors of the disk are passed over."""
        return Launch(plants=() if guarded else (FORGIVEN,))

    def inject(self, run: Run) -> Struck:
        """Make it so, and try."""
        run.reach(run.draw.randrange(5, 12))
        step, at = run.steps, time.monotonic()
        folder = run.folder / "checkpoints"
        _forbid(folder)
        try:
            (folder / "file").touch()
        except PermissionError as error:
            return Struck(at, step, f"{folder.name}: {error.strerror}")
        raise NotStruckError("the folder can still be written to")

    def undo(self, run: Run) -> None:
        """Let everybody write again."""
        _allow(run.folder / "checkpoints")


def _forbid(folder: Path) -> None:
    if os.geteuid() == 0:
        subprocess.run(["chattr", "+i", str(folder)], check=True, capture_output=True)
    else:
        folder.chmod(0o555)


def _allow(folder: Path) -> None:
    with suppress(OSError):  # the folder is gone; without chattr nothing was forbidden
        if os.geteuid() == 0:
            subprocess.run(["chattr", "-i", str(folder)], check=False, capture_output=True)
        else:
            folder.chmod(0o755)


NEMESES: tuple[Nemesis, ...] = (
    KilledSaving(
        name="rank killed while saving",
        numbers=(4, 39),
        how="SIGKILL to rank 0 between the last byte of a checkpoint and its name",
        promise=Promise((71,), ("rank 0 of 2 was killed by SIGKILL",), 6.0, heal_says=("resume: from step-00000012",)),
        guard="a temporary name, and a manifest that is written last",
        finds="healing: exit|healing: other bits",
    ),
    FullDisk(
        name="disk full",
        numbers=(34,),
        how="a tmpfs of 8 MB, filled while the run trains",
        promise=Promise((2,), ("cannot be written: the disk is full",), heal_says=("resume: from step-",)),
        guard="an error of the disk ends the run",
        finds="exit 0 instead of 2|not said: 'cannot be written",
        tier="seconds",
    ),
    FullDisk(
        name="disk full, going on",
        numbers=(34,),
        how="a tmpfs of 8 MB, filled but for 100 KB, with run.on_save_error=continue",
        promise=Promise((0,), ("going on without it (run.on_save_error=continue)", "is intact|no checkpoint yet")),
        guard="run.on_save_error=continue",
        finds="exit 2 instead of 0",
        spare=100_000,
    ),
    ReadOnlyFolder(
        name="checkpoints read-only",
        numbers=(40,),
        how="the folder of checkpoints made immutable (chattr +i), or mode 555 for a user",
        promise=Promise((2,), ("cannot be written: no permission to write",), heal_says=("resume: from step-",)),
    ),
    GoneFolder(
        name="checkpoints removed",
        numbers=(40,),
        how="the folder of checkpoints removed while the run trains",
        promise=Promise((2,), ("cannot be written: the folder is gone",), heal_says=("starting anew",)),
        which="checkpoints",
    ),
    GoneFolder(
        name="run folder removed",
        numbers=(40,),
        how="the whole folder of the run removed while it trains",
        promise=Promise((2,), ("cannot be written: the folder is gone",), heal_says=("starting anew",)),
        which="",
    ),
)
