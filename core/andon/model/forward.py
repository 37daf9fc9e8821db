"""One forward pass of a sequence classifier."""

from __future__ import annotations

import torch
from torch import nn

from andon.model.masks import masked, masking_of
from andon.model.precision import computing
from andon.step.task import Batch


def logits_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """[rows, classes]: one forward pass, without the labels, so that the model computes no loss of its own.

    A model whose weights are stored in half precision computes its matrix products in it (autocast).
    """
    ids = batch["input_ids"]
    masking = masking_of(model, ids.device)
    with computing(model, ids.device), masked(model, masking, batch["attention_mask"]) as mask:
        logits: torch.Tensor = model(input_ids=ids, attention_mask=mask).logits
    return logits
