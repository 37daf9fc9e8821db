"""Our trainer put together for a case, as `andon train` builds it, with watchers around its backend and its task."""

from __future__ import annotations

import copy
from array import array
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import nn

from andon.backend.base import Backend
from andon.config.schema import Adapter, Config, Contracts, Model, Optimizer, Training
from andon.data.chat import EncodedRow
from andon.model.adapter import trainable_parameters
from andon.model.build import ModelInterface
from andon.model.memory import plan_bytes
from andon.step.micro_batch import Task
from andon.step.plan import BatchPlan
from andon.step.replica import Replica
from andon.tasks.dpo import DpoTask
from andon.tasks.sft import SftTask, TokenRows
from andon.tasks.text import ClassificationTask
from andon.training.build import Run, build_model, build_run
from andon.training.reference import compute_references
from andon_falsify.subjects.case import BETA, PAD, VOCABULARY, Case
from andon_falsify.subjects.meter import StorageMeter, activation_bytes
from andon_falsify.subjects.placing import devices_of, place_of_bits
from andon_falsify.subjects.trace import Observations
from andon_falsify.subjects.watching import Watcher


@dataclass
class TrainerUnderTest(Run):
    """A run that is ready to start. It shares nothing with other runs, so a planted fault need not be removed.

    seen: what its watchers note. meters: count the bytes of each local rank; empty unless the case asks for it and all
    ranks are on the CPU.
    """

    task: Any
    case: Case
    seen: Observations
    meters: dict[int, StorageMeter]

    @property
    def by_rank(self) -> dict[int, Replica]:
        """The replicas of this process by rank."""
        return dict(zip(self.backend.ranks, self.replicas, strict=True))


def _config(case: Case) -> Config:
    model = Model(
        architecture=case.architecture,
        hidden_size=case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.heads,
        intermediate_size=case.inner,
        dropout=case.dropout,
        max_length=case.longest,
    )
    rank = case.rank or 1
    adapter = Adapter(kind="lora" if case.rank else "none", r=rank, alpha=2.0 * rank, dropout=case.dropout)
    chosen = {name: getattr(case, name) for name in ("lr", "weight_decay", "momentum", "clip_norm")}
    return Config(
        seed=case.seed,
        model=model,
        adapter=adapter,
        optimizer=Optimizer(name=case.optimizer, **chosen),
        training=Training(checkpoint_every=case.checkpoint_every),
        contracts=Contracts(base_every=2, audit_every=0),
    )


def _interface(case: Case) -> ModelInterface:
    if case.task != "classification":
        return ModelInterface("causal", (), VOCABULARY + 1, PAD)
    return ModelInterface("classification", tuple(map(str, range(case.rows.classes))), VOCABULARY + 1, PAD)


_untrained = lru_cache(maxsize=8)(build_model)


def model_of(case: Case) -> nn.Module:
    """The model of `case` before training: the same bits on every call."""
    config = _config(case)
    plain = Config(seed=config.seed, model=config.model, adapter=config.adapter)
    return copy.deepcopy(_untrained(plain, _interface(case)))


def task_of(case: Case) -> Task:
    """The trainer's own task over the rows of `case`."""
    if case.task == "classification":
        return ClassificationTask(
            case.rows.tokens,
            case.rows.labels,
            num_labels=case.rows.classes,
            vocab_size=VOCABULARY,
            pad_id=PAD,
            class_weights=case.class_weights,
            max_length=case.longest,
        )
    rows = [
        EncodedRow(row, array("i", tokens), array("f", case.token_weights(row)))
        for row, tokens in enumerate(case.rows.tokens)
    ]
    if case.task.endswith("dpo"):
        pairs = TokenRows.of(rows[: len(rows) // 2 * 2])
        task: SftTask = DpoTask(pairs, beta=BETA, pad_id=PAD, max_length=2 * case.longest)
    else:
        task = SftTask(rows, pad_id=PAD, max_length=case.longest)
    return task.packed(range(len(task))) if case.task.startswith("packed") else task


def plan_of(case: Case) -> BatchPlan:
    """The trainer's own plan of batches."""
    items = tuple(range(len(case.items)))
    return BatchPlan(items, case.batch_size, case.micro_batches, case.seed, case.epochs, case.max_steps)


def put_together(case: Case, backend: Backend, *, late: bool | None = None) -> TrainerUnderTest:
    """The trainer of `case` on `backend`. late: see `TrainingStep`."""
    place = place_of_bits(devices_of(case.backend, case.world))
    meters = {rank: StorageMeter() for rank in backend.ranks} if case.memory and place == "cpu" else {}
    seen, plan, task = Observations(backend.ranks, place), plan_of(case), task_of(case)
    watcher = Watcher(case, seen, plan, meters)
    watched = watcher.backend(backend), watcher.task(task)
    run = build_run(_config(case), _interface(case), *watched, plan, late=late, model=model_of(case))
    if isinstance(task, DpoTask):
        compute_references(run, task)
    if case.values:
        for replica in run.replicas:
            watcher.record_masks(replica.model)
    if meters:
        steps, model, device = range(1, plan.total_steps + 1), run.primary.model, run.primary.device
        leaves = [leaf for step in steps for leaf in plan.batch(step).micro_batches(case.micro_batches) if leaf]
        most = max(activation_bytes(model, task, task.load(leaf, device)) for leaf in leaves)
        sizes = (trainable_parameters(model), case.optimizer, case.micro_batches, most)
        seen.planned_bytes = plan_bytes(model, *sizes, world_size=case.world, momentum=case.momentum).total
    return TrainerUnderTest(**vars(run), case=case, seen=seen, meters=meters)
