"""The weight of a trained token in the loss, read from its logits and their gradient, however the loss is written.

A token is one row of logits [classes]. Cross entropy with weight w has the gradient w (p - onehot(label)) there, with
p = softmax(logits). The other elements add up to w (1 - p[label]), so the label's element is the largest in magnitude,
and w is the quotient of two sums. The residual is 0 if the loss is a plain cross entropy. Label
smoothing, soft targets, a sigmoid, squares and terms on the logits leave a residual, whatever the number of classes:
it is a share of the sum of magnitudes, to which a smoothed target adds its smoothing. Two classes always fit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_COLUMNS = 8
"""A row is trained if one of so many columns of its gradient is not 0."""
_CONFIDENT = 0.05
"""With less probability beside the label, the label's own element has lost digits, and the others give the weight."""
_ROUNDED = 4 * torch.finfo(torch.float32).eps
_TIE = 1.02
_GOLDEN = 0.6180339887498949


def spread(rows: int, count: int, number: int, device: torch.device, first: Sequence[Tensor] = ()) -> Tensor:
    """int64 [min(rows, count)]: distinct positions in an order that spreads every prefix of them over all rows.

    Another `number` gives other positions: a fixed choice might meet nothing but padding. first: bool [rows] each;
    rows that are true in more of them are preferred.
    """
    key = (torch.arange(rows, dtype=torch.float64, device=device) * _GOLDEN + number * _GOLDEN**2) % 1.0
    for each in first:
        key += each
    return key.topk(min(rows, count)).indices


def trained(gradient: Tensor) -> Tensor:
    """bool [rows]: whether each row of `gradient` [..., classes] has an element that is not 0. NaN is not 0."""
    step = max(gradient.shape[-1] // _COLUMNS, 1)
    return gradient[..., ::step].ne(0).any(-1).flatten()


def rows_at(tensor: Tensor, positions: Tensor) -> Tensor:
    """[positions, classes]: rows of `tensor` [..., classes]. Copies only these rows, whatever the strides."""
    if tensor.is_contiguous():
        return tensor.view(-1, tensor.shape[-1])[positions]
    places: tuple[Tensor, ...] = torch.unravel_index(positions, tensor.shape[:-1])
    return tensor[places]


def row_weights(logits: Tensor, gradient: Tensor) -> Tensor:
    """[rows, 5]: the fields of `Row`, in fp32 or fp64. NaN for a row whose gradient is 0.

    logits, gradient: [rows, classes] of one form.
    """
    kind = torch.finfo(gradient.dtype)
    exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
    z, g = logits.to(exact), gradient.to(exact)
    log_p = z.log_softmax(1)
    p = log_p.exp()
    # Of two elements that are almost all there is, the negative one is the label's: most weights are positive.
    label = torch.maximum(g, -g * _TIE).argmax(1, keepdim=True)
    # If no other element is negative, the label is the most probable class, although its own element may be 0.
    top = log_p.argmax(1, keepdim=True)
    label = torch.where(g.scatter(1, top, 0.0).amin(1, keepdim=True) >= 0, top, label)
    others = p.scatter(1, label, 0.0)
    rest, own = others.sum(1, keepdim=True), g.gather(1, label)
    g = g.scatter(1, label, 0.0)
    weight = torch.where(rest > _CONFIDENT, -own, g.sum(1, keepdim=True)) / rest
    size = weight.abs() * rest
    # 1 - p[label] was rounded as a number near 1 where the loss was computed, which is in fp32 or better.
    own_off = ((own + size.copysign(weight)).abs() - weight.abs() * _ROUNDED).clamp(min=0)
    residual = ((g - weight * others).abs().sum(1, keepdim=True) + own_off) / (2 * size)
    error = z.shape[1] * kind.tiny * kind.eps / size + _ROUNDED / 16 / rest
    error = torch.where(rest == 0, math.inf, error)
    return torch.cat([weight, residual, label.to(exact), -log_p.gather(1, label), error], 1)


NO_LOGITS, NOT_REACHED, NOT_SAMPLED, OTHER_LOSS, SIGNS, SEVERAL, REDUCTION, NOT_FINITE = range(1, 9)
REASONS = (
    "",
    "the model returned no logits",
    "no gradient was read at the logits that the model returned",
    "none of the rows that were read is trained, or the model is certain of all",
    "the loss is no plain cross entropy of the logits: smoothing, soft targets, squares",
    "tokens have weights of both signs, as in policy gradients",
    "the backward passes are of several losses, or they differ between ranks",
    "the reduction of the gradients is unknown",
    "the gradient of the logits is not finite",
)
"""Why the weights of an update are unknown, by the number of the reason; 0: they are known."""
LABELS, PASSES, ROWS = range(1, 4)
LENGTHS = "as means over batches of different lengths do"
BETWEEN = ("", "labels, as class weights do", f"micro-batches, {LENGTHS}", "rows")
"""What the weights of a rank differ between."""


class Row(NamedTuple):
    """residual: the share of the gradient that is not that of a plain cross entropy. loss: without its weight.

    error: the share of the gradient that may have been lost: to underflow, as in fp16 without a loss scale, or because
    the model is certain of the label.
    """

    weight: float
    residual: float
    label: float
    loss: float
    error: float


@dataclass(frozen=True)
class PassWeights:
    """The sampled rows of one backward pass. count: its trained rows. tolerance: the relative error of a weight."""

    rows: Sequence[Row]
    count: int
    tolerance: float

    @property
    def reason(self) -> int:
        if not (self.count and self.rows):
            return NOT_SAMPLED if self.count else 0
        if any(math.isnan(row.residual) for row in self.rows):
            return NOT_FINITE
        if not all(row.residual < 2 * self.tolerance for row in self.rows):
            return OTHER_LOSS
        return 0 if all(row.weight > 0 for row in self.rows) else SIGNS

    @property
    def total(self) -> float:
        return self.count * sum(row.weight for row in self.rows) / max(len(self.rows), 1)

    @property
    def loss(self) -> float:
        """The weighted loss of all trained rows, by the sampled ones."""
        return self.count * sum(row.weight * row.loss for row in self.rows) / max(len(self.rows), 1)

    @property
    def is_equal(self) -> bool:
        return _is_equal([row.weight for row in self.rows], self.tolerance)


def _is_equal(weights: Sequence[float], tolerance: float) -> bool:
    return not weights or max(weights) <= min(weights) * (1 + 2 * tolerance)


def between(passes: Sequence[PassWeights]) -> int:
    """What the weights of the known `passes` differ between; 0: they are equal.

    A weight that is a function of the label shows only if a label has several rows: these must have one weight.
    """
    taken = [each for each in passes if each.rows]
    tolerance = max((each.tolerance for each in taken), default=0.0)
    if all(each.is_equal for each in taken):
        return 0 if _is_equal([each.total / each.count for each in taken], tolerance) else PASSES
    # Torch divides by the sum of the weights of a pass, so only quotients within a pass are a function of the label.
    by_label = defaultdict[tuple[int, float], list[float]](list)
    for number, each in enumerate(taken):
        for row in each.rows:
            by_label[number, row.label].append(row.weight)
    same = all(_is_equal(weights, tolerance) for weights in by_label.values())
    return LABELS if same and any(len(weights) > 1 for weights in by_label.values()) else ROWS
