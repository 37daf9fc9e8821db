"""A long run under random faults must hold no more at its end: `python -m benchmarks.soak --minutes 30`.

A run of `--workers 2:3` trains for the whole time. Every few seconds a fault is drawn from the seed: SIGKILL of a rank
or an agent; SIGSTOP and SIGCONT of a rank, an agent or the launcher; another number of workers; SIGTERM. Whenever the
run ends, it is resumed. Meanwhile memory, files, sockets, threads, processes, temporary files and the run folder are
sampled. Flat means: over samples at the same age of each generation of workers, the median slope of all pairs
(Theil-Sen) is below the bound in the table, and counts at the end are those of the start. In the first and last tenth
of the time nobody is disturbed: there each rank accounts for its memory to the byte (`soak_ranks`), and may not grow by
half a GiB in a million steps. At the end every claim of `andon verify` must hold, and every step must have the bits of
an undisturbed run.

Controls: `--leak handle` and `--leak memory` plant a leak in the launcher, `--leak rank` in each rank. Such a run ends
with 0 if the leak shows in its row. For `--leak rank`, `--minutes 1` is enough.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from andon.run.atomic import is_leftover
from andon.run.ledger import read_ledger
from andon.run.repeats import differing
from andon_contracts.record import Step
from benchmarks.runs import command, environment, table
from benchmarks.soak_ranks import ALLOWED, ENVIRONMENT, LEAKS, Look, looks
from falsify.nemesis.planting import VARIABLE, Plant, written
from falsify.nemesis.processes import alive, command_line, session
from falsify.nemesis.schedule import KILL, PAUSE, PREEMPT, RESIZE, Fault, strike

LEAST, MOST = 2, 3
_AGE = 20
"""Lines of the ledger after which a generation is sampled first."""
_CALM = 600
"""Lines of the ledger that the first generation writes undisturbed, so that growth of a rank can be seen."""
_BETWEEN_S = (2.0, 10.0)
_EVERY_S = 2.0
_LIMIT_S = 240.0
"""The run hangs if the ledger has no new line for so long."""
_CODES = (71, 72, 75)
"""How a launch may end: too few ranks, a silent rank, SIGTERM."""
_SHARED = Path("/dev/shm")
_LOGS = ("ledger.jsonl", "metrics.jsonl")
"""They grow by a line a step, as they should."""
_LASTING = ("launcher", "fork server", "agent")
"""Roles whose processes outlive a generation of workers."""
_SETTLED, _GROWN, _SPAN = 100, 250, 200
"""Steps after which the folder holds all checkpoints that it keeps; after which a rank's buffers are full; and the
steps that a rank must then be observed for."""
_ENDS = 3
"""Samples at each end of a series, whose medians are compared."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--leak", choices=LEAKS, help="a control: plant this leak, and find it")
    parser.add_argument("--json", type=Path, help="file for the table and all samples")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as base:
        soak = Soak(Path(base), random.Random(f"soak {options.seed}"), options.leak)
        soak.run(options.minutes * 60)
        rows = judge(soak.samples, list(looks(soak.scratch)))
        print(table(("what", "samples", "start", "end", "slope", "verdict"), [row.cells() for row in rows]))
        print(soak.account(), flush=True)
        if options.json is not None:
            options.json.write_text(
                json.dumps([*map(asdict, rows), *map(asdict, soak.samples), *map(asdict, looks(soak.scratch))])
            )
        if options.leak:
            row = next(row for row in rows if row.what == LEAKS[options.leak])
            seen = row.series > 0 and not row.flat
            print("\n".join([*soak.wrong, f"the leak is {'found' if seen else 'NOT FOUND'} in: {row.what}"]))
            return 0 if seen and not soak.wrong else 1
        wrong = [f"{row.what} is not flat" for row in rows if not row.flat] + soak.wrong + soak.compared()
    print("\n".join([*wrong, "NOT FLAT" if wrong else "flat"]))
    return 1 if wrong else 0


# The run, and what is done to it


