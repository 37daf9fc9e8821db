"""Ranks as tasks of an engine: each finds its place, one that is killed is started again, the bits are the same.

Tests do not install Ray and Slurm. The script for Slurm is also tried without Slurm: `srun` and `scontrol` are then a
few lines that set the variables of tasks.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.repository.sources import ROOT
from tests.training.runs import Runs, outcome, records, write_jsonl

ENGINES = ROOT / "examples" / "engines"
PATIENCE_S = 280
EPOCHS = "training.epochs=10"
SRUN = """#!/bin/bash
# As srun starts the tasks of a job on one node; it ends with the highest code of them.
while [[ $1 == --* ]]; do shift; done
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & pids+=($!)
done
highest=0
for pid in "${pids[@]}"; do wait "$pid"; code=$?; ((code > highest)) && highest=$code; done
exit $highest
"""
SCONTROL = """#!/bin/bash
case $1 in show) echo localhost ;; requeue) echo "requeued $2" ;; esac
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Runs, Path]:
    folder = tmp_path_factory.mktemp("alone")
    runs = Runs(write_jsonl(folder / "train.jsonl"))
    assert runs.train(folder / "run", EPOCHS) == 0
    return runs, folder / "run"


def arguments(runs: Runs) -> list[str]:
    return [part for each in runs.overrides(EPOCHS) for part in ("--set", each)]


def parent_of_rank_one(run: Path) -> int | None:
    """The parent of the process that is rank 1 of the run; None where there is none."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            told = (process / "cmdline").read_bytes().split(b"\0"), (process / "environ").read_bytes().split(b"\0")
            above = int(re.findall(r"^PPid:\s*(\d+)$", (process / "status").read_text(), re.MULTILINE)[0])
        except OSError:
            continue
        if str(run).encode() in told[0] and b"andon" in told[0] and b"RANK=1" in told[1]:
            return above
    return None


def killed_in(run: Path, work: Callable[[], None]) -> None:
    """Do the work; once the run has a checkpoint, the parent of rank 1 is killed."""
    killed, ended = list[int](), threading.Event()

    def kill() -> None:
        while not killed and not ended.wait(0.05):
            found = parent_of_rank_one(run) if any((run / "checkpoints").glob("step-*")) else None
            if found is not None:
                os.kill(found, signal.SIGKILL)
                killed.append(found)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    try:
        work()
    finally:
        ended.set()
        killer.join()
    assert killed, "the run was over before its rank was killed"


def resumed(run: Path) -> bool:
    return bool(records(run, "resume"))


def as_slurm(tmp_path: Path, tasks: int, restarts: int = 0) -> dict[str, str]:
    """The variables of a job with so many tasks on this machine, and commands that stand for Slurm's."""
    commands = tmp_path / "bin"
    commands.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    return os.environ | {
        "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NTASKS": str(tasks),
        "SLURM_NTASKS_PER_NODE": str(tasks),
        "SLURM_RESTART_COUNT": str(restarts),
        "RUN_DIR": str(tmp_path / "run"),
    }


def submitted(environ: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ENGINES / "andon.sbatch"), *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


PYTHON = """#!/bin/bash
echo "$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE at $MASTER_ADDR, $TORCHELASTIC_RUN_ID: $*"
codes=($CODES); exit ${codes[$RANK]}
"""


@pytest.mark.parametrize(
    ("codes", "restarts", "queued"),
    [("0 0", 0, False), ("71 137", 0, True), ("75 75", 4, True), ("72 71", 5, False)]
    + [(f"0 {code}", 0, False) for code in (1, 2, 70)],
)
def test_each_task_is_a_rank_and_a_job_that_may_go_on_is_queued_again(
    tmp_path: Path, codes: str, restarts: int, queued: bool
) -> None:
    """Five times at most; starting again does not mend a crash, bad input or a broken contract."""
    environ = as_slurm(tmp_path, 2, restarts) | {"CODES": codes}
    (tmp_path / "bin" / "python").write_text(PYTHON)
    (tmp_path / "bin" / "python").chmod(0o755)
    done = submitted(environ, "--set", "optimizer.lr=1")
    said = sorted(line for line in done.stdout.splitlines() if " of " in line)
    arguments = f"-m andon train --set optimizer.lr=1 --workers 2 --run-dir {tmp_path / 'run'} --resume auto"
    place = f"at localhost, {os.getpid()}.{restarts}"
    assert said == [f"{rank} of 2, {rank} of 2 {place}: {arguments}" for rank in (0, 1)]
    assert done.returncode == max(map(int, codes.split()))
    assert (f"requeued {os.getpid()}" in done.stdout) == queued


def _slurm() -> bool:
    found = shutil.which("sinfo") and subprocess.run(["sinfo", "-h", "-t", "idle"], capture_output=True, check=False)
    return bool(found and found.returncode == 0 and found.stdout.strip())


# By default: test_each_task_is_a_rank_and_a_job_that_may_go_on_is_queued_again.
@pytest.mark.deep
@pytest.mark.skipif(not _slurm(), reason="needs Slurm with an idle node (sinfo): Debian's slurm-wlm does")
def test_tasks_of_slurm(tmp_path: Path, alone: tuple[Runs, Path]) -> None:
    runs, reference = alone
    given = os.environ | {
        "RUN_DIR": str(tmp_path / "run"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    place = ["--wait", "--nodes=1", "--ntasks-per-node=2", f"--output={tmp_path / 'said'}"]
    command = ["sbatch", *place, str(ENGINES / "andon.sbatch"), *arguments(runs)]
    ended = subprocess.run(command, env=given, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0, (tmp_path / "said").read_text()
    assert outcome(tmp_path / "run") == outcome(reference)


# By default: test_each_task_is_a_rank_and_a_job_that_may_go_on_is_queued_again.
@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'ray[train]'")
@pytest.mark.parametrize("workers", [2, 4])
def test_workers_of_ray(tmp_path: Path, alone: tuple[Runs, Path], workers: int) -> None:
    runs, reference = alone
    run = tmp_path / "run"

    def train() -> None:
        place = ["--workers", str(workers), "--cpus-per-worker", "0.25", "--run-dir", str(run)]
        command = [sys.executable, str(ENGINES / "ray_train.py"), *place, "--", *arguments(runs)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False)
        assert ended.returncode == 0, ended.stderr[-4000:]

    killed_in(run, train)
    assert resumed(run)
    assert outcome(run) == outcome(reference)
