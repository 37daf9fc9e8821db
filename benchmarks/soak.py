"""A long run under random faults must not leak: `python -m benchmarks.soak --minutes 30`.

A run trains for the whole time, and restarts after a failure (`run.max_restarts`). Every few seconds a fault is drawn
from the seed: SIGKILL of a rank; SIGSTOP and SIGCONT of a rank or the launcher; SIGTERM. A run that ends is resumed on
2 or 3 workers. Meanwhile the program samples memory, files, sockets, threads, processes, temporary files and the run
folder. Flat means: over samples at the same age of each generation of workers, the median slope of all pairs
(Theil-Sen) is below the bound in the table, and counts at the end equal those at the start. The first and last tenth of
the time are undisturbed. There each rank counts its own memory to the byte (`soak_ranks`), and may not grow by half a
GiB in a million steps. `benchmarks.schedules` compares the bits of disturbed and undisturbed runs.

`--leak` is a control: it plants a leak in each rank, and the exit code is 0 if the table shows it. `--minutes 1` is
enough for it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from psutil import NoSuchProcess, Process

from andon.run.atomic import is_leftover
from benchmarks.runs import command, environment, table
from benchmarks.schedules import KILL, PAUSE, PREEMPT, Fault, strike
from benchmarks.soak_ranks import ALLOWED, ENVIRONMENT, Look, looks
from falsify.nemesis.planting import VARIABLE, Plant, written
from falsify.nemesis.processes import command_line, marked, ranks

WORKERS = (2, 3)
LEAKING = "ranks: memory in use once settled, KiB"
"""The row that must show the planted leak."""
_AGE = 20
"""Ledger lines of a generation before its first sample."""
_CALM = 600
"""Ledger lines that the first generation writes undisturbed, enough to see a rank grow."""
_BETWEEN_S = (2.0, 10.0)
_EVERY_S = 2.0
_LIMIT_S = 240.0
"""The run hangs if the ledger has no new line for this long."""
_CODES = (71, 72, 75)
"""Exit codes that the faults explain: a lost rank, a silent rank, SIGTERM."""
_LASTING = ("launcher", "fork server")
"""Roles whose processes outlive a generation of workers."""
_SETTLED, _GROWN, _SPAN = 100, 250, 200
"""Steps after which the folder holds as many checkpoints as it keeps; after which a rank's buffers are full; and the
steps that a rank must then be observed for."""
_ENDS = 3
"""Samples at each end of a series, whose medians are compared."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--leak", action="store_true", help="control: plant a leak in each rank, and find it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as base:
        soak = Soak(Path(base), random.Random(f"soak {options.seed}"), options.leak)
        soak.run(options.minutes * 60)
        rows = judge(soak.samples, list(looks(soak.scratch)))
        print(table(("what", "samples", "start", "end", "slope", "verdict"), [row.cells() for row in rows]))
        print(soak.account(), flush=True)
        if options.leak:
            seen = any(row.what == LEAKING and row.series and not row.flat for row in rows)
            print("\n".join([*soak.wrong, f"the leak is {'found' if seen else 'NOT FOUND'} in: {LEAKING}"]))
            return 0 if seen and not soak.wrong else 1
        wrong = [f"{row.what} is not flat" for row in rows if not row.flat] + soak.wrong
    print("\n".join([*wrong, "NOT FLAT" if wrong else "flat"]))
    return 1 if wrong else 0


# The run and its faults


