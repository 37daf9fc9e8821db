"""The cost of `andon.watch` to a loop: `torchrun --standalone --nproc-per-node 2 -m benchmarks.watch_cost`.

Each process holds two replicas of one loop (clipping, AdamW, dropout) with the same weights and masks. One is watched.
On the same rows each takes a block of steps, in an order that alternates: a round. The watch is detached while the
other replica steps. A block lasts from a barrier until its slowest rank and device are done. The program prints each
round, then the median ratio with an interval that contains the median of 95 % of such samples, the ratio of means, and
the difference in milliseconds, of wall time and of processor time of the loop's thread, which other load affects less.

On a CPU the loop is a small encoder under DDP over gloo, and the program prints whether both replicas end with the same
weights. On GPUs it is a Qwen3 shape in bf16 (`--shape 0.6b`, `0.6b-lora`, `4b-lora`) under DDP or FSDP2 (`--wrap`), and
`--profile` shows the launches and the device time that the watch adds. `--shape tiny` and `tiny-lora` run on a CPU.
"""

from __future__ import annotations

import argparse
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
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import andon
from andon_contracts.watch import Watch
from andon_contracts.watch.intercept import listen, unlisten
from andon_contracts.watch.pace import FULL
from benchmarks.gpu_job import SHAPES, device_here, model_of, now_on_all, rest
from benchmarks.runs import table

_CUDA = torch.cuda.is_available()
ROLES = ("watched", "unwatched")
QWEN = {
    "0.6b": ("0.6b", "none"),
    "0.6b-lora": ("0.6b", "lora"),
    "4b-lora": ("reference", "lora"),
    "tiny": ("tiny", "none"),
    "tiny-lora": ("tiny", "lora"),
}
"""A shape of `gpu_job` and its adapter."""
_WARM_UP, _STEPS = 1 if _CUDA else 6, 16
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
            self.model = DistributedDataParallel(self.model, [device] if _CUDA else None, broadcast_buffers=False)
        elif wrap == "fsdp":
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
        self.began = time.perf_counter()
        self.loops = {role: Loop(options.shape, options.wrap, options.rows, device) for role in ROLES}
        watched = self.loops["watched"]
        self.watch: Watch = andon.watch(watched.model, watched.optimizer, budget=options.budget or None)

    def block(self, role: str) -> tuple[float, float]:
        unlisten(*self.watch.listeners)
        if role == "watched":
            listen(*self.watch.listeners)
        start, used = now_on_all(self.device), time.thread_time()
        for step in range(_STEPS):
            self.loops[role].step(self.number + step)
        rest(self.device)
        return (time.perf_counter() - start) / _STEPS, (time.thread_time() - used) / _STEPS

    def measure(self) -> dict[str, Any]:
        wall, busy = ({role: list[float]() for role in ROLES} for _ in range(2))
        for number in range(FULL if _CUDA else 0):  # on a CPU both replicas take the same steps
            self.loops["watched"].step(number)
        for turn in range(_WARM_UP + self.options.pairs):
            self.number += _STEPS
            for role in ROLES[:: 1 - 2 * (turn % 2)]:
                for times, seconds in zip((wall, busy), self.block(role), strict=True):
                    times[role].append(seconds)
            if self._is_late(f"round {turn}: {' and '.join(f'{1e3 * wall[r][-1]:.2f}' for r in ROLES)} ms", turn):
                break
        mine, others = (loop.trained for loop in self.loops.values())
        found: dict[str, Any] = {"rounds": len(wall["watched"]) - _WARM_UP, "trained_tensors": len(mine)}
        found |= compared({role: self._slowest(each) for role, each in wall.items()}, "")
        found |= compared({role: self._slowest(each) for role, each in busy.items()}, "processor_")
        if _CUDA:
            return found | ({"launches_and_ms_added": self._added()} if self.options.profile else {})
        return found | {"same_weights_as_unwatched": all(map(torch.equal, mine, others))}

    def _is_late(self, shown: str, turn: int) -> bool:  # rank 0 decides
        spent = torch.tensor(time.perf_counter() - self.began, device=self.device)
        if dist.is_initialized():
            dist.broadcast(spent, 0)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"{shown} a step, after {float(spent):.0f} s", flush=True)
        return turn >= _WARM_UP and float(spent) > self.options.seconds

    def _slowest(self, seconds: list[float]) -> list[float]:
        found = torch.tensor(seconds[_WARM_UP:], dtype=torch.float64, device=self.device)
        if dist.is_initialized():
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found.tolist()

    def _added(self) -> list[float]:
        from torch._C._autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        counts = {}
        for role in ROLES:
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
                self.block(role)
            # The range that a trace puts around an optimizer's step is not a kernel.
            kernels = [e for e in trace.events() or () if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
            counts[role] = (len(kernels), sum(e.device_time_total for e in kernels) / 1e3)
        return [round((a - b) / _STEPS, 3) for a, b in zip(counts["watched"], counts["unwatched"], strict=True)]


def compared(seconds: dict[str, list[float]], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {f"{prefix}{role}_ms": round(1e3 * statistics.median(seconds[role]), 3) for role in ROLES}
    ratios = [a / b for a, b in zip(seconds["watched"], seconds["unwatched"], strict=True)]
    low, high = median_interval(ratios)
    found[f"{prefix}watched_over_unwatched"] = f"{statistics.median(ratios):.4f} in [{low:.4f}, {high:.4f}]"
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
    parser.add_argument("--pairs", type=int, default=12 if _CUDA else 20, help="rounds, at most")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no further round after this time")
    parser.add_argument("--profile", action="store_true", help="on GPUs: profile a block of each role at the end")
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
    if ranks:
        dist.barrier()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
