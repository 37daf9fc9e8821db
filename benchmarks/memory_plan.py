"""The memory plan against what was measured: `python -m benchmarks.memory_plan`, on one GPU or on a CPU.

Each job is planned in a process that allocates nothing of the model, and run in another one. On a GPU the measured
figure is the most that torch's allocator had given out at once (`torch.cuda.max_memory_allocated`) in three steps; on a
CPU, with tiny shapes, the independent count of `measure_peak_bytes`. Prints a table and one JSON object; exits with 1
if a plan is off by more than `--within`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from andon.backend.devices import demand_determinism
from andon.backend.inprocess import InlineBackend
from andon.data.chat import EncodedRow
from andon.model.adapter import AdapterSpec, attach, trainable_parameters
from andon.model.batches import shapes_of
from andon.model.memory import measure_peak_bytes, plan_bytes
from andon.model.memory_compiled import compiled_activations
from andon.model.memory_trace import checkpoint_hollow, hollow, traced_activations
from andon.step.optimizer import OptimizerSpec
from andon.step.plan import BatchPlan
from andon.tasks.classification import ClassificationTask
from andon.tasks.sft import SftTask
from andon.tasks.task import ScoredTask
from andon.training.build import StepSpec, build_replicas, build_step
from benchmarks.runs import last_object, table

STEPS = 3


@dataclass(frozen=True)
class Job:
    """A model, and how it is trained. batch: rows of an update, all of `length` tokens. task: 'sft' trains a causal
    language model on packs of one row, of which every token but the first is learned."""

    name: str
    hidden: int = 2560
    layers: int = 4
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    inner: int = 9728
    vocabulary: int = 8192
    architecture: str = "decoder"
    dtype: str = "bfloat16"
    adapter: str = "lora"
    length: int = 256
    batch: int = 32
    micro_batches: int = 4
    checkpointing: bool = False
    compile: str = "off"
    optimizer: str = "adamw"
    task: str = "classification"


_SMALL: dict[str, Any] = {"hidden": 1024, "heads": 16, "inner": 3072}
_ENCODER = {**_SMALL, "architecture": "encoder", "head_size": 64, "inner": 4096, "vocabulary": 30_522}
_REFERENCE: dict[str, Any] = {"layers": 36, "vocabulary": 151_936}
_SFT = {**_SMALL, "layers": 28, "vocabulary": 151_936, "length": 2048, "batch": 8, "task": "sft"}
GPU_JOBS = (
    Job("reference, 36 layers, graphs", **_REFERENCE, compile="graphs"),
    Job("4 layers, fused kernels", compile="kernels"),
    Job("8 layers, graphs", layers=8, compile="graphs"),
    Job("8 layers, graphs, 8 micro-batches", layers=8, compile="graphs", micro_batches=8),
    Job("8 layers, graphs, checkpointing", layers=8, compile="graphs", checkpointing=True),
    Job("encoder, 8 layers, graphs", **_ENCODER, layers=8, compile="graphs"),
    Job("encoder, 8 layers, fp32, graphs", **_ENCODER, layers=8, dtype="float32", compile="graphs"),
    Job("encoder, 8 layers, graphs, checkpointing", **_ENCODER, layers=8, compile="graphs", checkpointing=True),
    Job("2 layers", layers=2),
    Job("4 layers, 8 micro-batches", micro_batches=8),
    Job("4 layers, whole batch at once", micro_batches=1),
    Job("4 layers, 512 tokens", length=512),
    Job("8 layers, 1024 tokens, checkpointing", layers=8, length=1024, checkpointing=True),
    Job("8 layers, checkpointing", layers=8, checkpointing=True),
    Job("4 layers, fp32 base", dtype="float32"),
    Job("0.6 B widths, 28 layers", **_SMALL, layers=28, vocabulary=151_936),
    Job("0.6 B widths, 8 layers, all weights trained", **_SMALL, layers=8, adapter="none"),
    Job("encoder, 8 layers, 128 tokens", **_ENCODER, layers=8, length=128),
    Job("encoder, 8 layers, SGD", **_ENCODER, layers=8, optimizer="sgd"),
    Job("reference, 36 layers", **_REFERENCE),
    Job("sft, 0.6 B, graphs", **_SFT, compile="graphs"),
    Job("sft, 0.6 B", **_SFT),
    Job("sft, 0.6 B, checkpointing", **_SFT, checkpointing=True),
    Job("sft, 0.6 B, all weights trained", **_SFT, adapter="none"),
    Job("sft, 0.6 B, fp32", **{**_SFT, "length": 512, "dtype": "float32"}),
)
_TINY = Job("", 64, 2, 4, 2, 16, 128, 256, length=32, batch=16)
CPU_JOBS = (
    replace(_TINY, name="2 layers"),
    replace(_TINY, name="2 layers, 8 micro-batches", micro_batches=8),
    replace(_TINY, name="2 layers, whole batch at once", micro_batches=1),
    replace(_TINY, name="2 layers, 64 tokens", length=64),
    replace(_TINY, name="6 layers", layers=6),
    replace(_TINY, name="6 layers, checkpointing", layers=6, checkpointing=True),
    replace(_TINY, name="2 layers, fp32", dtype="float32"),
    replace(_TINY, name="2 layers, wide", hidden=256, inner=512),
    replace(_TINY, name="2 layers, all weights trained", adapter="none"),
    replace(_TINY, name="encoder, 2 layers", architecture="encoder"),
    replace(_TINY, name="encoder, 4 layers, fp32", architecture="encoder", layers=4, dtype="float32"),
    replace(_TINY, name="encoder, 2 layers, SGD", architecture="encoder", optimizer="sgd"),
    replace(_TINY, name="sft, 2 layers", task="sft"),
    replace(_TINY, name="sft, 2 layers, large vocabulary", task="sft", vocabulary=151_936),
    replace(_TINY, name="sft, 2 layers, all weights trained, fp32", task="sft", adapter="none", dtype="float32"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="jobs whose name has this in it")
    parser.add_argument("--within", type=float, default=0.05, help="how far a plan may be off")
    parser.add_argument("--at-once", type=int, default=6 if torch.cuda.is_available() else 1, help="jobs side by side")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return _child(*options.child)
    kind, started = "cuda" if torch.cuda.is_available() else "cpu", time.perf_counter()
    jobs = [job for job in (GPU_JOBS if kind == "cuda" else CPU_JOBS) if options.only in job.name]
    with ThreadPoolExecutor(options.at_once) as pool:
        rows = list(pool.map(lambda job: _compared(job, kind), jobs))
    head = ["job", "planned MiB", "measured MiB", "planned / measured", "at rest", "reserved"]
    print(table(head, [_row(row) for row in rows]))
    worst = max((abs(row.get("ratio", 2.0) - 1) for row in rows), default=1.0)
    device = torch.cuda.get_device_name() if kind == "cuda" else "CPU"
    versions = {"torch": torch.__version__, "device": device, "seconds": round(time.perf_counter() - started, 1)}
    print(json.dumps({**versions, "worst": round(worst, 4), "jobs": rows}))
    return 0 if worst <= options.within else 1


def _child(what: str, kind: str, job: str) -> int:
    torch.set_num_threads(1)
    demand_determinism([torch.device(kind)])
    print(json.dumps({"planned": planned, "measured": measured}[what](Job(**json.loads(job)), kind)))
    return 0


def _compared(job: Job, kind: str) -> dict[str, Any]:
    """What two children printed, and the ratio; or the end of the complaint of one that failed."""
    found: dict[str, Any] = {"job": job.name}
    for what in ("planned", "measured"):
        words = ["-m", "benchmarks.memory_plan", "--child", what, kind, json.dumps(asdict(job))]
        environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            return found | {"error": done.stderr.strip()[-1500:]}
        found[what] = last_object(done.stdout)
    return found | {"ratio": round(found["planned"]["total"] / found["measured"]["peak"], 4)}


def _row(row: dict[str, Any]) -> list[object]:
    if "error" in row:
        return [row["job"], "-", "-", row["error"].splitlines()[-1][:120], "-", "-"]
    measured = row["measured"]
    sizes = (row["planned"]["total"], measured["peak"], measured["resting"], measured["reserved"])
    planned, peak, resting, reserved = (f"{size / 2**20:.1f}" for size in sizes)
    return [row["job"], planned, peak, f"{row['ratio']:.3f}", resting, reserved]


def planned(job: Job, kind: str) -> dict[str, Any]:
    started = time.perf_counter()
    model = model_of(job, torch.device("meta"))
    rows = -(-job.batch // job.micro_batches)
    compiled = kind == "cuda" and job.compile != "off"
    with hollow(model):
        if job.checkpointing:
            checkpoint_hollow(model, kind, compiled=compiled)
        if compiled:
            activations = compiled_activations(model, rows, job.length)
        else:
            activations = traced_activations(model, rows, job.length, kind)
        trainable = trainable_parameters(model)
        plan = plan_bytes(model, trainable, job.optimizer, job.micro_batches, activations, kind=kind)
    return {**plan.as_dict(), "seconds": round(time.perf_counter() - started, 1)}


def measured(job: Job, kind: str) -> dict[str, Any]:
    device = torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
    started = time.perf_counter()
    if kind == "cuda":
        trained(job, device)
        torch.cuda.synchronize()
        figures = {
            "peak": torch.cuda.max_memory_allocated(device),
            "resting": torch.cuda.memory_allocated(device),
            "reserved": torch.cuda.max_memory_reserved(device),
        }
    else:
        peak = measure_peak_bytes(lambda: trained(job, device)).peak
        figures = {"peak": peak, "resting": 0, "reserved": 0}
    return {**figures, "seconds": round(time.perf_counter() - started, 1)}


def trained(job: Job, device: torch.device) -> object:
    """Build the model, take three steps, and return what keeps it alive."""
    task = _task(job)
    plan = BatchPlan(tuple(range(len(task))), job.batch, job.micro_batches, 3, STEPS)
    backend = InlineBackend([device])
    update = StepSpec(
        OptimizerSpec(job.optimizer),
        seed=5,
        micro_batches=job.micro_batches,
        clip_norm=1.0,
        checkpointing=job.checkpointing,
        compile=job.compile,
        shapes=shapes_of(job.batch, job.micro_batches, [job.length]),
    )
    replicas = build_replicas(model_of(job, device), update, backend, task, 0)
    if device.type == "cuda":
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)
    step = build_step(update, backend, replicas, task)
    step.attest_start({})
    for number in range(1, STEPS + 1):
        step.launch(plan.batch(number), 1e-4, number).result()
    return step, replicas


def _task(job: Job) -> ScoredTask:
    tokens = [[1 + (row + place) % (job.vocabulary - 1) for place in range(job.length)] for row in range(2 * job.batch)]
    if job.task == "sft":
        weights = array("f", [1.0] * job.length)
        rows = [EncodedRow(place, array("i", ids), weights) for place, ids in enumerate(tokens)]
        return SftTask(rows, pad_id=0, max_length=job.length)
    labels = [row % 2 for row in range(2 * job.batch)]
    return ClassificationTask(tokens, labels, num_labels=2, vocab_size=job.vocabulary, pad_id=0)


def model_of(job: Job, device: torch.device) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, job.dtype))
    try:
        with device:
            base: Any = _base(job)
    finally:
        torch.set_default_dtype(before)
    base.config.dtype = getattr(torch, job.dtype)
    few = job.architecture == "decoder" and job.task != "sft"
    targets: Any = ("q_proj", "v_proj") if few else "all-linear"
    adapter = AdapterSpec(kind=job.adapter, r=16, alpha=32.0, dropout=0.05, targets=targets)
    return attach(base.train(), adapter, 1).to(device)


def _base(job: Job) -> nn.Module:
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3ForSequenceClassification,
    )

    shared: dict[str, Any] = {
        "hidden_size": job.hidden,
        "num_hidden_layers": job.layers,
        "num_attention_heads": job.heads,
        "intermediate_size": job.inner,
        "vocab_size": job.vocabulary,
        "max_position_embeddings": job.length,
        "pad_token_id": 0,
        "use_cache": False,
    }
    if job.task == "sft":
        shared["tie_word_embeddings"] = True
    else:
        shared["num_labels"] = 2
    if job.architecture == "encoder":
        return BertForSequenceClassification(BertConfig(**shared))
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
    own: dict[str, Any] = {"head_dim": job.head_size, "num_key_value_heads": job.kv_heads}
    kind = Qwen3ForCausalLM if job.task == "sft" else Qwen3ForSequenceClassification
    return kind(Qwen3Config(**shared, **own, **ends))


if __name__ == "__main__":
    raise SystemExit(main())
