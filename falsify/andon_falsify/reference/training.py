"""The plain loop: one process, one global batch after the other; no ranks, no accumulation, nothing drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from andon_falsify.reference.loss import loss_sum
from andon_falsify.reference.params import Masks, Params, no_dropout
from andon_falsify.reference.update import Law, State, clip


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
    whole = {**params, **leaves}
    count = sum(len(piece.labels) for piece in pieces)
    total = 0.0
    sums = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    for index, piece in enumerate(pieces):
        if not len(piece.labels):
            continue
        logits = model.logits(whole, piece.tokens, piece.attention, masks(index) if masks else no_dropout)
        loss = loss_sum(logits, piece.labels, class_weights)
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
    law: Law,
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
            weights, state = law.step(weights, clipped, state, lr)
        yield Update(step, loss, gradients, norm, lr, dict(weights), state)


def _at_step(masks: MasksOf, step: int) -> Callable[[int], Masks]:
    def of_piece(index: int) -> Masks:
        return masks(step, index)

    return of_piece
