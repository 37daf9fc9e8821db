"""The law of instruction tuning: a weighted sum over trained tokens, divided once by the number of trained tokens.

One row at a time and alone: nothing is packed, padded or masked, so rows cannot attend to each other. The law does not
know which rows the subject computed together, on how many ranks, or in how many micro-batches.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from andon_falsify.reference.decoder import Decoder
from andon_falsify.reference.params import Params
from andon_falsify.reference.training import row_losses

TokenRow = tuple[Sequence[int], Sequence[float]]
"""The tokens of a row, and what each counts in the loss. Nothing predicts the first token, so its weight is unused."""


def token_gradients(
    model: Decoder, params: Params, trainable: Collection[str], rows: Sequence[TokenRow]
) -> tuple[Tensor, dict[str, Tensor]]:
    """What each row adds to the loss of a global batch, [rows], and to its gradient by parameter, [rows, *shape].

    Their means over the rows are the loss and the gradient of the batch. A row adds nothing without a trained token.
    Raises `ValueError` if no row has one.
    """
    leaves = {name: params[name].detach().double().requires_grad_() for name in trainable}
    count = sum(weight != 0 for _, weights in rows for weight in weights[1:])
    if not count:
        raise ValueError("rows without a trained token have no mean loss")
    losses: list[Tensor] = []
    parts: dict[str, list[Tensor]] = {name: [] for name in leaves}
    for tokens, weights in rows:
        ids = torch.tensor(tokens, dtype=torch.int64)
        logits = model.next_token_logits({**params, **leaves}, ids)
        of_tokens = torch.tensor(weights[1:], dtype=torch.float64) * row_losses(logits[:-1], ids[1:])
        loss = of_tokens.sum() * len(rows) / count
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        losses.append(loss.detach())
        for (name, leaf), part in zip(leaves.items(), gradients, strict=True):
            parts[name].append(torch.zeros_like(leaf) if part is None else part)
    return torch.stack(losses), {name: torch.stack(of_rows).detach() for name, of_rows in parts.items()}
