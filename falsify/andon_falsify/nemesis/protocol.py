"""What a nemesis is, what a bench gives it, and what comes out: the contract between all modules of this package.

A bench plays a nemesis in this order, each time in a folder of its own (`bench.Bench.play`):

    prepare(run)                            # what the fault needs: a file of rows, a mount, a half-done run
    start(run, launch(guarded=True))        # where `before_start`, inject comes before this
    struck = inject(run)                    # brings the fault about, and returns the proof
    ... every process of the run ends, the bench holds it to `promise` ...
    undo(run)
    start(run, heal(guarded=True))          # where `promise.heals`: must end with the bits of the undisturbed run
    release(run)                            # always, at the very end

Two controls: `calm()` in a folder of its own, without inject, must end well with the undisturbed bits; and the whole
sequence with `guarded=False` must be found wrong by the same judge.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from andon_falsify.nemesis.run import Run

Tier = Literal["seconds", "minutes"]
Option: TypeAlias = "bool | int | float | str | tuple[Option, ...] | None"


class NotStruckError(RuntimeError):
    """The fault could not be brought about: the run ended first, or has no such process. No verdict on the trainer."""


class ClosingError(NotStruckError):
    """This command was asked to end: nothing more is started or waited for, and what was done is undone."""


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


@dataclass(frozen=True)
class Plant:
    """Something that is changed in the trainer's own processes: `function` ("module:name") is called as
    `function(plan: planting.Planting)` in the launcher and in every rank, before anything of it runs."""

    function: str
    options: tuple[tuple[str, Option], ...] = ()

    @classmethod
    def of(cls, function: str, **options: Option) -> Plant:
        """`Plant.of("package.module:function", rank=1, step=7)`."""
        return cls(function, tuple(options.items()))


@dataclass(frozen=True)
class Launch:
    """How a run is started: `andon train --workers WORKERS --set EACH_SETTING ...`, what is planted in it, variables
    of its environment beyond the bench's, and a command to put in front of it (`strace -f ...`)."""

    workers: str = "2"
    settings: tuple[str, ...] = ()
    plants: tuple[Plant, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    prefix: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()

    def but(self, **changes: object) -> Launch:
        """The same with other values."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Struck:
    """A fault that happened: when (`time.monotonic()`), after how many accepted updates, and what proves it."""

    at: float
    step: int
    proof: str


@dataclass(frozen=True, kw_only=True)
class Nemesis(ABC):
    """One fault. `numbers`: its rows in the catalogue of issue 5. `how`: how it is brought about, in a few words.

    guard: what is switched off in the control, in a few words; where there is nothing to switch off, `no_guard` says
    why, and there is no such control. finds: what the judge must then find, one of several texts by `one|other`;
    anything else is no sign of the guard. before_start: whether `inject` comes before the run is started.
    """

    name: str
    promise: Promise
    numbers: tuple[int, ...] = ()
    how: str = ""
    tier: Tier = "minutes"
    guard: str = ""
    finds: str = ""
    no_guard: str = ""
    before_start: bool = False

    def needs(self) -> str | None:
        """Why this machine cannot have this fault (rights, tools, a kernel's option); None: it can."""
        return None

    def prepare(self, run: Run) -> None:  # noqa: B027 - most need nothing
        """Make what the fault needs, before anything is started; may give `run` another folder or other rows."""

    def launch(self, *, guarded: bool) -> Launch:
        """How the disturbed run is started. guarded=False: with its protection switched off."""
        return Launch()

    def start(self, run: Run, launch: Launch) -> None:
        """Start it: one command by default. The same `run` is started again, with `--resume auto`, to heal."""
        run.spawn(run.command(launch), launch)

    @abstractmethod
    def inject(self, run: Run) -> Struck:
        """Bring the fault about, see that it happened, and say how. Raises `NotStruckError` where it could not."""

    def undo(self, run: Run) -> None:  # noqa: B027 - a process that was killed cannot be undone
        """Take the fault away; called once everything has ended, whether or not `inject` went well."""

    def calm(self) -> Launch:
        """How the control without the fault is started: the same run, with nothing planted in it."""
        return self.launch(guarded=True).but(plants=())

    def calm_key(self) -> object:
        """What decides how the control without the fault goes: nemeses that give the same share one.

        Those that start plain `andon train` on the bench's own files differ by the launch alone; every other one that
        does not say what it adds has a control of its own.
        """
        plain = type(self).prepare is Nemesis.prepare and type(self).start is Nemesis.start
        return self.calm() if plain else self.name

    def heal(self, *, guarded: bool) -> Launch:
        """How the run is resumed: as it was started, with nothing planted in it.

        Where only this depends on `guarded`, and not `launch`, both controls go on from one disturbed run, copied.
        """
        return self.launch(guarded=guarded).but(plants=())

    def release(self, run: Run) -> None:  # noqa: B027 - most hold nothing
        """Give back what `prepare` took (mounts, namespaces); always called, last."""


@dataclass(frozen=True)
class Ending:
    """How one launch ended: exit code of each command, what they said, how many processes were left after `GONE_S`
    (they were then killed), seconds from the fault to the end of the last process, and whether they had to be ended
    from here since they hung."""

    codes: tuple[int, ...]
    said: str
    left: int = 0
    seconds: float = 0.0
    hung: bool = False


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
        controls = self.calm == () and (bool(self.unguarded) or not self.nemesis.guard)
        return not self.wrong and controls
