"""The cost of `andon.watch` to a loop on GPUs: `torchrun --standalone --nproc-per-node 2 -m benchmarks.watch_gpu`.

In each process stand two replicas of one loop (Qwen3 of the shape asked for, random weights, autocast to bf16 over
fp32 or LoRA over bf16, clipping, fused AdamW). One is watched. Blocks of a few steps go in turns, in an order that goes
round: watched, not watched, and not watched again as a control; while the unwatched replica steps, the watch hears
nothing of the loop's calls. A block lasts from a barrier until the device of its slowest rank is done. Printed are the
medians of the ratios round by round, with an interval that holds the median of 95 % of such samples.

Afterwards a few steps of either are profiled: what the watch adds to a step in launches, copies, host synchronisations,
collectives and device time, kernel by kernel. And the memory: at rest, and at the peak, over the other replica's.

Without torchrun it is one process without DDP. `--shape tiny` runs on a CPU too, over gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import andon
from andon_contracts.watch import Watch
from andon_contracts.watch.intercept import listen, unlisten
from benchmarks.device_time import now_on_all
from benchmarks.runs import table
from benchmarks.watch_cost import PIECES, median_interval, timed_pieces

_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
_COPIES = ("cudaMemcpyAsync", "cudaMemcpy")
_READS = ("aten::_local_scalar_dense",)
_CUDA = torch.cuda.is_available()


@dataclass(frozen=True)
class Shape:
    """The loop: the model, what of it is trained, and the batch of a rank."""

    width: int
    layers: int
    inner: int
    heads: int
    full: bool
    rows: int = 16
    length: int = 256
    vocabulary: int = 151936
    key_heads: int = 8
    head: int = 128


SHAPES = {
    "full06": Shape(1024, 28, 3072, 16, full=True),
    "lora06": Shape(1024, 28, 3072, 16, full=False),
    "lora4": Shape(2560, 36, 9728, 32, full=False),
    "tiny": Shape(32, 2, 64, 4, full=True, rows=2, length=8, vocabulary=64, key_heads=2, head=8),
    "tinylora": Shape(32, 2, 64, 4, full=False, rows=2, length=8, vocabulary=64, key_heads=2, head=8),
}


def device_here() -> torch.device:
    """This rank's GPU, where there is one."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if _CUDA else torch.device("cpu")


class Loop:
    """One replica of the loop on this rank; `wrap` is "ddp", "fsdp" (FSDP2, by layer) or "none"."""

    def __init__(self, shape: Shape, wrap: str) -> None:
        device = device_here()
        torch.manual_seed(1)
        self.model: nn.Module = _model(shape, device)
        if wrap == "ddp":
            places = [device] if _CUDA else None
            self.model = DistributedDataParallel(self.model, device_ids=places, broadcast_buffers=False)
        elif wrap == "fsdp":
            _shard(self.model)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-5, fused=True)
        torch.manual_seed(7 + (dist.get_rank() if dist.is_initialized() else 0))
        self.tokens = torch.randint(1, shape.vocabulary, (shape.rows, shape.length), device=device)
        self.labels = torch.randint(0, 2, (shape.rows,), device=device)

    def step(self) -> None:
        """One update."""
        with torch.autocast("cuda", torch.bfloat16) if _CUDA else nullcontext():
            loss: Tensor = self.model(input_ids=self.tokens, labels=self.labels).loss
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _model(shape: Shape, device: torch.device) -> nn.Module:
    from peft import LoraConfig, TaskType, get_peft_model
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    config = Qwen3Config(
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        intermediate_size=shape.inner,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        head_dim=shape.head,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.length,
        pad_token_id=0,
        use_cache=False,
    )
    config.num_labels = 2
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if _CUDA and not shape.full else torch.float32)
    try:
        with device:
            model: nn.Module = Qwen3ForSequenceClassification(config)
    finally:
        torch.set_default_dtype(kept)
    if not shape.full:
        lora = LoraConfig(
            task_type=TaskType.SEQ_CLS, r=16, lora_alpha=32, lora_dropout=0.05, target_modules=["q_proj", "v_proj"]
        )
        model = get_peft_model(model, lora)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    return model


