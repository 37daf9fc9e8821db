"""Loss and gradient of rows, and training on them: one process, float64, no accumulation, nothing drawn at random.

The loss of a global batch is the weighted SUM of its rows' cross-entropies, divided once by the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from andon_falsify.reference.models import Decoder, Masks, Params, no_dropout
from andon_falsify.reference.update import State, UpdateRule, clip


class Model(Protocol):
    """Class scores from parameters and tokens: `Decoder`, `Encoder`, or a user's own forward pass."""

    def logits(self, params: Params, tokens: Tensor, attention: Tensor, masks: Masks = no_dropout) -> Tensor:
        """[rows, classes] for int64 tokens [rows, length] and their attention mask."""
        ...


@dataclass(frozen=True)
class Piece:
    """Rows that the subject computed together, so padded to one length and under the same masks.

    tokens: int64 [rows, length]. attention: [rows, length]. labels: int64 [rows].
    """

    tokens: Tensor
    attention: Tensor
    labels: Tensor


TokenRow = tuple[Sequence[int], Sequence[float]]
"""The tokens of a row, and the weight of each in the loss. Nothing predicts the first token: its weight is unused."""
PieceMasks = Callable[[int], Masks]
"""Index of a piece in its global batch -> the masks that the subject used there."""


@dataclass(frozen=True)
class RowGradients:
    """What each row adds to an update: its loss, and its gradient by parameter, [rows, *shape], in order of `rows`."""

    rows: tuple[int, ...]
    losses: Tensor
    gradients: Mapping[str, Tensor]


def row_losses(logits: Tensor, labels: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """w[label] * -log softmax(logits)[label] of each row (torch's mean divides by the weights instead).

    logits: [rows, classes]. labels: int64 [rows]. class_weights: [classes], 1 each by default. Returns [rows]. Raises
    `ValueError` for a label outside the classes.
    """
    classes = logits.shape[-1]
    if len(labels) and not bool(((labels >= 0) & (labels < classes)).all()):
        raise ValueError(f"labels {labels.tolist()} are not all within 0 to {classes - 1}")
    highest = logits.amax(-1, keepdim=True)
    log_normaliser = highest.squeeze(-1) + (logits - highest).exp().sum(-1).log()
    chosen = logits[torch.arange(len(labels)), labels]
    weights = torch.ones(classes, dtype=logits.dtype) if class_weights is None else class_weights.to(logits.dtype)
    return weights[labels] * (log_normaliser - chosen)


def row_gradients(
    model: Model,
    params: Params,
    trainable: Collection[str],
    pieces: Sequence[Piece],
    class_weights: Tensor | None = None,
    masks: PieceMasks | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each row [rows], and its gradient by parameter [rows, *shape], in the order of the pieces.

    `params` and `trainable` are canonical names. A trainable tensor that the loss does not reach has gradient 0. Raises
    `KeyError` for a trainable name without a parameter, `ValueError` if there are no rows.
    """

    def losses(params: Params) -> Iterator[Tensor]:
        for index, piece in enumerate(pieces):
            if len(piece.labels):
                of_piece = masks(index) if masks else no_dropout
                logits = model.logits(params, piece.tokens, piece.attention, of_piece)
                yield row_losses(logits, piece.labels, class_weights)

    return gradients_of(losses, params, trainable)


def token_gradients(
    model: Decoder, params: Params, trainable: Collection[str], rows: Sequence[TokenRow]
) -> tuple[Tensor, dict[str, Tensor]]:
    """As `row_gradients`, for instruction tuning: a weighted sum over tokens, divided once by the trained tokens.

    The means over the rows are the loss and gradient of the batch, so a row may count more than its own mean. Each row
    is computed alone: nothing is packed, padded or masked, and rows cannot attend to each other. Raises `ValueError` if
    no row has a trained token.
    """
    count = sum(weight != 0 for _, weights in rows for weight in weights[1:])
    if not count:
        raise ValueError("rows without a trained token have no mean loss")

    def losses(params: Params) -> Iterator[Tensor]:
        for tokens, weights in rows:
            ids = torch.tensor(tokens, dtype=torch.int64)
            logits = model.next_token_logits(params, ids)
            of_tokens = torch.tensor(weights[1:], dtype=torch.float64) * row_losses(logits[:-1], ids[1:])
            yield of_tokens.sum(0, keepdim=True) * len(rows) / count

    return gradients_of(losses, params, trainable)


def pair_gradients(
    model: Decoder,
    params: Params,
    trainable: Collection[str],
    pairs: Sequence[tuple[TokenRow, TokenRow]],
    start: Params,
    beta: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """As `row_gradients`, of pairs of a preferred and another answer (DPO, Rafailov et al. 2023, equation 7).

    The loss of a pair is -log sigmoid(beta * x). x is by how much log p(preferred) - log p(other) has risen since the
    parameters `start`. log p is the weighted sum over the tokens of a row, each row computed alone.
    """

    def log_prob(held: Params, row: TokenRow) -> Tensor:
        ids = torch.tensor(row[0], dtype=torch.int64)
        chances = model.next_token_logits(held, ids)[:-1].log_softmax(-1)
        return (torch.tensor(row[1][1:]).double() * chances[torch.arange(len(ids) - 1), ids[1:]]).sum()

    def losses(held: Params) -> Iterator[Tensor]:
        for better, worse in pairs:
            risen = (log_prob(held, better) - log_prob(start, better)) - (
                log_prob(held, worse) - log_prob(start, worse)
            )
            yield torch.log1p(torch.exp(-beta * risen))[None]

    return gradients_of(losses, params, trainable)


def gradients_of(
    losses: Callable[[Params], Iterable[Tensor]], params: Params, trainable: Collection[str]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The losses [rows] that `losses` yields in parts, and the gradient of each, by parameter [rows, *shape]."""
    leaves = {name: params[name].detach().double().requires_grad_() for name in trainable}
    rows: list[Tensor] = []
    parts: dict[str, list[Tensor]] = {name: [] for name in leaves}
    for part in losses({**params, **leaves}):
        rows.append(part.detach())
        gradients = torch.autograd.grad(
            part,
            list(leaves.values()),
            grad_outputs=torch.eye(len(part), dtype=part.dtype),
            is_grads_batched=True,
            allow_unused=True,
        )
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
            parts[name].append(leaf.new_zeros(len(part), *leaf.shape) if gradient is None else gradient)
    if not rows:
        raise ValueError("a batch of no rows has no gradient of a row")
    return torch.cat(rows), {name: torch.cat(each).detach() for name, each in parts.items()}


def train(
    model: Model,
    params: Params,
    trainable: Collection[str],
    batches: Iterable[Piece],
    rule: UpdateRule,
    rates: Iterable[float],
    clip_norm: float | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Train from `params` (canonical, float64), and yield the trained weights after each batch.

    A batch without rows changes nothing.
    """
    weights, state = {name: params[name].detach().double() for name in trainable}, State()
    for batch, rate in zip(batches, rates, strict=True):
        if len(batch.labels):
            rows = row_gradients(model, {**params, **weights}, trainable, [batch])[1]
            gradients = clip({name: tensor.mean(0) for name, tensor in rows.items()}, clip_norm)
            weights, state = rule.step(weights, gradients, state, rate)
        yield weights
