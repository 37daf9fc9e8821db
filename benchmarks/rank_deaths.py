"""Kill or stop one rank of a run and wait for the end of all: `python -m benchmarks.rank_deaths`.

Each round draws a rank and a step from the seed, sends SIGKILL (or SIGSTOP, which no rank can answer) once the ledger
shows the step, and measures the seconds until every process of the run is gone. It also checks what the command said
and ended with: 71 for a rank that died, 72 for one that fell silent.
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
from dataclasses import dataclass
from pathlib import Path

from andon_falsify.subjects.placing import why_not
from benchmarks.runs import command, environment, steps_of, table
from falsify.nemesis.processes import family, ranks, wait_until_gone

_EXPECTED = {"SIGKILL": 71, "SIGSTOP": 72}


@dataclass(frozen=True)
class Round:
    """One fault: seconds to the end of the last process, the command's exit code and its last line."""

    seconds: float
    code: int
    said: str


def main() -> int:
    """Print a line for each round; 0 if all ended in time, with the code and the rank that belong to the fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--backend", choices=("gloo", "nccl", "mixed"), default="gloo")
    parser.add_argument("--signal", choices=sorted(_EXPECTED), default="SIGKILL")
    parser.add_argument("--timeout", type=float, default=5.0, help="run.timeout_s, in seconds")
    parser.add_argument("--limit", type=float, help="seconds; 2 for SIGKILL, timeout + 3 for SIGSTOP if not given")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if reason := why_not(options.backend, options.workers):
        parser.error(reason)  # the run would go on on CPUs
    limit = options.limit or (2.0 if options.signal == "SIGKILL" else options.timeout + 3)
    draw = random.Random(options.seed)
    rows, good = [], 0
    with tempfile.TemporaryDirectory() as base:
        for number in range(options.rounds):
            rank, step = draw.randrange(options.workers), draw.randrange(1, 40)
            words = ["--backend", options.backend, "--workers", str(options.workers)]
            words += ["--set", f"run.timeout_s={options.timeout}"]
            folder = Path(base) / str(number)
            found = _round(command(folder, *words), folder, rank, step, options.signal)
            fits = found.seconds < limit and found.code == _EXPECTED[options.signal] and f"rank {rank}" in found.said
            good += fits
            rows.append((number, rank, step, f"{found.seconds:.2f}", found.code, found.said[:90], "" if fits else "NO"))
            print(rows[-1], flush=True)
    print(table(("round", "rank", "step", "s to the end of all", "exit", "said", ""), rows))
    times = sorted(float(row[3]) for row in rows)
    print(f"{good} of {len(rows)} within {limit:g} s; median {statistics.median(times):.2f}, longest {times[-1]:.2f} s")
    return 0 if good == len(rows) else 1


def _round(words: list[str], folder: Path, rank: int, step: int, name: str) -> Round:
    launcher = subprocess.Popen(
        words,
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
    if launcher.poll() is None:  # else it ended before the fault, and what it said is shown
        os.kill(ranks(members)[rank], signal.Signals[name])
    _, said = launcher.communicate()
    wait_until_gone(members)
    return Round(time.perf_counter() - start, launcher.returncode, (said.strip().splitlines() or [""])[-1])


if __name__ == "__main__":
    raise SystemExit(main())
