"""DPO's reference: the log-probabilities that the model gives to every answer at step 0.

They are computed once, before a checkpoint is restored, and kept as columns beside the run's tokens. A resumed run
loads them. If the columns are lost, they are computed again from the initial weights, which every start builds anew;
their digest is part of the run's identity, so that other values end the resume.

The values of training pairs come from training passes: the same packs in batches of the same shapes, so that a margin
before the first update is zero also in half precision. Those of scored pairs come from the passes of an evaluation.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from andon.backend.base import Backend
from andon.config.load import config_digest
from andon.console.messages import say
from andon.model.build import evaluating
from andon.model.causal import hidden_of, row_log_probs
from andon.model.masks import EvaluationBatching
from andon.run.columns import Columns, Numbers, key_of, load_if_there, load_or_build
from andon.step.micro_batch import Batch
from andon.tasks.dpo import DpoTask
from andon.training.build import Run
from andon.training.material import Material, tasks_of
from andon.training.token_cache import mapped
from andon.training.trainer import gathered_outputs

REFERENCE = "reference"
COLUMNS: Mapping[str, str] = {"trained": "d", "validated": "d", "scored": "d"}
"""The `array` type code of each column: two values a pair of the training, validation and evaluation rows' files."""


def add_references(material: Material, run: Run, batching: EvaluationBatching, folder: Path | None) -> None:
    """Set the references of `material`'s tasks, if they are of DPO, from `folder` or by `run`'s initial model.

    Collective. folder: for the columns; None: compute them without storing. Raises `Violation` for a log-probability
    that is not finite.
    """
    tasks = [task for task in tasks_of(material) if isinstance(task, DpoTask)]
    if not isinstance(material.task, DpoTask):
        return
    _, validated, scored = tasks
    built = [run.initial_weights, run.base]
    key = key_of((), config=config_digest(material.config), data=material.rows.digest, weights=built)

    def load(columns: Columns) -> str:
        for each, (name, kind) in zip(tasks, COLUMNS.items(), strict=True):
            each.references.copy_(mapped(columns, name, kind).view(-1, 2))
        return columns.digest

    def make(append: Callable[[Numbers], None]) -> Mapping[str, object]:
        append(
            {name: array("d", each.references.flatten().tolist()) for each, name in zip(tasks, COLUMNS, strict=True)}
        )
        return {}

    found = None if folder is None else load_if_there(folder, key, COLUMNS, load)
    backend = run.backend
    there = backend.gather([torch.tensor([int(found is not None)], device=device) for device in backend.devices])
    if not all(map(bool, there)):  # on every rank, since the passes are dealt to all
        if run.writes:
            say("computing the log-probabilities of all answers under the model before training")
        compute_references(run, material.task)
        for each, ids in {validated: material.validation_ids, scored: material.evaluation_ids}.items():
            score_references(backend, [replica.model for replica in run.replicas], each, ids, batching)
        found = None if folder is None else load_or_build(folder, key, COLUMNS, make, load)
    material.tokenizer.read.append(found or references_digest(material)[REFERENCE])


def references_digest(material: Material) -> dict[str, str]:
    """SHA-256 of all references, as `REFERENCE`; empty if the task has none."""
    tasks = dict.fromkeys(tasks_of(material))
    values = [task.references.numpy().tobytes() for task in tasks if isinstance(task, DpoTask)]
    return {REFERENCE: hashlib.sha256(b"".join(values)).hexdigest()} if values else {}


def compute_references(run: Run, task: DpoTask) -> None:
    """Set the references of the pairs that `run` trains, by training passes of its models as they are. Collective."""
    plan, first = run.plan, dict[object, int]()
    for step in range(1, min(plan.total_steps, plan.steps_per_epoch) + 1):
        for item in plan.batch(step).ids:
            first.setdefault(task.rows_of(item), item)  # of all copies of a pair, the first
    items = sorted(first.values(), key=lambda item: (-int(task.lengths[item]), item))
    rows = -(-min(plan.batch_size, len(plan.ids)) // plan.micro_batches)
    batches = [range(place, min(place + rows, len(items))) for place in range(0, len(items), rows)]
    models = [replica.model for replica in run.replicas]

    def log_probs(model: nn.Module, batch: Batch) -> torch.Tensor:
        # Compiled passes need gradients and training mode, in which dropout draws random numbers.
        device = batch["input_ids"].device
        draws = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
        before, hidden = draws.get_state(), hidden_of(model, batch).detach()
        if not torch.equal(before, draws.get_state()):
            with evaluating(model, device):
                hidden = hidden_of(model, batch)
        with torch.no_grad():
            return row_log_probs(model, hidden, batch, most)

    most = 2 * max(len(task.rows_of(item)) for item in items)
    _, table = gathered_outputs(run.backend, models, task, items, batches, log_probs, most)
    for item, values in zip(items, table, strict=True):
        pairs = list(task.rows_of(item))
        task.references[pairs] = values[: 2 * len(pairs)].view(-1, 2)


def score_references(
    backend: Backend, models: Sequence[nn.Module], task: DpoTask, ids: Sequence[int], batching: EvaluationBatching
) -> None:
    """Set the references of the pairs `ids` by the passes of an evaluation. Collective."""
    if ids:
        batches = batching.of(task.lengths[list(ids)].tolist())
        _, table = gathered_outputs(backend, models, task, ids, batches, task.outputs, task.width)
        task.references[list(ids)] = table
