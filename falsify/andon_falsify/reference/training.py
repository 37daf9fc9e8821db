"""The plain loop: one process, one global batch after the other; no ranks, no accumulation, nothing drawn at random.

Its loss is the weighted SUM of cross-entropies over the global batch, divided once by its number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from andon_falsify.reference.params import Masks, Params, no_dropout
from andon_falsify.reference.update import State, UpdateRule, clip


class Model(Protocol):
    """Class scores from parameters and tokens: `Decoder`, `Encoder`, or a user's own forward."""

    def logits(self, params: Params, tokens: Tensor, attention: Tensor, masks: Masks = no_dropout) -> Tensor:
        """[rows, classes] for int64 tokens [rows, length] and their attention mask."""
        ...


@dataclass(frozen=True)
class Piece:
    """Rows that the accused computed together, hence padded alike and under the same masks; a global batch is several.

    tokens: int64 [rows, length]. attention: [rows, length]. labels: int64 [rows].
    """

    tokens: Tensor
    attention: Tensor
    labels: Tensor


MasksOf = Callable[[int, int], Masks]
"""(update from 1, index of the piece) -> the masks that the accused used there."""


@dataclass(frozen=True)
class Update:
    """One update of the law. `gradients` are before clipping, `grad_norm` is their norm, `weights` those after."""

    step: int
    loss: float
    gradients: Mapping[str, Tensor]
    grad_norm: float
    lr: float
    weights: Mapping[str, Tensor]
    state: State


@dataclass(frozen=True)
class RowGradients:
    """What each row of an update adds: its loss, and its gradient by parameter, [rows, *shape], in order of `rows`."""

    rows: tuple[int, ...]
    losses: Tensor
    gradients: Mapping[str, Tensor]


def row_losses(logits: Tensor, labels: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """w[label] * -log softmax(logits)[label] of each row (seed D3; torch's mean divides by the weights).

    logits: [rows, classes]. labels: int64 [rows]. class_weights: [classes], 1 each by default. Returns [rows]. Raises
    `ValueError` for a label that is no class.
    """
    classes = logits.shape[-1]
    if len(labels) and not bool(((labels >= 0) & (labels < classes)).all()):
        msg = f"labels {labels.tolist()} are not all within 0 to {classes - 1}"
        raise ValueError(msg)
    highest = logits.amax(-1, keepdim=True)
    log_normaliser = highest.squeeze(-1) + (logits - highest).exp().sum(-1).log()
    chosen = logits[torch.arange(len(labels)), labels]
    weights = torch.ones(classes, dtype=logits.dtype) if class_weights is None else class_weights.to(logits.dtype)
    return weights[labels] * (log_normaliser - chosen)


def _losses(
    model: Model,
    params: Params,
    pieces: Sequence[Piece],
    class_weights: Tensor | None,
    masks: Callable[[int], Masks] | None,
) -> Iterator[Tensor]:
    for index, piece in enumerate(pieces):
        if len(piece.labels):
            logits = model.logits(params, piece.tokens, piece.attention, masks(index) if masks else no_dropout)
            yield row_losses(logits, piece.labels, class_weights)


def row_gradients(
    model: Model,
    params: Params,
    trainable: Collection[str],
    pieces: Sequence[Piece],
    class_weights: Tensor | None = None,
    masks: Callable[[int], Masks] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """As `gradient`, of each row by itself: losses [rows] and gradients [rows, *shape], in the order of the pieces.

    Raises `ValueError` for a batch of no rows.
    """
    leaves = {name: params[name].detach().double().requires_grad_() for name in trainable}
    losses: list[Tensor] = []
    parts: dict[str, list[Tensor]] = {name: [] for name in leaves}
    for of_piece in _losses(model, {**params, **leaves}, pieces, class_weights, masks):
        rows = len(of_piece)
        found = torch.autograd.grad(
            of_piece,
            list(leaves.values()),
            grad_outputs=torch.eye(rows, dtype=of_piece.dtype),
            is_grads_batched=True,
            allow_unused=True,
        )
        losses.append(of_piece.detach())
        for (name, leaf), part in zip(leaves.items(), found, strict=True):
            parts[name].append(leaf.new_zeros(rows, *leaf.shape) if part is None else part)
    if not losses:
        msg = "a batch of no rows has no gradient of a row"
        raise ValueError(msg)
    return torch.cat(losses), {name: torch.cat(of_pieces).detach() for name, of_pieces in parts.items()}


def gradient(
    model: Model,
    params: Params,
    trainable: Collection[str],
    pieces: Sequence[Piece],
    class_weights: Tensor | None = None,
    masks: Callable[[int], Masks] | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient of one global batch: both summed over its rows, divided once by their number.

    `params` and `trainable` are canonical names; `masks` gives those of each piece. A trainable tensor that the loss
    does not reach has a gradient of 0. Raises `KeyError` for a trainable name that is no parameter; a batch of no rows
    has loss 0 and gradient 0.
    """
    leaves = {name: params[name].detach().double().requires_grad_() for name in trainable}
    count = sum(len(piece.labels) for piece in pieces)
    total = 0.0
    sums = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    for of_piece in _losses(model, {**params, **leaves}, pieces, class_weights, masks):
        loss = of_piece.sum()
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        total += float(loss.detach())
        for name, part in zip(leaves, found, strict=True):
            if part is not None:
                sums[name] += part
    rows = max(count, 1)
    return total / rows, {name: part.detach() / rows for name, part in sums.items()}


def train(
    model: Model,
    params: Params,
    trainable: Collection[str],
    batches: Iterable[Sequence[Piece]],
    rule: UpdateRule,
    schedule: Callable[[int], float],
    *,
    clip_norm: float | None = None,
    class_weights: Tensor | None = None,
    masks: MasksOf | None = None,
) -> Iterator[Update]:
    """One update for each global batch, from `params` (canonical, float64), at the rate `schedule(step)`.

    A batch of no rows changes nothing and is no update of the optimizer, but has its step number.
    """
    weights = {name: params[name].detach().double() for name in trainable}
    state = State()
    for step, pieces in enumerate(batches, start=1):
        of_piece = _at_step(masks, step) if masks else None
        loss, gradients = gradient(model, {**params, **weights}, trainable, pieces, class_weights, of_piece)
        clipped, norm = clip(gradients, clip_norm)
        lr = schedule(step)
        if any(len(piece.labels) for piece in pieces):
            weights, state = rule.step(weights, clipped, state, lr)
        yield Update(step, loss, gradients, norm, lr, dict(weights), state)


def _at_step(masks: MasksOf, step: int) -> Callable[[int], Masks]:
    def of_piece(index: int) -> Masks:
        return masks(step, index)

    return of_piece