@dataclass
class Soak:
    base: Path
    draw: random.Random
    leak: str | None = None
    samples: list[Sample] = field(default_factory=list)
    struck: Counter[str] = field(default_factory=Counter)
    codes: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder, self._temporary, self.scratch = (self.base / each for each in ("run", "temporary", "scratch"))
        self._temporary.mkdir()
        self.scratch.mkdir()
        self._sampler = Sampler(self.folder, self._temporary)

    def run(self, seconds: float) -> None:
        began = time.monotonic()
        self._start()
        try:
            self._watch(began + 0.1 * seconds, _CALM if self.leak in (None, "rank") else _AGE)
            while time.monotonic() < began + 0.9 * seconds and not self.wrong:
                self._watch(time.monotonic() + self.draw.uniform(*_BETWEEN_S))
                self._disturb()
            self._watch(began + seconds)
        finally:
            self._finish()

    def _watch(self, until: float, age: int = _AGE) -> None:
        """Sample until then, and until a generation has written `age` lines; resume a run that ends."""
        seen, progress, since = False, -1, time.monotonic()
        while (time.monotonic() < until or not seen) and not self.wrong:
            if self._launcher.poll() is not None:
                self._ended()
                self._start()
            lines = self._sampler.lines_of_generation(self._launcher.pid)
            if lines != progress:
                progress, since = lines, time.monotonic()
            if time.monotonic() - since > _LIMIT_S:
                self.wrong.append(f"HANG: no new line in the ledger for {_LIMIT_S:g} s")
            elif lines >= _AGE and (sample := self._sampler.sample(self._launcher.pid)):
                self.samples.append(sample)
                seen = seen or sample.age >= age
                time.sleep(_EVERY_S)
            time.sleep(0.1)

    def _disturb(self) -> None:
        if not self.samples:
            return
        world = self.samples[-1].world
        kinds = [(KILL, "rank")] * 5 + [(PAUSE, "rank"), (PAUSE, "agent"), (PAUSE, "launcher")]
        kinds += [(KILL, "agent")] * 4 if world > LEAST else [(RESIZE, "agent")] * 8
        kinds += [(RESIZE, "agent")] * (world > LEAST) + [(PREEMPT, "launcher")]
        kind, victim = self.draw.choice(kinds)
        number = LEAST + MOST - world if kind == RESIZE else self.draw.randrange(world)
        fault = Fault(0, kind, victim, number, self.draw.uniform(0.1, 3.0) if kind == PAUSE else 0.0)
        happened = strike(fault, self.folder, self._launcher)
        self.struck[f"{kind} {victim}" if happened and kind != RESIZE else kind if happened else "not reached"] += 1

    def _start(self) -> None:
        line = command(self.folder, "--workers", f"{LEAST}:{MOST}", "--resume", "auto", *settings())
        line[1:3] = ["-m", "falsify.nemesis.driver"]
        plants = ["benchmarks.soak_ranks:account"] + [f"benchmarks.soak_ranks:{self.leak}"] * bool(self.leak)
        planted = written([Plant(each) for each in plants], self.scratch)
        given = {**environment(), **ENVIRONMENT, "TMPDIR": str(self._temporary), VARIABLE: planted}
        with (self.base / "said.txt").open("a") as said:
            self._launcher = subprocess.Popen(
                line, env=given, stdout=subprocess.DEVNULL, stderr=said, text=True, start_new_session=True
            )

    def _ended(self) -> None:
        """Check the end of a launch: its code, and that it left no process."""
        code = self._launcher.wait()
        self.codes[code] += 1
        if code not in _CODES:
            said = (self.base / "said.txt").read_text().strip().splitlines()
            self.wrong.append(f"a launch ended with {code}: {said[-1] if said else ''}")
        deadline = time.monotonic() + 10.0
        while (left := session(self._launcher.pid)) and time.monotonic() < deadline:
            time.sleep(0.02)
        if left:
            self.wrong.append(f"a launch left {len(left)} processes behind")
            for pid in filter(alive, left):
                os.kill(pid, signal.SIGKILL)

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
        if left or self._sampler.shared():
            self.wrong.append(f"temporary files are left: {left}, in shared memory {self._sampler.shared()}")

    def compared(self) -> list[str]:
        from andon_falsify.claims.ledgers import read_run, verify
        from andon_falsify.verdict import Outcome

        found = [f"FALSIFIED: {v.claim}" for v in verify([read_run(self.folder)]) if v.outcome is Outcome.FALSIFIED]
        last = int(last_line(self.folder)["step"])
        mine, other = _steps(self.folder), _steps(undisturbed(self.base / "calm", last))
        if sorted(mine) != list(range(1, last + 1)):
            found.append(f"LOST: {last - len(mine)} of {last} steps are not in the ledger")
        different = [step for step in mine if step not in other or differing(other[step], mine[step])]
        if different:
            found.append(f"OTHER BITS: in {len(different)} of {last} steps, first in step {min(different)}")
        return found

    def account(self) -> str:
        faults = ", ".join(f"{count} x {what}" for what, count in sorted(self.struck.items()))
        ends = ", ".join(f"{count} x {code}" for code, count in sorted(self.codes.items()))
        steps, generations = last_line(self.folder)["step"], self._sampler.generations
        return f"{steps} steps in {generations} generations of workers; faults: {faults}\nends: {ends}"


