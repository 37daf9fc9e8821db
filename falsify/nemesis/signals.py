"""Signals to the processes of a run (a rank, the launcher, the whole group), and worlds of another size."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from functools import partial

from .language import Fault, Guard, Nemesis, Promise
from .planting import NotStruckError, Plant, Struck
from .processes import family, ranks, send
from .run import TIMEOUT_S, Launch, Run


def sent(signum: signal.Signals, victim: str | int, *, pause_s: float = 0.0) -> Fault:
    """A signal, after a random number of updates, to the launcher, its process group ("group"), or a rank by number.

    pause_s: seconds until SIGCONT; 0: never.
    """
    target = f"rank {victim}" if isinstance(victim, int) else f"the {victim}"

    def strike(run: Run) -> Struck:
        run.reach(5, 20)
        launcher = run.launcher.pid
        number, found = (victim, ranks(launcher)) if isinstance(victim, int) else (0, family(launcher))
        if len(found) <= number:
            raise NotStruckError(f"there is no {target}: {len(found)} are there")
        at, step = time.monotonic(), run.steps
        seen = send(found[number], signum, group=victim == "group", pause_s=pause_s)
        if seen is None or (signum == signal.SIGSTOP and not seen.startswith("stopped")):
            raise NotStruckError(f"{target} had ended, or does not show {signum.name}")
        return Struck(at, step, f"{signum.name} to {target} after {step} updates{f': {seen}' if seen else ''}")

    return Fault(strike)


_KILL, _STOP = signal.SIGKILL, signal.SIGSTOP
_ON_TWO = Launch("2")
_REQUESTED = Launch("3", torchrun=3)
_ORPHANS = (Plant.of("no_orphan_guard"), Plant.of("slow_steps"))
_STATE, _OTHER = "the optimizer's state in a resume", "other bits|accepted, but the undisturbed run has no such"
_FORGETS = (("contracts.enabled=false",), (Plant.of("moments_lost"),))
_RESTORED = Guard(_STATE, _OTHER, (), (), *_FORGETS)
_DEAF = Guard("ranks that hear signals", "exit 71 instead of 75", plants=(Plant.of("deaf_ranks"),))
_on_three = partial(Nemesis, launched=Launch("3"), resumed=_ON_TWO)


def _killed(name: str, how: str, victim: int | str, guard: Guard = _RESTORED) -> Nemesis:
    named = isinstance(victim, int)
    promise = Promise((71 if named else -9,), (f"rank {victim} of 3 was killed by SIGKILL",) * named, 2.0)
    return _on_three(name, f"SIGKILL to {how}", promise, sent(_KILL, victim), guard)


def _asked(target: str, victim: str | int, signum: signal.Signals, how: str) -> Nemesis:
    promise, name = Promise((75,), ("ended at a step boundary",), 5.0), f"{signum.name} to {target}"
    return _on_three(name, f"{signum.name} to {how}", promise, sent(signum, victim), _DEAF)


NEMESES = (
    _killed("rank killed", "rank 1 of 3", 1),
    _killed("rank 0 killed", "rank 0 of 3, which holds the store and writes the files", 0),
    _killed(
        *("launcher killed", "`andon train`", "launcher"),
        Guard("ranks that end with their launcher", "processes left", plants=_ORPHANS),
    ),
    _killed("group killed", "the launcher's whole process group", "group"),
    _asked("a rank", 1, signal.SIGTERM, "rank 1 of 3"),
    _asked("the launcher", "launcher", signal.SIGTERM, "`andon train`"),
    _asked("the launcher", "launcher", signal.SIGUSR1, "`andon train`"),
    _on_three(
        *("rank stopped", f"SIGSTOP to rank 1 of 3 for good, run.timeout_s={TIMEOUT_S:g}"),
        Promise((72,), ("rank 1 of 3 gave no answer",), TIMEOUT_S + 3.0),
        sent(_STOP, 1),
        Guard("run.timeout_s", "not over", ("run.timeout_s=600",)),
    ),
    _on_three(
        *("rank paused", f"SIGSTOP to rank 1 of 3, SIGCONT 4 s later, run.timeout_s={TIMEOUT_S:g}"),
        *(Promise((0,)), sent(_STOP, 1, pause_s=4.0)),
        Guard("a timeout above the pause", "exit 72 instead of 0", ("run.timeout_s=1.5",)),
    ),
    _on_three(
        *("launcher paused", "SIGSTOP to `andon train`, SIGCONT 3 s later"),
        Promise((0,)),
        sent(_STOP, "launcher", pause_s=3.0),
        guard="ranks do not wait for their launcher",
    ),
    Nemesis(
        *("rank killed, restarted", "SIGKILL to rank 1 of 3, run.max_restarts=1"),
        Promise((0,), ("restart 1 of 1 from the last checkpoint",)),
        sent(_KILL, 1),
        Guard(_STATE, _OTHER, *_FORGETS),
        launched=Launch("3", ("run.max_restarts=1",)),
        resumed=_ON_TWO,
    ),
    Nemesis(
        *("agent of torchrun killed", "SIGKILL to torchrun with 2 ranks"),
        Promise((-9,), (), 2.0),
        sent(_KILL, "launcher"),
        Guard("ranks that end with their agent", "processes left|is being written by process", plants=_ORPHANS),
        launched=Launch("", torchrun=2),
        resumed=_ON_TWO,
    ),
    Nemesis(
        *("world smaller than asked for", "torchrun --nproc-per-node 2 with --workers 3"),
        Promise((1,), ("3 were requested, torchrun started 2",), 30.0, at_once=True),
        Fault(lambda _: Struck(time.monotonic(), 0, "torchrun starts 2 of 3 ranks"), before_start=True),
        guard="one comparison before anything else; without --workers torchrun decides",
        launched=replace(_REQUESTED, torchrun=2),
        resumed=_REQUESTED,
        undisturbed=_REQUESTED,
    ),
)
