"""What the GPU benchmarks share: models with random weights, random rows, clocks, and turns on one machine."""

from __future__ import annotations

import os
import random
import statistics
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore

from andon.config.schema import Adapter
from andon.data.chat import EncodedRow
from andon.model.adapter import attach
from andon.tasks.sft import SftTask
from andon.tasks.text import ClassificationTask, ScoredTask


@dataclass(frozen=True)
class Shape:
    """A Qwen3 decoder and its updates of `batch` rows of `length` tokens.

    causal: a language model that trains on packed conversations; otherwise a classifier with 2 labels.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocabulary: int
    length: int
    batch: int = 32
    causal: bool = False

    @property
    def products(self) -> float:
        """Floating-point operations of a step's matrix products, forward and backward, without the head."""
        width = self.heads * self.head_size
        layer = self.hidden * (2 * width + 2 * self.kv_heads * self.head_size + 3 * self.inner)
        return 4.0 * self.layers * layer * self.batch * self.length


SHAPES = {
    "reference": Shape(2560, 36, 32, 8, 128, 9728, 151_936, 256),
    "0.6b": Shape(1024, 28, 16, 8, 128, 3072, 151_936, 256),
    "small": Shape(256, 4, 4, 4, 64, 512, 1024, 64),
    "tiny": Shape(32, 1, 2, 2, 16, 32, 128, 16, 8),
    "sft-0.6b": Shape(1024, 28, 16, 8, 128, 3072, 151_936, 2048, 16, causal=True),
    "sft-tiny": Shape(32, 2, 2, 1, 16, 32, 128, 64, 8, causal=True),
}
CONVERSATIONS = 1_600


def model_of(shape: Shape, device: torch.device, adapter: str = "lora", dtype: Any = torch.bfloat16) -> nn.Module:
    spec = Adapter(kind=adapter, r=16, alpha=32.0, dropout=0.05, targets=targets_of(shape))
    return attach(base_of(shape, device, dtype), spec, 1).to(device)


def targets_of(shape: Shape) -> tuple[str, ...]:
    more = ("k_proj", "o_proj", "gate_proj", "up_proj", "down_proj") if shape.causal else ()
    return ("q_proj", "v_proj", *more)


def base_of(shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The model of `shape` on `device`, with the same bits in every process."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.inner,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.length,
        "pad_token_id": 0,
        "use_cache": False,
    }
    model = transformers.Qwen3ForCausalLM if shape.causal else transformers.Qwen3ForSequenceClassification
    sizes |= {"num_key_value_heads": shape.kv_heads, "head_dim": shape.head_size}
    sizes |= {"bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": shape.causal}
    config = transformers.Qwen3Config(**sizes)
    config.num_labels = 2
    torch.manual_seed(1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            base: nn.Module = model(config)
    finally:
        torch.set_default_dtype(before)
    base.config.dtype = dtype
    return base.train()


def rows_of(shape: Shape) -> tuple[list[list[int]], list[int]]:
    draw = random.Random(2)
    rows = [[draw.randrange(1, shape.vocabulary) for _ in range(shape.length)] for _ in range(8 * shape.batch)]
    return rows, [draw.randrange(2) for _ in rows]


@cache
def conversations_of(shape: Shape) -> tuple[EncodedRow, ...]:
    """Rows of 16 tokens to the full length, most of a few hundred. A tenth to a half of each is an untrained prompt."""
    draw = random.Random(4)
    rows = []
    for number in range(CONVERSATIONS):
        length = min(shape.length, max(shape.length // 128, 4, int(draw.lognormvariate(-2.1, 1.0) * shape.length)))
        prompt = max(1, int(length * draw.uniform(0.1, 0.5)))
        ids = array("i", (draw.randrange(1, shape.vocabulary) for _ in range(length)))
        rows.append(EncodedRow(number, ids, array("f", [0.0] * prompt + [1.0] * (length - prompt))))
    return tuple(rows)


def task_of(shape: Shape) -> ScoredTask:
    if shape.causal:
        whole = SftTask(conversations_of(shape), pad_id=0, max_length=shape.length, padding_multiple=shape.length)
        return whole.packed(range(CONVERSATIONS))
    rows, labels = rows_of(shape)
    return ClassificationTask(rows, labels, num_labels=2, vocab_size=shape.vocabulary, pad_id=0)


# Devices and clocks

Mark = torch.cuda.Event | float
"""A moment of the device; on a CPU the host's clock in seconds."""


def device_here() -> torch.device:
    """This rank's GPU, made current; without GPUs the CPU with one thread."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def rest(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def now(device: torch.device) -> float:
    rest(device)
    return time.perf_counter()


def now_on_all(device: torch.device) -> float:
    rest(device)
    if dist.is_initialized():
        dist.barrier()
    return now(device)


def mark(device: torch.device) -> Mark:
    """A mark after everything launched so far on the current stream of `device`."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(first: Mark, last: Mark) -> float:
    if isinstance(first, torch.cuda.Event):
        return float(first.elapsed_time(last)) / 1e3  # type: ignore[arg-type]
    return last - first  # type: ignore[operator]


def measured(shape: Shape, device: torch.device, rounds: Sequence[float]) -> dict[str, Any]:
    """The figures that every trainer prints. rounds: milliseconds per step of each round."""
    world, cuda, whole = int(os.environ.get("WORLD_SIZE", "1")), device.type == "cuda", statistics.median(rounds)
    return {
        "device": torch.cuda.get_device_name(device) if cuda else "CPU",
        "world": world,
        "torch": torch.__version__,
        "ms_by_round": list(rounds),
        "ms_per_step": round(whole, 3),
        "tflops_per_rank": round(shape.products / whole / 1e9 / world, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if cuda else 0.0,
    }


# Turns: jobs on one machine warm up side by side, then measure one at a time, in rounds

PORT, JOB = "ANDON_BENCHMARK_PORT", "ANDON_BENCHMARK_JOB"
"""Environment of a job: the port of the store on this host, and the job's name in the store."""
PATIENCE = timedelta(minutes=10)


class Turns:
    """One rank of a job that `benchmarks.gpu_compare` started. Otherwise it never waits."""

    def __init__(self) -> None:
        self._name, port = os.environ.get(JOB, ""), os.environ.get(PORT)
        self._store = TCPStore("127.0.0.1", int(port), timeout=PATIENCE) if port else None
        self._turn = 0

    def wait(self) -> None:
        if self._store is not None:
            self._store.add(f"{self._name}/{self._turn}/resting", 1)
            self._store.wait([f"{self._name}/{self._turn}/goes"])
            self._turn += 1
