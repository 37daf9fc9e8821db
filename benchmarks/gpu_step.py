"""The cost of a step on a GPU, and of its contracts: `torchrun --standalone --nproc-per-node N -m benchmarks.gpu_step`.

Without torchrun one process does it, on a CPU as well (`--shape tiny`). The reference job is a Qwen3-4B shape with
random weights: nothing is downloaded. Steps are launched as the trainer launches them, each before the last one is
read. The time of a step is what lies between the ends of two steps on the device; blocks of steps with contracts,
without, and again without are interleaved, and ratios are taken block by block. Rank 0 prints a table and one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from andon.backend.base import Backend
from andon.backend.devices import demand_determinism
from andon.backend.group import GroupBackend
from andon.backend.inprocess import InlineBackend
from andon.model.batches import shapes_of
from andon.step.audit import AuditSpec, default_every
from andon.step.optimizer import OptimizerSpec
from andon.step.plan import BatchPlan
from andon.step.replica import Replica
from andon.step.step import Pending, TrainingStep
from andon.training.build import StepSpec, build_replicas, build_step
from andon_contracts.digest import hex64
from andon_contracts.policy import suspended
from benchmarks.gpu_job import (
    SHAPES,
    Mark,
    Shape,
    Turns,
    between,
    mark,
    model_of,
    now,
    now_on_all,
    rest,
    task_of,
    trained_tokens,
)
from benchmarks.runs import table

BLOCK = 3
"""Steps of a block; the first is not counted, since within it the last block is read."""


def main() -> int:
    options = _options()
    world, kind = int(os.environ.get("WORLD_SIZE", "1")), "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device("cpu")
    demand_determinism([device])
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    name = "nccl" if kind == "cuda" else "gloo"
    if world > 1:
        dist.init_process_group(name)
    backend: Backend = GroupBackend(name, device) if world > 1 else InlineBackend([device])
    found = Measurement(options, backend, device).run()
    if backend.ranks[0] == 0:
        print(table(["what", "figure"], [[key, value] for key, value in found.items()]))
        print(json.dumps(found))
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="reference" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--layers", type=int, help="of the shape, for a smaller job of the same widths")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--compile", choices=("off", "kernels", "graphs"), default="off")
    parser.add_argument("--captured", action="store_true", help="eager passes as CUDA graphs, as run.cuda_graphs has")
    parser.add_argument("--inexact", action="store_true", help="each rank's rows at once, plain all-reduce")
    parser.add_argument("--adapter", choices=("lora", "none"), default="lora", help="none trains every weight")
    parser.add_argument("--audit", action="store_true", help="as often as by default: a hundredth of the work")
    parser.add_argument("--pairs", type=int, default=200, help="interleaved blocks with contracts and without")
    parser.add_argument("--steps", type=int, default=20, help="with contracts, timed as a whole, before the pairs")
    parser.add_argument("--rounds", type=int, default=1, help="of --steps; the median is taken")
    parser.add_argument("--warm-up", type=int, default=4)
    return parser.parse_args()


class Measurement:
    def __init__(self, options: argparse.Namespace, backend: Backend, device: torch.device) -> None:
        shape = SHAPES[options.shape]
        self.shape = Shape(**{**asdict(shape), "layers": options.layers or shape.layers})
        self.options, self.backend, self.device = options, backend, device
        task = task_of(self.shape)
        self.trained = trained_tokens(self.shape) / len(task) * self.shape.batch if self.shape.causal else 0.0
        count = options.warm_up + options.steps * options.rounds + 8 + 3 * BLOCK * (options.pairs + 1)
        rows, per_step = len(task), self.shape.batch
        self.plan = BatchPlan(tuple(range(rows)), per_step, options.micro_batches, 3, -(-count * per_step // rows))
        started = time.perf_counter()
        exact = not options.inexact
        parts = options.micro_batches if exact else backend.world_size
        update = StepSpec(
            OptimizerSpec(),
            seed=5,
            micro_batches=options.micro_batches,
            clip_norm=1.0,
            audit=AuditSpec(default_every(backend.world_size, options.micro_batches) if options.audit else 0),
            exact=exact,
            compile=options.compile,
            shapes=shapes_of(per_step, parts, [shape.length]),
            capture=options.captured,
        )
        replicas = build_replicas(model_of(self.shape, device, options.adapter), update, backend, task, 0)
        self.replica: Replica = replicas[0]
        self.built_s = time.perf_counter() - started
        self.step: TrainingStep = build_step(update, backend, replicas, task)
        self.taken = 0
        self._under_way: list[Pending] = []
        self.losses: list[float] = []
        self.tenths: list[float] = []

    def run(self) -> dict[str, Any]:
        self.step.attest_start({})
        base = self.replica.base_digest()
        first = time.perf_counter()
        self.take(self.options.warm_up)
        self.drain()
        warm_up_s = time.perf_counter() - first
        if self.device.type == "cuda":  # an operation that makes the host wait for the GPU is an error
            torch.cuda.set_sync_debug_mode("error")
        self.take(3)
        if self.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        self.drain()
        found = self.figures(self.in_turns()) | {"warm_up_s": round(warm_up_s, 1)}
        found |= self.compared() if self.options.pairs else {}
        self.step.attest_base(self.taken, base)
        return found

    def figures(self, rounds: list[float]) -> dict[str, Any]:
        whole = statistics.median(rounds)
        return {
            **vars(self.options),
            "layers": self.shape.layers,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU",
            "world": self.backend.world_size,
            "torch": torch.__version__,
            "ms_per_step": round(whole, 3),
            "ms_by_round": rounds,
            "ms_by_tenths_of_last_round": self.tenths,
            "tflops_per_rank": round(self.shape.products / whole / 1e9 / self.backend.world_size, 1),
            **({"trained_tokens_per_step": self.trained} if self.shape.causal else {}),
            "steps": self.taken,
            "weights": hex64(self.replica.weights_digest()),
            "loss": self.losses[-1],
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if self.device.type == "cuda" else 0.0,
            "build_s": round(self.built_s, 1),
        }

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

    def in_turns(self) -> list[float]:
        turns, rounds = Turns(), []
        for _ in range(self.options.rounds):
            turns.wait()
            rounds.append(round(self.timed_as_a_whole(), 3))
        turns.wait()
        return rounds

    def timed_as_a_whole(self) -> float:
        started = now_on_all(self.device)
        marks = self.take(self.options.steps)
        self.drain()
        whole = (now(self.device) - started) * 1e3 / float(self.options.steps)
        tenth = max(2, len(marks) // 10)
        parts = [marks[at : at + tenth] for at in range(0, len(marks) - tenth + 1, tenth)]
        self.tenths = [round(_mean_gap(part), 3) for part in parts]
        return whole

    def compared(self) -> dict[str, Any]:
        kinds = {"on": True, "off": False, "off again": False}
        marks: dict[str, list[list[Mark]]] = {name: [] for name in kinds}
        order = list(kinds)
        for pair in range(self.options.pairs + 1):
            for name in order[pair % 3 :] + order[: pair % 3]:
                marks[name].append(self.take(BLOCK, checked=kinds[name]))
        self.drain()
        times = {name: [_mean_gap(block) for block in blocks[1:]] for name, blocks in marks.items()}
        ratios = {
            "on/off": [on / off for on, off in zip(times["on"], times["off"], strict=True)],
            "off/off": [again / off for again, off in zip(times["off again"], times["off"], strict=True)],
        }
        return {
            "pairs": self.options.pairs,
            "on_over_off_median": round(statistics.median(ratios["on/off"]), 5),
            "off_over_off_median": round(statistics.median(ratios["off/off"]), 5),
            "on_ms_median": round(statistics.median(times["on"]), 3),
            "off_ms_median": round(statistics.median(times["off"] + times["off again"]), 3),
        }


def _mean_gap(marks: Sequence[Mark]) -> float:
    return between(marks[0], marks[-1]) * 1e3 / (len(marks) - 1)


if __name__ == "__main__":
    raise SystemExit(main())
