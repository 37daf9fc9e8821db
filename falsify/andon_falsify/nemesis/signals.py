"""Signals to the processes of a run: to a rank, an agent, the launcher, the whole process group."""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import dataclass

from andon_falsify.nemesis.planting import GUARDS
from andon_falsify.nemesis.processes import children
from andon_falsify.nemesis.protocol import Launch, Nemesis, NotStruckError, Plant, Promise, Struck
from andon_falsify.nemesis.run import TIMEOUT_S, Run
from andon_falsify.nemesis.schedule import processes_of, send

FORGETS = Plant(f"{GUARDS}:moments_lost")
UNCHECKED = "contracts.enabled=false"
_RESTORED = "the optimizer's state in a resume"


@dataclass(frozen=True, kw_only=True)
class Signal(Nemesis):
    """A signal to one process of the run, or to its group, at a step drawn at random.

    victim: launcher, group, or the number of a rank; of an elastic run agent as well. off, off_settings: what is
    planted and set where the guard is off; where there is neither, the resume forgets the moments. pause_s: how long
    until SIGCONT; 0: it never comes.
    """

    signum: signal.Signals
    victim: str
    workers: str = "3"
    guard: str = _RESTORED
    finds: str = "other bits|accepted, but the undisturbed run has no such"
    off: tuple[Plant, ...] = ()
    off_settings: tuple[str, ...] = ()
    pause_s: float = 0.0

    def launch(self, *, guarded: bool) -> Launch:
        """As many workers as were said, with or without the guard."""
        return Launch(self.workers, () if guarded else self.off_settings, () if guarded else self.off)

    def heal(self, *, guarded: bool) -> Launch:
        """On two workers; where the guard is the resume itself, it forgets the moments."""
        if guarded or self.off or self.off_settings:
            return Launch("2")
        return Launch("2", (UNCHECKED,), (FORGETS,))

    def inject(self, run: Run) -> Struck:
        """Send it once the ledger shows the step."""
        run.reach(run.draw.randrange(5, 20))
        pid, at, step = self._pid(run), time.monotonic(), run.steps
        seen = send(pid, self.signum, group=self.victim == "group", pause_s=self.pause_s)
        if seen is None or (self.signum == signal.SIGSTOP and not seen.startswith("stopped")):
            raise NotStruckError(f"{self._whom()} had ended, or does not show {self.signum.name}")
        shows = f": {seen}" if seen else ""
        return Struck(at, step, f"{self.signum.name} to {self._whom()} after {step} updates{shows}")

    def _pid(self, run: Run) -> int:
        if self.victim == "group":
            return run.launcher.pid
        number = {"launcher": 0, "agent": 1}.get(self.victim)
        found = processes_of("rank" if number is None else self.victim, run.folder, run.launcher.pid)
        number = int(self.victim) if number is None else number
        if len(found) <= number:
            raise NotStruckError(f"there is no {self._whom()}: {len(found)} are there")
        return found[number]

    def _whom(self) -> str:
        return f"rank {self.victim}" if self.victim.isdecimal() else f"the {self.victim}"


@dataclass(frozen=True, kw_only=True)
class TorchrunAgent(Signal):
    """SIGKILL to the agent of a user's own torchrun, under which the ranks were started."""

    def start(self, run: Run, launch: Launch) -> None:
        """torchrun for the disturbed run; the command itself to go on."""
        if launch.workers:
            super().start(run, launch)
            return
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        run.spawn([*torchrun, *run.arguments(launch)], launch)

    def _pid(self, run: Run) -> int:
        if not children(run.launcher.pid):
            raise NotStruckError("torchrun has no ranks")
        return run.launcher.pid


_ORPHANS = (Plant(f"{GUARDS}:no_orphan_guard"), Plant(f"{GUARDS}:slow_steps"))
_DEAF = (Plant(f"{GUARDS}:deaf_ranks"),)
_LOST = "was killed by SIGKILL"
_BOUNDARY = Promise((75,), ("ended at a step boundary",), 5.0)

