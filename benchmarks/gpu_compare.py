"""Our step and others' in turns on the same devices: `python -m benchmarks.gpu_compare --gpus 4`.

Every trainer of `--jobs` runs in processes of its own, all of them compile side by side, and then they take `--rounds`
of `--steps` updates one after another, in an order that rotates and turns round; ratios are taken round by round,
against the first of `--jobs`. A job that fails, is not ready within `--ready-within` or takes longer than `--turn-
within` for a turn is left out, and said. Prints a table and JSON, and what each job printed to `--logs`. All jobs'
models are on the device at once: on one GPU name a few at a time. Small on a CPU with `--shape tiny --rounds 2 --steps
2`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_job import SHAPES
from benchmarks.runs import last_object, table
from benchmarks.turns import Conductor
from falsify.nemesis.processes import family

_GRACE_S = 20.0
OURS, PEERS = ("benchmarks.gpu_step", "--pairs", "0"), ("benchmarks.gpu_peers",)
JOBS: dict[str, tuple[str, ...]] = {
    "andon": (*OURS, "--compile", "graphs"),
    "andon, 8 micro-batches": (*OURS, "--compile", "graphs", "--micro-batches", "8"),
    "andon, inexact": (*OURS, "--compile", "graphs", "--inexact"),
    "andon, eager": (*OURS, "--compile", "off"),
    "andon, eager, inexact": (*OURS, "--compile", "off", "--inexact"),
    "hf": PEERS,
    "hf, compiled": (*PEERS, "--compile"),
    "hf, micro-batches of 4": (*PEERS, "--per-device", "4"),
    "accelerate, compiled": (*PEERS, "--peer", "accelerate", "--compile"),
    "trl": (*PEERS, "--peer", "trl", "--per-device", "4"),
    "trl, flex": (*PEERS, "--peer", "trl", "--per-device", "4", "--attention", "flex_attention"),
    "trl, compiled": (*PEERS, "--peer", "trl", "--per-device", "4", "--compile"),
    "trl, liger": (*PEERS, "--peer", "trl", "--per-device", "4", "--liger"),
    "trl, flex, compiled": (*PEERS, "--peer", "trl", "--per-device", "8", "--attention", "flex_attention", "--compile"),
}


@dataclass
class Job:
    """A trainer in processes of its own, and where it writes."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self.process.poll() is None

    def stop(self) -> None:
        """End it and all of its ranks, by force if they do not."""
        members = family(self.process.pid)
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_GRACE_S)
        for member in members:
            with suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        self.process.wait()


