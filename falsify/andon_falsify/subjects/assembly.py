"""Our trainer put together for a case, with watchers around its task, its backend and its replicas."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import nn

from andon.backend.base import Backend, InlineBackend
from andon.config.schema import Adapter, Config, Contracts, Model, Optimizer, Training
from andon.model.adapter import trainable_parameters
from andon.model.build import ModelInterface
from andon.model.memory import plan_bytes
from andon.step.plan import BatchPlan
from andon.step.replica import Replica
from andon.tasks.text import ClassificationTask
from andon.training.build import Run, build_model, build_run
from andon_falsify.subjects.case import PAD, VOCABULARY, Case
from andon_falsify.subjects.interpose import Place, WatchedBackend, WatchedTask
from andon_falsify.subjects.meter import StorageMeter, activation_bytes
from andon_falsify.subjects.placing import devices_of, place_of_bits
from andon_falsify.subjects.trace import LeafMasks, Sightings, copied, digest


@dataclass
class Parts(Run):
    """A run that is ready to begin, and what a fault can be planted in.

    Everything belongs to this run alone, so nothing needs to be put back. seen: what its watchers have noted. place:
    which rank a thread is working for.
    """

    backend: WatchedBackend
    task: WatchedTask
    case: Case
    seen: Sightings
    place: Place

    @property
    def by_rank(self) -> dict[int, Replica]:
        """The replicas of this process by rank."""
        return dict(zip(self.backend.ranks, self.replicas, strict=True))


@lru_cache(maxsize=8)
def _pristine(model: Model, adapter: Adapter, seed: int, interface: ModelInterface) -> nn.Module:
    return build_model(Config(seed=seed, model=model, adapter=adapter), interface)


def config_of(case: Case) -> Config:
    """The configuration of the run of `case`."""
    return Config(
        seed=case.seed,
        model=Model(
            architecture=case.architecture,
            hidden_size=case.hidden,
            num_hidden_layers=case.layers,
            num_attention_heads=case.heads,
            num_key_value_heads=case.heads,
            intermediate_size=case.inner,
            dropout=case.dropout,
            max_length=case.longest,
        ),
        adapter=Adapter(
            kind="lora" if case.rank else "none", r=case.rank or 1, alpha=2.0 * (case.rank or 1), dropout=case.dropout
        ),
        optimizer=Optimizer(
            name=case.optimizer,
            lr=case.lr,
            weight_decay=case.weight_decay,
            momentum=case.momentum,
            clip_norm=case.clip_norm,
        ),
        training=Training(checkpoint_every=case.checkpoint_every),
        contracts=Contracts(base_every=2, audit_every=0),
    )


def interface_of(case: Case) -> ModelInterface:
    """What the rows of `case` require of its model."""
    return ModelInterface("classification", tuple(map(str, range(case.rows.classes))), VOCABULARY + 1, PAD)


def model_of(case: Case) -> nn.Module:
    """The model of `case` before training: the same bits on every call."""
    config = config_of(case)
    return copy.deepcopy(_pristine(config.model, config.adapter, config.seed, interface_of(case)))


def task_of(case: Case) -> ClassificationTask:
    """The trainer's own task over the rows of `case`."""
    return ClassificationTask(
        case.rows.tokens,
        case.rows.labels,
        num_labels=case.rows.classes,
        vocab_size=VOCABULARY,
        pad_id=PAD,
        class_weights=case.class_weights,
        max_length=case.longest,
    )


def plan_of(case: Case) -> BatchPlan:
    """The trainer's own plan of batches."""
    return BatchPlan(
        tuple(range(len(case.rows))), case.batch_size, case.micro_batches, case.seed, case.epochs, case.max_steps
    )


def put_together(case: Case, backend: Backend, meters: dict[int, StorageMeter], *, late: bool | None = None) -> Parts:
    """The trainer of `case` on `backend`, as `andon train` builds it, with watchers around its backend and its task.

    meters: one for each local rank where bytes are to be counted, else empty. late: see `TrainingStep`.
    """
    place, seen = Place(), Sightings(backend.ranks, place_of_bits(devices_of(case.backend, case.world)))
    inside: Callable[[int], AbstractContextManager[object]] = nullcontext
    if meters and in_process(backend):
        inside = meters.__getitem__
    plan, inner = plan_of(case), task_of(case)

    def on_leaf(rank: int, rows: tuple[int, ...], masks: LeafMasks) -> None:
        if not seen.at:  # the builder's own look at the model, before the first update
            return
        seen.of(rank, seen.at).leaves.append(rows)
        if case.values:
            seen.masks[seen.at, rows] = masks

    task = WatchedTask(inner, place, on_leaf, _poisoner(case, plan, seen))
    watched = WatchedBackend(backend, place, inside)
    run = build_run(config_of(case), interface_of(case), watched, task, plan, late=late, model=model_of(case))
    if case.values:
        for model in (replica.model for replica in run.replicas):
            task.watch(model)
    if meters:
        seen.planned_bytes = _planned_bytes(case, run.primary, inner, plan)
    return Parts(**vars(run), case=case, seen=seen, place=place)


def in_process(backend: Backend) -> bool:
    """Whether ranks share this process, so that bytes are counted inside of each one's work, in its own thread."""
    return isinstance(backend, InlineBackend)


def _poisoner(case: Case, plan: BatchPlan, seen: Sightings) -> Callable[[tuple[int, ...]], str]:
    """Says for the rows of a micro-batch which poison it gets at the step that is now being computed."""
    poison = case.poison
    if poison is None:
        return lambda ids: ""
    rows = plan.batch(poison.step).micro_batches(case.micro_batches)[poison.leaf]

    def poisoned(ids: tuple[int, ...]) -> str:
        return poison.kind if seen.at == poison.step and rows and rows[0] in ids else ""

    return poisoned


def describe(parts: Parts) -> None:
    """Note the state that the run starts from, as plain copies; to be called after faults are planted."""
    case, replicas, seen = parts.case, parts.replicas, parts.seen
    for rank, replica in zip(seen.ranks, replicas, strict=True):
        named = trainable_parameters(replica.model)
        # In the order of their addresses, which is that of the flat buffer whatever anyone says of it.
        in_flat_order = sorted(named.items(), key=lambda item: item[1].data_ptr())
        seen.layouts[rank] = tuple((name, tuple(p.shape), str(p.dtype)) for name, p in in_flat_order)
        seen.start[rank] = digest(named)
        seen.frozen[rank] = (digest(frozen_of(replica.model)), "")
    if case.values and seen.ranks[0] == 0:
        model: Any = replicas[0].model
        seen.state = copied(model.state_dict())
        base = model.get_base_model() if case.rank else model
        seen.config = cast(dict[str, Any], base.config.to_dict())


def frozen_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """What must not change, by name: parameters that do not train, and buffers."""
    frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    return frozen | dict(model.named_buffers())


def _planned_bytes(case: Case, replica: Replica, task: ClassificationTask, plan: BatchPlan) -> int:
    leaves = [
        leaf
        for step in range(1, plan.total_steps + 1)
        for leaf in plan.batch(step).micro_batches(case.micro_batches)
        if leaf
    ]
    most = max(activation_bytes(replica.model, task, task.load(leaf, replica.device)) for leaf in leaves)
    return plan_bytes(
        replica.model,
        trainable_parameters(replica.model),
        case.optimizer,
        case.micro_batches,
        most,
        world_size=case.world,
        momentum=case.momentum,
    ).total
