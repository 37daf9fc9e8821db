"""The language of nemeses: a place where a run is started, a fault that strikes it and heals, a promise, a guard.

`bench.Bench.play` plays a nemesis in this order, in a new folder:

    with place.taken(run):                   # hosts, a small disk; always released at the end
        place.start(run, launch)             # a fault with `before_start` has struck by now
        struck = fault.strike(run)           # returns its proof
        ... every process of the run ends, and the bench checks `promise` ...
        fault.heal(run)
        place.start(run, resumed)            # must end with the bits of the undisturbed run

Two controls follow: the same launch without the fault must end well, with the undisturbed bits; and with the guard
switched off the same judge must find something wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import inf

from .planting import Option, Plant, Struck
from .run import Ending, Launch, Run

INLINE = ("run.backend=inline",)
"""All ranks in one process."""


@dataclass(frozen=True)
class Promise:
    """What a user sees of a fault (docs/reliability.md). A text `one|other` stands for either.

    codes: possible exit codes of each command. says: texts in their output. within_s: seconds from the fault to the end
    of the last process. at_once: no checkpoint and no ledger line after the step of the fault is accepted. heal_says:
    texts in the output of the resumed run.
    """

    codes: tuple[int, ...]
    says: tuple[str, ...] = ()
    within_s: float = inf
    at_once: bool = False
    heal_says: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """Where a run is started, and how: `andon train` on this machine. Equal places share a control without faults."""

    def taken(self, run: Run) -> AbstractContextManager[None]:
        """Prepare the place for this run and release it afterwards. May raise `UnavailableError`."""
        return nullcontext()

    def start(self, run: Run, launch: Launch) -> None:
        run.start(launch)


HERE, TWO_WORKERS = Place(), Launch()


@dataclass(frozen=True)
class Fault:
    """strike: causes the fault and returns the proof that it happened.

    Otherwise it raises `NotStruckError`, or `UnavailableError`. heal: undoes it after every process has ended, even if
    it did not strike. plants: its parts inside the trainer's own processes. before_start: strikes before the run is
    started.
    """

    strike: Callable[[Run], Struck]
    heal: Callable[[Run], object] = lambda _: None  # a process that was killed cannot be healed
    plants: tuple[Plant, ...] = ()
    before_start: bool = False


def planted(function: str, **options: Option) -> Fault:
    """A fault inside a rank, by a function of `plants` that writes its own proof."""
    return Fault(Run.planted_strike, plants=(Plant.of(function, **options),))


@dataclass(frozen=True)
class Guard:
    """A protection of the trainer, and what switches it off in the disturbed run and in the resumed run.

    finds: what the judge must then find, as `one|other`.
    """

    what: str
    finds: str
    settings: tuple[str, ...] = ()
    plants: tuple[Plant, ...] = ()
    resume_settings: tuple[str, ...] = ()
    resume_plants: tuple[Plant, ...] = ()


@dataclass(frozen=True)
class Nemesis:
    """A fault, the promise, and the guard without which the judge must find something wrong.

    how: how the fault is caused. guard: or why nothing can be switched off. resumed, undisturbed: how the resumed run
    and the control without the fault are started; default: as the disturbed run.
    """

    name: str
    how: str
    promise: Promise
    fault: Fault
    guard: Guard | str
    launched: Launch = TWO_WORKERS
    resumed: Launch | None = None
    undisturbed: Launch | None = None
    place: Place = HERE

    def launch(self) -> Launch:
        return replace(self.launched, plants=(*self.fault.plants, *self.launched.plants))

    def heal(self) -> Launch:
        return self.resumed or replace(self.launched, plants=())

    def unguarded(self, guard: Guard) -> Nemesis:
        off = replace(self, launched=self.launched.plus(guard.settings, guard.plants))
        return replace(off, resumed=off.heal().plus(guard.resume_settings, guard.resume_plants))


@dataclass(frozen=True)
class Phase:
    """One disturbed run, with its guard or without, and its resumed run (`healing`).

    newer: checkpoints and ledger lines accepted after the step of the fault. other: those that differ from the
    undisturbed run's. result: how the final result differs, if it does. idle: plants that never acted.
    """

    struck: Struck
    ending: Ending
    newer: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    healing: Ending | None = None
    result: str = ""
    idle: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """The measurement of one nemesis.

    skipped: what this machine lacks. failed: why it could not be measured. wrong: the broken promises. without_fault,
    unguarded: what is wrong in the two controls; None if the control did not run. doubt: why the control without the
    guard proves nothing.
    """

    nemesis: Nemesis
    skipped: str = ""
    failed: str = ""
    phase: Phase | None = None
    wrong: tuple[str, ...] = ()
    without_fault: tuple[str, ...] | None = None
    unguarded: tuple[str, ...] | None = None
    doubt: str = ""

    @property
    def good(self) -> bool:
        """True if the promise holds and both controls are right, or if the nemesis was skipped."""
        if self.skipped:
            return True
        if self.doubt or self.failed or self.phase is None:
            return False
        noticed = bool(self.unguarded) or isinstance(self.nemesis.guard, str)
        return not self.wrong and self.without_fault == () and noticed
