"""The memory that a run needs: computed before it starts, and compared with the peak of its GPUs (F-HET-002).

Only the model's configuration is read, and no weights are allocated: passes run on fake tensors without memory.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from andon.backend.base import Backend
from andon.backend.devices import gpus_here, in_gib, look_at, of_all_ranks, placement, refuse_unfit
from andon.backend.host import free_ram
from andon.config.load import device_kind
from andon.config.schema import CAUSAL, Config
from andon.console.messages import InputError, say
from andon.model.adapter import attach, trainable_parameters
from andon.model.build import build_base
from andon.model.masks import EvaluationBatching, padded_length
from andon.model.memory import MemoryPlan, plan_bytes, traced_bytes
from andon.model.quantize import NONE, quantized_layers
from andon.step.audit import default_every
from andon.step.flat import DIVIDING
from andon.step.plan import efficiency, rank_leaves
from andon.training.material import Material, idleness, item_length, padding_multiple, prepare
from andon_contracts.laws.law import Judgement
from andon_contracts.laws.update import BUDGET, Peaks

_MIB = 2**20
CUDA_CONTEXT = 600 * _MIB
"""Bytes of a GPU outside torch's allocator: CUDA's context and loaded kernels."""
NCCL_BUFFERS = 500 * _MIB
"""Bytes of NCCL's buffers on each GPU, with more than one worker."""
PROCESS = 500 * _MIB
"""Bytes of a process that has loaded torch, transformers and peft."""
_UNSEEN = 32
"""Of a GPU's activations, one part in this many on top: temporary buffers of kernels, which a trace does not see."""
_CAPTURED_BYTES = 1 << 33
"""With `run.cuda_graphs=auto`: the largest micro-batch, in bytes, whose passes are captured as CUDA graphs."""
_WHERE = {"cpu": "{} on the CPU", "cuda": "{} on GPUs, each", "host": "{} that start on the CPU, before their GPUs"}
_PARTS = {"base": ["base"], "trained weights": ["weights"], "gradient": ["gradient"], "moments": ["moments"]}
_PARTS |= {"tree": ["partials"], "activations": ["activations"], "evaluation": ["evaluation"]}
_PARTS |= {"audit": ["audit", "recomputed"], "reduction": ["reduction"], "graphs": ["graphs"]}
_PARTS |= {"workspace": ["workspace", "ramp"]}
_PARTS |= {"outside of torch": ["outside"]}
"""Printed parts of a plan, each the sum of these fields."""


class NotPlannable(InputError):
    """The model cannot run on fake tensors, so its memory cannot be planned. It may still be trainable."""


