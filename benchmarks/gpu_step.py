"""The cost of a step on GPUs, and of its contracts: `torchrun --standalone --nproc-per-node N -m benchmarks.gpu_step`.

Without torchrun it runs in one process, also on a CPU (`--shape tiny`). The reference job is a Qwen3-4B shape with
random weights; nothing is downloaded. Steps are launched as the trainer launches them: each before the previous one is
read. Blocks of steps with contracts, without, and again without are interleaved, and ratios are taken block by block.
Rank 0 prints a table and one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from andon.backend.base import Backend, GroupBackend, InlineBackend
from andon.backend.devices import demand_determinism
from andon.config.schema import Config, Training
from andon.model.masks import shapes_of
from andon.step.plan import BatchPlan
from andon.step.step import Pending, TrainingStep
from andon.training.build import build_replicas
from andon_contracts.digest import hex64
from andon_contracts.policy import suspended
from benchmarks.gpu_job import (
    SHAPES,
    Mark,
    Turns,
    between,
    device_here,
    mark,
    measured,
    model_of,
    now,
    now_on_all,
    rest,
    task_of,
)
from benchmarks.runs import table

BLOCK = 3
"""Steps of a block. The first is not counted: the last step of the previous block is read within it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="reference" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--compile", choices=("off", "kernels", "graphs"), default="off")
    parser.add_argument("--captured", action="store_true", help="eager passes as CUDA graphs, like run.cuda_graphs")
    parser.add_argument("--adapter", choices=("lora", "none"), default="lora", help="none trains all weights")
    parser.add_argument("--pairs", type=int, default=200, help="interleaved blocks with contracts and without")
    parser.add_argument("--steps", type=int, default=20, help="steps with contracts, timed before the pairs")
    parser.add_argument("--rounds", type=int, default=1, help="repetitions of --steps; the median counts")
    parser.add_argument("--warm-up", type=int, default=4)
    options = parser.parse_args()
    device = device_here()
    demand_determinism([device])
    backend: Backend = InlineBackend([device])
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        name = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(name)
        backend = GroupBackend(name, device)
    found = Measurement(options, backend, device).run()
    if backend.ranks[0] == 0:
        print(table(["what", "figure"], [[key, value] for key, value in found.items()]))
        print(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return 0


class Measurement:
    def __init__(self, options: argparse.Namespace, backend: Backend, device: torch.device) -> None:
        self.options, self.device, self.shape = options, device, SHAPES[options.shape]
        self.task = task_of(self.shape)
        count = options.warm_up + options.steps * options.rounds + 8 + 3 * BLOCK * (options.pairs + 1)
        rows, per_step = len(self.task), self.shape.batch
        self.plan = BatchPlan(tuple(range(rows)), per_step, options.micro_batches, 3, -(-count * per_step // rows))
        started = time.perf_counter()
        config = Config(seed=5, training=Training(compile=options.compile))
        replicas = build_replicas(
            model_of(self.shape, device, options.adapter),
            config,
            backend,
            self.task,
            0,
            shapes=shapes_of(per_step, options.micro_batches, [self.shape.length]),
            capture=options.captured,
        )
        self.replica = replicas[0]
        self.built_s = time.perf_counter() - started
        self.step = TrainingStep(backend, replicas, self.task, options.micro_batches, 1.0)
        self.taken, self.losses = 0, [0.0]
        self._under_way: list[Pending] = []

    def run(self) -> dict[str, Any]:
        self.step.attest_start({})
        base = self.replica.base_digest()
        first = time.perf_counter()
        self.take(self.options.warm_up)
        self.drain()
        found = {"build_s": round(self.built_s, 1), "warm_up_s": round(time.perf_counter() - first, 1)}
        if self.device.type == "cuda":  # an operation that makes the host wait for the GPU is an error
            torch.cuda.set_sync_debug_mode("error")
        self.take(3)
        if self.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        self.drain()
        rounds, turns = [], Turns()
        for _ in range(self.options.rounds):
            turns.wait()
            rounds.append(self.timed_as_a_whole())
        turns.wait()
        found |= vars(self.options) | measured(self.shape, self.device, rounds)
        found |= {"steps": self.taken, "loss": self.losses[-1]}
        found |= {"weights": hex64(self.replica.weights_digest())}
        found |= self.compared() if self.options.pairs else {}
        self.step.attest_base(self.taken, base)
        return found

    def take(self, count: int, *, checked: bool = True) -> list[Mark]:
        marks = []
        for _ in range(count):
            self.taken += 1
            with nullcontext() if checked else suspended():
                self._under_way.append(self.step.launch(self.plan.batch(self.taken), 1e-4, self.taken))
            if len(self._under_way) > 1 or not self.step.late:
                self.losses.append(self._under_way.pop(0).result().loss)
            marks.append(mark(self.device))
        return marks

    def drain(self) -> None:
        while self._under_way:
            self.losses.append(self._under_way.pop(0).result().loss)
        rest(self.device)

    def timed_as_a_whole(self) -> float:
        """Milliseconds per step of a round."""
        started = now_on_all(self.device)
        self.take(self.options.steps)
        self.drain()
        return round((now(self.device) - started) * 1e3 / self.options.steps, 3)

    def compared(self) -> dict[str, Any]:
        kinds = {"on": True, "off": False, "off again": False}
        times: dict[str, list[list[Mark]]] = {name: [] for name in kinds}
        order = list(kinds)
        for pair in range(self.options.pairs + 1):
            for name in order[pair % 3 :] + order[: pair % 3]:
                times[name].append(self.take(BLOCK, checked=kinds[name]))
        self.drain()
        on, off, again = ([_mean_gap(block) for block in blocks[1:]] for blocks in times.values())
        return {
            "on_over_off_median": round(statistics.median(a / b for a, b in zip(on, off, strict=True)), 5),
            "off_over_off_median": round(statistics.median(a / b for a, b in zip(again, off, strict=True)), 5),
            "on_ms_median": round(statistics.median(on), 3),
            "off_ms_median": round(statistics.median(off + again), 3),
        }


def _mean_gap(marks: Sequence[Mark]) -> float:
    return between(marks[0], marks[-1]) * 1e3 / (len(marks) - 1)


if __name__ == "__main__":
    raise SystemExit(main())