def main() -> int:
    """Compare; 0 if every job took all of its rounds."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, help="ranks, each on a device of its own")
    parser.add_argument("--jobs", default="andon;hf;hf, compiled", help=f"of: {'; '.join(JOBS)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="updates of a round")
    parser.add_argument("--shape", choices=SHAPES, default="reference" if cuda else "tiny")
    parser.add_argument("--ready-within", type=float, default=360.0, help="seconds")
    parser.add_argument("--turn-within", type=float, default=120.0, help="seconds")
    parser.add_argument("--logs", type=Path, help="a folder; kept")
    options = parser.parse_args()
    names = [name.strip() for name in options.jobs.split(";")]
    if unknown := [name for name in names if name not in JOBS]:
        parser.error(f"unknown: {'; '.join(unknown)}")
    with tempfile.TemporaryDirectory() as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        found = compare(names, options, logs)
    print(table(list(next(iter(found.values()))), [list(row.values()) for row in found.values()]) if found else "none")
    print(json.dumps(found))
    return 0 if len(found) == len(names) else 1


def compare(names: list[str], options: argparse.Namespace, logs: Path) -> dict[str, dict[str, Any]]:
    """The figures of each job that took all rounds, by name."""
    conductor = Conductor()
    jobs = [started(name, options, conductor, logs) for name in names]
    try:
        ready = until_ready(jobs, partial(conductor.rests, turn=0, ranks=options.gpus), options.ready_within)
        for turn in range(options.rounds):
            for job in order_of(ready, turn):
                conductor.go(job.name, turn)
                if not came(partial(conductor.rests, job.name, turn + 1, options.gpus), job, options.turn_within):
                    ready.remove(job)
                    print(f"{job.name}: lost in round {turn}, {job.log.read_text()[-600:]}", flush=True)
        for job in ready:
            conductor.go(job.name, options.rounds)
            came(lambda: not job.alive, job, options.turn_within)  # noqa: B023
    finally:
        for job in jobs:
            job.stop()
    return figures([job for job in ready if job.process.returncode == 0], jobs)


def order_of(jobs: list[Job], turn: int) -> list[Job]:
    """Each begins in turn, and every second round goes backwards, so that none always follows the same other."""
    first = turn // 2 % max(1, len(jobs))
    rotated = jobs[first:] + jobs[:first]
    return rotated[::-1] if turn % 2 else rotated


def came(over: Callable[[], bool], job: Job, patience: float) -> bool:
    """Whether it came to be `over` while `job` lived; the job is stopped if not within `patience` seconds."""
    began = time.monotonic()
    while not over():
        if not job.alive or time.monotonic() - began > patience:
            job.stop()
            return over()
        time.sleep(0.01)
    return True


def started(name: str, options: argparse.Namespace, conductor: Conductor, logs: Path) -> Job:
    """The job's processes, begun."""
    module, *words = JOBS[name]
    words += ["--shape", options.shape, "--steps", str(options.steps), "--rounds", str(options.rounds)]
    launcher = [sys.executable]
    if options.gpus > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.gpus)]
    log = logs / f"{name.replace(' ', '-').replace(',', '')}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*launcher, "-m", module, *words],
            env={**os.environ, **conductor.environment_of(name)},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    return Job(name, process, log)


def until_ready(jobs: list[Job], rests: Callable[[str], bool], patience: float) -> list[Job]:
    """Those of `jobs` that wait for their first turn; the others have ended, or are ended when patience is over."""
    began, ready = time.monotonic(), set[str]()
    while time.monotonic() - began < patience and any(job.alive and job.name not in ready for job in jobs):
        for job in jobs:
            if job.name not in ready and rests(job.name):
                ready.add(job.name)
                print(f"{job.name}: ready after {time.monotonic() - began:.0f} s", flush=True)
        time.sleep(0.1)
    for job in jobs:
        if job.name not in ready:
            job.stop()
            print(f"{job.name}: not ready, {job.log.read_text()[-600:]}", flush=True)
    return [job for job in jobs if job.name in ready]


def figures(ended: list[Job], jobs: list[Job]) -> dict[str, dict[str, Any]]:
    """A row for each job that ended well, with its time over that of the first of `jobs`, round by round."""
    told = {}
    for job in ended:
        try:
            told[job.name] = last_object(job.log.read_text())
        except ValueError as error:
            print(f"{job.name}: {error}", flush=True)
    reference = by_work(told.get(jobs[0].name, {"ms_by_round": []}))
    rows = {}
    for name, each in told.items():
        rounds = each["ms_by_round"]
        ratios = [one / other for one, other in zip(by_work(each), reference, strict=bool(reference))]
        rows[name] = {
            "trainer": name,
            "ranks": each["world"],
            "ms a step": round(statistics.median(rounds), 2),
            "from": min(rounds),
            "to": max(rounds),
            f"over {jobs[0].name}": round(statistics.median(ratios), 4) if ratios else "",
            **_tokens(each),
            "TFLOP/s a rank": each["tflops_per_rank"],
            "GiB at the peak": each["peak_gib"],
            "weights": each.get("weights", ""),
        }
    return rows


def by_work(told: dict[str, Any]) -> list[float]:
    """Milliseconds of each round for the same work: an update, or where updates differ so many trained tokens."""
    return [ms / float(told.get("trained_tokens_per_step", 1.0)) for ms in told["ms_by_round"]]


def _tokens(told: dict[str, Any]) -> dict[str, int]:
    if "trained_tokens_per_step" not in told:
        return {}
    return {"trained tokens a second": round(1e3 / statistics.median(by_work(told)))}


if __name__ == "__main__":
    raise SystemExit(main())
