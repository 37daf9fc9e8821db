"""Our step and others' in turns on the same devices: `python -m benchmarks.gpu_compare --gpus 4`.

Every trainer of `--jobs` runs in processes of its own. All compile side by side; then they take `--rounds` of `--steps`
updates one after another, in an order that rotates and reverses. Ratios are taken round by round, against the first of
`--jobs`. A job that fails, is not ready within `--ready-within` or exceeds `--turn-within` is reported and left out.
All models are on the device at once: on one GPU name few jobs. On a CPU: `--shape tiny --rounds 2 --steps 2`.
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
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_job import SHAPES, Conductor
from benchmarks.runs import last_object, table
from falsify.nemesis.processes import family

OURS, PEERS, TRL = "benchmarks.gpu_step --pairs 0", "benchmarks.gpu_peers", "benchmarks.gpu_peers --peer trl"
JOBS = {
    "andon": f"{OURS} --compile graphs",
    "andon, 8 micro-batches": f"{OURS} --compile graphs --micro-batches 8",
    "andon, inexact": f"{OURS} --compile graphs --inexact",
    "andon, eager": f"{OURS} --compile off",
    "andon, eager, inexact": f"{OURS} --compile off --inexact",
    "hf": PEERS,
    "hf, compiled": f"{PEERS} --compile",
    "hf, micro-batches of 4": f"{PEERS} --per-device 4",
    "accelerate, compiled": f"{PEERS} --peer accelerate --compile",
    "trl": f"{TRL} --per-device 4",
    "trl, flex": f"{TRL} --per-device 4 --attention flex_attention",
    "trl, compiled": f"{TRL} --per-device 4 --compile",
    "trl, flex, compiled": f"{TRL} --per-device 8 --attention flex_attention --compile",
}


@dataclass
class Job:
    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def stop(self) -> None:
        members = family(self.process.pid)
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(20.0)
        for member in members:
            with suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        self.process.wait()

    def comes(self, over: Callable[[], bool], patience: float) -> bool:
        """Whether `over` becomes true within `patience` seconds while the job lives; if not, the job is stopped."""
        until = time.monotonic() + patience
        while not over():
            if self.process.poll() is not None or time.monotonic() > until:
                self.stop()
                print(f"{self.name}: left out, {self.log.read_text()[-600:]}", flush=True)
                return over()
            time.sleep(0.01)
        return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, help="ranks, each on its own device")
    parser.add_argument("--jobs", default="andon;hf;hf, compiled", help=f"of: {'; '.join(JOBS)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="updates of a round")
    parser.add_argument("--shape", choices=SHAPES, default="reference" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--ready-within", type=float, default=360.0, help="seconds")
    parser.add_argument("--turn-within", type=float, default=120.0, help="seconds")
    parser.add_argument("--logs", type=Path, help="a folder that keeps what each job prints")
    options = parser.parse_args()
    names = [name.strip() for name in options.jobs.split(";")]
    if unknown := [name for name in names if name not in JOBS]:
        parser.error(f"unknown: {'; '.join(unknown)}")
    with tempfile.TemporaryDirectory() as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        found = figures(compare(names, options, logs), names[0])
    print(table(list(next(iter(found.values()))), [list(row.values()) for row in found.values()]) if found else "none")
    print(json.dumps(found))
    return 0 if len(found) == len(names) else 1


def compare(names: list[str], options: argparse.Namespace, logs: Path) -> dict[str, dict[str, Any]]:
    conductor = Conductor()
    jobs = [started(name, options, conductor, logs) for name in names]
    try:
        until, ready = time.monotonic() + options.ready_within, []
        for job in jobs:  # they get ready side by side
            if job.comes(lambda: conductor.rests(job.name, 0, options.gpus), until - time.monotonic()):  # noqa: B023
                ready.append(job)
        for turn in range(options.rounds):
            first = turn // 2 % max(1, len(ready))
            for job in (ready[first:] + ready[:first])[:: -1 if turn % 2 else 1]:
                conductor.go(job.name, turn)
                if not job.comes(lambda: conductor.rests(job.name, turn + 1, options.gpus), options.turn_within):  # noqa: B023
                    ready.remove(job)
        for job in ready:
            conductor.go(job.name, options.rounds)
            job.comes(lambda: job.process.poll() is not None, options.turn_within)  # noqa: B023
    finally:
        for job in jobs:
            job.stop()
    return {job.name: last_object(job.log.read_text()) for job in ready if job.process.returncode == 0}


def started(name: str, options: argparse.Namespace, conductor: Conductor, logs: Path) -> Job:
    launcher = [sys.executable]
    if options.gpus > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.gpus)]
    words = [*JOBS[name].split(), "--shape", options.shape]
    words += ["--steps", str(options.steps), "--rounds", str(options.rounds)]
    log = logs / f"{name.replace(' ', '-').replace(',', '')}.log"
    environment = {**os.environ, **conductor.environment_of(name)}
    with log.open("wb") as out:
        process = subprocess.Popen([*launcher, "-m", *words], env=environment, stdout=out, stderr=subprocess.STDOUT)
    return Job(name, process, log)


def figures(told: dict[str, dict[str, Any]], first: str) -> dict[str, dict[str, Any]]:
    reference = by_work(told.get(first, {"ms_by_round": []}))
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
            f"over {first}": round(statistics.median(ratios), 4) if ratios else "",
            "TFLOP/s a rank": each["tflops_per_rank"],
            "GiB at the peak": each["peak_gib"],
            "weights": each.get("weights", ""),
        }
        if "trained_tokens_per_step" in each:
            rows[name]["trained tokens a second"] = round(1e3 / statistics.median(by_work(each)))
    return rows


def by_work(told: dict[str, Any]) -> list[float]:
    """Milliseconds of each round for the same work: an update, or a trained token if updates differ."""
    return [ms / float(told.get("trained_tokens_per_step", 1.0)) for ms in told["ms_by_round"]]


if __name__ == "__main__":
    raise SystemExit(main())
