"""The parts of one run, put together on this process's backend.

With a process group every rank does this; without one this process holds all ranks. Only rank 0 writes files.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from andon.backend.base import Backend
from andon.backend.clocked import ClockedBackend
from andon.backend.determinism import demand_determinism
from andon.backend.devices import placement
from andon.backend.group import GroupBackend, groups_of
from andon.backend.inprocess import InlineBackend, ThreadsBackend
from andon.backend.machine import look_at, none_works, of_all_ranks, refuse_unfit, refuse_without_nccl
from andon.config.schema import IN_PROCESS, Config
from andon.launch.clock import StepClock
from andon.launch.joining import join
from andon.launch.patience import Bounds
from andon.launch.pulse import Pulse
from andon.launch.rank import end_now, watched_by
from andon.messages import say
from andon.model.adapter import attach
from andon.model.build import build_base
from andon.model.compiled import compile_backbone
from andon.model.lengths import padded_lengths, shapes_of
from andon.model.masks import masking_of
from andon.problems import InputError, Problem
from andon.run.folder import RunFolder
from andon.run.provenance import environment
from andon.step.audit import AuditSpec, default_every
from andon.step.optimizer import OptimizerSpec
from andon.step.replica import Replica
from andon.step.step import TrainingStep
from andon.training.budget import agree_on_devices
from andon.training.material import Material, padding_multiple, prepare
from andon.training.replicas import build_replicas
from andon.training.speed import shares_of
from andon_contracts.policy import suspended


@dataclass
class Session:
    """The parts of one run. `started`: when its command began, in seconds since the epoch. clock: where it is.

    initial_weights, base: digests of the trainable and of the frozen weights as built, before anything is restored.
    planned_bytes: what each GPU replica may need; 0 where no rank is on a GPU.
    """

    config: Config
    folder: RunFolder
    material: Material
    backend: Backend
    replicas: list[Replica]
    step: TrainingStep
    environment: Mapping[str, Any]
    started: float
    initial_weights: int
    base: int
    clock: StepClock
    planned_bytes: int = 0

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes files."""
        return self.backend.ranks[0] == 0

    @property
    def models(self) -> list[nn.Module]:
        """The model of each local replica."""
        return [replica.model for replica in self.replicas]

    @property
    def primary(self) -> Replica:
        """The first local replica; all are equal."""
        return self.replicas[0]


@contextmanager
def assembled(
    config: Config, folder: RunFolder, started: float | None = None, *, writing: bool = True
) -> Iterator[Session]:
    """The parts of a run on this process's backend; rank 0 owns the run folder meanwhile. Nothing is trained yet.

    writing: whether the folder is to be written; otherwise it is left as it is, and nobody owns it.
    Raises `InputError` for what the user got wrong, a folder that another process owns included.
    """
    with ExitStack() as stack:
        if not config.contracts.enabled:
            stack.enter_context(suspended())
        clock = StepClock(compiles=config.training.compile != "off")
        backend = stack.enter_context(_backend(config, clock))
        if writing and backend.ranks[0] == 0:
            stack.enter_context(folder.open_for_writing())
        yield _assemble(config, folder, backend, time.time() if started is None else started, clock)


