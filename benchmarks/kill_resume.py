"""Kill a run at a random step and resume it on another number of workers: `python -m benchmarks.kill_resume`.

Each round kills one rank, the launcher, or the launcher's whole process group by SIGKILL once the ledger shows a step
drawn from the seed, waits until every process of the run is gone, resumes on another number of workers, and compares
the final weights and loss with those of a run that was not killed. The launch must have ended by the kill: 71 where a
rank was killed, SIGKILL otherwise.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.runs import command, environment, run, steps_of, table
from falsify.nemesis.processes import family, ranks, wait_until_gone

TARGETS = {"rank": 71, "launcher": -signal.SIGKILL, "group": -signal.SIGKILL}
"""What is killed, and how the launcher then ends."""


def main() -> int:
    """Print a line for each round; 0 if every round ended with the bits of the uninterrupted run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=["training.checkpoint_every=7"])
    options = parser.parse_args()
    settings = [part for item in options.set for part in ("--set", item)]
    draw = random.Random(options.seed)
    rows = []
    with tempfile.TemporaryDirectory() as base:
        whole = run(Path(base) / "whole", *settings).summary
        wanted = (whole["weights_digest"], whole["final_loss"]["hex"])
        for number in range(options.rounds):
            target, step = list(TARGETS)[number % len(TARGETS)], draw.randrange(1, whole["steps"])
            world, again = draw.sample((1, 2, 3, 4), 2)
            folder = Path(base) / f"round-{number}"
            killed_at, left, code = _killed(folder, target, step, world, settings, draw)
            found = run(folder, "--workers", str(again), "--resume", "auto", *settings).summary
            same = (found["weights_digest"], found["final_loss"]["hex"]) == wanted
            bits = "OTHER" if not same else "same" if code == TARGETS[target] else f"same, but ended with {code}"
            rows.append((number, target, f"{step} ({killed_at})", world, again, f"{left:.2f}", bits))
            print(rows[-1], flush=True)
    print(table(("round", "killed", "step wanted (seen)", "workers", "resumed on", "s until all gone", "bits"), rows))
    good = sum(row[-1] == "same" for row in rows)
    print(f"{good} of {len(rows)} resumed runs end with the bits of the uninterrupted run (seed {options.seed})")
    return 0 if rows and good == len(rows) else 1


def _killed(
    folder: Path, target: str, step: int, world: int, settings: list[str], draw: random.Random
) -> tuple[int, float, int]:
    """Start a run, kill, wait for its end; the last step its ledger holds, the seconds until all was gone, its code."""
    launcher = subprocess.Popen(
        command(folder, "--workers", str(world), *settings),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while steps_of(folder) < step and launcher.poll() is None:
        time.sleep(0.01)
    members = family(launcher.pid)
    if target == "rank":
        os.kill(draw.choice(ranks(members)), signal.SIGKILL)
    elif target == "launcher":
        os.kill(launcher.pid, signal.SIGKILL)
    else:
        os.killpg(launcher.pid, signal.SIGKILL)
    start = time.perf_counter()
    launcher.wait()
    wait_until_gone(members)
    return steps_of(folder), time.perf_counter() - start, launcher.returncode


if __name__ == "__main__":
    raise SystemExit(main())
