"""Faults of preference tuning (DPO): another reference than the model at step 0, other log-probabilities or pairs."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

import andon.tasks.dpo
import andon.training.reference
from andon.data.chat import EncodedRow
from andon.model.causal import row_log_probs
from andon.step.micro_batch import Batch
from andon.tasks.dpo import DpoTask
from andon.tasks.sft import TokenRows
from andon.training.reference import compute_references
from andon_falsify.compliance.cases import PLAIN
from andon_falsify.subjects.assembly import TrainerUnderTest
from andon_falsify.subjects.case import BETA, PAD, make_rows

from .planting import Fault, Plant, around, patched

DPO = PLAIN.but(rows=make_rows(26, longest=14), task="dpo")
"""Batches of 5, 5 and 3 pairs in 4 micro-batches."""
PACKED_DPO = DPO.but(task="packed dpo", batch_size=4)


def _of_other_rows(row: Callable[[int], int], weights: Callable[[Sequence[float]], Sequence[float]]) -> Plant:
    """Train on row(n) in place of row n, with changed loss weights; the reference is of the same rows."""

    def plant(parts: TrainerUnderTest, _: ExitStack) -> None:
        case, rows = parts.case, list[EncodedRow]()
        for place in map(row, range(len(case.rows))):
            own = array("f", (0.0, *weights(case.token_weights(place))[1:]))
            rows.append(EncodedRow(len(rows), array("i", case.rows.tokens[place]), own))
        task = DpoTask(TokenRows.of(rows), beta=BETA, pad_id=PAD, max_length=2 * case.longest)
        compute_references(parts, task)
        vars(parts.task.inner).update(vars(task))

    return plant


def _mean_of_tokens(parts: TrainerUnderTest, stack: ExitStack) -> None:
    def means(model: nn.Module, hidden: torch.Tensor, batch: Batch, count: int) -> torch.Tensor:
        numbers = torch.arange(1, count + 1)[:, None]
        counts = ((batch["rows"] * (batch["weights"] != 0))[:, None] == numbers).sum(dim=2)
        return row_log_probs(model, hidden, batch, count) / counts.clamp(min=1)

    for module in (andon.tasks.dpo, andon.training.reference):
        patched(stack, module, "row_log_probs", means)
    compute_references(parts, parts.task.inner)


def _trained_reference(parts: TrainerUnderTest, _: ExitStack) -> None:
    """The reference is of another adapter than that of step 0."""
    noise = torch.randn(parts.primary.parameters.size, generator=torch.Generator().manual_seed(0)) / 10
    kept = parts.primary.parameters.weights.detach().clone()
    for replica in parts.replicas:
        replica.parameters.weights.data.copy_(kept + noise)
    compute_references(parts, parts.task.inner)
    for replica in parts.replicas:
        replica.parameters.weights.data.copy_(kept)


def _reference_of_the_resume(parts: TrainerUnderTest, _: ExitStack) -> None:
    """A resume computes the reference again, from the weights that it has restored."""

    def restored(inner: Callable[..., None], *args: Any) -> None:
        inner(*args)
        compute_references(parts, parts.task.inner)

    for replica in parts.replicas:
        around(replica, "restore", restored)


_OFF = r"step 1: \d+ of 14 tensors .*"
FAULTS = (
    Fault("reference of a trained adapter", "gradient-law",
          _OFF + r"q_proj\.lora_B\.weight 0\.08", _trained_reference, DPO),
    Fault("reference computed again at a resume", "resume-equal", "step 3 of resumed: .* done again",
          _reference_of_the_resume, DPO, "resume"),
    Fault("chosen and rejected swapped", "gradient-law", _OFF + r"ratio -1",
          _of_other_rows(lambda row: row ^ 1, tuple), DPO),
    Fault("log-probabilities of prompt tokens", "gradient-law", _OFF + r"v_proj\.lora_B\.weight 1\.3",
          _of_other_rows(lambda row: row, lambda weights: [1.0] * len(weights)), DPO),
    Fault("mean of the tokens' log-probabilities", "gradient-law",
          _OFF + r"q_proj\.lora_B\.weight 0\.83", _mean_of_tokens, DPO),
)  # fmt: skip
