"""Assembles a run on this process's backend.

In a process group every rank does so; without one this process holds all ranks. Only rank 0 writes files.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from andon.backend.base import Backend, GroupBackend, InlineBackend, groups_of
from andon.backend.devices import (
    NO_GPU,
    demand_determinism,
    look_at,
    none_works,
    of_all_ranks,
    placement,
    refuse_unfit,
    refuse_without_nccl,
)
from andon.config.schema import Config
from andon.console.messages import InputError, say
from andon.launch.context import RankContext, is_rank
from andon.launch.heartbeat import Heartbeat, Timeouts
from andon.launch.joining import join
from andon.launch.portable import FORM, portable_kernels, require_in_effect
from andon.launch.rank import end_now, watched_by
from andon.model.build import facts_of
from andon.model.masks import padded_lengths, shapes_of
from andon.run.atomic import write_whole
from andon.run.folder import RunFolder
from andon.run.provenance import environment
from andon.training.build import Run, build_run
from andon.training.choices import placed, settings_line
from andon.training.forecast import agree_on_devices, evaluation_batching, uses_cuda_graphs
from andon.training.material import Material, padding_multiple, prepare, warnings_of
from andon.training.rows import is_tokenised_as_read, notes, skip_notes, with_task
from andon.training.trainer import Evaluator
from andon_contracts.liveness.diagnosis import StepClock
from andon_contracts.policy import suspended


@dataclass
class Session:
    """A run with its folder, its data and its clock.

    started: start of its command, by `time.monotonic`. began: the same in seconds since the epoch, to compare with file
    times. planned_bytes: planned memory of each GPU replica; 0 on CPUs.
    """

    config: Config
    folder: RunFolder
    material: Material
    run: Run
    environment: Mapping[str, Any]
    started: float
    began: float
    clock: StepClock
    evaluator: Evaluator
    planned_bytes: int = 0


@contextmanager
def assembled(
    config: Config, folder: RunFolder, started: float | None = None, *, writing: bool = True
) -> Iterator[Session]:
    """Context manager: a run assembled on this process's backend, not yet trained. Inside, rank 0 owns the run folder.

    writing: False leaves the folder unchanged and unowned. Raises `InputError` for a mistake of the user, and for a
    folder that another process owns.
    """
    config = with_task(placed(config)[0])
    torch.set_num_threads(1)
    with ExitStack() as stack:
        if config.run.portable:
            require_in_effect()
            stack.enter_context(portable_kernels())
        if not config.contracts.enabled:
            stack.enter_context(suspended())
        if writing and (not is_rank() or RankContext.from_environment().rank == 0):
            stack.enter_context(folder.open_for_writing())
        # Before the rendezvous, as tokenizing many rows takes long.
        material = prepare(config, folder.tokens if writing else None)
        config, plan, task = material.config, material.plan, material.task
        own, compiling = config.run, config.training.compile
        clock = StepClock(compiles=compiling != "off")

        # The backend
        name, devices, note = placement(own)
        demand_determinism(devices)
        backend: Backend = InlineBackend(devices)
        if name != "inline":
            refuse_without_nccl(name)
            store, rank, world = join(groups_of(name), own.timeout_s)
            timeouts = Timeouts(own.timeout_s, own.step_deadline_s)
            watched_by(Heartbeat(store, rank, world, clock, timeouts, end_now))
            if note and rank == 0:
                say(note)
            if world != own.workers:
                raise InputError(f"run.workers: {own.workers} were requested, {world} ranks were started")
            name, device = _usable(config, name, devices, rank)
            if device.type == "cuda":
                torch.cuda.set_device(device)
            backend = joined = GroupBackend(name, device, clock=clock)
            stack.callback(joined.close)
        logs = backend.ranks[0] == 0

        # The model and its replicas
        started = time.monotonic() if started is None else started
        memory = agree_on_devices(material, backend)
        if logs and compiling != "off" and any(device.type != "cuda" for device in backend.devices):
            say(f"training.compile={compiling} is for GPUs: on the CPU the model runs eagerly")
        if logs and backend.name == "mixed":
            say("mixed: a GPU drops other activations than a CPU, so the result depends on which rank computes what")
        captured = uses_cuda_graphs(config, backend.devices[0].type, memory.activations if memory else None)
        captured = captured and (memory is None or memory.graphs > 0)  # a GPU may have no room for them
        lengths = padded_lengths(config.model.max_length, padding_multiple(config))
        shapes = shapes_of(plan.batch_size, plan.micro_batches, lengths)
        run = build_run(config, material.interface, backend, task, plan, shapes=shapes, capture=captured)
        model = run.primary.model
        task.require_fit(model, run.primary.device)
        if logs:
            chosen = [settings_line(config)] if config.model.base is not None else []
            of_rows = notes(material.rows) if is_tokenised_as_read(config) else ()
            of_model = (*facts_of(model).notes, *warnings_of(model, material.tokenizer))
            for line in (*chosen, *of_model, *task.notes, *of_rows, *skip_notes(material.unusable)):
                say(line)
            skipped = (*material.rows.skipped, *material.unusable)
            if skipped and writing:
                write_whole(folder.skipped, "".join(f"{problem}\n" for problem in skipped).encode())
                say(f"note: all {len(skipped)} skipped rows are listed in {folder.skipped}")
        accelerators = [torch.cuda.get_device_name(device) for device in backend.devices if device.type == "cuda"]
        portable = FORM if own.portable else None
        yield Session(
            config=config,
            folder=folder,
            material=material,
            run=run,
            environment=environment(torch.get_num_threads(), accelerators, portable=portable),
            started=started,
            began=time.time() - (time.monotonic() - started),
            clock=clock,
            evaluator=Evaluator(backend, run.replicas, evaluation_batching(material, config)),
            planned_bytes=memory.total if memory else 0,
        )


def _usable(config: Config, name: str, devices: Sequence[torch.device], rank: int) -> tuple[str, torch.device]:
    """Run a first kernel on this rank's device. Returns backend and device; the CPU if no GPU works and `cpu_fallback`.

    Collective if ranks are on GPUs. Raises `InputError` on every rank if only some GPUs work, if those named in
    `run.devices` do not, and for GPUs of different models under `nccl`.
    """
    device = devices[rank]
    if all(each.type != "cuda" for each in devices):
        return name, device
    looks = of_all_ranks(look_at(device.index or 0) if device.type == "cuda" else None)
    fault = "" if config.run.devices else none_works(looks)
    if not fault:
        refuse_unfit(name, looks, None)
        return name, device
    if not config.run.cpu_fallback:
        raise InputError.at("run.backend", f"{name} needs a GPU that works, and none does ({fault}); {NO_GPU}")
    if rank == 0:
        say(f"no GPU works here ({fault}): training on the CPU instead of {name} (clause cpu-fallback)")
    return "gloo" if name == "nccl" else name, torch.device("cpu")
