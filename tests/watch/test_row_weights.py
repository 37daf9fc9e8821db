"""The weight of a row by its logits and their gradient: held to the weights with which the loss was written."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from andon_contracts.watch.row_weights import (
    LABELS,
    NOT_FINITE,
    NOT_SAMPLED,
    OTHER_LOSS,
    PASSES,
    ROWS,
    SIGNS,
    PassWeights,
    Row,
    between,
    row_weights,
    rows_at,
    spread,
    trained,
)

Loss = Callable[[Tensor, Tensor], Tensor]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 1.5e-2, torch.float16: 5e-3}


def drawn(seed: int, rows: int, classes: int, dtype: torch.dtype, sharp: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, classes, generator=generator) * sharp).to(dtype).requires_grad_()
    return logits, torch.randint(classes, (rows,), generator=generator)


def read(loss: Loss, logits: Tensor, labels: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss(logits, labels), logits)
    return row_weights(logits.detach(), gradient).double()


@given(
    st.integers(0, 999),
    st.sampled_from([2, 3, 97, 1500]),
    st.sampled_from(list(TOLERANCE)),
    st.floats(0.1, 6.0) | st.floats(6.0, 400.0),
    st.booleans(),
)
@example(63, 2, torch.float64, 4.2, True)  # certain of a label, whose element was rounded to less than the other one
@example(0, 3, torch.float32, 30.0, False)  # certain of labels, whose elements were rounded to 0
def test_each_row_has_the_weight_with_which_the_loss_was_written(
    seed: int, classes: int, dtype: torch.dtype, sharp: float, by_hand: bool
) -> None:
    """Any weights, of any dtype, for unsure and confident models, with a loss of torch or one by hand."""
    logits, labels = drawn(seed, 7, classes, dtype, sharp)
    weights = torch.linspace(0.05, 2.0, 7).double()

    def loss(z: Tensor, y: Tensor) -> Tensor:
        if by_hand:
            return -(z.float().log_softmax(-1).gather(1, y[:, None])[:, 0] * weights).sum()
        return (F.cross_entropy(z.double(), y, reduction="none") * weights).sum()

    found = read(loss, logits, labels)
    losses = F.cross_entropy(logits.detach().double(), labels, reduction="none")
    sure = found[:, 4] < 1e-3  # of the others, what is beside the label was lost
    assert sure[losses > 1e-4].all() or dtype == torch.float16
    tolerance = max(TOLERANCE[dtype], 2e-5 * by_hand)
    assert found[sure, 0].tolist() == pytest.approx(weights[sure].tolist(), rel=tolerance)
    assert not bool((found[sure, 1] > tolerance).any())
    assert found[sure, 2].tolist() == labels[sure].tolist()
    assert found[sure, 3].tolist() == pytest.approx(losses[sure].tolist(), rel=1e-3, abs=1e-5)


def _soft(z: Tensor, y: Tensor) -> Tensor:
    target = F.one_hot(y, z.shape[1]).double() * 0.6 + 0.4 * torch.arange(z.shape[1]).double().softmax(0)
    return F.cross_entropy(z.double(), target)


OTHERS: dict[str, Loss] = {
    "label smoothing": lambda z, y: F.cross_entropy(z.double(), y, label_smoothing=0.1),
    "soft targets": _soft,
    "sigmoid": lambda z, y: F.binary_cross_entropy_with_logits(z.double(), F.one_hot(y, z.shape[1]).double()),
    "squares": lambda z, y: (z.double() - F.one_hot(y, z.shape[1])).square().mean(),
    "a term on the logits": lambda z, y: F.cross_entropy(z.double(), y) + 0.1 * z.double().logsumexp(1).square().mean(),
    "entropy": lambda z, y: (z.double().softmax(1) * z.double().log_softmax(1)).sum(1).mean(),
}


@given(st.integers(0, 999), st.sampled_from(sorted(OTHERS)), st.sampled_from([5, 97, 1500]), st.booleans())
def test_a_loss_other_than_cross_entropy_leaves_a_residual(seed: int, name: str, classes: int, half: bool) -> None:
    """In 16 bits too, beyond their rounding. With up to 4 classes, some rows of another loss look like it."""
    logits, labels = drawn(seed, 9, classes, torch.bfloat16 if half else torch.float32)
    assert float(read(OTHERS[name], logits, labels)[:, 1].max()) > 0.03


@given(st.integers(0, 999), st.sampled_from([7, 97]))
def test_a_negative_weight_is_read_as_such(seed: int, classes: int) -> None:
    """As policy gradients have where the advantage is negative. Of 3 classes, another label can fit as well."""
    logits, labels = drawn(seed, 5, classes, torch.float32)
    weights = torch.tensor([0.5, -0.5, 1.0, -2.0, 0.1])
    found = read(lambda z, y: (F.cross_entropy(z, y, reduction="none") * weights).sum(), logits, labels)
    assert found[:, 0].tolist() == pytest.approx(weights.tolist(), rel=1e-4)
    assert found[:, 2].tolist() == labels.tolist()


def test_a_row_with_no_probability_left_beside_its_label_is_not_read() -> None:
    assert float(row_weights(torch.tensor([[0.0, 200.0]]), torch.tensor([[1e-40, 0.0]]))[0, 4]) == math.inf


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 50))
def test_positions_are_distinct_spread_and_those_of_labels_come_first(rows: int, count: int, number: int) -> None:
    cpu = torch.device("cpu")
    found = spread(rows, count, number, cpu).tolist()
    assert len(set(found)) == len(found) == min(rows, count)
    gaps = [b - a for a, b in itertools.pairwise([-1, *sorted(found), rows])]
    assert max(gaps) <= 4 * (rows // len(found) + 1)
    labels = torch.arange(rows) % 7 == 3
    wanted = min(count, int(labels.sum()))
    assert labels[spread(rows, count, number, cpu, [labels])[:wanted]].all()


@given(st.integers(0, 99), st.sampled_from([2, 3, 97]), st.booleans())
def test_ignored_rows_do_not_count_and_rows_are_found_in_any_layout(seed: int, classes: int, turned: bool) -> None:
    logits, labels = drawn(seed, 24, classes, torch.float32)
    labels[::3] = -100
    whole = logits.detach().view(4, 6, classes)
    # cross_entropy wants the classes second, so such a gradient is transposed in memory.
    whole = whole.transpose(1, 2).contiguous().transpose(1, 2) if turned else whole
    z = whole.requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(z.transpose(1, 2), labels.view(4, 6)), z)
    assert trained(gradient).tolist() == labels.ne(-100).tolist()
    picked = torch.tensor([1, 4, 23])
    assert torch.equal(rows_at(gradient, picked), gradient.reshape(-1, classes)[picked])


def of(*rows: tuple[float, int], count: int | None = None, residual: float = 0.0) -> PassWeights:
    listed = [Row(weight, residual, label, 1.0, 0.0) for weight, label in rows]
    return PassWeights(listed, len(rows) if count is None else count, 1e-3)


@pytest.mark.parametrize(
    ("passes", "expected"),
    [
        ([of((0.25, 0), (0.25, 1)), of((0.25, 0))], 0),
        ([of((1 / 6, 0), (1 / 6, 1), (1 / 6, 0)), of((1 / 2, 0))], PASSES),
        ([of((0.1, 0), (0.3, 1), (0.1, 0))], LABELS),
        ([of((0.1, 0), (0.3, 1), (0.1, 0)), of((0.2, 0), (0.6, 1))], LABELS),  # each divided by its own sum
        ([of((0.1, 0), (0.3, 1), (0.2, 0))], ROWS),
    ],
)
def test_unequal_weights_are_named_by_what_they_follow(passes: list[PassWeights], expected: int) -> None:
    assert between(passes) == expected


@pytest.mark.parametrize(
    ("each", "expected"),
    [
        (of((0.5, 0), (0.5, 1)), 0),
        (of(count=3), NOT_SAMPLED),
        (of((0.5, 0), residual=0.1), OTHER_LOSS),
        (of((float("nan"), 0), residual=float("nan")), NOT_FINITE),
        (of((0.5, 0), (-0.5, 1)), SIGNS),
    ],
)
def test_a_pass_says_why_its_weights_are_unknown(each: PassWeights, expected: int) -> None:
    assert each.reason == expected