@dataclass
class Soak:
    base: Path
    draw: random.Random
    leak: bool
    samples: list[Sample] = field(default_factory=list)
    struck: Counter[str] = field(default_factory=Counter)
    codes: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    generations: int = 0
    _known: tuple[int, ...] = ()
    _from: int = 0
    _sampled: int = 0

    def __post_init__(self) -> None:
        self.folder, self._temporary, self.scratch = (self.base / each for each in ("run", "temporary", "scratch"))
        self._temporary.mkdir()
        self.scratch.mkdir()

    def run(self, seconds: float) -> None:
        began = time.monotonic()
        self._start()
        try:
            self._watch(began + 0.1 * seconds, _CALM)
            while time.monotonic() < began + 0.9 * seconds and not self.wrong:
                self._watch(time.monotonic() + self.draw.uniform(*_BETWEEN_S))
                self._disturb()
            self._watch(began + seconds)
        finally:
            self._finish()

    def _watch(self, until: float, age: int = _AGE) -> None:
        """Sample until that time and until a generation has written `age` lines. Resume a run that ends."""
        seen, progress, since = False, -1, time.monotonic()
        while (time.monotonic() < until or not seen) and not self.wrong:
            if self._launcher.poll() is not None:
                self._ended()
                self._start()
                seen = False  # a launcher that still starts has no handler for SIGTERM
            lines = self._lines_of_generation()
            if lines != progress:
                progress, since = lines, time.monotonic()
            if time.monotonic() - since > _LIMIT_S:
                self.wrong.append(f"HANG: no new line in the ledger for {_LIMIT_S:g} s")
            elif lines >= _AGE and (sample := self._sample()):
                self.samples.append(sample)
                seen = seen or sample.age >= age
                time.sleep(_EVERY_S)
            time.sleep(0.1)

    def _disturb(self) -> None:
        if not self.samples:
            return
        kinds = [(KILL, "rank")] * 5 + [(PAUSE, "rank"), (PAUSE, "launcher")] + [(PREEMPT, "launcher")] * 3
        kind, victim = self.draw.choice(kinds)
        seconds = self.draw.uniform(0.1, 3.0) if kind == PAUSE else 0.0
        fault = Fault(0, kind, victim, self.draw.randrange(self.samples[-1].world), seconds)
        happened = strike(fault, self.folder, self._launcher)
        self.struck[f"{kind} {victim}" if happened else "not reached"] += 1

    def _start(self) -> None:
        self._world = self.draw.choice(WORKERS)
        line = command(self.folder, "--workers", str(self._world), "--resume", "auto", *settings())
        line[1:3] = ["-m", "falsify.nemesis.planting"]
        plants = ["benchmarks.soak_ranks:account"] + ["benchmarks.soak_ranks:leak"] * self.leak
        planted = written([Plant(each) for each in plants], self.scratch)
        given = {**environment(), **ENVIRONMENT, "TMPDIR": str(self._temporary), VARIABLE: planted}
        with (self.base / "said.txt").open("a") as said:
            self._launcher = subprocess.Popen(
                line, env=given, stdout=subprocess.DEVNULL, stderr=said, text=True, start_new_session=True
            )

    def _ended(self) -> None:
        """Check how a launch ended: its exit code, and that no process is left."""
        code = self._launcher.wait()
        self.codes[code] += 1
        if code not in _CODES:
            said = (self.base / "said.txt").read_text().strip().splitlines()
            self.wrong.append(f"a launch ended with {code}: {said[-1] if said else ''}")
        deadline = time.monotonic() + 10.0
        while (left := self._members()) and time.monotonic() < deadline:
            time.sleep(0.02)
        if left:
            self.wrong.append(f"a launch left {len(left)} processes behind")
            for process in left:
                with suppress(NoSuchProcess):
                    process.kill()

    def _finish(self) -> None:
        if self._launcher.returncode is not None:
            return
        self._launcher.send_signal(signal.SIGTERM)
        try:
            self._launcher.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.wrong.append("HANG: the run does not end at SIGTERM")
            self._launcher.kill()
        self._ended()
        if "Traceback" in (self.base / "said.txt").read_text():
            self.wrong.append("a traceback was printed")
        left = [path.name for path in self._temporary.iterdir() if not path.name.startswith("torchinductor_")]
        if left:
            self.wrong.append(f"temporary files are left: {left}")

    def _lines_of_generation(self) -> int:
        """Ledger lines since this generation of workers was first seen; 0 between generations."""
        found = self._ranks()
        if not found:
            return 0
        last = last_line(self.folder)
        if (self._launcher.pid, *found) != self._known:
            self._known, self._from = (self._launcher.pid, *found), last["seq"]
            self.generations += 1
        return int(last["seq"]) - self._from

    def _sample(self) -> Sample | None:
        launcher, found, step = self._launcher.pid, self._ranks(), last_line(self.folder).get("step", 0)
        roles = {launcher: "launcher"} | {pid: f"rank {rank}" for rank, pid in enumerate(found)}
        members = {process.pid: process for process in self._members()}
        held = tuple(one for each in members.values() if (one := _held(each, roles)) is not None)
        if not found or {one.pid for one in held} != members.keys() or not roles.keys() <= members.keys():
            return None
        entries = [name for _, folders, files in os.walk(self.folder) for name in (*folders, *files)]
        first, self._sampled = self._sampled != self.generations, self.generations
        return Sample(
            generation=self.generations,
            first=first,
            age=self._lines_of_generation(),
            step=step,
            world=len(found),
            held=held,
            processes=len(held),
            entries=len(entries),
            leftovers=sum(map(is_leftover, entries)),
            temporary=len(list(self._temporary.iterdir())),
        )

    def _ranks(self) -> list[int]:
        """The ranks, once all have been started."""
        found = [process.pid for process in ranks(self._launcher.pid)]
        return found if len(found) == self._world else []

    def _members(self) -> list[Process]:
        return marked("TMPDIR", str(self._temporary))

    def account(self) -> str:
        faults = ", ".join(f"{count} x {what}" for what, count in sorted(self.struck.items()))
        ends = ", ".join(f"{count} x {code}" for code, count in sorted(self.codes.items()))
        steps, generations = last_line(self.folder)["step"], self.generations
        return f"{steps} steps in {generations} generations of workers; faults: {faults}\nends: {ends}"