def settings() -> list[str]:
    values = "training.batch_size=4 training.micro_batches=4 data.validation_fraction=0.02 training.epochs=1000"
    values += " training.checkpoint_every=20 training.evaluate_every=50 run.timeout_s=30"
    values += " schedule.warmup_fraction=0 model.hidden_size=16 model.intermediate_size=32 contracts.base_every=20"
    return [part for value in values.split() for part in ("--set", value)]


def undisturbed(folder: Path, last: int) -> Path:
    """The same run in one process, ended by SIGTERM after step `last`. Raises `RuntimeError` if it ends earlier."""
    line = command(folder, "--workers", "1", "--set", "run.backend=inline", *settings())
    with tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(line, env=environment(), stdout=subprocess.DEVNULL, stderr=stderr)
        while process.poll() is None and last_line(folder).get("step", 0) <= last:
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        process.wait()
        stderr.seek(0)
        said = stderr.read()
    if process.returncode != 75:
        raise RuntimeError(f"the undisturbed run ended with {process.returncode}: {said[-2000:]}")
    return folder


def _steps(folder: Path) -> dict[int, Step]:
    return {record.step: record for record in read_ledger(folder / "ledger.jsonl") if isinstance(record, Step)}


# What the run holds at one moment


@dataclass(frozen=True)
class Held:
    pid: int
    role: str
    memory_kib: int
    files: int
    sockets: int
    threads: int


@dataclass(frozen=True)
class Sample:
    """The holdings of a run whose workers all train.

    matched: the first sample of this generation. age: lines of the ledger since the generation was first seen.
    disk_kib, entries: of the run folder without its two logs. leftovers, temporary, shared: temporary files in the run
    folder, in the temporary folder, in shared memory.
    """

    generation: int
    matched: bool
    age: int
    step: int
    world: int
    held: tuple[Held, ...]
    disk_kib: float
    entries: int
    leftovers: int
    temporary: int
    shared: int


