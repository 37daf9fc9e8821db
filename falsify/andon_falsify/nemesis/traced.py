"""Disks that forget, or fail to keep, by strace: rows 37 and 40 of the catalogue of issue 5."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass

from andon_falsify.nemesis import crash_points, power_cut
from andon_falsify.nemesis.damaged import FORGIVEN, PLANTS
from andon_falsify.nemesis.protocol import Launch, Nemesis, NotStruckError, Plant, Promise, Struck
from andon_falsify.nemesis.run import Run

_END_S = 60.0
_LAST_LINES_S = 5.0
"""How long strace has to write what it saw last."""


@dataclass(frozen=True, kw_only=True)
class FailingSync(Nemesis):
    """From a step on every fsync of rank 0 fails with an input/output error."""

    guard: str = "an fsync that fails is fatal for what it was to save"
    finds: str = "exit 0 instead of 2"

    def needs(self) -> str | None:
        """strace, and the right to trace."""
        return crash_points.missing()

    def launch(self, *, guarded: bool) -> Launch:
        """Without its guard errors of the disk are passed over."""
        return Launch(plants=() if guarded else (FORGIVEN,))

    def inject(self, run: Run) -> Struck:
        """Attach strace to rank 0; its log must show a call that failed."""
        run.reach(run.draw.randrange(5, 12))
        step, log = run.steps, run.scratch / "strace"
        options = ["-f", "-y", "-o", str(log), "-e", "trace=fsync", "-e", "inject=fsync:error=EIO"]
        with attached(run, options):
            run.wait_for(lambda: "(INJECTED)" in log.read_text() or run.over(), "fsync failed", _END_S)
            at = time.monotonic()
            run.launcher.wait(_END_S)
        failed = [line for line in log.read_text().splitlines() if "(INJECTED)" in line]
        if not failed:
            raise NotStruckError("no fsync was called")
        return Struck(at, step, f"{len(failed)} calls of fsync failed, first {failed[0].split('<')[-1][:80]}")


class attached:
    """strace on rank 0 of a run for the time of the context; it has stopped the rank once before the body runs."""

    def __init__(self, run: Run, options: list[str]) -> None:
        found = run.ranks()
        if not found:
            raise NotStruckError("there is no rank 0")
        command = ["strace", *options, "-p", str(found[0])]
        self._strace = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._strace.stderr is not None
        said = self._strace.stderr.readline()
        if "attached" not in said:
            raise NotStruckError(f"strace does not attach: {said}")

    def __enter__(self) -> attached:
        return self

    def __exit__(self, *_error: object) -> None:
        """It ends with the rank. Where it does not, it is killed: asked to end, it may wait for a thread for ever."""
        try:
            self._strace.communicate(timeout=_LAST_LINES_S)
        except subprocess.TimeoutExpired:
            self._strace.kill()
            self._strace.communicate()


@dataclass(frozen=True, kw_only=True)
class PowerCut(Nemesis):
    """All processes end at once, and what rank 0 wrote after the last fsync is lost. `names`: so are new names."""

    names: bool
    guard: str = "fsync of files and folders"
    finds: str = "healing: exit|healing: other bits|healing: not said: 'resume: from step-"

    def needs(self) -> str | None:
        """strace, and the right to trace."""
        return crash_points.missing()

    def launch(self, *, guarded: bool) -> Launch:
        """Without its guard nothing is synced."""
        return Launch(plants=() if guarded else (Plant.of(f"{PLANTS}:no_fsync"),))

    def inject(self, run: Run) -> Struck:
        """Log what rank 0 writes and syncs, kill all, and take away what was not synced."""
        run.wait_for(lambda: bool(run.ranks()), "rank 0 is there")
        log = run.scratch / "strace"
        with attached(run, ["-f", "-y", "-s", "0", "-o", str(log), "-e", f"trace={','.join(power_cut.CALLS)}"]):
            run.reach(run.draw.randrange(13, 22))
            step, at = run.steps, time.monotonic()
            run.kill()
        lines = log.read_text(errors="replace").splitlines()
        if not power_cut.synced_or_lost(lines, run.folder):
            raise NotStruckError(f"strace saw nothing that was written to the run: {len(lines)} calls")
        proof = power_cut.cut(lines, run.folder, names=self.names)
        return Struck(at, step, f"{len(lines)} calls logged; {proof}")


NEMESES: tuple[Nemesis, ...] = (
    PowerCut(
        name="power cut, names kept",
        numbers=(37,),
        how="SIGKILL to all; what strace saw rank 0 write after the last fsync is cut off its files",
        promise=Promise((-9,), heal_says=("resume: from step-000000",)),
        names=False,
    ),
    PowerCut(
        name="power cut, names lost",
        numbers=(37,),
        how="the same, and names given after the last fsync of their folder are taken back",
        promise=Promise((-9,), heal_says=("resume: from step-000000",)),
        names=True,
    ),
    FailingSync(
        name="fsync fails",
        numbers=(40,),
        how="strace lets every fsync of rank 0 fail with EIO",
        promise=Promise((2,), ("cannot be written: the disk reports an input/output error",)),
    ),
)