def settings() -> list[str]:
    values = "training.batch_size=4 training.micro_batches=4 data.validation_fraction=0.02 training.epochs=1000"
    values += " training.checkpoint_every=20 training.evaluate_every=50 run.timeout_s=30"
    values += " run.max_restarts=1000000 schedule.warmup_fraction=0"
    values += " model.hidden_size=16 model.intermediate_size=32 contracts.base_every=20"
    return [part for value in values.split() for part in ("--set", value)]


def last_line(folder: Path) -> dict[str, Any]:
    lines: list[bytes] = []
    with suppress(FileNotFoundError), (folder / "ledger.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 20)))
        lines = file.read().rpartition(b"\n")[0].splitlines()
    return json.loads(lines[-1]) if lines else {"seq": 0, "step": 0}


# Samples of the run


@dataclass(frozen=True)
class Held:
    """Resources of one process."""

    pid: int
    role: str
    memory_kib: int
    files: int
    sockets: int
    threads: int


@dataclass(frozen=True)
class Sample:
    """Resources of a run while all its workers train.

    first: whether it is the first sample of its generation. age: ledger lines since the generation began. entries,
    leftovers: all files and folders of the run folder, and its temporary files. temporary: entries of TMPDIR.
    """

    generation: int
    first: bool
    age: int
    step: int
    world: int
    held: tuple[Held, ...]
    processes: int
    entries: int
    leftovers: int
    temporary: int


def _held(process: Process, roles: dict[int, str]) -> Held | None:
    try:
        role = roles.get(process.pid) or ("fork server" if "forkserver" in command_line(process) else "other")
        links = [os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
        memory, threads = process.memory_info().rss // 1024, process.num_threads()
    except (FileNotFoundError, ProcessLookupError, NoSuchProcess):
        return None
    return Held(process.pid, role, memory, len(links), sum(link.startswith("socket:") for link in links), threads)


# Whether the samples stay flat


Points = Sequence[tuple[float, float]]
Series = Mapping[Any, Points]
"""Comparable points (time, value) by their origin, for example a process."""


@dataclass(frozen=True)
class Row:
    """One quantity. start, end: medians of the first and last three samples of the series that moved most. Flat: the
    slope is at most `bound`, and start and end differ by at most `apart`."""

    what: str
    series: int
    samples: int
    start: float
    end: float
    slope: float
    per: str
    bound: float
    apart: float

    @property
    def flat(self) -> bool:
        """False without a series of two samples."""
        return self.series > 0 and self.slope <= self.bound and abs(self.end - self.start) <= self.apart

    def cells(self) -> tuple[str, ...]:
        slope = f"{self.slope:.3g} a {self.per} (at most {self.bound:.3g})"
        verdict = "flat" if self.flat else "NOT FLAT" if self.series else "NOT SAMPLED TWICE"
        return self.what, f"{self.samples} in {self.series}", f"{self.start:g}", f"{self.end:g}", slope, verdict


def judge(samples: Sequence[Sample], found: Sequence[Look]) -> list[Row]:
    first = [sample for sample in samples if sample.first and sample.step >= _SETTLED]
    rows = []
    for role in (*_LASTING, "rank"):
        memory = _by_process(first, role, "memory_kib")
        rows.append(_row(f"{role}: memory, KiB", memory, 32.0, math.inf))
        rows += [_row(f"{role}: {what}", _by_process(first, role, what)) for what in ("files", "sockets", "threads")]
    for what, value in ((LEAKING, "in_use"), ("ranks: memory beside malloc once settled, KiB", "beside")):
        points: dict[Any, list[tuple[float, float]]] = defaultdict(list)
        for look in found:
            if look.age >= _GROWN:
                points[look.pid].append((look.age / 100, getattr(look, value) / 1024))
        long = {pid: each for pid, each in points.items() if each[-1][0] - each[0][0] >= _SPAN / 100}
        rows.append(_row(what, long, ALLOWED * 100 / 1024, math.inf, "hundred steps", steepest))
    for name, what, bound, apart in _WHOLE:
        points = defaultdict(list)
        for sample in first:
            points[sample.world].append((sample.generation, getattr(sample, what)))
        rows.append(_row(name, points, bound, apart))
    return rows


_WHOLE = (
    ("processes", "processes", 0.0, 0.0),
    ("run folder, entries", "entries", 0.05, 6.0),  # the best checkpoint may be an additional one
    ("run folder, temporary files", "leftovers", 0.0, 0.0),
    ("temporary folder, entries", "temporary", 0.0, 0.0),
)


def theil_sen(series: Series) -> float:
    """The median slope over all pairs of points of the same series; 0 without a pair."""
    slopes: list[float] = []
    for points in series.values():
        pairs = itertools.islice(itertools.combinations(points, 2), 100_000)
        slopes += [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs if b[0] != a[0]]
    return median(slopes) if slopes else 0.0


def steepest(series: Series) -> float:
    """The largest slope of a series from its first to its last samples. A leak once an epoch shows in few pairs."""

    def slope(points: Points) -> float:
        first, last = points[:_ENDS], points[-_ENDS:]
        return (_median(last) - _median(first)) / (median(at for at, _ in last) - median(at for at, _ in first))

    return max(map(slope, series.values()), default=0.0)


def _by_process(samples: Iterable[Sample], role: str, what: str) -> Series:
    """Points (generation, value) by process and world size. Ranks are matched by number, other roles by pid."""
    points: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        for held in sample.held:
            if held.role.startswith(role):
                key = held.pid if held.role in _LASTING else held.role
                points[key, sample.world].append((sample.generation, getattr(held, what)))
    return points


def _row(
    what: str,
    series: Series,
    bound: float = 0.0,
    apart: float = 0.0,
    per: str = "generation",
    slope: Callable[[Series], float] = theil_sen,
) -> Row:
    long = {key: points for key, points in series.items() if len(points) > 1}
    ends = [(_median(points[:_ENDS]), _median(points[-_ENDS:])) for points in long.values()]
    start, end = max(ends, key=lambda pair: abs(pair[1] - pair[0]), default=(0.0, 0.0))
    return Row(what, len(long), sum(map(len, long.values())), start, end, slope(long), per, bound, apart)


def _median(points: Points) -> float:
    return median(value for _, value in points)


if __name__ == "__main__":
    sys.exit(main())