@dataclass
class Sampler:
    folder: Path
    temporary: Path
    generations: int = 0
    _known: tuple[int, int] = (0, 0)
    _from: int = 0
    _matched: int = 0
    _shared: set[str] = field(default_factory=set)
    _before: frozenset[str] = field(default_factory=lambda: frozenset(_names(_SHARED)))

    def lines_of_generation(self, launcher: int) -> int:
        """Lines in the ledger since this generation of workers was first seen; 0 if there is no generation."""
        found = self._agents()
        if not found:
            return 0
        last = last_line(self.folder)
        if (launcher, found["generation"]) != self._known:
            self._known, self._from = (launcher, found["generation"]), last["seq"]
            self.generations += 1
        return int(last["seq"]) - self._from

    def sample(self, launcher: int) -> Sample | None:
        found, step = self._agents(), last_line(self.folder).get("step", 0)
        roles = {launcher: "launcher"} | {each["agent"]: "agent" for each in found.get("agents", [])}
        roles |= {each["worker"]: f"rank {each['rank']}" for each in found.get("agents", [])}
        members = session(launcher)
        held = tuple(one for pid in members if (one := _held(pid, roles)) is not None)
        if not found or {one.pid for one in held} != set(members) or not roles.keys() <= set(members):
            return None
        self._note_shared(members)
        walked = [Path(at) / name for at, folders, files in os.walk(self.folder) for name in (*folders, *files)]
        entries = [path for path in walked if path.name not in _LOGS]
        matched, self._matched = self._matched != self.generations, self.generations
        return Sample(
            generation=self.generations,
            matched=matched,
            age=self.lines_of_generation(launcher),
            step=step,
            world=len(found["agents"]),
            held=held,
            disk_kib=sum(map(_size, entries)) / 1024,
            entries=len(entries),
            leftovers=sum(is_leftover(path.name) for path in entries),
            temporary=len(_names(self.temporary)),
            shared=self.shared(),
        )

    def shared(self) -> int:
        return len(self._shared & set(_names(_SHARED)))

    def _note_shared(self, members: list[int]) -> None:
        """An entry belongs to the run if one of its processes has it mapped, or its name has the pid of one."""
        if new := set(_names(_SHARED)) - self._before - self._shared:
            mapped, pids = "", {str(pid) for pid in members}
            for pid in members:
                with suppress(FileNotFoundError, ProcessLookupError):
                    mapped += Path(f"/proc/{pid}/maps").read_text()
            self._shared |= {
                name for name in new if f"/dev/shm/{name}" in mapped or pids & set(name.replace(".", "_").split("_"))
            }

    def _agents(self) -> dict[str, Any]:
        with suppress(FileNotFoundError):
            return dict(json.loads((self.folder / "reports" / "agents.json").read_text()))
        return {}


