"""Builds a `Run` from a configuration, a backend, a task and a plan.

`andon train`, the coordinator and the falsifier's subject are built here, so that the falsifier tests the shipped
trainer. An observer passes its own backend or task, which wraps the trainer's.
"""

from __future__ import annotations

import copy
import traceback
from dataclasses import dataclass

import torch
from torch import nn

from andon.backend.base import Backend
from andon.config.schema import DPO, Config
from andon.console.messages import InputError
from andon.model.adapter import attach, trainable_parameters
from andon.model.build import ModelInterface, build_base, checkpoint_layers, require_finite, without_adapter
from andon.model.compiled import compile_backbone
from andon.model.masks import Shape, masking_of, padding_of
from andon.model.quantize import NONE, quantize
from andon.run.checkpoint import Checkpoint
from andon.step.captured import CapturedPasses
from andon.step.flat import DIVIDING
from andon.step.micro_batch import Task, refuse_unkeyed
from andon.step.plan import BatchPlan, Schedule
from andon.step.replica import WEIGHTS, Replica, base_digest, restore_state
from andon.step.step import TrainingStep
from andon_contracts.digest import hex64, tree_digest
from andon_contracts.violation import first_line, kind_of


@dataclass
class Run:
    """A run that is ready to train.

    initial_weights, base: digests of the trainable and frozen weights as built, before a checkpoint is restored.
    frozen: digest of the frozen weights in the replicas, another than `base` if they are quantized there.
    """

    config: Config
    backend: Backend
    task: Task
    plan: BatchPlan
    replicas: list[Replica]
    step: TrainingStep
    schedule: Schedule
    initial_weights: int
    base: int
    frozen: int

    @property
    def primary(self) -> Replica:
        """The first local replica; all are equal."""
        return self.replicas[0]

    @property
    def writes(self) -> bool:
        """Whether this process holds rank 0, which writes the files."""
        return self.backend.ranks[0] == 0

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore every replica from `checkpoint`.

        Raises `InputError` for a checkpoint of another model or plan, and for weights that are not finite.
        """
        weights = {name: value for name, value in checkpoint.tensors.items() if name.startswith(f"{WEIGHTS}/")}
        require_finite(weights, checkpoint.path)
        try:
            if checkpoint.step > self.plan.total_steps:
                raise ValueError(f"it is of step {checkpoint.step}, and the run has {self.plan.total_steps}")
            for replica in self.replicas:
                restore_state(replica, checkpoint.tensors, checkpoint.step)
        except ValueError as error:
            raise InputError.at(checkpoint.path, f"is not a checkpoint of this run: {error}") from error
        if hex64(tree_digest(checkpoint.tensors)) != checkpoint.digest:
            raise InputError.at(checkpoint.path, "was changed while it was read; resume again")

    def load_weights(self, checkpoint: Checkpoint) -> None:
        """Load only the trained weights into every replica. Raises `InputError` for weights of another model."""
        for replica in self.replicas:
            for name, view in replica.parameters.weight_views().items():
                saved = checkpoint.tensors.get(f"{WEIGHTS}/{name}")
                if saved is None or saved.shape != view.shape:
                    raise InputError.at(checkpoint.path, f"has no weights {name} of this run's model")
                view.copy_(saved)


def build_run(
    config: Config,
    interface: ModelInterface,
    backend: Backend,
    task: Task,
    plan: BatchPlan,
    *,
    shapes: frozenset[Shape] = frozenset(),
    capture: bool = False,
    late: bool | None = None,
    model: nn.Module | None = None,
) -> Run:
    """Build the run of `config` on this process's `backend`, without training. Collective if ranks are on GPUs.

    The number of micro-batches is the plan's. shapes, capture: see `build_replicas`. late: see `TrainingStep`. model: a
    result of `build_model`, which becomes the first replica's. Raises `InputError` for a model that cannot be trained.
    """
    built = build_model(config, interface, backend.devices[0]) if model is None else model
    loaded = None if config.model.quantize == NONE else base_digest(built, backend.devices[0])
    replicas = build_replicas(built, config, backend, task, plan.ids[0], shapes=shapes, capture=capture)
    clip_norm, frozen = config.optimizer.clip_norm, replicas[0].base_digest()
    return Run(
        config=config,
        backend=backend,
        task=task,
        plan=plan,
        replicas=replicas,
        step=TrainingStep(backend, replicas, task, plan.micro_batches, clip_norm, config.contracts, late=late),
        schedule=Schedule(config, plan.total_steps),
        initial_weights=replicas[0].weights_digest(),
        base=frozen if loaded is None else loaded,
        frozen=frozen,
    )


def build_model(config: Config, interface: ModelInterface, device: torch.device | None = None) -> nn.Module:
    """Build the model with its adapter, not quantized, with the same bits on every call, on the CPU.

    For dpo a base's own dropout becomes `model.dropout`, by default 0. device: where `attach` moves trained weights.
    Raises `InputError`.
    """
    model = build_base(config.model, interface, config.seed)
    for module in model.modules() if config.task == DPO and config.model.base is not None else ():
        for name, value in [*vars(module).items()]:
            if type(value) in (int, float) and (name == "p" or "drop" in name):
                setattr(module, name, config.model.dropout)
    return attach(model, config.adapter, config.seed, interface.new_tokens)


def build_replicas(
    model: nn.Module,
    config: Config,
    backend: Backend,
    task: Task,
    sample: int,
    *,
    own_base: bool = False,
    shapes: frozenset[Shape] = frozenset(),
    capture: bool = False,
) -> list[Replica]:
    """Build one replica for each local rank of `backend`, all with the weights of `model` (on the CPU, as built).

    Trainable weights are separate; replicas on one device share the frozen base, unless `own_base`. The base is
    quantized once, on the first device. sample: id of a row of `task` for a trial pass. shapes: of the micro-batches,
    for compilation. capture: run eager passes on GPUs as CUDA graphs, with the same bits; not with activation
    checkpointing, which would read the device's generator inside a graph.

    Raises `InputError` for a model that cannot be trained to the same bits anywhere: its random numbers cannot be keyed
    by micro-batch, or it keeps running statistics.
    """
    compiling, placed, replicas = config.training.compile, dict[torch.device, nn.Module](), list[Replica]()
    try:
        for device in backend.devices:
            if device in placed:
                first = placed[device]
                shared = {} if own_base else {id(each): each for each in first.parameters() if not each.requires_grad}
                own = copy.deepcopy(first, memo=dict(shared))
            else:
                own = copy.deepcopy(model) if placed else model
                if not placed and config.model.quantize != NONE:
                    quantize(own, device)
                own = placed[device] = own.to(device)
            own.train()
            padding_of(own, device)  # now: the trial needs the weights as built, and no hooks
            if config.training.activation_checkpointing:
                checkpoint_layers(own)
            _try(own, task, sample, device)
            master_on = torch.device("cpu") if backend.name == "mixed" and device.type != "cpu" else None
            # The same condition as in `uses_cuda_graphs`.
            captures = capture and device.type == "cuda" and backend.name in ("inline", "nccl")
            passes = CapturedPasses(device) if captures else None
            trained = trainable_parameters(own)
            dividing = backend if backend.name in DIVIDING else None
            replicas.append(Replica(own, trained, config.optimizer, config.seed, device, master_on, passes, dividing))
    except InputError:
        raise
    except ValueError as error:
        raise InputError.at("model.base", str(error)) from error
    for replica in replicas:
        masking_of(replica.model, replica.device)  # now: the trial needs the weights as built
    # After the mask trials, which need the uncompiled model.
    for replica in replicas:
        if compiling != "off" and replica.device.type == "cuda":
            compile_backbone(replica.model, compiling, shapes)
            replica.compiled()
    return replicas


def _try(model: nn.Module, task: Task, sample: int, device: torch.device) -> None:
    batch = task.load([sample], device)
    try:
        refuse_unkeyed(lambda: task.loss_sum(model, batch), device)
    except Exception as error:
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        theirs = any(str(frame.f_globals.get("__name__")).startswith("transformers.models.") for frame in frames)
        if isinstance(error, InputError) or kind_of(error) != "failed" or not theirs:  # out of memory is not "failed"
            raise
        name = type(without_adapter(model)).__name__
        what = f"{name} fails on a row with these settings ({first_line(error)}); change model.base or model.max_length"
        raise InputError.at("model.base", what) from error
