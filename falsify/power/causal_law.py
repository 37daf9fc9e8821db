"""The law of one update of a causal language model: a weighted sum over tokens, divided once by how many there are.

One row at a time and alone: nothing is packed, padded or masked here, so that rows cannot touch each other. Which rows
somebody computed together, on how many ranks and in how many micro-batches, has no place in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from andon_falsify.reference.decoder import Decoder
from andon_falsify.reference.params import Params
from andon_falsify.reference.training import row_losses


@dataclass(frozen=True)
class TokenRow:
    """A row's tokens, and what it counts to predict each of them from those before it; 0 for one that is not trained.

    Nothing predicts a row's first token, so its weight counts for nothing.
    """

    tokens: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def trained(self) -> int:
        """How many of its tokens are trained."""
        return sum(weight != 0 for weight in self.weights[1:])


@dataclass(frozen=True)
class TokenSum:
    """Sums over the trained tokens of some rows: of weight * cross-entropy, of its gradients, and of the tokens."""

    loss: float
    gradients: dict[str, Tensor]
    tokens: int


def token_sum(model: Decoder, params: Params, trainable: Collection[str], row: TokenRow) -> TokenSum:
    """What one row adds to a global batch, in float64 and divided by nothing.

    `params` and `trainable` are canonical names; a tensor that the loss does not reach has a gradient of 0. Raises
    `ValueError` for a row with another number of weights than of tokens, `KeyError` for a name that is no parameter.
    """
    if len(row.tokens) != len(row.weights):
        msg = f"a row has {len(row.tokens)} tokens and {len(row.weights)} weights"
        raise ValueError(msg)
    leaves = {name: params[name].detach().double().requires_grad_() for name in trainable}
    tokens = torch.tensor(row.tokens, dtype=torch.int64)
    weights = torch.tensor(row.weights[1:], dtype=torch.float64)
    logits = model.next_token_logits({**params, **leaves}, tokens)
    loss = (weights * row_losses(logits[:-1], tokens[1:])).sum()
    found: Sequence[Tensor | None] = [None] * len(leaves)
    if row.trained:
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    gradients = {
        name: torch.zeros_like(leaf) if part is None else part.detach()
        for (name, leaf), part in zip(leaves.items(), found, strict=True)
    }
    return TokenSum(float(loss.detach()), gradients, row.trained)


def mean_of(sums: Iterable[TokenSum]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient of rows together: their sums, divided once by the trained tokens of all of them.

    Raises `ValueError` where there is no trained token.
    """
    parts: Sequence[TokenSum] = tuple(sums)
    tokens = sum(part.tokens for part in parts)
    if not tokens:
        raise ValueError("rows without a trained token have no mean loss")
    gradients = {
        name: torch.stack([part.gradients[name] for part in parts]).sum(0) / tokens for name in parts[0].gradients
    }
    return sum(part.loss for part in parts) / tokens, gradients
