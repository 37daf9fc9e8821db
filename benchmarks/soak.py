"""One long run under random faults, that must hold no more at its end: `python -m benchmarks.soak --minutes 30`.

A run of `--workers 2:3` trains for the whole time. Every few seconds it meets a fault drawn from the seed: SIGKILL of a
rank or an agent; SIGSTOP and SIGCONT of a rank, an agent or the launcher; another number of workers; SIGTERM, after
which it is resumed, as it is after any other end. Meanwhile memory, open files, sockets, threads, processes, temporary
files and the run folder are looked at. Flat means: over the looks at the same age of each generation of workers the
median slope of all pairs (Theil-Sen) is below the bound in the table, and counts at the end are those of the start.
In the first tenth of the time, and for at least `_CALM` lines of the ledger, nobody is disturbed, and in the last tenth
neither: there each rank that trains on accounts for its memory to the byte, and may not grow by half a GiB in a million
steps. At the end every claim of `andon verify` must hold, and every step must have the bits of an undisturbed run.

`--leak handle` and `--leak memory` plant a leak in the launcher, `--leak rank` one in each rank: the controls. Such a
run ends with 0 where the leak is found in its row. That of the ranks needs no more than `--minutes 1`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from andon.run.ledger import read_ledger
from andon.run.repeats import differing
from andon_contracts.record import Step
from benchmarks.runs import command, environment, table
from benchmarks.soak_leak import IN_RANKS, LEAKS
from benchmarks.soak_ranks import ENVIRONMENT, looks
from benchmarks.soak_samples import Sample, Sampler, last_line
from benchmarks.soak_verdict import Row, judge
from falsify.nemesis.planting import VARIABLE, Plant, written
from falsify.nemesis.processes import alive, session
from falsify.nemesis.schedule import KILL, PAUSE, PREEMPT, RESIZE, Fault, strike

LEAST, MOST = 2, 3
_AGE = 20
"""Lines of the ledger after which a generation is looked at first."""
_CALM = 600
"""Lines of the ledger that the first generation writes undisturbed: from them it is seen whether a rank grows."""
_BETWEEN_S = (2.0, 10.0)
"""Seconds from that look to the next fault, drawn between these."""
_EVERY_S = 2.0
_CODES = (71, 72, 75)
"""How a launch may end: fewer ranks than the least, a rank that is silent, SIGTERM."""
_CACHE = "torchinductor_"
"""A folder that torch makes for its compiler and keeps for whoever comes next."""
_LIMIT_S = 240.0
"""Without a new line in the ledger for so long, the run hangs."""


def main() -> int:
    """Print what was done, the table, and what does not hold; 0 if all is flat, verified and of the same bits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--leak", choices=LEAKS, help="a control: what leaks; 0 if it is found")
    parser.add_argument("--json", type=Path, help="file for all looks and the verdict")
    options = parser.parse_args()
    print(
        f"seed {options.seed}, {options.minutes:g} minutes{f', leak: {options.leak}' * bool(options.leak)}", flush=True
    )
    with tempfile.TemporaryDirectory() as base:
        soak = Soak(Path(base), random.Random(f"soak {options.seed}"), options.leak)
        soak.run(options.minutes * 60)
        rows = judge(soak.samples, looks(soak.scratch))
        print(table(("what", "looks", "start", "end", "slope", "verdict"), [row.cells() for row in rows]), flush=True)
        account = soak.account()
        print(account, flush=True)
        if options.leak:
            _write(options.json, _document(soak, rows, soak.wrong))
            return _control(options.leak, rows, soak)
        wrong = [f"{row.what} is not flat" for row in rows if not row.flat] + soak.wrong
        _write(options.json, _document(soak, rows, wrong))  # the comparison takes as long as the steps did
        wrong += soak.compared()
    print("\n".join(wrong))
    _write(options.json, _document(soak, rows, wrong))
    print("NOT FLAT" if wrong else "flat")
    return 1 if wrong else 0


def _control(leak: str, rows: Sequence[Row], soak: Soak) -> int:
    """Say whether the leak that was planted was found, and found where it is; 0 if so."""
    row = next(row for row in rows if row.what == LEAKS[leak])
    found = row.series > 0 and not row.flat
    print("\n".join([*soak.wrong, f"the leak is {'found' if found else 'NOT FOUND'} in: {row.what}"]))
    return 0 if found and not soak.wrong else 1