NEMESES: tuple[Nemesis, ...] = (
    Signal(
        name="rank killed",
        numbers=(1,),
        how="SIGKILL to rank 1 of 3",
        promise=Promise((71,), (f"rank 1 of 3 {_LOST}",), 2.0),
        signum=signal.SIGKILL,
        victim="1",
        tier="seconds",
    ),
    Signal(
        name="rank 0 killed",
        numbers=(2,),
        how="SIGKILL to rank 0 of 3, which holds the store and writes the files",
        promise=Promise((71,), (f"rank 0 of 3 {_LOST}",), 2.0),
        signum=signal.SIGKILL,
        victim="0",
    ),
    Signal(
        name="launcher killed",
        numbers=(8,),
        how="SIGKILL to `andon train`",
        promise=Promise((-9,), (), 2.0),
        signum=signal.SIGKILL,
        victim="launcher",
        guard="ranks that end with their launcher",
        finds="processes left",
        off=_ORPHANS,
    ),
    Signal(
        name="group killed",
        numbers=(1, 2),
        how="SIGKILL to the launcher's whole process group",
        promise=Promise((-9,), (), 2.0),
        signum=signal.SIGKILL,
        victim="group",
    ),
    Signal(
        name="SIGTERM to a rank",
        numbers=(3,),
        how="SIGTERM to rank 1 of 3",
        promise=_BOUNDARY,
        signum=signal.SIGTERM,
        victim="1",
        guard="ranks that hear signals",
        finds="exit 71 instead of 75",
        off=_DEAF,
    ),
    Signal(
        name="SIGTERM to the launcher",
        numbers=(3,),
        how="SIGTERM to `andon train`",
        promise=_BOUNDARY,
        signum=signal.SIGTERM,
        victim="launcher",
        guard="ranks that hear signals",
        finds="exit 71 instead of 75",
        off=_DEAF,
    ),
    Signal(
        name="SIGUSR1 to the launcher",
        numbers=(3,),
        how="SIGUSR1 to `andon train`",
        promise=_BOUNDARY,
        signum=signal.SIGUSR1,
        victim="launcher",
        guard="ranks that hear signals",
        finds="exit 71 instead of 75",
        off=_DEAF,
    ),
    Signal(
        name="rank stopped",
        numbers=(5,),
        how=f"SIGSTOP to rank 1 of 3 for good, run.timeout_s={TIMEOUT_S:g}",
        promise=Promise((72,), ("rank 1 of 3 gave no answer",), TIMEOUT_S + 3.0),
        signum=signal.SIGSTOP,
        victim="1",
        guard="run.timeout_s",
        finds="not over",
        off_settings=("run.timeout_s=600",),
    ),
    Signal(
        name="rank paused",
        numbers=(5, 10),
        how=f"SIGSTOP to rank 1 of 3, SIGCONT 4 s later, run.timeout_s={TIMEOUT_S:g}",
        promise=Promise((0,)),
        signum=signal.SIGSTOP,
        victim="1",
        pause_s=4.0,
        guard="a timeout above the pause",
        finds="exit 72 instead of 0",
        off_settings=("run.timeout_s=1.5",),
    ),
    Signal(
        name="launcher paused",
        numbers=(9,),
        how="SIGSTOP to `andon train`, SIGCONT 3 s later",
        promise=Promise((0,)),
        signum=signal.SIGSTOP,
        victim="launcher",
        pause_s=3.0,
        guard="",
        no_guard="ranks do not wait for their launcher",
    ),
    Signal(
        name="agent killed",
        numbers=(8,),
        how="SIGKILL to an agent of `--workers 2:3`",
        promise=Promise((0,), ("going on with 2 workers",)),
        signum=signal.SIGKILL,
        victim="agent",
        workers="2:3",
        off=(FORGETS,),
        off_settings=(UNCHECKED,),
    ),
    TorchrunAgent(
        name="agent of torchrun killed",
        numbers=(8,),
        how="SIGKILL to torchrun with 2 ranks",
        promise=Promise((-9,), (), 2.0),
        signum=signal.SIGKILL,
        victim="launcher",
        workers="",
        guard="ranks that end with their agent",
        finds="processes left|is being written by process",
        off=_ORPHANS,
    ),
)
