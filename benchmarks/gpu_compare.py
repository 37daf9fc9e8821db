"""Andon's step and other trainers' in turns on the same devices: `python -m benchmarks.gpu_compare --gpus 4`.

Each trainer of `--jobs` runs in its own processes. All compile side by side. Then they take `--rounds` of `--steps`
updates one after another, in an order that rotates and reverses. Ratios are taken round by round, against the first of
`--jobs`. A job that fails, is not ready within `--ready-within` or takes too long for a turn is reported and left out.
All models share the device: on one GPU name few jobs. On a CPU: `--shape tiny --rounds 2 --steps 2`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from psutil import NoSuchProcess
from torch._C._distributed_c10d import TCPStore

from benchmarks.gpu_job import JOB, PATIENCE, PORT, SHAPES
from benchmarks.runs import last_object, table
from falsify.nemesis.processes import family

OURS, PEERS = "benchmarks.gpu_step --pairs 0", "benchmarks.gpu_peers"
JOBS = {
    "andon": f"{OURS} --compile graphs",
    "andon, 8 micro-batches": f"{OURS} --compile graphs --micro-batches 8",
    "andon, eager": f"{OURS} --compile off",
    "hf": PEERS,
    "hf, compiled": f"{PEERS} --compile",
    "hf, micro-batches of 4": f"{PEERS} --per-device 4",
}
_TURN_S = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, help="ranks of each job, one device per rank")
    parser.add_argument("--jobs", default="andon;hf;hf, compiled", help=f"of: {'; '.join(JOBS)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="updates of a round")
    parser.add_argument("--shape", choices=SHAPES, default="reference" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--ready-within", type=float, default=360.0, help="seconds")
    options = parser.parse_args()
    names = [name.strip() for name in options.jobs.split(";")]
    if unknown := [name for name in names if name not in JOBS]:
        parser.error(f"unknown: {'; '.join(unknown)}")
    with tempfile.TemporaryDirectory() as folder:
        found = figures(compare(names, options, Path(folder)), names[0])
    print(table(list(next(iter(found.values()))), [list(row.values()) for row in found.values()]) if found else "none")
    print(json.dumps(found))
    return 0 if len(found) == len(names) else 1


class Job:
    def __init__(self, name: str, options: argparse.Namespace, store: TCPStore, folder: Path) -> None:
        self.name, self._ranks, self._store = name, options.gpus, store
        launcher = [sys.executable, "-m"]
        if options.gpus > 1:
            launcher += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(options.gpus), "-m"]
        words = [*JOBS[name].split(), "--shape", options.shape]
        words += ["--steps", str(options.steps), "--rounds", str(options.rounds)]
        self.log = folder / name
        environment = {**os.environ, PORT: str(store.port), JOB: name}
        with self.log.open("wb") as out:
            self.process = subprocess.Popen([*launcher, *words], env=environment, stdout=out, stderr=subprocess.STDOUT)

    def rests(self, turn: int, patience: float) -> bool:
        """Whether all ranks wait for this turn within `patience` seconds."""
        return self._comes(lambda: self._store.add(f"{self.name}/{turn}/resting", 0) == self._ranks, patience)

    def goes(self, turn: int) -> None:
        self._store.set(f"{self.name}/{turn}/goes", "")

    def ends(self) -> bool:
        return self._comes(lambda: self.process.poll() is not None, _TURN_S) and self.process.returncode == 0

    def _comes(self, over: Callable[[], bool], patience: float) -> bool:
        until = time.monotonic() + patience
        while not over():
            if self.process.poll() is not None or time.monotonic() > until:
                self.stop()
                print(f"{self.name}: left out, {self.log.read_text()[-600:]}", flush=True)
                return False
            time.sleep(0.01)
        return True

    def stop(self) -> None:
        members = family(self.process.pid)
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(20.0)
        for member in members:
            with suppress(NoSuchProcess):
                member.kill()
        self.process.wait()


def compare(names: list[str], options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """What each job printed, without those that were left out."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    jobs = [Job(name, options, store, folder) for name in names]
    try:
        until = time.monotonic() + options.ready_within
        ready = [job for job in jobs if job.rests(0, until - time.monotonic())]
        for turn in range(options.rounds):
            first = turn // 2 % max(1, len(ready))
            for job in (ready[first:] + ready[:first])[:: -1 if turn % 2 else 1]:
                job.goes(turn)
                if not job.rests(turn + 1, _TURN_S):
                    ready.remove(job)
        for job in ready:
            job.goes(options.rounds)
        return {job.name: last_object(job.log.read_text()) for job in ready if job.ends()}
    finally:
        for job in jobs:
            job.stop()


def figures(printed: dict[str, dict[str, Any]], first: str) -> dict[str, dict[str, Any]]:
    reference = printed.get(first, {"ms_by_round": []})["ms_by_round"]
    rows = {}
    for name, each in printed.items():
        rounds = each["ms_by_round"]
        ratios = [one / other for one, other in zip(rounds, reference, strict=bool(reference))]
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
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