@dataclass
class Soak:
    """The run, what is done to it, and what was seen. `base`: an empty folder."""

    base: Path
    draw: random.Random
    leak: str | None = None
    samples: list[Sample] = field(default_factory=list)
    struck: Counter[str] = field(default_factory=Counter)
    codes: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    _launcher: subprocess.Popen[str] | None = None

    def __post_init__(self) -> None:
        self.folder, self._temporary = self.base / "run", self.base / "temporary"
        self.scratch = self.base / "scratch"
        self._temporary.mkdir()
        self.scratch.mkdir()
        self._sampler = Sampler(self.folder, self._temporary)

    def run(self, seconds: float) -> None:
        """Train and disturb for so long; then end the run by SIGTERM, and look at what is left."""
        began = time.monotonic()
        launcher = self._start()
        try:
            calm = _AGE if self.leak and self.leak not in IN_RANKS else _CALM
            launcher = self._watch(launcher, began + 0.1 * seconds, calm)
            while time.monotonic() < began + 0.9 * seconds and not self.wrong:
                launcher = self._watch(launcher, time.monotonic() + self.draw.uniform(*_BETWEEN_S))
                self._disturb(launcher)
            launcher = self._watch(launcher, began + seconds)
        finally:
            self._finish(launcher)

    def _watch(self, launcher: subprocess.Popen[str], until: float, age: int = _AGE) -> subprocess.Popen[str]:
        """Look until then, and until a generation of that age was seen; a run that ends is resumed. The launcher then.

        age: in lines of the ledger.
        """
        seen, progress, since = False, -1, time.monotonic()
        while (time.monotonic() < until or not seen) and not self.wrong:
            if launcher.poll() is not None:
                self._ended(launcher)
                launcher = self._start()
            lines = self._sampler.lines_of_generation(launcher.pid)
            if lines != progress:
                progress, since = lines, time.monotonic()
            if time.monotonic() - since > _LIMIT_S:
                self.wrong.append(f"HANG: no new line in the ledger for {_LIMIT_S:g} s")
                return launcher
            if lines >= _AGE and (sample := self._sampler.look(launcher.pid)):
                self.samples.append(sample)
                seen = seen or sample.age >= age
                time.sleep(_EVERY_S)
            time.sleep(0.1)
        return launcher

    def _disturb(self, launcher: subprocess.Popen[str]) -> None:
        world = self.samples[-1].world
        kinds = [(KILL, "rank")] * 5 + [(PAUSE, "rank"), (PAUSE, "agent"), (PAUSE, "launcher")]
        kinds += [(KILL, "agent")] * 4 if world > LEAST else [(RESIZE, "agent")] * 8
        kinds += [(RESIZE, "agent")] * (world > LEAST) + [(PREEMPT, "launcher")]
        kind, victim = self.draw.choice(kinds)
        number = LEAST + MOST - world if kind == RESIZE else self.draw.randrange(world)
        fault = Fault(0, kind, victim, number, self.draw.uniform(0.1, 3.0) if kind == PAUSE else 0.0)
        happened = strike(fault, self.folder, launcher)
        self.struck[f"{kind} {victim}" if happened and kind != RESIZE else kind if happened else "not reached"] += 1

    def _start(self) -> subprocess.Popen[str]:
        line = command(self.folder, "--workers", f"{LEAST}:{MOST}", "--resume", "auto", *settings())
        line[1:3] = ["-m", "falsify.nemesis.driver"]
        plants = ["benchmarks.soak_ranks:account"] + [f"benchmarks.soak_leak:{self.leak}"] * bool(self.leak)
        planted = written([Plant(each) for each in plants], self.scratch)
        with (self.base / "said.txt").open("a") as said:
            self._launcher = subprocess.Popen(
                line,
                env={**environment(), **ENVIRONMENT, "TMPDIR": str(self._temporary), VARIABLE: planted},
                stdout=subprocess.DEVNULL,
                stderr=said,
                text=True,
                start_new_session=True,
            )
        return self._launcher

    def _ended(self, launcher: subprocess.Popen[str]) -> None:
        """Hold the end of a launch to what is promised."""
        code = launcher.wait()
        self.codes[code] += 1
        if code not in _CODES:
            said = (self.base / "said.txt").read_text().strip().splitlines()
            self.wrong.append(f"a launch ended with {code}: {said[-1] if said else ''}")
        deadline = time.monotonic() + 10.0
        while (left := session(launcher.pid)) and time.monotonic() < deadline:
            time.sleep(0.02)
        if left:
            self.wrong.append(f"a launch left {len(left)} processes behind")
            for pid in filter(alive, left):
                os.kill(pid, signal.SIGKILL)

    def _finish(self, launcher: subprocess.Popen[str]) -> None:
        launcher = self._launcher or launcher
        if launcher.returncode is not None:
            return
        launcher.send_signal(signal.SIGTERM)
        try:
            launcher.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.wrong.append("HANG: the run does not end at SIGTERM")
            launcher.kill()
        self._ended(launcher)
        if "Traceback" in (self.base / "said.txt").read_text():
            self.wrong.append("a traceback was printed")
        left = [path.name for path in self._temporary.iterdir() if not path.name.startswith(_CACHE)]
        if left or self._sampler.shared():
            self.wrong.append(f"temporary files are left: {left}, in shared memory {self._sampler.shared()}")

    def compared(self) -> list[str]:
        """All that is wrong with the run's ledger: claims that do not hold, steps that come out otherwise."""
        from andon_falsify.claims.ledgers import read_run, verify
        from andon_falsify.verdict import Outcome as Verdicts

        verdicts = verify([read_run(self.folder)])
        found = [f"FALSIFIED: {each.claim}" for each in verdicts if each.outcome is Verdicts.FALSIFIED]
        last = int(last_line(self.folder)["step"])
        mine, other = _steps(self.folder), _steps(undisturbed(self.base / "calm", last))
        if sorted(mine) != list(range(1, last + 1)):
            found.append(f"LOST: {last - len(mine)} of {last} steps are not in the ledger")
        different = [step for step in mine if step not in other or differing(other[step], mine[step])]
        if different:
            found.append(f"OTHER BITS: in {len(different)} of {last} steps, first in step {min(different)}")
        return found

    def account(self) -> str:
        """Two lines on what was done."""
        faults = ", ".join(f"{count} x {what}" for what, count in sorted(self.struck.items()))
        ends = ", ".join(f"{count} x {code}" for code, count in sorted(self.codes.items()))
        steps, generations = last_line(self.folder)["step"], self._sampler.generations
        return f"{steps} steps in {generations} generations of workers; faults: {faults}\nends: {ends}"


