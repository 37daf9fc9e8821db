"""Random schedules of faults, each healed and compared: `python -m benchmarks.schedules --count 200 --seed 1`.

Each schedule is drawn from (seed, number): a short run on 2 to 4 workers, half of them with `run.max_restarts=3`, and
one to three faults: SIGKILL of a rank or the launcher; SIGSTOP and, up to 2 s later, SIGCONT of either; SIGSTOP of a
rank without SIGCONT; SIGTERM of the launcher. A run that the faults end is resumed once, undisturbed, on another number
of workers. The checks: it ends with a code that a fault explains, without a traceback
and without processes left; resumed, it ends with 0; weights, moments, loss and every update have the bits of an
undisturbed run; `andon verify`'s checkers find no claim falsified on its ledger. Two controls: a run without faults
passes, and a forged result does not. At least half of the faults must have happened.

Starting processes takes most of the time and some of it is waiting: use up to twice as many jobs as cores.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from andon_falsify.claims.ledgers import RecordedRun as Ledger
from andon_falsify.claims.ledgers import read_run, verify
from andon_falsify.verdict import Outcome as Decided
from falsify.nemesis import judging
from falsify.nemesis.bench import Bench
from falsify.nemesis.processes import family, ranks, send
from falsify.nemesis.run import UPDATES, Ending, Launch, steps_of

KILL, PAUSE, STOP, PREEMPT = "kill", "pause", "stop", "preempt"
_SIGNALS = {KILL: signal.SIGKILL, PAUSE: signal.SIGSTOP, STOP: signal.SIGSTOP, PREEMPT: signal.SIGTERM}
_LIMIT_S = 300.0
"""A launch that takes longer hangs; normally it takes seconds."""
_KEPT = ("training.keep_checkpoints=3",)
"""The default, so that checkpoints are pruned under faults too."""


@dataclass(frozen=True)
class Fault:
    """After `step` updates in the ledger do `kind` to `victim`: the launcher, or the rank `number`.

    kind: SIGKILL; SIGSTOP, and SIGCONT after `seconds`; SIGSTOP alone; or SIGTERM.
    """

    step: int
    kind: str
    victim: str
    number: int
    seconds: float = 0.0

    def __str__(self) -> str:
        whom = self.victim + (f" {self.number}" if self.victim != "launcher" else "")
        return f"{self.kind} {whom}" + (f" {self.seconds:.2f} s" if self.kind == PAUSE else "") + f" at {self.step}"


@dataclass(frozen=True)
class Schedule:
    """One run: its number of workers, its `run.max_restarts`, its faults in order, the workers that resume it."""

    number: int
    workers: int
    restarts: int
    faults: tuple[Fault, ...]
    heal: int

    @classmethod
    def draw(cls, seed: int, number: int, steps: int) -> Schedule:
        """The schedule of this number. (seed, number) determines it."""
        draw = random.Random(f"schedule {seed} {number}")
        workers, restarts = draw.randrange(2, 5), draw.choice((0, 3))
        at = sorted(draw.sample(range(1, steps), draw.randrange(1, 4 if restarts else 3)))
        return cls(number, workers, restarts, tuple(_fault(draw, step, workers) for step in at), draw.randrange(1, 5))


def _fault(draw: random.Random, step: int, workers: int) -> Fault:
    kind = draw.choice([KILL, KILL, KILL, PAUSE, PAUSE, STOP, PREEMPT])
    victim = {STOP: "rank", PREEMPT: "launcher"}.get(kind) or draw.choice(["rank", "rank", "launcher"])
    return Fault(step, kind, victim, draw.randrange(workers), draw.uniform(0.1, 2.0) if kind == PAUSE else 0.0)


def strike(fault: Fault, folder: Path, launcher: subprocess.Popen[Any]) -> bool:
    """Wait for the step and cause the fault. Returns False if the run has ended, or has no such process."""
    while steps_of(folder) < fault.step and launcher.poll() is None:
        time.sleep(0.003)
    found = ranks(launcher.pid) if fault.victim == "rank" else family(launcher.pid)[:1]
    if launcher.poll() is not None or not found:
        return False
    return send(found[fault.number % len(found)], _SIGNALS[fault.kind], pause_s=fault.seconds) is not None


@dataclass(frozen=True)
class Outcome:
    schedule: Schedule
    struck: tuple[bool, ...]
    codes: tuple[int, ...]
    wrong: str

    def __str__(self) -> str:
        faults = zip(self.schedule.faults, self.struck, strict=True)
        done = ", ".join(f"{fault}{'' if happened else ' (not reached)'}" for fault, happened in faults)
        codes = " ".join(map(str, self.codes))
        size = f"{self.schedule.workers} workers, {self.schedule.restarts} restarts"
        return f"{self.schedule.number}: {size}, {done}; exits {codes}: {self.wrong or 'same'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first schedule, to repeat one")
    parser.add_argument("--jobs", type=int, default=1, help="schedules in parallel, of up to five processes each")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as base:
        stage = Stage(Bench.prepare(Path(base), options.seed))
        controls, began = stage.controls(), time.monotonic()
        print("\n".join(f"control: {name}: {'as it should be' if good else 'WRONG'}" for name, good in controls))

        def one(number: int) -> Outcome:
            outcome = stage.play(Schedule.draw(options.seed, number, UPDATES))
            print(outcome, flush=True)
            return outcome

        try:
            with ThreadPoolExecutor(options.jobs) as pool:
                found = list(pool.map(one, range(options.first, options.first + options.count)))
        finally:
            stage.bench.close()
    same, seconds = sum(not outcome.wrong for outcome in found), time.monotonic() - began
    faults = [happened for outcome in found for happened in outcome.struck]
    print(
        f"{same} of {len(found)} schedules (seed {options.seed}) end with the bits of the undisturbed run and leave no "
        f"process; {sum(faults)} of {len(faults)} faults happened; {len(found) / seconds * 60:.1f} schedules a minute"
    )
    good = all(held for _, held in controls) and same == len(found) and 2 * sum(faults) >= len(faults)
    return 0 if good else 1


@dataclass(frozen=True)
class Stage:
    bench: Bench

    def controls(self) -> list[tuple[str, bool]]:
        calm = self.play(Schedule(-1, 3, 0, (), 2))
        forged = self.bench.base / "forged"
        shutil.copytree(self.bench.reference.folder, forged)
        summary = json.loads((forged / "summary.json").read_text())
        summary["weights_digest"] = f"{int(summary['weights_digest'], 16) ^ 1:016x}"
        (forged / "summary.json").write_text(json.dumps(summary))
        caught = bool(self.bench.reference.differs(forged))
        return [("no fault passes", calm.codes == (0,) and not calm.wrong), ("another digest is caught", caught)]

    def play(self, schedule: Schedule) -> Outcome:
        """Run it, disturb it, resume it, judge it. The folder stays if something is wrong."""
        run = self.bench.open(f"schedule-{schedule.number}", str(schedule.number))
        launch = Launch(str(schedule.workers), (*_KEPT, f"run.max_restarts={schedule.restarts}"))
        try:
            run.start(launch)
            struck = tuple(strike(fault, run.folder, run.launcher) for fault in schedule.faults)
            endings = [run.end(_LIMIT_S, time.monotonic())]
            happened = [fault for fault, did in zip(schedule.faults, struck, strict=True) if did]
            wrong = unexplained(happened, endings[0])
            if not wrong and endings[0].codes != (0,):
                run.start(replace(launch, workers=str(schedule.heal)))
                endings.append(run.end(_LIMIT_S, time.monotonic()))
                wrong = "; ".join(judging.wrong_without_fault(endings[1], ""))
        finally:
            run.kill()
        wrong = wrong or self.bench.reference.differs(run.folder) or self._falsified(run.folder)
        if not wrong:
            shutil.rmtree(run.scratch)
        return Outcome(schedule, struck, tuple(code for each in endings for code in each.codes), wrong)

    @cached_property
    def _whole(self) -> Ledger:
        return read_run(self.bench.reference.folder)

    def _falsified(self, folder: Path) -> str:
        verdicts = verify([self._whole, read_run(folder)])
        broken = [verdict.claim for verdict in verdicts if verdict.outcome is Decided.FALSIFIED]
        return f"FALSIFIED: {', '.join(broken)}" if broken else ""


def unexplained(happened: Sequence[Fault], ending: Ending) -> str:
    """What is wrong with the end of a disturbed launch, if no fault that happened explains it; otherwise empty."""
    may = {0}
    for fault in happened:
        lost = -signal.SIGKILL if fault.victim == "launcher" else 71
        may |= {KILL: {lost}, STOP: {71, 72}, PREEMPT: {75}}.get(fault.kind, set())
    (code,) = ending.codes
    expected = replace(ending, codes=(0,)) if code in may and not ending.hung else ending
    found = "; ".join(judging.wrong_without_fault(expected, ""))
    return f"{found}: {ending.output[-300:]}" if found else ""


if __name__ == "__main__":
    raise SystemExit(main())
