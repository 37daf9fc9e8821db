"""The cost of `andon.watch` to a loop: `torchrun --standalone --nproc-per-node 2 -m benchmarks.watch_cost`.

Each process holds replicas of one loop (clipping, AdamW, dropout) with the same weights and masks: one is watched, two
are not. On the same rows each takes a block of steps, in an order that rotates. The second unwatched one is a control.
The watch is detached while an unwatched replica steps. A block lasts from a barrier until its slowest rank and device
are done. The program prints median ratios, each with an interval that contains the median of 95 % of such samples,
ratios of means, and the difference in milliseconds, for wall time and for processor time of the loop's thread, which
depends less on other load. It also prints whether all replicas end with the same weights.

On a CPU the loop is a small encoder under DDP over gloo. On GPUs it is a Qwen3 shape in bf16 (`--shape 0.6b`,
`0.6b-lora`, `4b-lora`) under DDP or FSDP2 (`--wrap`). There the control is the unwatched replica again, and a profile
shows the launches and the device time that the watch adds to a step. `--shape tiny` and `tiny-lora` run on a CPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import andon
from andon_contracts.watch import Watch
from andon_contracts.watch.intercept import listen, unlisten
from andon_contracts.watch.pace import FULL
from benchmarks.gpu_job import SHAPES, device_here, model_of, now_on_all, rest
from benchmarks.runs import table

ROLES = ("watched", "unwatched", "control")
QWEN = {
    "0.6b": ("0.6b", "none"),
    "0.6b-lora": ("0.6b", "lora"),
    "4b-lora": ("reference", "lora"),
    "tiny": ("tiny", "none"),
    "tiny-lora": ("tiny", "lora"),
}
"""A shape of `gpu_job` and its adapter."""
_CUDA = torch.cuda.is_available()
_WARM_UP, _STEPS = 2 if _CUDA else 6, 16
"""Rounds that are not counted, and steps of a block, of which the watch reads at least one in full."""
_TOKENS, _LENGTH, _CLASSES, _WIDTH = 512, 48, 4, 96


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_TOKENS, _WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(_LENGTH, _WIDTH))
        layer = nn.TransformerEncoderLayer(_WIDTH, 4, 2 * _WIDTH, 0.1, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(_WIDTH, _CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens) + self.place).mean(1))


class Loop:
    def __init__(self, shape: str, wrap: str, rows: int, device: torch.device) -> None:
        torch.manual_seed(1)
        self.device, self.rows, self.qwen = device, rows, QWEN.get(shape)
        self.length, self.vocabulary = _LENGTH, _TOKENS
        if self.qwen is not None:
            job = SHAPES[self.qwen[0]]
            self.length, self.vocabulary = job.length, job.vocabulary
            self.model: nn.Module = model_of(replace(job, batch=rows), device, self.qwen[1])
        else:
            self.model = Encoder()
        if wrap == "ddp":
            places = [device] if device.type == "cuda" else None
            self.model = DistributedDataParallel(self.model, device_ids=places, broadcast_buffers=self.qwen is None)
        elif wrap == "fsdp":
            from torch.distributed.fsdp import fully_shard

            for module in self.model.modules():
                if type(module).__name__ == "Qwen3DecoderLayer":
                    fully_shard(module)
            fully_shard(self.model)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-3 if self.qwen is None else 1e-5)

    def step(self, number: int) -> None:
        """One update, on rows and with masks that `number` and the rank decide."""
        torch.manual_seed(1000 * number + (dist.get_rank() if dist.is_initialized() else 0))
        tokens = torch.randint(1, self.vocabulary, (self.rows, self.length), device=self.device)
        with torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext():
            if self.qwen is None:
                loss = nn.functional.cross_entropy(self.model(tokens), tokens[:, 0] % _CLASSES)
            else:
                loss = self.model(input_ids=tokens, labels=tokens[:, 0] % 2).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Bench:
    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device, self.number = options, device, 0
        made = [Loop(options.shape, options.wrap, options.rows, device) for _ in ROLES[: 2 if _CUDA else 3]]
        self.loops = dict(zip(ROLES, [*made, made[1]], strict=False))
        watched = self.loops["watched"]
        self.watch: Watch = andon.watch(watched.model, watched.optimizer, budget=options.budget or None)

    def block(self, role: str) -> tuple[float, float]:
        if role != "watched":
            unlisten(*self.watch.listeners)
        try:
            start, used = now_on_all(self.device), time.thread_time()
            for step in range(_STEPS):
                self.loops[role].step(self.number + step)
            rest(self.device)
            return (time.perf_counter() - start) / _STEPS, (time.thread_time() - used) / _STEPS
        finally:
            if role != "watched":
                listen(*self.watch.listeners)

    def measure(self) -> dict[str, Any]:
        wall, busy = ({role: list[float]() for role in ROLES} for _ in range(2))
        for number in range(FULL if _CUDA else 0):  # on a CPU all replicas take the same steps
            self.loops["watched"].step(number)
        orders = list(itertools.permutations(ROLES))
        for turn in range(_WARM_UP + self.options.pairs):
            self.number += _STEPS
            for role in orders[turn % len(orders)]:
                seconds, used = self.block(role)
                wall[role].append(seconds)
                busy[role].append(used)
        weights = {role: [p.detach() for p in loop.trained] for role, loop in self.loops.items()}
        found = compared({role: self._slowest(each) for role, each in wall.items()}, "")
        found |= compared({role: self._slowest(each) for role, each in busy.items()}, "processor_")
        found["trained_tensors"] = len(weights["watched"])
        if _CUDA:
            return found | {"launches_and_ms_added": self._added()}
        return found | {"same_weights_as_unwatched": all(map(torch.equal, weights["watched"], weights["unwatched"]))}

    def _slowest(self, seconds: list[float]) -> list[float]:
        found = torch.tensor(seconds[_WARM_UP:], dtype=torch.float64, device=self.device)
        if dist.is_initialized():
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found.tolist()

    def _added(self) -> list[float]:
        from torch._C._autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        counts = {}
        for role in ROLES[:2]:
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
                self.block(role)
            # The range that a trace puts around an optimizer's step is not a kernel.
            kernels = [e for e in trace.events() or () if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
            counts[role] = (len(kernels), sum(e.device_time_total for e in kernels) / 1e3)
        return [round((a - b) / _STEPS, 3) for a, b in zip(counts["watched"], counts["unwatched"], strict=True)]


def compared(seconds: dict[str, list[float]], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {f"{prefix}{role}_ms": round(1e3 * statistics.median(seconds[role]), 3) for role in ROLES}
    for role in ("watched", "control"):
        ratios = [a / b for a, b in zip(seconds[role], seconds["unwatched"], strict=True)]
        low, high = median_interval(ratios)
        found[f"{prefix}{role}_over_unwatched"] = f"{statistics.median(ratios):.4f} in [{low:.4f}, {high:.4f}]"
    found[f"{prefix}mean_ratio"] = round(sum(seconds["watched"]) / sum(seconds["unwatched"]), 4)
    extra = [a - b for a, b in zip(seconds["watched"], seconds["unwatched"], strict=True)]
    return found | {f"{prefix}extra_ms": round(1e3 * statistics.median(extra), 3)}


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The order statistics that enclose the population's median in 95 % of such samples."""
    ordered, count = sorted(values), len(values)
    half = 1.96 * math.sqrt(count) / 2
    low, high = math.floor((count - 1) / 2 - half), math.ceil((count - 1) / 2 + half)
    return ordered[max(low, 0)], ordered[min(high, count - 1)]


def main() -> int:
    ranks = "RANK" in os.environ
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("encoder", *QWEN), default="0.6b" if _CUDA else "encoder")
    parser.add_argument("--wrap", choices=("ddp", "fsdp", "none"), default="ddp" if ranks else "none")
    parser.add_argument("--pairs", type=int, default=12 if _CUDA else 20, help="rounds")
    parser.add_argument("--budget", type=float, default=0.01, help="`budget=` of the watch; 0: every update in full")
    parser.add_argument("--rows", type=int, default=16, help="rows of a rank's batch")
    options = parser.parse_args()
    device = device_here()
    if ranks:
        dist.init_process_group("nccl" if _CUDA else "gloo", device_id=device if _CUDA else None)
    bench = Bench(options, device)
    with bench.watch:
        found = bench.measure()
    if not ranks or dist.get_rank() == 0:
        print(table(["what", "figure"], [[name, value] for name, value in found.items()]))
        print(json.dumps({**vars(options), **found}))
    if ranks:
        dist.barrier()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
