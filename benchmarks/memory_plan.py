"""The memory plan against the measured peak: `python -m benchmarks.memory_plan`, on one GPU or on a CPU.

Each job is planned in a process that allocates nothing of the model, and runs three steps in another process. On a GPU
the measured figure is `torch.cuda.max_memory_allocated`; on a CPU, with tiny shapes, the independent count of
`measure_peak_bytes`. The program prints a table and one JSON object. The exit code is 1 if a plan is off by more than
5 %.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from andon.backend.devices import demand_determinism
from andon.backend.inprocess import InlineBackend
from andon.model.adapter import trainable_parameters
from andon.model.batches import shapes_of
from andon.model.memory import measure_peak_bytes, plan_bytes
from andon.model.memory_compiled import compiled_activations
from andon.model.memory_trace import checkpoint_hollow, hollow, traced_activations
from andon.step.optimizer import OptimizerSpec
from andon.step.plan import BatchPlan
from andon.training.build import StepSpec, build_replicas, build_step
from benchmarks.gpu_job import SHAPES, Shape, model_of, task_of
from benchmarks.runs import last_object, table

STEPS, WITHIN = 3, 0.05


@dataclass(frozen=True)
class Job:
    name: str
    shape: Shape
    dtype: torch.dtype = torch.bfloat16
    adapter: str = "lora"
    micro_batches: int = 4
    checkpointing: bool = False
    compile: str = "off"
    optimizer: str = "adamw"


REFERENCE, SMALL = SHAPES["reference"], SHAPES["0.6b"]
WIDE = replace(REFERENCE, layers=4, vocabulary=8192)
EIGHT = replace(WIDE, layers=8)
ENCODER = replace(SMALL, layers=8, head_size=64, inner=4096, vocabulary=30_522, encoder=True)
GPU_JOBS = (
    Job("reference, 36 layers, graphs", REFERENCE, compile="graphs"),
    Job("4 layers, fused kernels", WIDE, compile="kernels"),
    Job("8 layers, graphs", EIGHT, compile="graphs"),
    Job("8 layers, graphs, 8 micro-batches", EIGHT, compile="graphs", micro_batches=8),
    Job("8 layers, graphs, checkpointing", EIGHT, compile="graphs", checkpointing=True),
    Job("encoder, 8 layers, graphs", ENCODER, compile="graphs"),
    Job("encoder, 8 layers, fp32, graphs", ENCODER, torch.float32, compile="graphs"),
    Job("encoder, 8 layers, graphs, checkpointing", ENCODER, compile="graphs", checkpointing=True),
    Job("2 layers", replace(WIDE, layers=2)),
    Job("4 layers, 8 micro-batches", WIDE, micro_batches=8),
    Job("4 layers, whole batch at once", WIDE, micro_batches=1),
    Job("4 layers, 512 tokens", replace(WIDE, length=512)),
    Job("8 layers, 1024 tokens, checkpointing", replace(EIGHT, length=1024), checkpointing=True),
    Job("8 layers, checkpointing", EIGHT, checkpointing=True),
    Job("4 layers, fp32 base", WIDE, torch.float32),
    Job("0.6 B widths, 28 layers", SMALL),
    Job("0.6 B widths, 8 layers, all weights trained", replace(SMALL, layers=8, vocabulary=8192), adapter="none"),
    Job("encoder, 8 layers, 128 tokens", replace(ENCODER, length=128)),
    Job("encoder, 8 layers, SGD", ENCODER, optimizer="sgd"),
    Job("reference, 36 layers", REFERENCE),
)
TINY = Shape(64, 2, 4, 2, 16, 128, 256, length=32, batch=16)
TINY_ENCODER = replace(TINY, encoder=True)
CPU_JOBS = (
    Job("2 layers", TINY),
    Job("2 layers, 8 micro-batches", TINY, micro_batches=8),
    Job("2 layers, whole batch at once", TINY, micro_batches=1),
    Job("2 layers, 64 tokens", replace(TINY, length=64)),
    Job("6 layers", replace(TINY, layers=6)),
    Job("6 layers, checkpointing", replace(TINY, layers=6), checkpointing=True),
    Job("2 layers, fp32", TINY, torch.float32),
    Job("2 layers, wide", replace(TINY, hidden=256, inner=512)),
    Job("2 layers, all weights trained", TINY, adapter="none"),
    Job("encoder, 2 layers", TINY_ENCODER),
    Job("encoder, 4 layers, fp32", replace(TINY_ENCODER, layers=4), torch.float32),
    Job("encoder, 2 layers, SGD", TINY_ENCODER, optimizer="sgd"),
)
JOBS = {job.name: job for job in (GPU_JOBS if torch.cuda.is_available() else CPU_JOBS)}
KIND = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        what, name = options.child
        torch.set_num_threads(1)
        demand_determinism([torch.device(KIND)])
        print(json.dumps({"planned": planned, "measured": measured}[what](JOBS[name])))
        return 0
    with ThreadPoolExecutor(6 if KIND == "cuda" else 1) as pool:
        rows = list(pool.map(_compared, JOBS))
    print(table(["job", "planned MiB", "measured MiB", "planned / measured"], [_row(row) for row in rows]))
    worst = max((abs(row.get("ratio", 2.0) - 1) for row in rows), default=1.0)
    device = torch.cuda.get_device_name() if KIND == "cuda" else "CPU"
    print(json.dumps({"torch": torch.__version__, "device": device, "worst": round(worst, 4), "jobs": rows}))
    return 0 if worst <= WITHIN else 1


def _compared(name: str) -> dict[str, Any]:
    """The output of both children and their ratio, or the end of the error message of a child that failed."""
    found: dict[str, Any] = {"job": name}
    for what in ("planned", "measured"):
        words = ["-m", "benchmarks.memory_plan", "--child", what, name]
        environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            return found | {"error": done.stderr.strip()[-1500:]}
        found[what] = last_object(done.stdout)
    return found | {"ratio": round(found["planned"]["total"] / found["measured"]["peak"], 4)}


def _row(row: dict[str, Any]) -> list[object]:
    if "error" in row:
        return [row["job"], "-", "-", row["error"].splitlines()[-1][:120]]
    sizes = (row["planned"]["total"], row["measured"]["peak"])
    return [row["job"], *(f"{size / 2**20:.1f}" for size in sizes), f"{row['ratio']:.3f}"]


def planned(job: Job) -> dict[str, int]:
    model = model_of(job.shape, torch.device("meta"), job.adapter, job.dtype)
    rows, length = -(-job.shape.batch // job.micro_batches), job.shape.length
    compiled = KIND == "cuda" and job.compile != "off"
    with hollow(model):
        if job.checkpointing:
            checkpoint_hollow(model, KIND, compiled=compiled)
        if compiled:
            activations = compiled_activations(model, rows, length)
        else:
            activations = traced_activations(model, rows, length, KIND)
        trainable = trainable_parameters(model)
        return plan_bytes(model, trainable, job.optimizer, job.micro_batches, activations, kind=KIND).as_dict()


def measured(job: Job) -> dict[str, int]:
    if KIND == "cpu":
        return {"peak": measure_peak_bytes(lambda: trained(job, torch.device("cpu"))).peak}
    device = torch.device(KIND, 0)
    trained(job, device)
    torch.cuda.synchronize()
    return {"peak": torch.cuda.max_memory_allocated(device), "reserved": torch.cuda.max_memory_reserved(device)}


def trained(job: Job, device: torch.device) -> object:
    """Build the model, take three steps, and return what keeps it alive."""
    task, shape = task_of(job.shape), job.shape
    plan = BatchPlan(tuple(range(len(task))), shape.batch, job.micro_batches, 3, STEPS)
    backend = InlineBackend([device])
    update = StepSpec(
        OptimizerSpec(job.optimizer),
        seed=5,
        micro_batches=job.micro_batches,
        clip_norm=1.0,
        checkpointing=job.checkpointing,
        compile=job.compile,
        shapes=shapes_of(shape.batch, job.micro_batches, [shape.length]),
    )
    replicas = build_replicas(model_of(shape, device, job.adapter, job.dtype), update, backend, task, 0)
    if device.type == "cuda":
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)
    step = build_step(update, backend, replicas, task)
    step.attest_start({})
    for number in range(1, STEPS + 1):
        step.launch(plan.batch(number), 1e-4, number).result()
    return step, replicas


if __name__ == "__main__":
    raise SystemExit(main())
