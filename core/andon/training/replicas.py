"""Replicas of one model for the ranks of this process: trainable weights of their own, the frozen base shared."""

from __future__ import annotations

import copy

import torch
from torch import nn

from andon.backend.base import Backend
from andon.model.adapter import trainable_parameters
from andon.model.checkpointing import checkpoint_layers
from andon.problems import InputError, Problem
from andon.step.keyed import KeyedRandomness, needs_full_interception
from andon.step.optimizer import OptimizerSpec
from andon.step.replica import Replica
from andon.step.task import Task


def build_replicas(
    model: nn.Module,
    backend: Backend,
    optimizer: OptimizerSpec,
    seed: int,
    task: Task,
    sample: int,
    *,
    checkpointing: bool = False,
    compiled: bool = False,
) -> list[Replica]:
    """One replica for each local rank of `backend`, all with the weights of `model` (on the CPU, as built).

    sample: a row for the one forward pass that finds out how the model draws its random numbers. checkpointing: whether
    layers compute their activations again in the backward pass. compiled: whether the models on GPUs will be.
    In a `mixed` group GPUs drop what CPUs would, except where masks are drawn a second time or inside of kernels.
    Raises `InputError` for a model that cannot be trained to the same bits anywhere: whose random numbers cannot be
    keyed by micro-batch, or that keeps running statistics.
    """
    on_device: dict[torch.device, nn.Module] = {}
    replicas: list[Replica] = []
    try:
        for device in backend.devices:
            own = _placed(model, device, on_device)
            own.train()
            if checkpointing:
                checkpoint_layers(own, device)
            batch = task.load([sample], device)
            full = needs_full_interception(lambda m=own, b=batch: task.loss_sum(m, b), device)  # type: ignore[misc]
            as_cpus = draws_as_cpus(backend.name, device, checkpointing=checkpointing, compiled=compiled)
            randomness = KeyedRandomness(seed, device, intercept_all=full, host_drawn=as_cpus)
            if as_cpus:
                with randomness.micro_batch(0, 0), torch.no_grad():
                    task.loss_sum(own, batch)  # raises for what cannot be drawn as a CPU does
            master_on = torch.device("cpu") if backend.name == "mixed" and device.type != "cpu" else None
            replicas.append(Replica(own, trainable_parameters(own), optimizer, randomness, device, master_on))
    except InputError:
        raise
    except ValueError as error:
        raise InputError([Problem("model.base", str(error))]) from error
    return replicas


def draws_as_cpus(backend: str, device: torch.device, *, checkpointing: bool, compiled: bool) -> bool:
    """Whether dropout on `device` is to be what it would be on a CPU, since ranks on CPUs are beside it."""
    return backend == "mixed" and device.type != "cpu" and not checkpointing and not compiled


def _placed(model: nn.Module, device: torch.device, placed: dict[torch.device, nn.Module]) -> nn.Module:
    """A replica's model on `device`; a second one there shares the frozen tensors of the first."""
    if device not in placed:
        placed[device] = copy.deepcopy(model).to(device) if placed else model.to(device)
        return placed[device]
    first = placed[device]
    shared = {id(p): p for p in first.parameters() if not p.requires_grad}
    return copy.deepcopy(first, memo=dict(shared))
