"""One real run of `andon train` that faults disturb: its command line, its processes, how it ended."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from .hosts import Host
from .left_behind import Undisturbed
from .planting import VARIABLE, ClosingError, NotStruckError, Plant, Struck, first_strike, written
from .processes import marked

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
"""With 86 training rows the last batch of an epoch is short. All checkpoints stay, for the comparison."""
UPDATES = 33
"""The number of updates with 86 training rows and 10 validation rows."""
TIMEOUT_S = 5.0
"""`run.timeout_s` of `SETTINGS`: how long a rank may be silent."""
LIMIT_S = 120.0
"""A launch takes seconds. One that takes longer than this hangs."""
SLACK_S = 4.0
"""How long beyond its bound a launch is watched before it is killed."""
GONE_S = 3.0
"""How long processes of the run may outlive the last command."""
OWNER = "ANDON_NEMESIS_RUN"
"""Environment variable of every process of a run: the run's `scratch`, which identifies it."""


@dataclass(frozen=True)
class Launch:
    """`andon train --workers WORKERS --set SETTING ...`, with plants. torchrun: its number of ranks; 0: not used."""

    workers: str = "2"
    settings: tuple[str, ...] = ()
    plants: tuple[Plant, ...] = ()
    torchrun: int = 0

    def plus(self, settings: tuple[str, ...] = (), plants: tuple[Plant, ...] = ()) -> Launch:
        """The same launch with more settings and plants. The last of several values of a setting counts."""
        return replace(self, settings=(*self.settings, *settings), plants=(*self.plants, *plants))


@dataclass(frozen=True)
class Ending:
    """How one launch ended.

    codes, output: of its commands. left: processes that had to be killed after `GONE_S`. seconds: from the fault to the
    end of the last process. hung: the commands had to be killed.
    """

    codes: tuple[int, ...]
    output: str
    left: int = 0
    seconds: float = 0.0
    hung: bool = False


def row_lines(name: str, count: int) -> list[bytes]:
    """Lines of a JSONL file: texts of a few words, three labels in turn. Each name has its own, fixed texts."""
    draw = random.Random(name)
    words = [f"word{number}" for number in range(40)]
    rows = [
        {"text": " ".join(draw.choices(words, k=draw.randrange(2, 9))), "label": ("north", "south", "west")[number % 3]}
        for number in range(count)
    ]
    return [json.dumps(row).encode() + b"\n" for row in rows]


def environment() -> dict[str, str]:
    """This process's environment, offline, with the checkout on the path: this package is not installed."""
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path.rstrip(os.pathsep)}


def steps_of(folder: Path) -> int:
    """The number of updates in the ledger in `folder`. An update that was repeated counts twice."""
    try:
        return (folder / "ledger.jsonl").read_bytes().count(b'"kind":"step"')
    except FileNotFoundError:
        return 0


