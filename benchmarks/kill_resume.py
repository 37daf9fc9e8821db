"""Kill a run at a random step, and resume it on another number of workers: `python -m benchmarks.kill_resume`.

Each round kills a rank, the launcher, or its whole process group by SIGKILL once the ledger shows a step drawn from the
seed. It waits until every process of the run is gone, resumes on another number of workers, and compares the final
weights and loss with those of a run that was not killed. The launcher must end with 71 if a rank was killed, else by
SIGKILL.

`--deaths` only ends a rank and measures the seconds until every process is gone: by SIGKILL (71), or by `--signal
SIGSTOP` (72), after which the rank cannot answer for `run.timeout_s` (5 here). The command must name the rank.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

from andon_falsify.subjects.placing import why_not
from benchmarks.runs import command, environment, run, steps_of, table
from falsify.nemesis.processes import family, ranks

TARGETS = {"rank": 71, "launcher": -signal.SIGKILL, "group": -signal.SIGKILL}
"""What is killed, and how the launcher then ends."""
SIGNALS = {"SIGKILL": 71, "SIGSTOP": 72}
_TIMEOUT_S = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=["training.checkpoint_every=7"])
    parser.add_argument("--deaths", action="store_true", help="end one rank and measure; resume nothing")
    parser.add_argument("--workers", type=int, default=4, help="with --deaths")
    parser.add_argument("--backend", choices=("gloo", "nccl", "mixed"), default="gloo", help="with --deaths")
    parser.add_argument("--signal", choices=SIGNALS, default="SIGKILL", help="with --deaths")
    parser.add_argument("--limit", type=float, help="seconds; default: 2 for SIGKILL, 8 for SIGSTOP")
    options = parser.parse_args()
    if reason := why_not(options.backend, options.workers):
        parser.error(reason)  # the run would fall back to CPUs
    with tempfile.TemporaryDirectory() as base:
        return (deaths if options.deaths else resumed)(options, Path(base))


def resumed(options: argparse.Namespace, base: Path) -> int:
    settings = [part for item in options.set for part in ("--set", item)]
    draw, rows = random.Random(options.seed), []
    whole = run(base / "whole", *settings).summary
    wanted = (whole["weights_digest"], whole["final_loss"]["hex"])
    for number in range(options.rounds):
        target, step = list(TARGETS)[number % len(TARGETS)], draw.randrange(1, whole["steps"])
        world, again = draw.sample((1, 2, 3, 4), 2)
        folder, rank = base / f"round-{number}", draw.randrange(world)
        seconds, code, _ = killed(folder, ["--workers", str(world), *settings], step, target, rank, signal.SIGKILL)
        at = steps_of(folder)
        found = run(folder, "--workers", str(again), "--resume", "auto", *settings).summary
        same = (found["weights_digest"], found["final_loss"]["hex"]) == wanted
        bits = "OTHER" if not same else "same" if code == TARGETS[target] else f"same, but ended with {code}"
        rows.append((number, target, f"{step} ({at})", world, again, f"{seconds:.2f}", bits))
        print(rows[-1], flush=True)
    print(table(("round", "killed", "step wanted (seen)", "workers", "resumed on", "s until all gone", "bits"), rows))
    good = sum(row[-1] == "same" for row in rows)
    print(f"{good} of {len(rows)} resumed runs end with the bits of the uninterrupted run (seed {options.seed})")
    return 0 if rows and good == len(rows) else 1


def deaths(options: argparse.Namespace, base: Path) -> int:
    limit = options.limit or (2.0 if options.signal == "SIGKILL" else _TIMEOUT_S + 3)
    words = ["--backend", options.backend, "--workers", str(options.workers)]
    words += ["--set", f"run.timeout_s={_TIMEOUT_S}"]
    draw, rows = random.Random(options.seed), []
    for number in range(options.rounds):
        rank, step = draw.randrange(options.workers), draw.randrange(1, 40)
        sent = signal.Signals[options.signal]
        seconds, code, said = killed(base / str(number), words, step, "rank", rank, sent)
        good = seconds < limit and code == SIGNALS[options.signal] and f"rank {rank}" in said
        rows.append((number, rank, step, f"{seconds:.2f}", code, said[:90], "" if good else "NO"))
        print(rows[-1], flush=True)
    print(table(("round", "rank", "step", "s to the end of all", "exit", "said", ""), rows))
    times, right = sorted(float(row[3]) for row in rows), sum(row[-1] == "" for row in rows)
    print(
        f"{right} of {len(rows)} within {limit:g} s; median {statistics.median(times):.2f}, longest {times[-1]:.2f} s"
    )
    return 0 if right == len(rows) else 1


def killed(
    folder: Path, words: list[str], step: int, target: str, rank: int, sent: signal.Signals
) -> tuple[float, int, str]:
    launcher = subprocess.Popen(
        command(folder, *words),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while steps_of(folder) < step and launcher.poll() is None:
        time.sleep(0.005)
    members = family(launcher.pid)
    start = time.perf_counter()
    if launcher.poll() is None:  # else it ended before, and its last line says why
        if target == "group":
            os.killpg(launcher.pid, sent)
        else:
            os.kill(ranks(launcher.pid)[rank].pid if target == "rank" else launcher.pid, sent)
    _, said = launcher.communicate()
    if left := psutil.wait_procs(members, timeout=60.0)[1]:
        raise RuntimeError(f"processes outlive the run: {[process.pid for process in left]}")
    return time.perf_counter() - start, launcher.returncode, (said.strip().splitlines() or [""])[-1]


if __name__ == "__main__":
    raise SystemExit(main())
