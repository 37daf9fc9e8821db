"""One real run of `andon train` that is to be disturbed: its command line, its processes, its end."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from .hosts import Host
from .left_behind import Undisturbed
from .planting import VARIABLE, Plant, Struck, first_strike, written
from .processes import family, marked, ranks, session
from .trainer import environment, steps_of

SETTINGS = (
    "training.batch_size=8",
    "training.micro_batches=4",
    "training.epochs=3",
    "training.checkpoint_every=4",
    "training.keep_checkpoints=100",
    "run.timeout_s=5",
    "run.grace_s=20",
    "model.hidden_size=16",
    "model.intermediate_size=32",
    "model.num_hidden_layers=1",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=2",
    "adapter.r=2",
)
"""86 rows, the last update of an epoch short; all checkpoints stay, to be compared."""
UPDATES = 33
"""How many they make of 86 training rows and 10 to validate."""
TIMEOUT_S = 5.0
"""`run.timeout_s` of `SETTINGS`: how long a rank may be silent."""
LIMIT_S = 120.0
"""A launch without a bound of its own that takes longer hangs: what it does takes seconds."""
SLACK_S = 4.0
"""How long beyond its bound a launch is watched before it is ended from here."""
GONE_S = 3.0
"""How long after the last command processes of the run may still be there."""
OWNER = "ANDON_NEMESIS_RUN"
"""In the environment of every process of a run: its `scratch`, which no other run has."""


class NotStruckError(RuntimeError):
    """The fault could not be brought about: the run ended first, or has no such process. No verdict on the trainer."""


class ClosingError(NotStruckError):
    """This command was asked to end: nothing more is started or waited for, and what was done is undone."""


@dataclass(frozen=True)
class Launch:
    """How a run is started: `andon train --workers WORKERS --set EACH_SETTING ...`, what is planted in it, and
    variables of its environment beyond the bench's."""

    workers: str = "2"
    settings: tuple[str, ...] = ()
    plants: tuple[Plant, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def but(self, **changes: object) -> Launch:
        """The same with other values."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def plus(self, settings: tuple[str, ...] = (), plants: tuple[Plant, ...] = ()) -> Launch:
        """The same with more; of two settings for one thing the later one counts."""
        return replace(self, settings=(*self.settings, *settings), plants=(*self.plants, *plants))


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


def row_lines(name: str, count: int) -> list[bytes]:
    """Rows of a few words each, of three labels in turn; the same at every call, others for another name."""
    draw = random.Random(name)
    words = [f"word{number}" for number in range(40)]
    rows = [
        {"text": " ".join(draw.choices(words, k=draw.randrange(2, 9))), "label": ("north", "south", "west")[number % 3]}
        for number in range(count)
    ]
    return [json.dumps(row).encode() + b"\n" for row in rows]


@dataclass
class Run:
    """One run that is to be disturbed: where it lives, and its processes. Faults act on it.

    folder: the run's. scratch: a folder for whatever a nemesis needs, beside it. rows, held: data files; both are the
    bench's own until a fault gives others. draw: every random choice comes from it. closing: set once this command is
    to end; from then on nothing is started or waited for. hosts: where it runs on several.
    """

    scratch: Path
    folder: Path
    rows: Path
    held: Path
    whole: Undisturbed
    draw: random.Random
    closing: threading.Event = field(default_factory=threading.Event)
    hosts: tuple[Host, ...] = ()
    commands: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _logs: list[Path] = field(default_factory=list)
    _started: int = 0

    def arguments(self, launch: Launch) -> list[str]:
        """What follows `python` (or torchrun's own arguments): `-m MODULE train ...`; resumes what there is."""
        module = f"{__package__}.driver" if launch.plants else "andon"
        settings = [part for value in (*SETTINGS, *launch.settings) for part in ("--set", value)]
        files = ["--data", str(self.rows), "--eval-data", str(self.held)]
        place = ["--run-dir", str(self.folder), "--resume", "auto"]
        workers = ["--workers", launch.workers] if launch.workers else []
        return ["-m", module, "train", *place, *workers, *files, *settings]

    def command(self, launch: Launch) -> list[str]:
        """The whole command line of `andon train`."""
        return [sys.executable, *self.arguments(launch)]

    def spawn(self, command: Sequence[str], launch: Launch) -> subprocess.Popen[bytes]:
        """Start a command of this run in a session of its own; what it says on both streams is kept.

        Raises `ClosingError` once this command is to end.
        """
        self._go_on()
        variables = {**environment(), "OMP_NUM_THREADS": "1", **dict(launch.environment)}
        variables[OWNER] = str(self.scratch)
        variables[VARIABLE] = written(launch.plants, self.scratch)
        self._started += 1
        log = self.scratch / f"said-{self._started}"
        with log.open("wb") as file:
            started = subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        self.commands.append(started)
        self._logs.append(log)
        self._go_on()  # who closes has ended what there was, and may have missed this one: `play` ends it
        return started

    def _go_on(self) -> None:
        if self.closing.is_set():
            raise ClosingError("this command was ended")

    @property
    def launcher(self) -> subprocess.Popen[bytes]:
        """The command that was started first in this launch."""
        return self.commands[0]

    @property
    def steps(self) -> int:
        """Updates that the ledger holds so far, repeated ones too."""
        return steps_of(self.folder)

    def over(self) -> bool:
        """Whether every command of this launch has ended."""
        return all(command.poll() is not None for command in self.commands)

    def wait_for(self, seen: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
        """Wait until `seen`. Raises `NotStruckError` where all has ended before, or it takes too long."""
        deadline = time.monotonic() + limit_s
        while not seen():
            self._go_on()
            if self.over():
                raise NotStruckError(f"the run ended before {what}: {self.said()[-300:]}")
            if time.monotonic() > deadline:
                raise NotStruckError(f"not {what} within {limit_s:g} s")
            time.sleep(0.003)

    def reach(self, step: int) -> None:
        """Wait until the ledger holds so many updates. Raises `NotStruckError` as `wait_for` does."""
        self.wait_for(lambda: self.steps >= step, f"step {step}")

    def planted_strike(self) -> Struck:
        """Wait until a plant of this run strikes. Raises `NotStruckError` where the run ends without."""
        try:
            self.wait_for(lambda: first_strike(self.scratch) is not None, "the planted fault happened")
        except NotStruckError:
            if first_strike(self.scratch) is None:  # what strikes may end the run before it is seen here
                raise
        found = first_strike(self.scratch)
        assert found is not None
        return found

    def ranks(self) -> list[int]:
        """Process ids of the ranks that `andon train` started, in order; empty where there are none yet, or no more."""
        return ranks(family(self.launcher.pid))

    def said(self) -> str:
        """Everything that the commands of this launch have said so far, paths as seen from `scratch`."""
        said = "\n".join(log.read_text(encoding="utf-8", errors="replace") for log in self._logs).strip()
        return said.replace(f"{self.scratch}/", "")

    def end(self, limit_s: float, since: float) -> Ending:
        """Wait for the end of all commands, and of every process that they started; then this launch is forgotten.

        limit_s: seconds from now after which the commands are ended from here. since: `time.monotonic()` of the fault.
        """
        deadline = time.monotonic() + limit_s
        while not self.over() and time.monotonic() < deadline:
            self._go_on()
            time.sleep(0.01)
        self._go_on()
        hung = not self.over()
        gone = time.monotonic() + GONE_S
        while not hung and self._members() and time.monotonic() < gone:
            time.sleep(0.01)
        seconds = time.monotonic() - since
        left = self._members()
        self.kill()
        ending = Ending(tuple(each.returncode for each in self.commands), self.said(), len(left), seconds, hung)
        self.commands, self._logs = [], []
        return ending

    def kill(self) -> None:
        """End every process of this launch, those too that start while others are ended."""
        deadline = time.monotonic() + GONE_S
        while (members := self._members()) and time.monotonic() < deadline:
            for pid in members:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.003)
        for command in self.commands:
            command.wait()

    def _members(self) -> list[int]:
        """By session, and by environment: torchrun gives each rank a session of its own."""
        sessions = (pid for command in self.commands for pid in session(command.pid))
        return sorted({*sessions, *marked(OWNER, str(self.scratch))})
