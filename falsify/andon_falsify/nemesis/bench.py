"""Plays a nemesis against real runs of `andon train`: fault, heal, control without fault, control without guard."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from andon_falsify.nemesis import judging
from andon_falsify.nemesis.left_behind import Undisturbed
from andon_falsify.nemesis.planting import VARIABLE, idle, written
from andon_falsify.nemesis.processes import family, marked, ranks, session
from andon_falsify.nemesis.protocol import ClosingError, Ending, Launch, Nemesis, NotStruckError, Phase, Row
from andon_falsify.nemesis.trainer import environment, steps_of

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


@dataclass
class Run:
    """One run that is to be disturbed: where it lives, and its processes. Nemeses act on it.

    folder: the run's. scratch: a folder for whatever the nemesis needs, beside it. rows, held: data files; both are
    the bench's own until `prepare` gives others. draw: every random choice comes from it. closing: set once this
    command is to end; from then on nothing is started or waited for.
    """

    scratch: Path
    folder: Path
    rows: Path
    held: Path
    whole: Undisturbed
    draw: random.Random
    closing: threading.Event = field(default_factory=threading.Event)
    commands: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _logs: list[Path] = field(default_factory=list)
    _started: int = 0

    def arguments(self, launch: Launch) -> list[str]:
        """What follows `python` (or torchrun's own arguments): `-m MODULE train ...`; resumes what there is."""
        module = "andon_falsify.nemesis.driver" if launch.plants else "andon"
        settings = [part for value in (*SETTINGS, *launch.settings) for part in ("--set", value)]
        files = ["--data", str(self.rows), "--eval-data", str(self.held)]
        place = ["--run-dir", str(self.folder), "--resume", "auto"]
        workers = ["--workers", launch.workers] if launch.workers else []
        return ["-m", module, "train", *place, *workers, *files, *settings, *launch.arguments]

    def command(self, launch: Launch) -> list[str]:
        """The whole command line of `andon train`."""
        return [*launch.prefix, sys.executable, *self.arguments(launch)]

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


@dataclass
class Bench:
    """What all nemeses share: the rows, and the run that nobody disturbed. Prepared once in a folder."""

    base: Path
    whole: Undisturbed
    rows: Path
    held: Path
    seed: int
    closing: threading.Event = field(default_factory=threading.Event)
    _calm: dict[object, tuple[str, ...]] = field(default_factory=dict)
    _runs: list[Run] = field(default_factory=list)

    @classmethod
    def prepare(cls, base: Path, seed: int = 1, settings: Sequence[str] = ()) -> Bench:
        """Write the rows, and train once undisturbed. Raises `RuntimeError` where that fails."""
        rows, held = base / "rows.jsonl", base / "held.jsonl"
        write_rows(rows, 96)
        write_rows(held, 12)
        bench = cls(base, Undisturbed(base / "whole"), rows, held, seed)
        run = Run(base, base / "whole", rows, held, bench.whole, random.Random(seed))
        launch = Launch(settings=("training.checkpoint_every=1", *settings))
        try:
            run.spawn(run.command(launch), launch)
            ending = run.end(LIMIT_S, time.monotonic())
        finally:
            run.kill()
        if ending.codes != (0,):
            raise RuntimeError(f"the undisturbed run ended with {ending.codes}: {ending.said[-2000:]}")
        if lacking := bench.whole.lacking(UPDATES):
            raise RuntimeError(f"nothing can be held against the undisturbed run: {lacking}")
        return bench

    def play(self, nemesis: Nemesis) -> Row:
        """Both phases and both controls of a nemesis, judged."""
        if self.closing.is_set():
            return Row(nemesis, unplayed="not begun")
        try:
            reason = nemesis.needs()
            if reason is not None:
                return Row(nemesis, skipped=reason)
            phases = self.disturbed(nemesis)
            calm = self._control(nemesis)
        except ClosingError as error:
            return Row(nemesis, unplayed=f"not played to its end: {error}")
        except NotStruckError as error:
            return Row(nemesis, failed=f"the fault did not happen: {error}")
        except Exception as error:  # noqa: BLE001 - one that is broken itself must not take the others' rows along
            return Row(nemesis, failed=f"the nemesis failed: {type(error).__name__}: {error}")
        wrong, *unguarded = (judging.wrong(nemesis.promise, phase) for phase in phases)
        row = Row(nemesis, phase=phases[0], wrong=wrong, calm=calm)
        if not unguarded:
            return row
        return replace(row, unguarded=unguarded[0], doubt=judging.doubt(phases[1], unguarded[0], nemesis.finds))

    def disturbed(self, nemesis: Nemesis) -> list[Phase]:
        """The disturbed run, and where there is a guard to switch off, the one without it."""
        if nemesis.guard and nemesis.launch(guarded=True) == nemesis.launch(guarded=False):
            return self._phases(nemesis, guarded=True, heals=(True, False))
        return [
            phase
            for guarded in (True, False)
            if guarded or nemesis.guard
            for phase in self._phases(nemesis, guarded=guarded, heals=(guarded,))
        ]

    def _phases(self, nemesis: Nemesis, *, guarded: bool, heals: Sequence[bool]) -> list[Phase]:
        """One disturbed run, healed once for each of `heals` (with its guard, without), each from the same folder."""
        run = self._run(nemesis, "guarded" if guarded else "unguarded")
        try:
            nemesis.prepare(run)
            phase = self._fault(nemesis, run, guarded=guarded)
            if not nemesis.promise.heals or (not guarded and judging.wrong_before_healing(nemesis.promise, phase)):
                return [phase]  # without its guard it is found wrong already, and needs no second look
            kept = run.folder.with_name(f"{run.folder.name}-kept")
            found = []
            for number, each in enumerate(heals, start=1):
                if number < len(heals):
                    shutil.copytree(run.folder, kept, symlinks=True)
                found.append(self._healed(nemesis, run, phase, guarded=each))
                if number < len(heals):
                    shutil.rmtree(run.folder)
                    shutil.copytree(kept, run.folder, symlinks=True)
            return found
        finally:
            run.kill()
            nemesis.release(run)

    def _fault(self, nemesis: Nemesis, run: Run, *, guarded: bool) -> Phase:
        launch = nemesis.launch(guarded=guarded)
        try:
            if nemesis.before_start:
                struck = nemesis.inject(run)
                nemesis.start(run, launch)
            else:
                nemesis.start(run, launch)
                struck = nemesis.inject(run)
            ending = run.end(min(nemesis.promise.within_s + SLACK_S, LIMIT_S), struck.at)
        finally:
            run.kill()
            nemesis.undo(run)
        newer, other = run.whole.accepted(run.folder, struck.step)
        off = [] if guarded else [each for each in launch.plants if each not in nemesis.launch(guarded=True).plants]
        return Phase(struck, ending, newer, other, idle=idle(off, run.scratch))

    def _healed(self, nemesis: Nemesis, run: Run, phase: Phase, *, guarded: bool) -> Phase:
        launch = nemesis.heal(guarded=guarded)
        nemesis.start(run, launch)
        healing = run.end(LIMIT_S, time.monotonic())
        unmoved = (*phase.idle, *idle(launch.plants, run.scratch))
        return replace(phase, healing=healing, result=run.whole.differs(run.folder), idle=unmoved)

    def _control(self, nemesis: Nemesis) -> tuple[str, ...]:
        """The same run without the fault; played once for all nemeses that start alike."""
        launch, key = nemesis.calm(), nemesis.calm_key()
        if key not in self._calm:
            run = self._run(nemesis, "calm")
            try:
                nemesis.prepare(run)
                nemesis.start(run, launch)
                ending = run.end(LIMIT_S, time.monotonic())
                self._calm[key] = judging.not_calm(ending, run.whole.differs(run.folder))
            finally:
                run.kill()
                nemesis.release(run)
        return self._calm[key]

    def _run(self, nemesis: Nemesis, what: str) -> Run:
        scratch = Path(tempfile.mkdtemp(prefix=f"{what}-", dir=self.base))
        draw = random.Random(f"{nemesis.name} {self.seed}")
        run = Run(scratch, scratch / "run", self.rows, self.held, self.whole, draw, self.closing)
        self._runs.append(run)
        return run

    def close(self) -> None:
        """Have whoever plays here stop: what is under way is ended, so that it is undone and released there."""
        self.closing.set()
        for run in self._runs:
            run.kill()


def write_rows(path: Path, count: int) -> None:
    """`row_lines` of the file's name, as that file."""
    path.write_bytes(b"".join(row_lines(path.name, count)))


def row_lines(name: str, count: int) -> list[bytes]:
    """Rows of a few words each, of three labels in turn; the same at every call, others for another name."""
    draw = random.Random(name)
    words = [f"word{number}" for number in range(40)]
    rows = [
        {"text": " ".join(draw.choices(words, k=draw.randrange(2, 9))), "label": ("north", "south", "west")[number % 3]}
        for number in range(count)
    ]
    return [json.dumps(row).encode() + b"\n" for row in rows]
