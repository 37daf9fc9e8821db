"""The cost of a campaign: the quick budget on our trainer, and one 2-rank case with its ranks up.

`python -m benchmarks.campaign [--backend gloo]`; the first as a process of its own, as a user runs it. Ends with 1
where a claim does not hold.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from andon_falsify.campaign.budget import BUDGETS
from andon_falsify.campaign.generator import Layout, draw
from andon_falsify.campaign.trainer_bench import AndonBench
from andon_falsify.campaign.trial import LAW
from andon_falsify.ranks.pool import RankPools
from andon_falsify.ranks.trainer import AndonTrainer
from andon_falsify.verdict import Outcome
from benchmarks.runs import table


def quick(backend: str) -> tuple[float, int, str]:
    """Seconds, exit code and last line of `andon falsify --backend BACKEND`."""
    began = time.perf_counter()
    words = [sys.executable, "-m", "andon", "falsify", "--backend", backend]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return time.perf_counter() - began, done.returncode, done.stdout.splitlines()[-1]


def cases(backend: str, seeds: int) -> tuple[list[float], list[float], bool]:
    """For each 2-rank case: seconds of its run alone, and of the trial with its comparison run and its verdicts."""
    runs, trials, holds = [], [], True
    with RankPools() as pools:
        trainer = AndonTrainer(pools)
        drawn = [
            trial
            for seed in range(seeds)
            for trial in draw(seed, BUDGETS["quick"], Layout((backend,), (2,), (1, 2)), [LAW])
        ]
        AndonBench(trainer).attempt(drawn[0])
        for trial in drawn:
            began = time.perf_counter()
            trainer.run(trial.case)
            runs.append(time.perf_counter() - began)
            began = time.perf_counter()
            found = AndonBench(trainer).attempt(trial)
            trials.append(time.perf_counter() - began)
            holds = holds and all(verdict.outcome is Outcome.HOLDS for verdict in found.values())
    return runs, trials, holds


def main() -> int:
    """Print both, and whether every claim held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    runs, trials, holds = cases(options.backend, options.seeds)
    rows = [
        (name, f"{statistics.median(seconds):.3f}", f"{max(seconds):.3f}", len(seconds))
        for name, seconds in (("run", runs), ("run, comparison run and verdicts", trials))
    ]
    print(table(("2 ranks, warm", "median s", "largest s", "cases"), rows))
    seconds, code, last = quick(options.backend)
    print(f"andon falsify --backend {options.backend}: {seconds:.1f} s, exit code {code}; {last}")
    return 0 if holds and code == 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
