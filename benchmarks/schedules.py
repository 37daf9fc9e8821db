"""Random schedules of faults, each healed and compared: `python -m benchmarks.schedules --count 200 --seed 1`.

Each schedule is drawn from (seed, number): a short run on 2 to 4 workers, fixed or elastic, and one to three faults:
SIGKILL of a rank, an agent or the launcher; SIGSTOP and, up to 2 s later, SIGCONT of any of them; SIGSTOP of a rank for
good; SIGTERM of the launcher; another number of workers. Where that does not let it come to its end, the run is healed:
resumed once, undisturbed, on another number of workers. Held for it: it ends with a code that a fault of it explains,
without a traceback, with no process left; healed, it ends with 0; its weights, moments, loss and every update are those
of an undisturbed run, to the bit; `andon verify`'s checkers find no claim falsified on its ledger. Two controls: no
fault at all passes, and a result that is tampered with does not. At least half of the faults must have happened.

Most of a schedule is the start of its processes, which takes both cores; some of it is waiting. So more jobs than cores
are faster, up to twice as many.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from andon_falsify.claims.ledgers import RecordedRun as Ledger
from andon_falsify.claims.ledgers import read_run, verify
from andon_falsify.verdict import Outcome as Decided
from falsify.nemesis import judging
from falsify.nemesis.bench import Bench
from falsify.nemesis.run import UPDATES, Ending, Launch
from falsify.nemesis.schedule import KILL, PREEMPT, STOP, Fault, Schedule, strike

_LIMIT_S = 300.0
"""A launch that takes longer hangs: what it does takes seconds."""
_KEPT = ("training.keep_checkpoints=3",)
"""As by default: checkpoints are pruned under faults too."""


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
        return f"{self.schedule.number}: {self.schedule.workers} workers, {done}; exits {codes}: {self.wrong or 'same'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first schedule, to repeat one")
    parser.add_argument("--jobs", type=int, default=1, help="schedules at a time, of up to five processes each")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds after which none is begun")
    options = parser.parse_args()
    print(f"seed {options.seed}: schedules {options.first} to {options.first + options.count - 1}", flush=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as base:
        stage = Stage(Bench.prepare(Path(base), options.seed))
        controls = stage.controls()
        print("\n".join(f"control: {name}: {'as it should be' if good else 'WRONG'}" for name, good in controls))
        began = time.monotonic()
        try:
            found = _played(stage, options, began + options.deadline)
        finally:
            stage.bench.close()
    account, good = told(found, time.monotonic() - began)
    print(f"{account} ({options.count} asked for, seed {options.seed})")
    return 0 if good and all(held for _, held in controls) else 1


def _played(stage: Stage, options: argparse.Namespace, deadline: float) -> list[Outcome]:
    def one(number: int) -> Outcome | None:
        if time.monotonic() > deadline:
            return None
        found = stage.play(Schedule.draw(options.seed, number, UPDATES))
        print(found, flush=True)
        return found

    with ThreadPoolExecutor(options.jobs) as pool:
        numbers = range(options.first, options.first + options.count)
        return [outcome for outcome in pool.map(one, numbers) if outcome is not None]


def told(found: Sequence[Outcome], seconds: float) -> tuple[str, bool]:
    same = sum(not outcome.wrong for outcome in found)
    faults = [happened for outcome in found for happened in outcome.struck]
    idle = sum(not any(outcome.struck) for outcome in found)
    words = (
        f"{same} of {len(found)} schedules end with the bits of the undisturbed run and leave no process; "
        f"{sum(faults)} of {len(faults)} faults happened, none in {idle} schedules; "
        f"{seconds:.0f} s, {len(found) / seconds * 60:.1f} schedules a minute"
    )
    return words, bool(found) and same == len(found) and 2 * sum(faults) >= len(faults)


@dataclass(frozen=True)
class Stage:
    bench: Bench

    def controls(self) -> list[tuple[str, bool]]:
        calm = self.play(Schedule(-1, "2:3", (), 2))
        forged = self.bench.base / "forged"
        shutil.copytree(self.bench.whole.folder, forged)
        summary = json.loads((forged / "summary.json").read_text())
        summary["weights_digest"] = f"{int(summary['weights_digest'], 16) ^ 1:016x}"
        (forged / "summary.json").write_text(json.dumps(summary))
        caught = bool(self.bench.whole.differs(forged))
        return [("no fault passes", calm.codes == (0,) and not calm.wrong), ("another digest is caught", caught)]

    def play(self, schedule: Schedule) -> Outcome:
        """Run it, disturb it, heal it, judge what is left; the folder stays where something is wrong."""
        run = self.bench.open(f"schedule-{schedule.number}", str(schedule.number))
        launch = Launch(schedule.workers, _KEPT)
        try:
            run.spawn(run.command(launch), launch)
            struck = tuple(strike(fault, run.folder, run.launcher) for fault in schedule.faults)
            endings = [run.end(_LIMIT_S, time.monotonic())]
            happened = [fault for fault, did in zip(schedule.faults, struck, strict=True) if did]
            wrong = unexplained(happened, endings[0])
            if not wrong and endings[0].codes != (0,):
                run.spawn(run.command(launch.but(workers=str(schedule.heal))), launch)
                endings.append(run.end(_LIMIT_S, time.monotonic()))
                wrong = "; ".join(judging.not_calm(endings[1], ""))
        finally:
            run.kill()
        wrong = wrong or self.bench.whole.differs(run.folder) or self._falsified(run.folder)
        if not wrong:
            shutil.rmtree(run.scratch)
        return Outcome(schedule, struck, tuple(code for each in endings for code in each.codes), wrong)

    @cached_property
    def _whole(self) -> Ledger:
        return read_run(self.bench.whole.folder)

    def _falsified(self, folder: Path) -> str:
        verdicts = verify([self._whole, read_run(folder)])
        broken = [verdict.claim for verdict in verdicts if verdict.outcome is Decided.FALSIFIED]
        return f"FALSIFIED: {', '.join(broken)}" if broken else ""


def unexplained(happened: Sequence[Fault], ending: Ending) -> str:
    """The fault in the end of a disturbed launch: no fault that happened leads to it. Empty where one does."""
    may = {0}
    for fault in happened:
        lost = -signal.SIGKILL if fault.victim == "launcher" else 71
        may |= {KILL: {lost}, STOP: {71, 72}, PREEMPT: {75}}.get(fault.kind, set())
    (code,) = ending.codes
    expected = replace(ending, codes=(0,)) if code in may and not ending.hung else ending
    found = "; ".join(judging.not_calm(expected, ""))
    return f"{found}: {ending.said[-300:]}" if found else ""


if __name__ == "__main__":
    raise SystemExit(main())