def _shard(model: nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        if type(module).__name__ == "Qwen3DecoderLayer":
            fully_shard(module)
    fully_shard(model)


class Bench:
    """A watched replica and an unwatched one, and the blocks that they take in turns."""

    def __init__(self, shape: Shape, wrap: str, steps: int, action: str) -> None:
        self.steps = steps
        device = device_here()
        self.memory: dict[str, int] = {}
        if _CUDA:  # what the first loop of a process makes for all is charged to neither
            warm = Loop(SHAPES["tiny"], wrap)
            warm.step()
            del warm
        base = _allocated(device)
        self.unwatched = Loop(shape, wrap)
        self._run(self.unwatched)
        plain = _allocated(device) - base
        self.watched = Loop(shape, wrap)
        self.watch: Watch = andon.watch(self.watched.model, self.watched.optimizer, action=action)  # type: ignore[arg-type]
        self._run(self.watched)
        self.memory["at rest, of the loop"] = plain
        self.memory["at rest, of the watch"] = _allocated(device) - base - 2 * plain

    def _run(self, loop: Loop) -> float:
        """Seconds a step of a block, on this rank."""
        device = device_here()
        started = now_on_all(device)
        for _ in range(self.steps):
            loop.step()
        return (now_on_all(device) - started) / self.steps

    def block(self, role: str) -> float:
        """Seconds a step of a block of the replica that plays `role`."""
        if role == "watched":
            return self._run(self.watched)
        unlisten(self.watch.hearing)
        try:
            return self._run(self.unwatched)
        finally:
            listen(self.watch.hearing)

    def peaks(self) -> None:
        """Note what a block of either takes above what lies there at rest."""
        for role in ("unwatched", "watched"):
            if _CUDA:
                torch.cuda.reset_peak_memory_stats()
                rest = _allocated(device_here())
                self.block(role)
                self.memory[f"above that in a step, {role}"] = torch.cuda.max_memory_allocated() - rest

    def counted(self, role: str) -> tuple[Counter[str], Counter[str], Counter[str]]:
        """Of a block: events by kind, launches by kernel, and microseconds by kernel; of this rank."""
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if _CUDA else [])]
        self.block(role)
        with profile(activities=kinds) as trace:
            self.block(role)
        counts, kernels, lasted = Counter[str](), Counter[str](), Counter[str]()
        for event in trace.events() or ():
            for kind, names in (("launches", _LAUNCHES), ("waits", _WAITS), ("copies", _COPIES), ("reads", _READS)):
                counts[kind] += event.name in names
            counts["concatenations"] += event.name == "aten::cat"
            counts["collectives"] += event.name.startswith("c10d::")
            # A range that a trace lays around an optimizer's step, on the device too, is no kernel.
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
                kernels[event.name] += 1
                lasted[event.name] += event.device_time_total
        counts["device us"] = round(lasted.total())
        return counts, kernels, lasted


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _ratios(bench: Bench, rounds: int) -> dict[str, object]:
    roles = ("watched", "unwatched", "control")
    seconds: dict[str, list[float]] = {role: [] for role in roles}
    for number in range(rounds):
        for place in range(len(roles)):
            role = roles[(number + place) % len(roles)]
            seconds[role].append(bench.block(role))
    plain = [(a + b) / 2 for a, b in zip(seconds["unwatched"], seconds["control"], strict=True)]
    found: dict[str, object] = {f"{role}_ms": round(1e3 * statistics.median(seconds[role]), 3) for role in roles}
    pairs = {
        "watched_over_unwatched": (seconds["watched"], plain),
        "control": (seconds["control"], seconds["unwatched"]),
    }
    for name, (over, under) in pairs.items():
        ratios = [a / b for a, b in zip(over, under, strict=True)]
        found[name] = round(statistics.median(ratios), 4)
        found[f"{name}_interval"] = [round(end, 4) for end in median_interval(ratios)]
    return found