@contextmanager
def _backend(config: Config, clock: StepClock) -> Iterator[Backend]:
    """The configured backend; in a rank process it joins the process group, which `andon.launch.rank` takes down."""
    torch.set_num_threads(1)
    name, devices, note = placement(config.run.backend, config.run.workers, config.run.devices)
    demand_determinism(devices)
    if name in IN_PROCESS:
        backend: Backend = (InlineBackend if name == "inline" else ThreadsBackend)(devices)
        try:
            yield backend
        finally:
            backend.close()
        return
    refuse_without_nccl(name)
    store, rank, world = join(groups_of(name), config.run.timeout_s)
    watched_by(Pulse(store, rank, world, clock, Bounds(config.run.timeout_s, config.run.step_deadline_s), end_now))
    if note and rank == 0:
        say(note)
    if world != config.run.workers:
        raise InputError([Problem("run.workers", f"{config.run.workers} were asked for, {world} ranks were started")])
    name, device = _usable(config, name, devices, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    joined = GroupBackend(name, device)
    try:
        yield ClockedBackend(joined, clock)
    finally:
        joined.close()


def _usable(config: Config, name: str, devices: Sequence[torch.device], rank: int) -> tuple[str, torch.device]:
    """The backend and the device of this rank, its first kernel run; the CPU where no GPU that was found works.

    Collective where ranks are on GPUs. Raises `InputError` on every rank where some work and some do not, where those
    that were asked for by name do not, and for GPUs of different models under `nccl`.
    """
    device = devices[rank]
    if all(each.type != "cuda" for each in devices):
        return name, device
    found = of_all_ranks(look_at(device.index or 0) if device.type == "cuda" else None)
    fault = "" if config.run.devices else none_works(found)
    if not fault:
        refuse_unfit(name, found, None)
        return name, device
    if rank == 0:
        say(f"no GPU works here ({fault}): training on the CPU instead of {name} (clause cpu-fallback)")
    return "gloo" if name == "nccl" else name, torch.device("cpu")


def audit_spec(config: Config, world_size: int) -> AuditSpec:
    """The audit that `config` asks for on `world_size` ranks; by default it costs a hundredth of the work."""
    every, coverage = config.contracts.audit_every, config.contracts.audit_coverage
    return AuditSpec(
        every=default_every(world_size, config.training.micro_batches) if every is None else every,
        coverage=None if coverage == "all" else coverage,
        seed=config.seed,
    )


def _compile(config: Config, replicas: Sequence[Replica], *, telling: bool) -> None:
    """Have the backbones on GPUs compiled as `config` asks; on a CPU they run as they are, which is said."""
    training = config.training
    if training.compile == "off":
        return
    lengths = padded_lengths(config.model.max_length, padding_multiple(config))
    shapes = shapes_of(training.batch_size, training.micro_batches, lengths)
    for replica in replicas:
        if replica.device.type == "cuda":
            compile_backbone(replica.model, training.compile, shapes)
    if telling and any(replica.device.type != "cuda" for replica in replicas):
        say(f"training.compile={training.compile} is for GPUs: on the CPU the model runs eagerly")


def _tell_of_masks(config: Config, backend: Backend) -> None:
    training = config.training
    named = [name for name in ("compile", "activation_checkpointing") if getattr(training, name) not in (False, "off")]
    if backend.name == "mixed" and backend.ranks[0] == 0 and named:
        say(f"mixed: with training.{named[0]} each GPU draws dropout of its own, so who computes changes the result")


def _shares(
    config: Config, backend: Backend, replica: Replica, material: Material, folder: RunFolder
) -> tuple[int, ...] | None:
    """Micro-batches of each rank where they differ; without exact sums each rank computes its rows at once."""
    if not config.training.exact:
        return None
    return shares_of(backend, replica, material.task, material.plan, config.training.micro_batches, folder.ledger)


def _assemble(config: Config, folder: RunFolder, backend: Backend, started: float, clock: StepClock) -> Session:
    material = prepare(config)
    planned_bytes = agree_on_devices(config, material, backend)
    model = attach(build_base(material.model), material.adapter, config.seed)
    optimizer = config.optimizer
    first, second = optimizer.betas
    spec = OptimizerSpec(optimizer.name, (first, second), optimizer.eps, optimizer.weight_decay, optimizer.momentum)
    replicas = build_replicas(
        model,
        backend,
        spec,
        config.seed,
        material.task,
        material.plan.ids[0],
        checkpointing=config.training.activation_checkpointing,
        compiled=config.training.compile != "off",
    )
    for replica in replicas:
        masking_of(replica.model, replica.device)  # now, while it has the weights that every start of this run has
    _compile(config, replicas, telling=backend.ranks[0] == 0)
    _tell_of_masks(config, backend)
    step = TrainingStep(
        backend,
        replicas,
        material.task,
        config.training.micro_batches,
        optimizer.clip_norm,
        audit_spec(config, backend.world_size),
        exact=config.training.exact,
        shares=_shares(config, backend, replicas[0], material, folder),
    )
    accelerators = [torch.cuda.get_device_name(device) for device in backend.devices if device.type == "cuda"]
    return Session(
        config=config,
        folder=folder,
        material=material,
        backend=backend,
        replicas=replicas,
        step=step,
        environment=environment(torch.get_num_threads(), accelerators),
        started=started,
        initial_weights=replicas[0].weights_digest(),
        base=replicas[0].base_digest(),
        planned_bytes=planned_bytes,
        clock=clock,
    )
