"""The language of nemeses: a place where a run is started, faults that strike it and are healed, a promise, a guard.

A bench plays a nemesis in this order, each time in a folder of its own (`bench.Bench.play`):

    with place.taken(run):                   # hosts, a small disk; given back at the very end, whatever happens
        place.start(run, launch)             # where a fault strikes `before_start`, it has struck by now
        struck = [fault.strike(run), ...]    # each brings itself about, and returns the proof
        ... every process of the run ends, the bench holds it to `promise` ...
        fault.heal(run)                      # the last one first
        place.start(run, resumed)            # where `promise.heals`: must end with the bits of the undisturbed run

A nemesis with several faults brings all of them about in one run, in their order. Two controls: the same launch with no
fault must end well with the undisturbed bits; and all of it with the guard switched off must be found wrong by the
same judge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import inf
from typing import Literal

from .planting import Option, Plant, Struck
from .run import Ending, Launch, Run

Tier = Literal["seconds", "minutes"]
INLINE = ("run.backend=inline",)
"""All ranks in one process."""


@dataclass(frozen=True)
class Promise:
    """What a user is promised to see of a fault (docs/reliability.md).

    codes: what each command that was started may end with. says: what must stand in what the commands said, each of
    them. within_s: seconds from the fault to the end of the last process. at_once: nothing is accepted from the step
    of the fault on, no checkpoint and no ledger line. heals: resuming ends with the undisturbed bits. heal_says: what
    must stand in what the resumed run said. May name one of several texts by `one|other`.
    """

    codes: tuple[int, ...]
    says: tuple[str, ...] = ()
    within_s: float = inf
    at_once: bool = False
    heals: bool = True
    heal_says: tuple[str, ...] = ()


class Place:
    """Where a run is started, and how: `andon train` on this machine. Equal places are alike without a fault."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).values()))

    def needs(self) -> str | None:
        """Why this machine has no such place (rights, tools); None: it has."""
        return None

    def taken(self, run: Run) -> AbstractContextManager[None]:
        """The place, made for this run, for the time of the context; may give `run` another folder."""
        return _given()

    def start(self, run: Run, launch: Launch) -> None:
        """Start a command there; called again, with `--resume auto`, to go on."""
        run.spawn(run.command(launch), launch)


@contextmanager
def _given() -> Iterator[None]:
    yield


HERE = Place()
TWO_WORKERS = Launch()


def _nothing(_: Run) -> None:
    """A process that was killed cannot be healed."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    strike: brings it about, sees that it happened, and says how; raises `NotStruckError` where it could not. heal:
    takes it away, once every process has ended, whether or not it struck. plants: what of it is planted in the
    trainer's own processes. before_start: whether it strikes before the run is started. needs: why this machine cannot
    have it; None: it can.
    """

    strike: Callable[[Run], Struck]
    heal: Callable[[Run], object] = _nothing
    plants: tuple[Plant, ...] = ()
    before_start: bool = False
    needs: Callable[[], str | None] = lambda: None


def planted(function: str, **options: Option) -> Fault:
    """A fault inside a rank, by a function of `plants`, with its own proof."""
    return Fault(Run.planted_strike, plants=(Plant.of(function, **options),))


@dataclass(frozen=True)
class Guard:
    """A protection that a control switches off.

    what: which, in a few words. finds: what the judge must then find, one of several texts by `one|other`; anything
    else is no sign of the guard. settings, plants: what switches it off in the disturbed run; resume_settings,
    resume_plants: in the resumed one.
    """

    what: str
    finds: str
    settings: tuple[str, ...] = ()
    plants: tuple[Plant, ...] = ()
    resume_settings: tuple[str, ...] = ()
    resume_plants: tuple[Plant, ...] = ()


@dataclass(frozen=True)
class Nemesis:
    """Faults of one run, what is promised of it, and by what it is seen that the judge can tell.

    numbers: rows in the catalogue of issue 5. how: how it is brought about, in a few words. guard: None where there is
    nothing to switch off; `no_guard` says why, and there is no such control. launched: how the run is started, without
    its plants; resumed: how it goes on, where that is not the same; undisturbed: how the control without the faults is
    started, where that is not the same.
    """

    name: str
    numbers: tuple[int, ...]
    how: str
    promise: Promise
    faults: tuple[Fault, ...]
    guard: Guard | None = None
    no_guard: str = ""
    launched: Launch = TWO_WORKERS
    resumed: Launch | None = None
    undisturbed: Launch | None = None
    place: Place = HERE
    tier: Tier = "minutes"

    def needs(self) -> str | None:
        """Why this machine cannot have this nemesis (rights, tools, a kernel's option); None: it can."""
        asked = (self.place.needs, *(fault.needs for fault in self.faults))
        return next((reason for needs in asked if (reason := needs()) is not None), None)

    def launch(self, *, guarded: bool) -> Launch:
        """How the disturbed run is started. guarded=False: with its protection switched off."""
        planted = self.launched.plus(plants=tuple(plant for fault in self.faults for plant in fault.plants))
        return planted if guarded or self.guard is None else planted.plus(self.guard.settings, self.guard.plants)

    def heal(self, *, guarded: bool) -> Launch:
        """How the run goes on; by default as it was started, with nothing planted in it.

        Where only this depends on `guarded`, and not `launch`, both controls go on from one disturbed run, copied.
        """
        launch = self.resumed or self.launch(guarded=guarded).but(plants=())
        if guarded or self.guard is None:
            return launch
        return launch.plus(self.guard.resume_settings, self.guard.resume_plants)

    def calm(self) -> Launch:
        """How the control without the faults is started: the same run, with nothing planted in it."""
        return self.undisturbed or self.launched

    def calm_key(self) -> object:
        """What decides how the control without the faults goes: nemeses that give the same share one."""
        return self.place, self.calm()


@dataclass(frozen=True)
class Phase:
    """What was found of one sequence (with its guard or without): the ends of both launches, and what is in the
    folder: checkpoints accepted from the fault's step on, checkpoints that hold other tensors than the undisturbed run
    had at their step, ledger lines of other bits, and how the final result differs (empty: not at all). idle: what was
    planted to switch a guard off, and never acted."""

    struck: Struck
    ending: Ending
    newer: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    healing: Ending | None = None
    result: str = ""
    idle: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One nemesis as it was measured; a line of the table. wrong: every promise that does not hold (empty: all do).

    calm, unguarded: what the judge said of the control without the fault ("" is right) and of the one without the
    guard ("" is wrong: the judge saw nothing), None where it was not played. failed: why it could not be measured.
    doubt: why the one without the guard shows nothing, whatever was wrong with it. skipped: why this machine cannot
    have it. unplayed: why it was not played though it may be.
    """

    nemesis: Nemesis
    skipped: str = ""
    unplayed: str = ""
    failed: str = ""
    phase: Phase | None = None
    wrong: tuple[str, ...] = ()
    calm: tuple[str, ...] | None = None
    unguarded: tuple[str, ...] | None = None
    doubt: str = ""

    @property
    def good(self) -> bool:
        """Whether the promise holds and every control that there is, is as it should be; a skipped one is not bad."""
        if self.skipped:
            return True
        if self.unplayed or self.doubt or self.failed or self.phase is None:
            return False
        controls = self.calm == () and (bool(self.unguarded) or self.nemesis.guard is None)
        return not self.wrong and controls
