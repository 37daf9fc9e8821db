"""Faults of instruction tuning: wrong loss weights, wrong divisors, rows of a pack that attend to each other."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

import andon.model.causal
from andon.data.chat import EncodedRow
from andon.model.build import backbone_of
from andon.step.micro_batch import Batch, LeafLoss
from andon.tasks.sft import SftTask
from andon_falsify.compliance.cases import PLAIN
from andon_falsify.subjects.assembly import TrainerUnderTest
from andon_falsify.subjects.case import PAD, make_rows

from .planting import Fault, Plant, around, patched

SFT = PLAIN.but(rows=make_rows(21, longest=14), task="sft", batch_size=8)
"""Batches of 8, 8 and 5 rows in 4 micro-batches."""
PACKED = SFT.but(task="packed sft", batch_size=4)


def _weighed(change: Callable[[Sequence[float]], Sequence[float]]) -> Plant:
    """Train every row with the loss weights change(weights)."""

    def plant(parts: TrainerUnderTest, _: ExitStack) -> None:
        case = parts.case
        weights = [(0.0, *change(case.token_weights(row))[1:]) for row in range(len(case.rows))]
        rows = [
            EncodedRow(row, array("i", tokens), array("f", weights[row])) for row, tokens in enumerate(case.rows.tokens)
        ]
        vars(parts.task.inner).update(vars(SftTask(rows, pad_id=PAD, max_length=case.longest)))

    return plant


def _loss(change: Callable[[Batch, LeafLoss], LeafLoss], planned: int) -> Plant:
    """Train every micro-batch on change(batch, loss), with `planned` loss terms a row in the plan."""

    def loss_sum(inner: Callable[..., LeafLoss], model: nn.Module, batch: Batch) -> LeafLoss:
        return change(batch, inner(model, batch))

    def plant(parts: TrainerUnderTest, _: ExitStack) -> None:
        around(parts.task, "loss_sum", loss_sum)
        around(parts.task, "planned_terms", lambda inner, ids: (planned,) * len(ids))

    return plant


def _mean_of_each(batch: Batch, loss: LeafLoss) -> LeafLoss:
    assert loss.terms is not None
    rows = torch.full_like(loss.terms, len(batch["rows"]))
    return LeafLoss(loss.loss_sum / loss.terms.clamp(min=1) * rows, loss.correct, rows)


def _every_token_counts(batch: Batch, loss: LeafLoss) -> LeafLoss:
    assert loss.terms is not None
    return replace(loss, terms=torch.full_like(loss.terms, SFT.longest * len(batch["rows"])))


def _hidden(change: Callable[..., torch.Tensor]) -> Plant:
    """Compute hidden states by change(original, model, batch)."""

    def plant(parts: TrainerUnderTest, stack: ExitStack) -> None:
        patched(stack, andon.model.causal, "hidden_of", partial(change, andon.model.causal.hidden_of))

    return plant


def _mask_of_ones(inner: Callable[..., torch.Tensor], model: nn.Module, batch: Batch) -> torch.Tensor:
    return inner(model, {**batch, "rows": torch.ones_like(batch["rows"])})


def _default_cache(_: Callable[..., torch.Tensor], model: nn.Module, batch: Batch) -> torch.Tensor:
    backbone: Any = backbone_of(model)
    output = backbone(input_ids=batch["input_ids"], position_ids=batch["positions"], use_cache=True)
    hidden: torch.Tensor = output.last_hidden_state
    return hidden


_OFF = r"step 1: 7 of 14 tensors .*"
FAULTS = (
    Fault("loss over prompt tokens", "gradient-law", _OFF + r"o_proj\.lora_B\.weight 0\.89",
          _weighed(lambda weights: [1.0] * len(weights)), SFT),
    Fault("mean of the micro-batches' means", "gradient-law", _OFF + r"o_proj\.lora_B\.weight 0\.30",
          _loss(_mean_of_each, planned=1), SFT),
    Fault("mask off by one", "gradient-law", _OFF + r"o_proj\.lora_B\.weight 1\.3",
          _weighed(lambda weights: [*weights[1:], 0.0]), SFT),
    Fault("stop token not trained", "gradient-law", _OFF + r"k_proj\.lora_B\.weight 1\.1",
          _weighed(lambda weights: [*weights[:-1], 0.0]), SFT),
    Fault("rows of a pack see each other: a mask of ones", "gradient-law", _OFF + r"o_proj\.lora_B\.weight 0\.64",
          _hidden(_mask_of_ones), PACKED),
    Fault("rows of a pack see each other: the default cache", "gradient-law", _OFF + r"o_proj\.lora_B\.weight 0\.64",
          _hidden(_default_cache), PACKED),
    Fault("padded tokens counted, and planned", "gradient-law", _OFF + r"ratio 0\.242",
          _loss(_every_token_counts, planned=SFT.longest), SFT),
)  # fmt: skip
