"""What one replica of a run will need: its bytes, phase by phase, found without a model that has memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from andon.config.schema import SFT, Config
from andon.console.problems import InputError, Problem
from andon.model.adapter import attach, trainable_parameters
from andon.model.batches import EvaluationBatching, padded_length
from andon.model.build import build_shape
from andon.model.memory import (
    MemoryPlan,
    checkpoint_fake_layers,
    plan_bytes,
    traced_activations,
    traced_evaluation,
    with_fake_weights,
)
from andon.training.material import Material, padding_multiple


def largest(material: Material, config: Config) -> tuple[int, int]:
    """Rows and padded length of the largest micro-batch."""
    rows = -(-min(material.plan.batch_size, len(material.plan.ids)) // config.training.micro_batches)
    lengths = material.task.lengths[list(material.plan.ids)]
    longest = min(int(lengths.max()), config.model.max_length)
    return rows, padded_length(longest, padding_multiple(config), config.model.max_length)


def evaluation_batching(material: Material, config: Config) -> EvaluationBatching:
    """In which batches rows of `config` are scored: by M, rows and lengths alone."""
    rows, length = largest(material, config)
    return EvaluationBatching(rows * length, padding_multiple(config), config.model.max_length)


_CAPTURED_BYTES = 1 << 33
"""Of a micro-batch whose passes are captured by themselves."""


class NotPlannable(InputError):
    """A model that cannot be followed on tensors without memory: it may well be trained."""


class Study:
    """Plans of single replicas, each setting looked at once."""

    def __init__(self, material: Material) -> None:
        self.material = material
        self._known: dict[Any, tuple[int, int]] = {}

    def sizes(self, config: Config) -> tuple[int, int]:
        """Weights in all, and those that train."""
        model = self._shape(config)
        trained = sum(parameter.numel() for parameter in trainable_parameters(model).values())
        return sum(parameter.numel() for parameter in model.parameters()), trained

    def _shape(self, config: Config) -> Any:
        interface = self.material.interface
        model = build_shape(config.model, interface, config.seed)
        return attach(model, config.adapter, config.seed, interface.new_tokens)

    def plan(self, config: Config, kind: str, workers: int) -> MemoryPlan:
        """What one of `workers` replicas on a device of `kind` needs, without what lies outside of torch.

        Of compiled passes the plan is a bound: what eager ones need, and what captured graphs hold. Raises
        `NotPlannable` where the model's own code fails on tensors that hold nothing.
        """
        try:
            return self._plan(config, kind, workers)
        except InputError:
            raise
        except Exception as error:
            reason = next(iter(str(error).splitlines()), "")
            what = f"its memory cannot be planned ({type(error).__name__}: {reason})"
            raise NotPlannable([Problem("model.base", what)]) from error

    def _plan(self, config: Config, kind: str, workers: int) -> MemoryPlan:
        rows, length = largest(self.material, config)
        evaluated = _evaluated(self.material, config)
        model, training, optimizer = self._shape(config), config.training, config.optimizer
        plan = plan_bytes(
            model,
            trainable_parameters(model),
            optimizer.name,
            training.micro_batches,
            0,  # of a micro-batch: found below, because that leaves fake weights in the model
            world_size=workers,
            momentum=optimizer.momentum,
            kind=kind,
        )
        checkpointing = training.activation_checkpointing
        asked = (config.model.dtype, config.adapter, checkpointing, rows, length, evaluated, kind)
        if asked not in self._known:
            self._known[asked] = _phases(model, checkpointing, (rows, length), evaluated, kind)
        activations, evaluation = self._known[asked]
        # The graphs keep their memory while an evaluation, or an eager pass of another shape, runs beside them.
        held = activations if kind == "cuda" and training.compile == "graphs" else 0
        graphs = min(held, evaluation)
        if captures(config, kind, activations):
            graphs = (
                activations + plan.workspace
            )  # they are captured on a stream of their own, where products have theirs
        moments = 0 if updated_on_host(config, kind) else plan.moments
        return replace(plan, activations=activations, evaluation=evaluation, graphs=graphs, moments=moments)


def captures(config: Config, kind: str, activations: int | None) -> bool:
    """Whether a replica on a device of `kind` has its eager passes as CUDA graphs. activations: bytes of a micro-batch,
    which the graphs hold beside those of eager passes; None: not known. A large one gains little: its kernels take
    longer than their launches. Unpacked rows of `sft` gain nothing: their passes hardly ever repeat a shape.
    """
    training, asked = config.training, config.run.cuda_graphs
    repeats = config.task != SFT or training.packing
    fits = activations is not None and activations <= _CAPTURED_BYTES and repeats
    possible = kind == "cuda" and config.run.backend in ("inline", "nccl")
    possible = possible and training.compile == "off" and not training.activation_checkpointing
    return possible and asked != "never" and (fits or asked == "always")


def with_graphs_that_fit(plan: MemoryPlan, config: Config, free: int) -> MemoryPlan:
    """`plan`, without CUDA graphs where `free` bytes have no room for them and nobody asked: the bits are the same."""
    unasked = config.run.cuda_graphs == "auto" and config.training.compile == "off"  # compiled ones are asked for
    return replace(plan, graphs=0) if unasked and plan.needed > free else plan


def updated_on_host(config: Config, kind: str) -> bool:
    """Whether a replica on a device of `kind` has its update made on the CPU, on buffers of its own there."""
    return config.run.backend == "mixed" and kind == "cuda"


def _evaluated(material: Material, config: Config) -> tuple[int, int]:
    """Rows and padded length of the largest batch that is scored; packs are trained on, their rows are scored alone."""
    scored = (material.validation_task, material.validation_ids), (material.evaluation_task, material.evaluation_ids)
    lengths = [task.lengths[list(ids)].clamp(max=config.model.max_length).tolist() for task, ids in scored if ids]
    batching = evaluation_batching(material, config)
    return max((batching.largest(each) for each in lengths), key=lambda shape: (shape[0] * shape[1], shape[1]))


def _phases(
    model: Any, checkpointing: bool, trained: tuple[int, int], scored: tuple[int, int], kind: str
) -> tuple[int, int]:
    """Bytes of a micro-batch and of a batch of an evaluation, run eagerly; trained, scored: rows and length of each."""
    with with_fake_weights(model):
        evaluation = traced_evaluation(model, *scored, kind)
        if checkpointing:
            checkpoint_fake_layers(model, kind)
        return traced_activations(model, *trained, kind), evaluation


def smaller_settings(config: Config) -> Sequence[tuple[str, Config, str]]:
    """Settings that may need less memory: as they are written, the configuration with them, and what they cost. First
    those that cost no accuracy."""
    training, changes = config.training, []

    def change(section: str, key: str, value: Any, price: str) -> None:
        part = getattr(config, section).model_copy(update={key: value})
        written = str(value).lower() if isinstance(value, bool) else value
        changes.append((f"{section}.{key}={written}", config.model_copy(update={section: part}), price))

    if config.run.cuda_graphs == "always":
        change("run", "cuda_graphs", "never", "same bits; small models wait for their launches")
    more = min(2 * training.micro_batches, training.batch_size)
    while more > training.micro_batches and more <= 8 * training.micro_batches:
        change("training", "micro_batches", more, "another result, as valid")
        more = 0 if more == training.batch_size else min(2 * more, training.batch_size)
    if not training.activation_checkpointing:
        change("training", "activation_checkpointing", True, "same bits if not compiled; about a third more time")
    if config.model.dtype == "float32" and config.adapter.kind == "lora":
        change("model", "dtype", "bfloat16", "frozen weights rounded to 8 bits of precision")
    if config.model.max_length >= 32:
        change("model", "max_length", config.model.max_length // 2, "longer texts are cut there")
    if config.adapter.kind == "none":
        change("adapter", "kind", "lora", "trains an adapter instead of all weights")
    elif config.adapter.r > 1:
        change("adapter", "r", config.adapter.r // 2, "a smaller adapter")
    return changes
