"""Signals to the processes of a run (a rank, the launcher, the whole group), and worlds of another size."""

from __future__ import annotations

import signal
import sys
import time
from functools import partial

from .language import Fault, Guard, Nemesis, Place, Promise
from .planting import Plant, Struck
from .processes import processes_of, send
from .run import TIMEOUT_S, Launch, NotStruckError, Run

FORGETS = Plant.of("moments_lost")
UNCHECKED = "contracts.enabled=false"
_WORLD = "ANDON_WORLD"


def sent(signum: signal.Signals, victim: str | int, *, pause_s: float = 0.0) -> Fault:
    """A signal at a step drawn at random to the launcher, its process group or the rank of this number.

    pause_s: how long until SIGCONT; 0: it never comes.
    """
    whom = f"rank {victim}" if isinstance(victim, int) else f"the {victim}"

    def strike(run: Run) -> Struck:
        run.reach(run.draw.randrange(5, 20))
        kind, number = ("rank", victim) if isinstance(victim, int) else ("launcher", 0)
        found = processes_of(kind, run.launcher.pid)
        if len(found) <= number:
            raise NotStruckError(f"there is no {whom}: {len(found)} are there")
        at, step = time.monotonic(), run.steps
        seen = send(found[number], signum, group=victim == "group", pause_s=pause_s)
        if seen is None or (signum == signal.SIGSTOP and not seen.startswith("stopped")):
            raise NotStruckError(f"{whom} had ended, or does not show {signum.name}")
        return Struck(at, step, f"{signum.name} to {whom} after {step} updates{f': {seen}' if seen else ''}")

    return Fault(strike)


class Torchrun(Place):
    """A user's own torchrun, with as many ranks as the launch's environment says; the command itself where it does not.

    apart: what torchrun says is kept from what its ranks say: its own traceback says nothing of them.
    """

    def __init__(self, *, apart: bool = False) -> None:
        self.apart = apart

    def start(self, run: Run, launch: Launch) -> None:
        """One command, of torchrun."""
        ranks = dict(launch.environment).get(_WORLD)
        if ranks is None:
            super().start(run, launch)
            return
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        if self.apart:
            torchrun = ["sh", "-c", 'exec "$@" 2>"$0"', str(run.scratch / "torchrun"), *torchrun]
            torchrun += ["--no-python", "sh", "-c", 'exec "$@" 2>&1', "sh", sys.executable]
        run.spawn([*torchrun, *run.arguments(launch)], launch)


def _smaller(run: Run) -> Struck:
    return Struck(time.monotonic(), 0, "torchrun --nproc-per-node 2 with --workers 3")


_ASKED_FOR = Launch("3", environment=((_WORLD, "3"),))
_HEALED = Launch("2")
_on_three = partial(Nemesis, launched=Launch("3"), resumed=_HEALED)
_ORPHANS = (Plant.of("no_orphan_guard"), Plant.of("slow_steps"))
_OTHER = "other bits|accepted, but the undisturbed run has no such"
_STATE = "the optimizer's state in a resume"
_RESTORED = Guard(_STATE, _OTHER, resume_settings=(UNCHECKED,), resume_plants=(FORGETS,))


def _asked(victim: str | int, signum: signal.Signals, how: str) -> Nemesis:
    """Asked to end, it does so at a step boundary."""
    whom = f"the {victim}" if isinstance(victim, str) else "a rank"
    promise = Promise((75,), ("ended at a step boundary",), 5.0)
    off = Guard("ranks that hear signals", "exit 71 instead of 75", plants=(Plant.of("deaf_ranks"),))
    return _on_three(f"{signum.name} to {whom}", (3,), f"{signum.name} to {how}", promise, (sent(signum, victim),), off)


NEMESES = (
    _on_three(
        "rank killed",
        (1,),
        "SIGKILL to rank 1 of 3",
        Promise((71,), ("rank 1 of 3 was killed by SIGKILL",), 2.0),
        (sent(signal.SIGKILL, 1),),
        _RESTORED,
        tier="seconds",
    ),
    _on_three(
        "rank 0 killed",
        (2,),
        "SIGKILL to rank 0 of 3, which holds the store and writes the files",
        Promise((71,), ("rank 0 of 3 was killed by SIGKILL",), 2.0),
        (sent(signal.SIGKILL, 0),),
        _RESTORED,
    ),
    _on_three(
        "launcher killed",
        (8,),
        "SIGKILL to `andon train`",
        Promise((-9,), (), 2.0),
        (sent(signal.SIGKILL, "launcher"),),
        Guard("ranks that end with their launcher", "processes left", plants=_ORPHANS),
    ),
    _on_three(
        "group killed",
        (1, 2),
        "SIGKILL to the launcher's whole process group",
        Promise((-9,), (), 2.0),
        (sent(signal.SIGKILL, "group"),),
        _RESTORED,
    ),
    _asked(1, signal.SIGTERM, "rank 1 of 3"),
    _asked("launcher", signal.SIGTERM, "`andon train`"),
    _asked("launcher", signal.SIGUSR1, "`andon train`"),
    _on_three(
        "rank stopped",
        (5,),
        f"SIGSTOP to rank 1 of 3 for good, run.timeout_s={TIMEOUT_S:g}",
        Promise((72,), ("rank 1 of 3 gave no answer",), TIMEOUT_S + 3.0),
        (sent(signal.SIGSTOP, 1),),
        Guard("run.timeout_s", "not over", ("run.timeout_s=600",)),
    ),
    _on_three(
        "rank paused",
        (5, 10),
        f"SIGSTOP to rank 1 of 3, SIGCONT 4 s later, run.timeout_s={TIMEOUT_S:g}",
        Promise((0,)),
        (sent(signal.SIGSTOP, 1, pause_s=4.0),),
        Guard("a timeout above the pause", "exit 72 instead of 0", ("run.timeout_s=1.5",)),
    ),
    _on_three(
        "launcher paused",
        (9,),
        "SIGSTOP to `andon train`, SIGCONT 3 s later",
        Promise((0,)),
        (sent(signal.SIGSTOP, "launcher", pause_s=3.0),),
        no_guard="ranks do not wait for their launcher",
    ),
    Nemesis(
        "rank killed, restarted",
        (1,),
        "SIGKILL to rank 1 of 3, run.max_restarts=1",
        Promise((0,), ("restart 1 of 1 from the last checkpoint",)),
        (sent(signal.SIGKILL, 1),),
        Guard(_STATE, _OTHER, (UNCHECKED,), (FORGETS,)),
        launched=Launch("3", ("run.max_restarts=1",)),
        resumed=_HEALED,
    ),
    Nemesis(
        "agent of torchrun killed",
        (8,),
        "SIGKILL to torchrun with 2 ranks",
        Promise((-9,), (), 2.0),
        (sent(signal.SIGKILL, "launcher"),),
        Guard("ranks that end with their agent", "processes left|is being written by process", plants=_ORPHANS),
        launched=Launch("", environment=((_WORLD, "2"),)),
        resumed=_HEALED,
        place=Torchrun(),
    ),
    Nemesis(
        "world smaller than asked for",
        (16, 41),
        "torchrun --nproc-per-node 2 with --workers 3",
        Promise((1,), ("3 were asked for, torchrun started 2",), 30.0, at_once=True),
        (Fault(_smaller, before_start=True),),
        no_guard="one comparison before anything else; without --workers torchrun decides",
        launched=_ASKED_FOR.but(environment=((_WORLD, "2"),)),
        resumed=_ASKED_FOR,
        undisturbed=_ASKED_FOR,
        place=Torchrun(apart=True),
    ),
)
