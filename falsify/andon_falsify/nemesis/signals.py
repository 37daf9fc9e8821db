"""Signals to the processes of a run: to a rank, the launcher, an agent, the whole process group."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

from andon_falsify.nemesis.bench import Run
from andon_falsify.nemesis.processes import state_of
from andon_falsify.nemesis.protocol import Launch, Nemesis, NotStruckError, Plant, Promise, Struck

FORGETS = Plant("andon_falsify.nemesis.guards:moments_lost")
"""The guard that is off in most controls here: a resume that restores everything."""


@dataclass(frozen=True, kw_only=True)
class Signal(Nemesis):
    """A signal to one process of the run, or to its group, at a step drawn at random.

    victim: launcher, group, or the number of a rank. off: what is planted in the run where the guard is off.
    """

    signum: signal.Signals
    victim: str
    guard: str = "a resume that restores the optimizer's state, held to the digests of repeated steps"
    settings: tuple[str, ...] = ()
    off: tuple[Plant, ...] = ()

    def launch(self, *, guarded: bool) -> Launch:
        """On three workers."""
        return Launch("3", self.settings, () if guarded else self.off)

    def heal(self, *, guarded: bool) -> Launch:
        """On two; without its guard the moments are lost on the way."""
        forgetful = not guarded and not self.off
        return Launch("2", ("contracts.enabled=false",) * forgetful, (FORGETS,) * forgetful)

    def inject(self, run: Run) -> Struck:
        """Send it once the ledger shows the step."""
        run.reach(run.draw.randrange(5, 20))
        pid = run.launcher.pid
        if self.victim.isdecimal():
            found = run.ranks()
            if len(found) <= int(self.victim):
                raise NotStruckError(f"there are {len(found)} ranks")
            pid = found[int(self.victim)]
        at, step = time.monotonic(), run.steps
        if self.victim == "group":
            os.killpg(pid, self.signum)
        else:
            os.kill(pid, self.signum)
        return Struck(at, step, f"{self.signum.name} to {self._whom()} {self._seen(pid)}")

    def _whom(self) -> str:
        return f"rank {self.victim}" if self.victim.isdecimal() else f"the {self.victim}"

    def _seen(self, pid: int) -> str:
        """What the process table says of the victim afterwards."""
        wanted = {signal.SIGKILL: ("", "Z", "X"), signal.SIGSTOP: ("T", "t")}.get(self.signum)
        deadline = time.monotonic() + 5.0
        while wanted is not None and state_of(pid) not in wanted:
            if time.monotonic() > deadline:
                raise NotStruckError(f"{pid} shows {state_of(pid)!r} after {self.signum.name}")
            time.sleep(0.001)
        return f"(state {state_of(pid) or 'gone'})"


NEMESES: tuple[Nemesis, ...] = (
    Signal(
        name="rank killed",
        numbers=(1,),
        how="SIGKILL to rank 1 of 3",
        promise=Promise((71,), ("rank 1 of 3 was killed by SIGKILL",), 2.0),
        signum=signal.SIGKILL,
        victim="1",
        tier="seconds",
    ),
)
