"""Random schedules of faults, each healed and compared: `python -m benchmarks.schedules --count 200 --seed 1`.

Each schedule is drawn from (seed, number): a short run on 2 to 4 workers, fixed or elastic, and one to three faults:
SIGKILL of a rank, an agent or the launcher; SIGSTOP and, up to 2 s later, SIGCONT of any of them; SIGSTOP of a rank for
good; SIGTERM of the launcher; another number of workers. Then the run is healed: resumed, on another number of workers,
until it is finished. Held for it: its final weights and loss are those of an undisturbed run, to the bit; `andon
verify`'s checkers find no claim falsified on its ledger; no process of it is left; it ended with a code that is
documented, and without a traceback. Two controls: no fault at all passes, and a result that is tampered with does not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from andon_falsify.nemesis.bench import write_rows
from andon_falsify.nemesis.processes import session
from andon_falsify.nemesis.schedule import Schedule, strike
from benchmarks.runs import command, environment

_CODES = (0, 71, 72, 75, -signal.SIGKILL)
"""How a disturbed run may end: done, a rank lost or silent, preempted, or its launcher killed from here."""
_LIMIT_S = 300.0
"""A launch that takes longer hangs: what it does takes seconds."""
_GONE_S = 10.0


@dataclass(frozen=True)
class Outcome:
    """One schedule: which of its faults happened, the exit code of each launch, and what is wrong (nothing: "")."""

    schedule: Schedule
    struck: tuple[bool, ...]
    codes: tuple[int, ...]
    wrong: str


def main() -> int:
    """Print a line for each schedule; 0 if nothing is wrong with any, and both controls are as they should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first schedule, to repeat one")
    parser.add_argument("--jobs", type=int, default=1, help="schedules at a time, of up to five processes each")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds after which none is begun")
    options = parser.parse_args()
    print(f"seed {options.seed}: schedules {options.first} to {options.first + options.count - 1}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as base:
        bench = Bench.prepare(Path(base))
        controls = bench.controls()
        print("\n".join(f"control: {name}: {'as it should be' if good else 'WRONG'}" for name, good in controls))

        def one(number: int) -> Outcome | None:
            if time.monotonic() - began > options.deadline:
                return None
            found = bench.play(Schedule.draw(options.seed, number, bench.steps))
            print(_line(found), flush=True)
            return found

        with ThreadPoolExecutor(options.jobs) as pool:
            numbers = range(options.first, options.first + options.count)
            found = [outcome for outcome in pool.map(one, numbers) if outcome is not None]
    good = sum(not outcome.wrong for outcome in found)
    faults = [happened for outcome in found for happened in outcome.struck]
    print(
        f"{good} of {len(found)} schedules end with the bits of the undisturbed run and leave no process "
        f"({options.count} asked for, seed {options.seed}); {sum(faults)} of {len(faults)} faults happened, "
        f"{time.monotonic() - began:.0f} s"
    )
    return 0 if found and good == len(found) and all(held for _, held in controls) else 1


def _line(outcome: Outcome) -> str:
    faults = zip(outcome.schedule.faults, outcome.struck, strict=True)
    done = ", ".join(f"{fault}{'' if happened else ' (not reached)'}" for fault, happened in faults)
    codes = " ".join(map(str, outcome.codes))
    verdict = outcome.wrong or "same"
    return f"{outcome.schedule.number}: {outcome.schedule.workers} workers, {done}; exits {codes}: {verdict}"


@dataclass(frozen=True)
class Bench:
    """What all schedules share: the settings of their runs, and the run that nobody disturbed."""

    base: Path
    settings: tuple[str, ...]
    whole: Path
    steps: int

    @classmethod
    def prepare(cls, base: Path) -> Bench:
        """Write the rows, and run once undisturbed on two workers."""
        rows, held = base / "rows.jsonl", base / "held.jsonl"
        write_rows(rows, 96)
        write_rows(held, 12)
        values = "training.batch_size=8 training.epochs=3 training.checkpoint_every=4 run.timeout_s=5 run.grace_s=20"
        values += " model.hidden_size=16 model.intermediate_size=32"
        settings = ["--data", str(rows), "--eval-data", str(held)]
        settings += [part for value in values.split() for part in ("--set", value)]
        whole = base / "whole"
        done = subprocess.run(command(whole, *settings), env=environment(), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"the undisturbed run ended with {done.returncode}: {done.stderr[-2000:]}")
        return cls(base, tuple(settings), whole, json.loads((whole / "summary.json").read_text())["steps"])

    def controls(self) -> list[tuple[str, bool]]:
        """A schedule without a fault passes; a copy of the undisturbed run with another digest does not."""
        calm = self.play(Schedule(-1, "2:3", (), 2))
        forged = self.base / "forged"
        shutil.copytree(self.whole, forged)
        summary = json.loads((forged / "summary.json").read_text())
        summary["weights_digest"] = f"{int(summary['weights_digest'], 16) ^ 1:016x}"
        (forged / "summary.json").write_text(json.dumps(summary))
        return [("no fault passes", not calm.wrong), ("another digest is caught", bool(self._other_bits(forged)))]

    def play(self, schedule: Schedule) -> Outcome:
        """Run it, disturb it, heal it, judge what is left; the folder stays where something is wrong."""
        folder = self.base / f"schedule-{schedule.number}"
        struck: list[bool] = []
        codes: list[int] = []
        wrong = ""
        for workers in (schedule.workers, str(schedule.heal), "2"):
            launcher = self._start(folder, workers)
            if not codes:
                struck = [strike(fault, folder, launcher) for fault in schedule.faults]
            wrong = _end(launcher)
            codes.append(launcher.returncode)
            if wrong or codes[-1] == 0:
                break
        wrong = wrong or ("" if codes[-1] == 0 else f"not healed: exit {codes[-1]}") or self._other_bits(folder)
        if not wrong:
            shutil.rmtree(folder)
        return Outcome(schedule, tuple(struck), tuple(codes), wrong)

    def _start(self, folder: Path, workers: str) -> subprocess.Popen[str]:
        line = command(folder, "--workers", workers, "--resume", "auto", *self.settings)
        nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
        return subprocess.Popen(line, env=environment(), stdout=nothing, stderr=pipe, text=True, start_new_session=True)

    def _other_bits(self, folder: Path) -> str:
        """What differs from the undisturbed run; empty where nothing does."""
        wanted, seen = _result(self.whole), _result(folder)
        if wanted != seen:
            return f"OTHER: {seen} where {wanted} belongs"
        from andon_falsify.verdict import Outcome as Verdicts
        from andon_falsify.verification import read_run, verify

        verdicts = verify([read_run(self.whole), read_run(folder)])
        broken = [verdict.claim for verdict in verdicts if verdict.outcome is Verdicts.FALSIFIED]
        return f"FALSIFIED: {', '.join(broken)}" if broken else ""


def _end(launcher: subprocess.Popen[str]) -> str:
    """Wait for the end of the launch and of its session; what is wrong with it."""
    try:
        said = launcher.communicate(timeout=_LIMIT_S)[1]
    except subprocess.TimeoutExpired:
        _kill(session(launcher.pid))
        launcher.communicate()
        return f"HANG: not over after {_LIMIT_S:g} s"
    deadline = time.monotonic() + _GONE_S
    while left := session(launcher.pid):
        if time.monotonic() > deadline:
            _kill(left)
            return f"LEFT BEHIND: {len(left)} processes"
        time.sleep(0.02)
    if launcher.returncode not in _CODES or "Traceback" in said:
        return f"exit {launcher.returncode}: {said.strip()[-300:]}"
    return ""


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _result(folder: Path) -> tuple[str, str, int]:
    found = json.loads((folder / "summary.json").read_text())
    return found["weights_digest"], found["final_loss"]["hex"], found["steps"]


if __name__ == "__main__":
    raise SystemExit(main())
