"""Andon's training on the workers of Ray Train, which starts them, and again after one has died.

    python examples/engines/ray_train.py --workers 4 --run-dir /shared/runs/x -- config.yaml --set optimizer.lr=1e-3

What stands behind `--` is given to `andon train` as it is. The result is that of `andon train`, to the bit.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def rank(given: dict[str, list[str]]) -> None:
    """What each worker does: be the parent of one rank, as an agent of torchrun is, until it has ended.

    Ray has said in the environment which rank it is of how many, and keeps a store at MASTER_ADDR; the rank meets the
    others there. Whoever kills the worker kills the rank with it.
    """
    as_torchrun = {
        "TORCHELASTIC_RUN_ID": ray.train.get_context().get_experiment_name(),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there already: connect, do not open another
        "TORCHELASTIC_RESTART_COUNT": "0",  # each attempt of Ray has a store of its own
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "andon", "train", *given["arguments"]]
    ended = subprocess.run(command, env=os.environ | as_torchrun, check=False).returncode
    if ended != 0:  # 71: another rank was lost. Ray begins again, and --resume auto goes on
        raise RuntimeError(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} ended with {ended}")


def main() -> None:
    """Train, and begin again after a failure as often as was said."""
    asked = argparse.ArgumentParser()
    asked.add_argument("--workers", type=int, required=True)
    asked.add_argument("--run-dir", type=Path, required=True, help="on a disk that all machines share")
    asked.add_argument("--cpus-per-worker", type=float, default=1)
    asked.add_argument("--max-failures", type=int, default=3)
    asked.add_argument("arguments", nargs="*", help="of andon train, behind --")
    given = asked.parse_args()
    folder = given.run_dir.absolute()
    of_run = ["--workers", str(given.workers), "--run-dir", str(folder), "--resume", "auto"]
    TorchTrainer(
        rank,
        train_loop_config={"arguments": [*given.arguments, *of_run]},
        scaling_config=ScalingConfig(
            num_workers=given.workers,
            resources_per_worker={"CPU": given.cpus_per_worker},
        ),
        run_config=RunConfig(
            name=folder.name,
            storage_path=str(folder.parent / "ray"),  # what Ray itself writes down
            failure_config=FailureConfig(max_failures=given.max_failures),
        ),
    ).fit()


if __name__ == "__main__":
    main()
