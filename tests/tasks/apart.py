"""The gradient of a task by a loop that shares nothing with it: row by row, unpadded, in float64, divided once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from andon.backend.inprocess import InlineBackend
from andon.model.adapter import trainable_parameters
from andon.model.build import ModelSpec
from andon.step.optimizer import OptimizerSpec
from andon.step.plan import BatchPlan
from andon.step.task import Task
from andon.training.build import Run, RunSpec, StepSpec, build_run
from andon_falsify.reference.decoder import Decoder
from andon_falsify.reference.params import Lora, canonical, canonical_name
from tests.model.tiny import CPU, LORA, TINY

STEPS = 50
WORLD = 3
Logits = Callable[[list[int]], torch.Tensor]
"""Tokens of one row to the outputs at its last one, float64 [outputs]."""


def ragged(count: int, seed: int = 5) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 13, (count,), generator=draw).tolist()
    return [torch.randint(0, 32, (length,), generator=draw).tolist() for length in lengths]


def tiny(head: str, *labels: str) -> ModelSpec:
    return replace(TINY, head=head, num_labels=len(labels), labels=labels)


def farthest(
    spec: ModelSpec, task: Task, rows: int, row_loss: Callable[[Logits, int], torch.Tensor], row_terms: list[int]
) -> float:
    """Over `STEPS` updates, how far any tensor's gradient is from the float64 one, relative, in the L2 norm.

    row_loss: a row's part of the sum. row_terms: of each row.
    """
    plan = BatchPlan(tuple(range(rows)), batch_size=7, micro_batches=4, seed=1, epochs=STEPS, max_steps=STEPS)
    step = StepSpec(OptimizerSpec(), seed=5, micro_batches=4, clip_norm=None)
    run = build_run(RunSpec(spec, LORA, step, peak_lr=1e-3), InlineBackend([CPU] * WORLD), task, plan)
    for module in (module for model in run.models for module in model.modules() if isinstance(module, nn.Dropout)):
        module.p = 0.0  # a head of tokens has one of its own
    run.step.attest_start({})
    worst = 0.0
    for batch in map(plan.batch, range(1, STEPS + 1)):
        parameters, logits = _reference(run)
        losses = [row_loss(logits, row) for row in batch.ids if row_terms[row]]
        (torch.stack(losses).sum() / sum(row_terms[row] for row in batch.ids)).backward()  # type: ignore[no-untyped-call]
        run.step(batch, run.schedule.rate(batch.step), batch.step)
        for name, found in run.primary.reduced_gradient().items():
            wanted = parameters[str(canonical_name(name))].grad
            if wanted is None or not wanted.any():  # A of an adapter has no gradient while B is zero
                assert not found.any()
                continue
            worst = max(worst, float((found - wanted).norm() / wanted.norm()))
    return worst


def _reference(run: Run) -> tuple[dict[str, torch.Tensor], Logits]:
    model = run.primary.model
    parameters = canonical(dict(model.named_parameters()))
    for name in trainable_parameters(model):
        parameters[str(canonical_name(name))].requires_grad_(True)
    config = model.get_base_model().config.to_dict()  # type: ignore[operator]
    decoder = Decoder.from_config(config, Lora(LORA.alpha))

    def logits(tokens: list[int]) -> torch.Tensor:
        row = torch.tensor([tokens])
        return decoder.logits(parameters, row, torch.ones_like(row))[0]

    return parameters, logits
