"""Disks that fill, fail, forget or lie, and damaged checkpoints: rows 4, 34 to 37, 39 to 41."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .language import Fault, Guard, Nemesis, Place, Promise, planted
from .left_behind import MANIFEST, STATE, TENSORS
from .planting import NotStruckError, Plant, Struck, UnavailableError
from .processes import ranks
from .run import Launch, Run
from .signals import sent
from .tracing import CALLS, attached, power_cut

_PAGE = 4096
_END_S = 60.0
_DAMAGED = (TENSORS, STATE, MANIFEST)
"""The damaged file of each of the newest checkpoints."""


@dataclass(frozen=True)
class SmallDisk(Place):
    size: str

    @contextmanager
    def taken(self, run: Run) -> Iterator[None]:
        disk = run.scratch / "disk"
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={self.size}", "tmpfs", str(disk)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UnavailableError(f"no tmpfs can be mounted: {done.stderr.strip()}")
        try:
            run.folder = disk / "run"
            yield
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=True)


def _fill(run: Run) -> Struck:
    at, step = run.reach(5, 12)
    filler = run.folder.parent / "filler"
    with filler.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(_PAGE))
            except OSError as error:
                return Struck(at, step, f"{error.strerror}: {filler.stat().st_size} bytes of filler")


def gone(which: str) -> Fault:
    """Remove a folder of the run while it trains; "": the run folder itself."""

    def strike(run: Run) -> Struck:
        at, step = run.reach(5, 12)
        removed = (run.folder / which).with_name("removed")
        (run.folder / which).rename(removed)
        shutil.rmtree(removed)
        return Struck(at, step, f"{which or 'run'} folder removed")

    return Fault(strike)


def _forbid(run: Run) -> Struck:
    at, step = run.reach(5, 12)
    folder = run.folder / "checkpoints"
    try:
        _read_only(folder, True)
        (folder / "file").touch()
    except PermissionError as error:
        return Struck(at, step, f"{folder.name}: {error.strerror}")
    except (OSError, subprocess.CalledProcessError) as error:
        raise UnavailableError(f"no folder can be made read-only: {error}") from error
    raise UnavailableError("this user may write to a folder that is read-only")


def _allow(run: Run) -> None:
    with suppress(OSError, subprocess.CalledProcessError):  # nothing was forbidden
        _read_only(run.folder / "checkpoints", False)


def _read_only(folder: Path, on: bool) -> None:
    """Permissions do not bind root, but the attribute `immutable` does."""
    if os.geteuid() == 0:
        subprocess.run(["chattr", "+i" if on else "-i", str(folder)], check=True, capture_output=True)
    else:
        folder.chmod(0o555 if on else 0o755)


@contextmanager
def _traced(run: Run, *options: str) -> Iterator[Path]:
    """Trace rank 0 with strace. Yields the log."""
    run.wait_for(lambda: bool(ranks(run.launcher.pid)), "rank 0 is there")
    log = run.scratch / "strace"
    with attached(ranks(run.launcher.pid)[0].pid, "-f", "-o", str(log), *options):
        yield log


def _fail_syncs(run: Run) -> Struck:
    """Let every further fsync of rank 0 fail with an input/output error, and find one in strace's log."""
    _, step = run.reach(5, 12)
    with _traced(run, "-e", "trace=fsync", "-e", "inject=fsync:error=EIO") as log:
        run.wait_for(lambda: "(INJECTED)" in log.read_text(), "fsync failed", _END_S)
        at = time.monotonic()
        run.launcher.wait(_END_S)
    failed = [line for line in log.read_text().splitlines() if "(INJECTED)" in line]
    return Struck(at, step, f"{len(failed)} calls of fsync failed, first {failed[0].split('<')[-1][:80]}")


def powerless(*, names: bool) -> Fault:
    """Kill all processes and take back what rank 0 wrote after the last fsync. names: new names too."""

    def strike(run: Run) -> Struck:
        with _traced(run, "-s", "0", "-e", f"trace={','.join(CALLS)}") as log:
            at, step = run.reach(13, 22)
            run.kill()
        lines = log.read_text(errors="replace").splitlines()
        return Struck(at, step, f"{len(lines)} calls logged; {power_cut(lines, run.folder, names=names)}")

    return Fault(strike)


def damaged(damage: Callable[[Path, Path], object]) -> Fault:
    """End the run, then damage one file of each of its three newest checkpoints: the tensors of the newest.

    damage: changes a file; its second argument is the same file of the checkpoint before.
    """

    def strike(run: Run) -> Struck:
        run.reach(17, 24)
        run.launcher.send_signal(signal.SIGTERM)
        run.launcher.wait(_END_S)
        step, changed = run.steps, []
        newest = sorted(run.folder.glob("checkpoints/step-????????"), reverse=True)
        for folder, before, name in zip(newest, newest[1:], _DAMAGED, strict=False):
            content = (folder / name).read_bytes()
            damage(folder / name, before / name)
            if (folder / name).read_bytes() == content:
                raise NotStruckError(f"{folder / name} is as it was")
            changed.append(f"{folder.name}/{name}")
        if len(changed) < len(_DAMAGED):
            raise NotStruckError(f"too few checkpoints to damage: {len(newest)}")
        return Struck(time.monotonic(), step, f"changed: {', '.join(changed)}")

    return Fault(strike)