def largest(material: Material, config: Config) -> tuple[int, int]:
    """Rows and padded length of the largest micro-batch."""
    rows = -(-min(material.plan.batch_size, len(material.plan.ids)) // config.training.micro_batches)
    longest, limit = int(material.task.lengths[list(material.plan.ids)].max()), item_length(config)
    return rows, padded_length(min(longest, limit), padding_multiple(config), limit)


def evaluation_batching(material: Material, config: Config) -> EvaluationBatching:
    """The evaluation batching of `config`, which depends on micro-batches, rows and lengths only."""
    rows, length = largest(material, config)
    return EvaluationBatching(rows * length, padding_multiple(config), item_length(config))


class MemoryPlanner:
    """Computes memory plans of single replicas, with a cache of traces by their settings."""

    def __init__(self, material: Material) -> None:
        self.material = material
        self._traced: dict[Any, tuple[int, int]] = {}

    def shape(self, config: Config) -> nn.Module:
        """The model with its adapter, on the meta device."""
        interface = self.material.interface
        base = build_base(config.model, interface, config.seed, weights=False)
        return attach(base, config.adapter, config.seed, interface.new_tokens)

    def plan(self, config: Config, kind: str, workers: int) -> MemoryPlan:
        """Bytes of one of `workers` replicas on a device of `kind`, without memory outside of torch's allocator.

        For compiled passes the plan is an upper bound: the need of eager passes, and of captured graphs. Raises
        `NotPlannable` if the model's code fails on fake tensors.
        """
        try:
            return self._plan(config, kind, workers)
        except InputError:
            raise
        except Exception as error:
            reason = next(iter(str(error).splitlines()), "")
            what = f"its memory cannot be planned ({type(error).__name__}: {reason})"
            raise NotPlannable.at("model.base", what) from error

    def _plan(self, config: Config, kind: str, workers: int) -> MemoryPlan:
        material, training, optimizer = self.material, config.training, config.optimizer
        model, checkpointing = self.shape(config), config.training.activation_checkpointing
        contracts, micro_batches, audited = config.contracts, training.micro_batches, 0
        every = default_every(workers, micro_batches) if contracts.audit_every is None else contracts.audit_every
        if contracts.enabled and 0 < every <= material.plan.total_steps:
            audited = micro_batches if contracts.audit_coverage == "all" else contracts.audit_coverage
        options: dict[str, Any] = {"world_size": workers, "momentum": optimizer.momentum, "kind": kind}
        # Before activations are traced, since the trace leaves fake weights in the model.
        weights = trainable_parameters(model)
        layers = {} if config.model.quantize == NONE else quantized_layers(model)
        options |= {"audited": audited, "packed": [layer.weight for layer in layers.values()]}
        options["divided"] = config.run.backend in DIVIDING
        plan = plan_bytes(model, weights, optimizer.name, micro_batches, 0, **options)
        trained, terms, retained = largest(material, config), sys.maxsize, training.compile == "graphs"
        # Evaluation scores rows without packing.
        scored = [(material.validation_task, material.validation_ids)]
        scored += [(material.evaluation_task, material.evaluation_ids)]
        lengths = [task.lengths[list(ids)].clamp(max=item_length(config)).tolist() for task, ids in scored if ids]
        batching = evaluation_batching(material, config)
        evaluated = max(map(batching.largest, lengths), key=lambda shape: (shape[0] * shape[1], shape[1]))
        if config.task in CAUSAL:
            trained_ids = [(material.task, material.plan.ids), *scored]
            terms = max(max(task.trained_tokens(ids)) for task, ids in trained_ids if ids)  # type: ignore[union-attr]
            terms = padded_length(terms, padding_multiple(config))
        key = (config.model.dtype, config.adapter, checkpointing, trained, evaluated, kind, terms, retained)
        if key not in self._traced:
            how: dict[str, Any] = {"terms": terms, "checkpointing": checkpointing, "retained": retained}
            self._traced[key] = traced_bytes(model, kind, trained, evaluated, **how)
        # A trace has the layers unpacked. A pass over packed ones unpacks one at a time.
        activations, evaluation = (traced + plan.evaluation for traced in self._traced[key])
        if kind == "cuda":
            activations += activations // _UNSEEN
        graphs = 0
        if uses_cuda_graphs(config, kind, activations):
            graphs = activations
        elif kind == "cuda" and retained:
            # torch's compiled graphs keep their memory during evaluations and eager passes of other shapes.
            graphs = min(activations, evaluation)
        on_host = kind == "cuda" and config.run.backend == "mixed"  # the optimizer runs on the CPU
        moments = 0 if on_host else plan.moments
        return replace(plan, activations=activations, evaluation=evaluation, graphs=graphs, moments=moments)


def uses_cuda_graphs(config: Config, kind: str, activations: int | None) -> bool:
    """Whether a replica on a device of `kind` captures its uncompiled passes as CUDA graphs.

    activations: bytes of a micro-batch, which graphs hold in addition to eager passes; None: unknown. Large
    micro-batches gain little, since their kernels take longer than their launches. Unpacked rows of `sft` gain nothing,
    since their shapes hardly ever repeat.
    """
    training, choice = config.training, config.run.cuda_graphs
    if kind != "cuda" or config.run.backend not in ("inline", "nccl") or choice == "never":
        return False
    if training.compile != "off" or training.activation_checkpointing:
        return False
    repeats = config.task not in CAUSAL or training.packing
    return choice == "always" or (activations is not None and activations <= _CAPTURED_BYTES and repeats)


def drop_graphs_if_too_big(plan: MemoryPlan, config: Config, free: int) -> MemoryPlan:
    """`plan`, without CUDA graphs if it needs more than `free` bytes and they are optional. Bits do not change."""
    optional = config.run.cuda_graphs == "auto" and config.training.compile == "off"  # `compile: graphs` demands them
    return replace(plan, graphs=0) if optional and plan.needed > free else plan


def smaller_settings(config: Config) -> Iterator[tuple[str, Config, str]]:
    """Changes that may need less memory, those without loss of accuracy first. Each is the setting as written on the
    command line, the configuration with it, and its cost."""

    def change(section: str, key: str, value: Any, price: str) -> tuple[str, Config, str]:
        part = getattr(config, section).model_copy(update={key: value})
        written = str(value).lower() if isinstance(value, bool) else value
        return f"{section}.{key}={written}", config.model_copy(update={section: part}), price

    training = config.training
    if config.run.cuda_graphs == "always":
        yield change("run", "cuda_graphs", "never", "same bits; small models wait for their launches")
    for more in sorted({min(factor * training.micro_batches, training.batch_size) for factor in (2, 4, 8)}):
        if more > training.micro_batches:
            yield change("training", "micro_batches", more, "another result, as valid")
    if not training.activation_checkpointing:
        price = "same bits if not compiled; about a third more time"
        yield change("training", "activation_checkpointing", True, price)
    if config.model.dtype == "float32" and config.adapter.kind == "lora":
        yield change("model", "dtype", "bfloat16", "frozen weights rounded to 8 bits of precision")
    packable = config.adapter.kind == "lora" and not config.adapter.dora and device_kind(config.run) != "mixed"
    if packable and config.model.base is not None and config.model.quantize == NONE and not config.run.portable:
        yield change("model", "quantize", "nf4", "frozen weights in 4 bits; needs andon[qlora]")
    if config.model.max_length >= 32:
        yield change("model", "max_length", config.model.max_length // 2, "longer texts are cut there")
    if config.adapter.kind == "none":
        yield change("adapter", "kind", "lora", "trains an adapter instead of all weights")
    elif config.adapter.r > 1:
        yield change("adapter", "r", config.adapter.r // 2, "a smaller adapter")


@dataclass(frozen=True)
class Remedy:
    """A setting with which a run would fit. needed: the bytes that it would need then. price: the setting's cost."""

    setting: str
    needed: int
    price: str


def first_that_fits(config: Config, needed_if_fits: Callable[[Config], int | None]) -> Remedy | None:
    """The first of `smaller_settings` with which the run fits; None if no single setting is enough."""
    for setting, changed, price in smaller_settings(config):
        with suppress(InputError):  # the setting is invalid for this model or these rows
            needed = needed_if_fits(changed)
            if needed is not None:
                return Remedy(setting, needed, price)
    return None


# `andon plan`: the need of each number of workers on a machine's devices.


@dataclass(frozen=True)
class Machine:
    """gpus: free bytes of each GPU. ram: bytes of host memory that processes can still allocate; None if unknown."""

    gpus: tuple[int, ...]
    ram: int | None


@dataclass(frozen=True)
class Need:
    """The need on one kind of device: 'cuda', 'cpu', or 'host', the RAM in which ranks build models before they move
    them to their GPUs. ranks: their number. budget: free bytes of each GPU, or of the RAM; None: unknown."""

    kind: str
    ranks: int
    needed: int
    budget: int | None
    fits: bool | None
    each_rank: MemoryPlan


@dataclass(frozen=True)
class WorldPlan:
    """The plan for one number of workers. problem: why it is impossible, or empty. idle: why some workers would train
    on no row, or empty. note: for the user, about devices. fits: no problem, and no need above a known budget."""

    workers: int
    micro_batches_of_each: tuple[int, ...]
    efficiency: float
    fits: bool = False
    problem: str = ""
    idle: str = ""
    note: str = ""
    devices: tuple[Need, ...] = ()


@dataclass(frozen=True)
class Forecast:
    """rows, length: of the largest micro-batch. weights, trained: numbers of weights. remedy: for the first number of
    workers that does not fit; None if all fit, or if no single setting is enough."""

    rows: int
    length: int
    weights: int
    trained: int
    worlds: tuple[WorldPlan, ...]
    remedy: Remedy | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON values for `--json`; sizes in bytes."""
        worlds = []
        for world in self.worlds:
            devices = [asdict(need) | {"each_rank": need.each_rank.as_dict()} for need in world.devices]
            worlds.append(asdict(world) | {"efficiency": round(world.efficiency, 4), "devices": devices})
        return {
            "micro_batch": {"rows": self.rows, "length": self.length},
            "weights": self.weights,
            "trained": self.trained,
            "worlds": worlds,
            "remedy": None if self.remedy is None else asdict(self.remedy),
        }

    def lines(self) -> Iterator[str]:
        """The output lines of `andon plan`."""
        yield f"model: {self.weights:,} weights, {self.trained:,} of them trained"
        yield f"largest micro-batch: {self.rows} rows of {self.length} tokens"
        for world in self.worlds:
            parts = world.micro_batches_of_each
            busiest = max(parts)
            share = f"{world.efficiency:.0%} busy, at most {busiest} of {sum(parts)} micro-batches on one"
            yield f"workers {world.workers}: {share}"
            if world.idle:
                yield f"  note: {world.idle}"
            elif world.efficiency < 1:
                waiting = sum(count < busiest for count in parts)
                yield f"  note: {waiting} of {world.workers} workers would wait for the others in every step"
            if world.note:
                yield f"  note: {world.note}"
            if world.problem:
                yield f"  cannot be: {world.problem}"
            for need in world.devices:
                verdict = "what is free is unknown"
                if need.budget is not None:
                    verdict = f"{'fits' if need.fits else 'DOES NOT FIT'} in the {in_gib(need.budget)} that are free"
                yield f"  {_WHERE[need.kind].format(need.ranks)}: {in_gib(need.needed)}, {verdict}"
                sizes = {name: sum(getattr(need.each_rank, part) for part in of) for name, of in _PARTS.items()}
                shown = [f"{name} {size / _MIB:,.1f} MiB" for name, size in sizes.items() if size]
                yield f"    a replica: {', '.join(shown)}"
        if self.remedy is not None:
            yield f"would fit with --set {self.remedy.setting}: {in_gib(self.remedy.needed)} ({self.remedy.price})"
        elif not all(world.fits or world.problem for world in self.worlds):
            yield "no single setting would make it fit"


def machine_here(gpu_bytes: int | None, workers: int) -> Machine:
    """This machine. gpu_bytes: instead a machine with a GPU of this size per worker and unknown host memory."""
    if gpu_bytes is not None:
        return Machine((gpu_bytes,) * workers, None)
    # `gpus_here` creates a CUDA context on each GPU. A plan counts the context already, so add its bytes back.
    return Machine(tuple(min(each.free + CUDA_CONTEXT, each.total) for each in gpus_here()), free_ram())


def forecast(config: Config, workers: Sequence[int], machine: Machine) -> Forecast:
    """The plan for each of `workers`. Raises the `InputError` that a run would raise before it reads weights."""
    material = prepare(config)
    config, planner = material.config, MemoryPlanner(material)
    worlds = tuple(_world(planner, config, count, machine) for count in workers)
    model, remedy = planner.shape(config), None
    short = next((world for world in worlds if not world.fits and not world.problem), None)
    if short is not None:
        lacking = max((need for need in short.devices if need.fits is False), key=lambda n: n.needed - (n.budget or 0))

        def needed_if_fits(changed: Config) -> int | None:
            same_rows = changed.model.max_length == config.model.max_length  # else rows are cut and packed differently
            other = planner if same_rows else MemoryPlanner(prepare(changed))
            world = _world(other, changed, short.workers, machine)
            return next((n.needed for n in world.devices if n.kind == lacking.kind), 0) if world.fits else None

        remedy = first_that_fits(config, needed_if_fits)
    trained = sum(parameter.numel() for parameter in trainable_parameters(model).values())
    weights = sum(parameter.numel() for parameter in model.parameters())
    return Forecast(*largest(material, config), weights, trained, worlds, remedy)


def _world(planner: MemoryPlanner, config: Config, workers: int, machine: Machine) -> WorldPlan:
    parts = config.training.micro_batches
    leaves, idle = tuple(map(len, rank_leaves(parts, workers))), idleness(planner.material.plan, workers)
    world = WorldPlan(workers, leaves, efficiency(parts, workers), idle=idle)
    other = {"workers": workers, "devices": config.run.devices if workers == config.run.workers else None}
    try:
        backend, devices, note = placement(config.run.model_copy(update=other), len(machine.gpus))
    except InputError as error:
        return replace(world, problem=str(error))
    needs: list[Need] = []

    def add(kind: str, ranks: int, needed: int, budget: int | None, each_rank: MemoryPlan) -> None:
        needs.append(Need(kind, ranks, needed, budget, None if budget is None else needed <= budget, each_rank))

    gpus = [device.index for device in devices if device.type == "cuda"]
    if gpus:
        plan = planner.plan(config, "cuda", workers)
        plan = replace(plan, outside=CUDA_CONTEXT + (NCCL_BUFFERS if workers > 1 and backend == "nccl" else 0))
        free = min(machine.gpus[index] for index in gpus)
        plan = drop_graphs_if_too_big(plan, config, free)
        add("cuda", len(gpus), plan.needed, free, plan)
        # A rank's host memory: the model before it moves to the GPU, or the optimizer's buffers if they are larger.
        phases = [{"base": plan.loaded or plan.base, "weights": plan.weights}]
        if config.run.backend == "mixed":
            on_cpu = planner.plan(config, "cpu", workers)
            phases.append({"weights": on_cpu.weights, "gradient": on_cpu.gradient, "moments": on_cpu.moments})
        host = MemoryPlan(**max(phases, key=lambda phase: sum(phase.values())), outside=PROCESS)
        on_host = len(set(gpus))  # ranks of one host: fewer than all, if the run needs several
        add("host", on_host, on_host * host.needed, machine.ram, host)
    ranks = workers - len(gpus)
    if ranks:
        plan = replace(planner.plan(config, "cpu", workers), outside=PROCESS)
        loading = plan.loaded + plan.weights + plan.outside if plan.loaded else 0
        largest_phase, own = max(plan.needed, loading), plan.weights + plan.gradient + plan.moments + plan.partials
        needed = ranks * largest_phase
        if backend == "inline":  # one process: ranks share the base and compute in turn
            needed = largest_phase + (ranks - 1) * own
        add("cpu", ranks, needed, machine.ram, plan)
    return replace(world, fits=all(need.fits is not False for need in needs), note=note, devices=tuple(needs))


# A run on GPUs: agreement before the first step, and comparison with the peak at the end.


def agree_on_devices(material: Material, backend: Backend) -> MemoryPlan | None:
    """The plan of a GPU replica; None if no rank is on a GPU, or, with a warning, if memory cannot be planned.

    Collective if ranks are on GPUs. Raises the same `InputError` on every rank for a GPU with too little free memory.
    Other faults of GPUs were refused before the backend was created.
    """
    device, config, planner = backend.devices[0], material.config, MemoryPlanner(material)
    mine = look_at(device.index or 0) if device.type == "cuda" else None
    if backend.name == "inline" and len(backend.devices) == 1:
        gpus = {} if mine is None else {0: mine}
    else:
        gpus = of_all_ranks(mine) if backend.name in ("nccl", "mixed") else {}
    if not gpus:
        return None
    try:
        planned = planner.plan(config, "cuda", backend.world_size)
    except NotPlannable as error:
        if 0 in backend.ranks:
            say(f"warning: {error}")
        refuse_unfit(backend.name, gpus, None)
        return None
    planned = drop_graphs_if_too_big(planned, config, min(each.free for each in gpus.values()))
    size = min((each.total for each in gpus.values() if not each.fault), default=0)
    remedy = fitting_setting(planner, backend.world_size, size) if 0 < size < planned.needed else ""
    refuse_unfit(backend.name, gpus, planned.needed, remedy)
    return planned


def fitting_setting(planner: MemoryPlanner, workers: int, size: int) -> str:
    """Advice for a run that needs more than the `size` bytes of a GPU: the first setting with which it fits."""
    config = planner.material.config

    def needed_if_fits(changed: Config) -> int | None:
        if changed.model.max_length != config.model.max_length:
            return None  # rows would have to be tokenised again
        needed = drop_graphs_if_too_big(planner.plan(changed, "cuda", workers), changed, size).needed
        return needed if needed <= size else None

    remedy = first_that_fits(config, needed_if_fits)
    if remedy is None:
        return "no single setting would make it fit; andon plan says what needs most"
    return f"it would fit with --set {remedy.setting} ({remedy.price})"


def hold_to_budget(backend: Backend, step: int, planned: int) -> Mapping[str, int]:
    """Bytes for the summary: `planned` and `peak` of GPUs, `process_peak` of this process. Collective if ranks are on
    GPUs. A peak above the plan is only a warning, since results are still right."""
    process = {"process_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if not planned:
        return process
    local = [
        torch.tensor([torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0], device=device)
        for device in backend.devices
    ]
    peaks = [int(peak) for peak in backend.gather(local)]
    judgement = Judgement(BUDGET, Peaks(peaks, planned, step))
    for law in judgement.broken():
        if 0 in backend.ranks:
            say(f"warning: {judgement.violation(law)}")
    return {"planned": planned, "peak": max(peaks), **process}