def _added(bench: Bench) -> tuple[list[list[object]], list[list[object]]]:
    """By kind of event, and by kernel: what a step has without the watch, and what with it."""
    plain, plain_kernels, plain_us = bench.counted("unwatched")
    watched, kernels, us = bench.counted("watched")
    steps = bench.steps
    kinds: list[list[object]] = [
        [kind, round(plain[kind] / steps, 2), round(watched[kind] / steps, 2)] for kind in watched
    ]
    extra = sorted(us, key=lambda name: plain_us[name] - us[name])[:15]
    return kinds, [
        [name[:70], round((kernels[name] - plain_kernels[name]) / steps, 2), round((us[name] - plain_us[name]) / steps)]
        for name in extra
        if kernels[name] != plain_kernels[name] or us[name] > 1.1 * plain_us[name]
    ]


def measure(shape: Shape, wrap: str, *, rounds: int, steps: int, pieces: bool = False) -> dict[str, Any]:
    """The figures, of this rank where they are not of all. steps: of a block."""
    bench = Bench(shape, wrap, steps, "warn")
    try:
        found: dict[str, Any] = {"ranks": dist.get_world_size() if dist.is_initialized() else 1, "wrap": wrap}
        found |= _ratios(bench, rounds)
        bench.peaks()
        found["memory"] = dict(bench.memory)
        found["a step: kind, unwatched, watched"], found["added: kernel, launches, us"] = _added(bench)
        if pieces:
            with timed_pieces() as spent:
                bench.block("watched")
            found["host us a step"] = {name: round(1e6 * spent[name][-1] / steps) for name in PIECES}
        found["findings"] = [str(each) for each in bench.watch.findings]
        found["trained_tensors"] = len(bench.watched.trained)
        found["trained_elements"] = sum(p.numel() for p in bench.watched.trained)
        found["shape"] = asdict(shape)
        return found
    finally:
        bench.watch.close()


def memory_share(memory: dict[str, int]) -> float:
    """The part that the watch adds to the most that the loop has at once; 0.0 where no device's memory was seen."""
    if not any(memory.values()):
        return 0.0
    own, peak = memory["at rest, of the loop"], memory["above that in a step, unwatched"]
    more = memory["at rest, of the watch"] + memory["above that in a step, watched"] - peak
    return more / (own + peak)


def rows_of(found: dict[str, Any]) -> list[list[object]]:
    """The figures as rows of a table."""
    rows: list[list[object]] = [
        [f"{role} step, median", f"{found[f'{role}_ms']} ms"] for role in ("watched", "unwatched", "control")
    ]
    for name in ("watched_over_unwatched", "control"):
        rows.append([name.replace("_", " "), f"{found[name]} in {found[f'{name}_interval']}"])
    rows.append(["memory over the loop's own", f"{100 * memory_share(found['memory']):.2f} %"])
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; print tables and one JSON object on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="full06")
    parser.add_argument("--wrap", choices=("ddp", "fsdp", "none"), help="without torchrun: none")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4, help="of a block")
    parser.add_argument("--pieces", action="store_true", help="say where the host's time of the watch goes")
    options = parser.parse_args(arguments)
    ranks = "RANK" in os.environ
    if _CUDA:
        torch.cuda.set_device(device_here())
    else:
        torch.set_num_threads(1)
    if ranks:
        dist.init_process_group("nccl" if _CUDA else "gloo", device_id=device_here() if _CUDA else None)
    wrap = options.wrap or ("ddp" if ranks else "none")
    shape = SHAPES[options.shape]
    found = measure(shape, wrap, rounds=options.rounds, steps=options.steps, pieces=options.pieces)
    if not ranks or dist.get_rank() == 0:
        print(table(["what", "figure"], rows_of(found)))
        print(table(["a step", "unwatched", "watched"], found["a step: kind, unwatched, watched"]))
        print(table(["added: kernel", "launches", "us"], found["added: kernel, launches, us"]))
        if options.pieces:
            print(table(["piece", "host us a step"], [[k, v] for k, v in found["host us a step"].items()]))
        print(json.dumps({"name": options.shape, **found}))
    if ranks:
        dist.barrier()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