@dataclass
class Run:
    """One run. Faults act on it.

    folder: the run folder. scratch: a folder for anything else. rows, eval_rows: data files, shared until a fault
    replaces them. reference: the run to compare with. draw: the source of random choices. closing: set once this
    command must end. hosts: of a run on several.
    """

    scratch: Path
    folder: Path
    rows: Path
    eval_rows: Path
    reference: Undisturbed
    draw: random.Random
    closing: threading.Event = field(default_factory=threading.Event)
    hosts: tuple[Host, ...] = ()
    commands: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _logs: list[Path] = field(default_factory=list)

    def arguments(self, launch: Launch) -> list[str]:
        """The arguments of `python`. Resumes a run that exists."""
        module = f"{__package__}.planting" if launch.plants else "andon"
        settings = [part for value in (*SETTINGS, *launch.settings) for part in ("--set", value)]
        files = ["--data", str(self.rows), "--eval-data", str(self.eval_rows)]
        place = ["--run-dir", str(self.folder), "--resume", "auto"]
        workers = ["--workers", launch.workers] if launch.workers else []
        return ["-m", module, "train", *place, *workers, *files, *settings]

    def start(self, launch: Launch) -> None:
        command = [sys.executable, *self.arguments(launch)]
        if launch.torchrun:  # the output of torchrun itself is dropped
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            torchrun += ["--nproc-per-node", str(launch.torchrun), *self.rank_command(launch)]
            command = ["sh", "-c", 'exec "$@" 2>"$0"', str(self.scratch / "torchrun"), *torchrun]
        self.spawn(command, launch)

    def rank_command(self, launch: Launch) -> list[str]:
        """The last arguments of torchrun. Ranks write to stdout only, torchrun to stderr."""
        return ["--no-python", "sh", "-c", 'exec "$@" 2>&1', "sh", sys.executable, *self.arguments(launch)]

    def spawn(self, command: Sequence[str], launch: Launch) -> None:
        """Start a command of this run in a new session and record its output.

        Raises `ClosingError` if this command is to end.
        """
        self._raise_if_closing()
        variables = {**environment(), "OMP_NUM_THREADS": "1", OWNER: str(self.scratch)}
        variables[VARIABLE] = written(launch.plants, self.scratch)
        log = self.scratch / f"output-{len(list(self.scratch.glob('output-*'))) + 1}"
        with log.open("wb") as file:
            started = subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        self.commands.append(started)
        self._logs.append(log)
        self._raise_if_closing()  # `Bench.close` may have missed this process; then `Bench.play` kills it

    def _raise_if_closing(self) -> None:
        if self.closing.is_set():
            raise ClosingError("this command was ended")

    @property
    def launcher(self) -> subprocess.Popen[bytes]:
        return self.commands[0]

    @property
    def steps(self) -> int:
        return steps_of(self.folder)

    def over(self) -> bool:
        return all(command.poll() is not None for command in self.commands)

    def wait_for(self, seen: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
        """Wait until `seen()`. Raises `NotStruckError` if all commands end first, or after `limit_s`."""
        deadline = time.monotonic() + limit_s
        while not seen():
            self._raise_if_closing()
            if self.over() and not seen():  # what it waits for may itself have ended the run
                raise NotStruckError(f"the run ended before {what}: {self.output()[-300:]}")
            if time.monotonic() > deadline:
                raise NotStruckError(f"not {what} within {limit_s:g} s")
            time.sleep(0.003)

    def reach(self, first: int, end: int | None = None) -> tuple[float, int]:
        """Wait until the ledger has `first` updates, or a number drawn from first to end - 1.

        Returns the time and the number of updates then. Raises `NotStruckError` as `wait_for` does.
        """
        step = first if end is None else self.draw.randrange(first, end)
        self.wait_for(lambda: self.steps >= step, f"step {step}")
        return time.monotonic(), self.steps

    def planted_strike(self) -> Struck:
        """Wait until a plant of this run strikes. Raises `NotStruckError` if the run ends first."""
        self.wait_for(lambda: first_strike(self.scratch) is not None, "the planted fault happened")
        found = first_strike(self.scratch)
        assert found is not None
        return found

    def output(self) -> str:
        """The output of this launch so far, with paths relative to `scratch`."""
        output = "\n".join(log.read_text(encoding="utf-8", errors="replace") for log in self._logs).strip()
        return output.replace(f"{self.scratch}/", "")

    def end(self, limit_s: float = LIMIT_S, since: float | None = None) -> Ending:
        """Wait until all commands and all of their processes have ended, and forget this launch.

        limit_s: seconds until the commands are killed. since: `time.monotonic()` of the fault; default: now.
        """
        began = time.monotonic()
        while not self.over() and time.monotonic() < began + limit_s:
            self._raise_if_closing()
            time.sleep(0.01)
        self._raise_if_closing()
        hung = not self.over()
        gone = time.monotonic() + GONE_S
        while not hung and self._members() and time.monotonic() < gone:
            time.sleep(0.01)
        seconds = time.monotonic() - (began if since is None else since)
        left = self._members()
        self.kill()
        ending = Ending(tuple(each.returncode for each in self.commands), self.output(), len(left), seconds, hung)
        self.commands, self._logs = [], []
        return ending

    def kill(self) -> None:
        """Kill every process of this launch, those that start meanwhile too."""
        deadline = time.monotonic() + GONE_S
        while (members := self._members()) and time.monotonic() < deadline:
            for process in members:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.003)
        for command in self.commands:
            command.wait()

    def _members(self) -> list[psutil.Process]:
        return marked(OWNER, str(self.scratch))