def cut_short(path: Path, _before: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def flip(path: Path, _before: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 4
    path.write_bytes(data)


def zero(path: Path, _before: Path) -> None:
    """Set a page in the middle of a file to zeros, or all of a smaller file."""
    data = bytearray(path.read_bytes())
    start = len(data) // 2 // _PAGE * _PAGE
    length = len(data[start : start + _PAGE])
    data[start : start + _PAGE] = bytes(length)
    path.write_bytes(data)


def mix(path: Path, before: Path) -> None:
    shutil.copyfile(before, path)


_FORGIVEN, _BELIEVED = (Plant.of("forgiven"),), (Plant.of("unverified"),)
_REFUSED = Guard(
    "an error of the disk ends the run", "exit 0 instead of 2|not said: 'cannot be written", plants=_FORGIVEN
)
_LAST = ("training.keep=last",)  # `best` reads a checkpoint at the end, whose absence is an error too
_FATAL = Guard("a checkpoint that cannot be written ends the run", "exit 0 instead of 2", _LAST, _FORGIVEN)
_VERIFIED = Guard(
    "the check of every byte against the manifest", "healing: exit|healing: other bits", resume_plants=_BELIEVED
)
_SYNCED = Guard(
    "fsync of files and folders",
    "healing: exit|healing: other bits|healing: not said: 'resume: from step-",
    plants=(Plant.of("silent", target="os:fsync"),),
)
_RESUMED = ("resume: from step-",)
_REJECTED = ("resume: rejected", f"/{TENSORS}:", f"/{STATE}:", f"/{MANIFEST}:", *_RESUMED)
_GONE = Promise((2,), ("the folder is gone|was removed, moved or replaced",), heal_says=("starting anew",))
_POWER = Promise((-9,), heal_says=("resume: from step-000000",))
_NEWEST = "the tensors, the state and the manifest of the three newest checkpoints"


def _unwritable(why: str, *heal_says: str) -> Promise:
    return Promise((2,), (f"cannot be written: {why}",), heal_says=heal_says)


def _damaged(name: str, how: str, damage: Callable[[Path, Path], object], says: tuple[str, ...] = _REJECTED) -> Nemesis:
    return Nemesis(name, how, Promise((75,), heal_says=says), damaged(damage), _VERIFIED)


NEMESES = (
    Nemesis(
        *("rank killed while saving", "SIGKILL to rank 0 between the last byte of a checkpoint and its name"),
        Promise((71,), ("rank 0 of 2 was killed by SIGKILL",), 6.0, heal_says=("resume: from step-00000012",)),
        planted("dies_while_saving", step=14),
        Guard(
            "a temporary name, and a manifest that is written last",
            _VERIFIED.finds,
            plants=(Plant.of("saves_in_place", step=14),),
            resume_plants=_BELIEVED,
        ),
    ),
    Nemesis(
        *("disk full", "a tmpfs of 8 MB, filled while the run trains"),
        _unwritable("the disk is full", *_RESUMED),
        Fault(_fill, heal=lambda run: (run.folder.parent / "filler").unlink(missing_ok=True)),
        _REFUSED,
        place=SmallDisk("8m"),
    ),
    Nemesis(
        "checkpoints read-only",
        "the folder of checkpoints made immutable (chattr +i), or mode 555 for a user",
        _unwritable("no permission to write", *_RESUMED),
        Fault(_forbid, _allow),
        _FATAL,
    ),
    Nemesis(
        *("checkpoints removed", "the folder of checkpoints removed while the run trains", _GONE, gone("checkpoints")),
        _FATAL,
    ),
    Nemesis(
        *("run folder removed", "the whole folder of the run removed while it trains", _GONE, gone("")),
        # The launcher reads from the summary that a run is finished, and the summary is removed too.
        Guard("what cannot be written ends the run", "exit 71 instead of 2", _LAST, _FORGIVEN),
    ),
    Nemesis(
        "power cut, names kept",
        "SIGKILL to all; what strace saw rank 0 write after the last fsync is cut off its files",
        _POWER,
        powerless(names=False),
        _SYNCED,
    ),
    Nemesis(
        "power cut, names lost",
        "the same, and names given after the last fsync of their folder are taken back",
        _POWER,
        powerless(names=True),
        _SYNCED,
    ),
    Nemesis(
        *("fsync fails", "strace lets every fsync of rank 0 fail with EIO"),
        _unwritable("the disk reports an input/output error"),
        Fault(_fail_syncs),
        Guard("an fsync that fails is fatal for what it was to save", "exit 0 instead of 2", plants=_FORGIVEN),
    ),
    _damaged("checkpoints cut short", f"100 bytes fewer of {_NEWEST}", cut_short),
    _damaged("bits flipped in checkpoints", f"one bit of {_NEWEST}", flip),
    _damaged("pages of zeros in checkpoints", f"a page of {_NEWEST}", zero),
    _damaged(
        *("files of two checkpoints mixed", f"{_NEWEST} from the one before each", mix),
        ("resume: rejected", f"/{TENSORS}:", *_RESUMED),
    ),
    Nemesis(
        *("another number of workers on resume", "2 workers, ended by SIGTERM, resumed on 3"),
        Promise((75,), heal_says=_RESUMED),
        sent(signal.SIGTERM, "launcher"),
        Guard(
            *("moments that are lost, with contracts off", "healing: other bits", (), ()),
            *(("contracts.enabled=false",), (Plant.of("moments_lost"),)),
        ),
        resumed=Launch("3"),
    ),
)
