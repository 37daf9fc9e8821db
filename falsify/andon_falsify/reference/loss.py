"""The loss: the class-weighted SUM of cross-entropies over the global batch, divided once by its number of rows."""

from __future__ import annotations

import torch
from torch import Tensor


def loss_sum(logits: Tensor, labels: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """Sum over rows of w[label] * -log softmax(logits)[label] (seed D3; torch's mean divides by the weights).

    logits: [rows, classes]. labels: int64 [rows]. class_weights: [classes], 1 each by default. Returns a scalar;
    0 for no rows. Raises `ValueError` for a label that is no class.
    """
    classes = logits.shape[-1]
    if len(labels) and not bool(((labels >= 0) & (labels < classes)).all()):
        msg = f"labels {labels.tolist()} are not all within 0 to {classes - 1}"
        raise ValueError(msg)
    highest = logits.amax(-1, keepdim=True)
    log_normaliser = highest.squeeze(-1) + (logits - highest).exp().sum(-1).log()
    chosen = logits[torch.arange(len(labels)), labels]
    weights = torch.ones(classes, dtype=logits.dtype) if class_weights is None else class_weights.to(logits.dtype)
    return (weights[labels] * (log_normaliser - chosen)).sum()