def settings() -> list[str]:
    """A small model, a checkpoint every few seconds, and more epochs than any soak comes to."""
    values = "training.batch_size=4 training.micro_batches=4 data.validation_fraction=0.02 training.epochs=1000"
    values += " training.checkpoint_every=20 training.evaluate_every=50 run.timeout_s=30"
    values += " schedule.warmup_fraction=0 model.hidden_size=16 model.intermediate_size=32 contracts.base_every=20"
    return [part for value in values.split() for part in ("--set", value)]


def undisturbed(folder: Path, last: int) -> Path:
    """The same run in one process that nobody disturbs, ended by SIGTERM after step `last`.

    Raises `RuntimeError` where it does not come to it.
    """
    line = command(folder, "--workers", "1", "--set", "run.backend=inline", *settings())
    with tempfile.TemporaryFile("w+") as said_there:
        process = subprocess.Popen(line, env=environment(), stdout=subprocess.DEVNULL, stderr=said_there)
        while process.poll() is None and last_line(folder).get("step", 0) <= last:
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        process.wait()
        said_there.seek(0)
        said = said_there.read()
    if process.returncode != 75:
        raise RuntimeError(f"the undisturbed run ended with {process.returncode}: {said[-2000:]}")
    return folder


def _steps(folder: Path) -> dict[int, Step]:
    """The last record of each step."""
    return {record.step: record for record in read_ledger(folder / "ledger.jsonl") if isinstance(record, Step)}


def _write(path: Path | None, document: dict[str, object]) -> None:
    if path is not None:
        path.write_text(json.dumps(document, indent=1))


def _document(soak: Soak, rows: Sequence[Row], wrong: Sequence[str]) -> dict[str, object]:
    return {
        "wrong": list(wrong),
        "faults": dict(soak.struck),
        "ends": {str(code): count for code, count in soak.codes.items()},
        "rows": [{**dataclasses.asdict(row), "apart": str(row.apart), "flat": row.flat} for row in rows],
        "looks": [dataclasses.asdict(sample) for sample in soak.samples],
        "accounts": [dataclasses.asdict(look) for look in looks(soak.scratch)],
    }


if __name__ == "__main__":
    sys.exit(main())
