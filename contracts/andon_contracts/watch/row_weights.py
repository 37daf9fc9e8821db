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
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

SAMPLED = 16
"""The most rows of one tensor of logits that are read."""
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
    if tensor.dim() == 2:
        return tensor[positions]
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
    # Of two elements that are almost all there is, the negative one is the label's: most weights are positive.
    label = torch.maximum(g, g * -_TIE).argmax(1, keepdim=True)
    others = log_p.exp().scatter(1, label, 0.0)
    rest, own = others.sum(1, keepdim=True), g.gather(1, label)
    g = g.scatter(1, label, 0.0)
    weight = torch.where(rest > _CONFIDENT, -own, g.sum(1, keepdim=True)) / rest
    size = weight.abs() * rest
    # 1 - p[label] was rounded as a number near 1 where the loss was computed, which is in fp32 or better.
    own_off = ((own + size.copysign(weight)).abs() - weight.abs() * _ROUNDED).clamp(min=0)
    residual = ((g - weight * others).abs().sum(1, keepdim=True) + own_off) / (2 * size)
    error = z.shape[1] * kind.tiny * kind.eps / size + _ROUNDED / 16 / rest
    return torch.cat([weight, residual, label.to(exact), -log_p.gather(1, label), error], 1)


class Reason(IntEnum):
    """Why the weights of an update are unknown."""

    NONE = 0
    NO_LOGITS = 1
    NOT_REACHED = 2
    NOT_SAMPLED = 3
    OTHER_LOSS = 4
    SIGNS = 5
    SEVERAL = 6
    REDUCTION = 7
    OTHER_TERMS = 8


class Unequal(IntEnum):
    """Between what the weights of one update differ on this rank: the first of these that explains the difference."""

    NOT = 0
    LABELS = 1
    PASSES = 2
    ROWS = 3


class Row(NamedTuple):
    """residual: the share of the gradient that is not that of a plain cross entropy. loss: without its weight.

    error: the share of the gradient that may have been lost: to underflow, as in fp16 without a loss scale, or because
    the model is certain of the label.
    """

    weight: float
    residual: float
    label: float
    loss: float
    error: float = 0.0


@dataclass(frozen=True)
class PassWeights:
    """The sampled rows of one backward pass. count: its trained rows. tolerance: the relative error of a weight."""

    rows: Sequence[Row]
    count: int
    tolerance: float

    @property
    def reason(self) -> Reason:
        if not self.count:
            return Reason.NONE
        if not self.rows:
            return Reason.NOT_SAMPLED
        # NaN fails every comparison, so this form finds it.
        if not all(row.residual < 4 * self.tolerance and math.isfinite(row.weight) for row in self.rows):
            return Reason.OTHER_LOSS
        return Reason.NONE if all(row.weight > 0 for row in self.rows) else Reason.SIGNS

    @property
    def mean(self) -> float:
        return math.fsum(row.weight for row in self.rows) / len(self.rows) if self.rows else 0.0

    @property
    def total(self) -> float:
        """The sum of the weights of all trained rows."""
        return self.count * self.mean

    @property
    def loss(self) -> float:
        """The weighted loss of all trained rows, by the sampled ones."""
        return self.count * math.fsum(row.weight * row.loss for row in self.rows) / max(len(self.rows), 1)

    @property
    def is_equal(self) -> bool:
        weights = [row.weight for row in self.rows]
        return not weights or max(weights) <= min(weights) * (1 + 2 * self.tolerance)


def unequal(passes: Sequence[PassWeights]) -> Unequal:
    """Between what the weights of the known `passes` differ.

    A weight that is a function of the label shows only if a label has several rows: these must have one weight.
    """
    taken = [each for each in passes if each.rows]
    tolerance = 1 + 2 * max((each.tolerance for each in taken), default=0.0)
    if all(each.is_equal for each in taken):
        means = [each.mean for each in taken]
        return Unequal.PASSES if means and max(means) > min(means) * tolerance else Unequal.NOT
    relative = defaultdict[tuple[int, float], list[float]](list)
    # Torch divides by the sum of the weights of a pass, so only quotients within a pass are a function of the label.
    for place, each in enumerate(taken):
        for row in each.rows:
            relative[place, row.label].append(row.weight)
    same = all(max(weights) <= min(weights) * tolerance for weights in relative.values())
    return Unequal.LABELS if same and any(len(weights) > 1 for weights in relative.values()) else Unequal.ROWS
