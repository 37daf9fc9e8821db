"""The cost of the contracts: `torchrun --standalone --nproc-per-node 2 -m benchmarks.contract_cost`.

In one job, the embedded run's steps are taken in interleaved pairs on the same rows: contracts on and off, and as a
control off and off. Printed are the median of the ratios pair by pair, and the number of evaluations a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch.distributed as dist

from andon.config.load import load_config
from andon.run.folder import RunFolder
from andon.step.step import TrainingStep
from andon.training.session import assembled
from andon_contracts.policy import evaluations, reset_evaluations, suspended


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    config = load_config(None, options.set, {"run.workers": 2})
    with tempfile.TemporaryDirectory() as folder, assembled(config, RunFolder(Path(folder) / "run")) as session:
        ratios = _measure(session.run.step, session.material.plan, options.pairs)
        if session.run.writes:
            print(json.dumps(ratios, indent=2))
        dist.barrier()
    return 0


def _measure(step: TrainingStep, plan: object, pairs: int) -> dict[str, object]:
    kinds = {"on/off": (False, True), "off/off": (True, True)}
    found: dict[str, list[float]] = {name: [] for name in kinds}
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    count = 0
    reset_evaluations()
    for pair in range(pairs):
        batch = plan.batch(pair % (plan.total_steps - 1) + 1)  # type: ignore[attr-defined]
        for name, (first_off, second_off) in kinds.items():
            taken = {}
            order = (0, 1) if pair % 2 == 0 else (1, 0)
            for place in order:
                off = (first_off, second_off)[place]
                count += 1
                dist.barrier()
                start = time.perf_counter()
                with suspended() if off else nullcontext():
                    step(batch, 1e-4, count)
                taken[place] = time.perf_counter() - start
                seconds["off" if off else "on"].append(taken[place])
            if pair >= 5:
                found[name].append(taken[0] / taken[1])
    on_steps = pairs
    return {
        "pairs": len(found["on/off"]),
        "on_over_off_median": round(statistics.median(found["on/off"]), 4),
        "off_over_off_median": round(statistics.median(found["off/off"]), 4),
        "on_ms_median": round(statistics.median(seconds["on"]) * 1e3, 2),
        "off_ms_median": round(statistics.median(seconds["off"]) * 1e3, 2),
        "evaluations_per_step": round(sum(evaluations().values()) / on_steps, 2),
    }


if __name__ == "__main__":
    raise SystemExit(main())