def last_line(folder: Path) -> dict[str, Any]:
    lines: list[bytes] = []
    with suppress(FileNotFoundError), (folder / "ledger.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 20)))
        lines = file.read().rpartition(b"\n")[0].splitlines()
    return json.loads(lines[-1]) if lines else {"seq": 0, "step": 0}


def _held(pid: int, roles: dict[int, str]) -> Held | None:
    try:
        role = roles.get(pid) or ("fork server" if b"forkserver" in command_line(pid) else "other")
        memory = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * (os.sysconf("SC_PAGE_SIZE") // 1024)
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Held(pid, role, memory, len(links), sum(link.startswith("socket:") for link in links), threads)


def _names(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()] if folder.is_dir() else []


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.lstat().st_size if path.is_file() else 0
    return 0


# Whether it stays flat


Series = Mapping[Any, Sequence[tuple[float, float]]]
"""Comparable points (when, how much), by what they are of."""


@dataclass(frozen=True)
class Row:
    """One quantity. start, end: medians of the first and last three samples of the series that moved most. Flat: the
    slope for each `per` is at most `bound`, and start and end differ by at most `apart`."""

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
        """Whether it did not grow; a quantity that was not sampled twice is not known to be flat."""
        return self.series > 0 and self.slope <= self.bound and abs(self.end - self.start) <= self.apart

    def cells(self) -> tuple[str, ...]:
        slope = f"{self.slope:.3g} a {self.per} (at most {self.bound:.3g})"
        verdict = "flat" if self.flat else "NOT FLAT" if self.series else "NOT SAMPLED TWICE"
        return self.what, f"{self.samples} in {self.series}", f"{self.start:g}", f"{self.end:g}", slope, verdict


def judge(samples: Sequence[Sample], found: Sequence[Look]) -> list[Row]:
    matched = [sample for sample in samples if sample.matched and sample.step >= _SETTLED]
    rows = []
    for role in (*_LASTING, "rank"):
        name = "ranks" if role == "rank" else role
        memory = "ranks: memory at the same age, KiB" if role == "rank" else f"{role}: memory, KiB"
        rows.append(_row(memory, _by_process(matched, role, lambda held: held.memory_kib), 32.0, math.inf))
        for what, value in _COUNTS.items():
            rows.append(_row(f"{name}: {what}", _by_process(matched, role, value), 0.0, 0.0))
    for what, of in (("in use", "in_use"), ("beside malloc", "beside")):
        points: dict[Any, list[tuple[float, float]]] = defaultdict(list)
        for look in found:
            if look.age >= _GROWN:
                points[look.pid].append((look.age / 100, getattr(look, of) / 1024))
        long = {pid: each for pid, each in points.items() if each[-1][0] - each[0][0] >= _SPAN / 100}
        name, bound = f"ranks: memory {what} once settled, KiB", ALLOWED * 100 / 1024
        rows.append(_row(name, long, bound, math.inf, "hundred steps", steepest))
    for what, whole, bound, apart in _WHOLE:
        points = defaultdict(list)
        for sample in matched:
            points[sample.world].append((sample.generation, whole(sample)))
        rows.append(_row(what, points, bound, apart))
    return rows


_COUNTS: dict[str, Callable[[Held], float]] = {
    "open files": lambda held: held.files,
    "sockets": lambda held: held.sockets,
    "threads": lambda held: held.threads,
}
_WHOLE: tuple[tuple[str, Callable[[Sample], float], float, float], ...] = (
    ("processes", lambda sample: len(sample.held), 0.0, 0.0),
    ("run folder without its logs, KiB", lambda sample: sample.disk_kib, 1.0, math.inf),
    ("run folder, entries", lambda sample: sample.entries, 0.05, 6.0),  # the best checkpoint may be a further one
    ("run folder, temporary files", lambda sample: sample.leftovers, 0.0, 0.0),
    ("temporary folder, entries", lambda sample: sample.temporary, 0.0, 0.0),
    ("shared memory, entries", lambda sample: sample.shared, 0.0, 0.0),
)


def theil_sen(series: Series) -> float:
    """The median slope over all pairs of points of the same series; 0 if there is none."""
    slopes: list[float] = []
    for points in series.values():
        pairs = itertools.islice(itertools.combinations(points, 2), 100_000)
        slopes += [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs if b[0] != a[0]]
    return median(slopes) if slopes else 0.0


def steepest(series: Series) -> float:
    """The largest slope of a series from its first to its last samples; a leak once an epoch is in few pairs."""

    def slope(points: Sequence[tuple[float, float]]) -> float:
        first, last = points[:_ENDS], points[-_ENDS:]
        return (_median(last) - _median(first)) / (median(at for at, _ in last) - median(at for at, _ in first))

    return max(map(slope, series.values()), default=0.0)


def _by_process(samples: Iterable[Sample], role: str, value: Callable[[Held], float]) -> Series:
    """Points of each process of a role in a world of one size, by generation; of ranks by their number."""
    points: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        for held in sample.held:
            if held.role.startswith(role):
                key = held.pid if held.role in _LASTING else held.role
                points[key, sample.world].append((sample.generation, value(held)))
    return points


def _row(
    what: str,
    series: Series,
    bound: float,
    apart: float,
    per: str = "generation",
    slope: Callable[[Series], float] = theil_sen,
) -> Row:
    long = {key: points for key, points in series.items() if len(points) > 1}
    ends = [(_median(points[:_ENDS]), _median(points[-_ENDS:])) for points in long.values()]
    start, end = max(ends, key=lambda pair: abs(pair[1] - pair[0]), default=(0.0, 0.0))
    return Row(what, len(long), sum(map(len, long.values())), start, end, slope(long), per, bound, apart)


def _median(points: Sequence[tuple[float, float]]) -> float:
    return median(value for _, value in points)


if __name__ == "__main__":
    sys.exit(main())
