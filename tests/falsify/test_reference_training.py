"""The reference's update laws are torch's, to float64's last digits, and its loop is the sum of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from andon_falsify.reference.params import Masks, Params, no_dropout
from andon_falsify.reference.training import Piece, gradient, row_gradients, train
from andon_falsify.reference.update import AdamW, Sgd, State, UpdateRule, clip
from tests.falsify.models import pieces

LAST_DIGITS = 1e-12
RATES = (1e-2, 3e-3, 0.0, 5e-2, 1e-3)
LAWS: list[tuple[UpdateRule, Callable[[Iterable[Tensor]], torch.optim.Optimizer]]] = [
    (Sgd(), lambda weights: torch.optim.SGD(weights)),
    (Sgd(0.9, 0.1), lambda weights: torch.optim.SGD(weights, momentum=0.9, weight_decay=0.1)),
    (AdamW(), lambda weights: torch.optim.AdamW(weights)),
    (
        AdamW((0.7, 0.9), 1e-3, 0.3),
        lambda weights: torch.optim.AdamW(weights, betas=(0.7, 0.9), eps=1e-3, weight_decay=0.3),
    ),
]


def tensors(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (2, 3), "b": (3,)}
    return {
        name: scale * torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
    }


@pytest.mark.parametrize(("law", "build"), LAWS, ids=["sgd", "sgd-momentum", "adamw", "adamw-other"])
def test_an_update_is_torchs(law: UpdateRule, build: Callable[[Iterable[Tensor]], torch.optim.Optimizer]) -> None:
    """Five updates at five rates, one of them 0, give torch's weights; a tensor without a gradient stays."""
    weights = tensors(0)
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    optimizer = build(leaves.values())
    state = State()
    for step, lr in enumerate(RATES, start=1):
        gradients = tensors(step)
        if step == 3:
            del gradients["b"]
        for name, leaf in leaves.items():
            leaf.grad = gradients.get(name)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        weights, state = law.step(weights, gradients, state, lr)
        for name, leaf in leaves.items():
            assert torch.allclose(weights[name], leaf.detach(), rtol=LAST_DIGITS, atol=LAST_DIGITS)
    assert state.updates == len(RATES)


@given(st.integers(0, 2**31), st.floats(1e-3, 1e3), st.floats(1e-6, 1e6))
def test_clipping_is_torchs(seed: int, limit: float, scale: float) -> None:
    """Norm and clipped gradients are those of clip_grad_norm_, just above and far from the limit."""
    gradients = tensors(seed, scale)
    leaves = [torch.zeros_like(value).requires_grad_() for value in gradients.values()]
    for leaf, value in zip(leaves, gradients.values(), strict=True):
        leaf.grad = value.clone()
    expected = float(torch.nn.utils.clip_grad_norm_(leaves, limit))
    clipped, norm = clip(gradients, limit)
    assert norm == pytest.approx(expected, rel=LAST_DIGITS)
    for leaf, value in zip(leaves, clipped.values(), strict=True):
        assert leaf.grad is not None
        assert torch.allclose(value, leaf.grad, rtol=LAST_DIGITS, atol=0)


def test_no_limit_clips_nothing() -> None:
    """None leaves the gradient as it is, and still reports its norm: 3-4-5."""
    gradients = {"a": torch.tensor([3e3]), "b": torch.tensor([4e3])}
    clipped, norm = clip(gradients, None)
    assert (norm, clipped["a"].item(), clipped["b"].item()) == (5e3, 3e3, 4e3)


class Line:
    def logits(self, params: Params, tokens: Tensor, attention: Tensor, masks: Masks = no_dropout) -> Tensor:
        size = attention.sum(-1).double()
        mask = masks("input", tuple(size.shape))
        score = params["w"] * (size if mask is None else size * mask)
        return torch.stack((torch.zeros_like(score), score), dim=-1)


def by_hand(weight: float, batch: list[Piece], class_weights: tuple[float, float]) -> tuple[float, float]:
    loss, slope, rows = 0.0, 0.0, 0
    for piece in batch:
        for size, label in zip(piece.attention.sum(-1).tolist(), piece.labels.tolist(), strict=True):
            chance = 1 / (1 + torch.exp(torch.tensor(-weight * size, dtype=torch.float64)).item())
            own = chance if label else 1 - chance
            loss -= class_weights[label] * torch.log(torch.tensor(own, dtype=torch.float64)).item()
            slope += class_weights[label] * (chance - label) * size
            rows += 1
    return loss / rows, slope / rows


def test_ragged_pieces_are_one_batch() -> None:
    """Pieces of 3, 1, 0 and 2 rows give the weighted sum over 6 rows divided by 6, row by row too: no mean of means."""
    batch = pieces(1, ((3, 5), (1, 4), (2, 3)), classes=2)
    batch.insert(2, Piece(*(torch.zeros(0, 4, dtype=torch.int64),) * 2, torch.zeros(0, dtype=torch.int64)))
    params = {"w": torch.tensor(0.3, dtype=torch.float64)}
    weights = torch.tensor([0.5, 3.0], dtype=torch.float64)
    loss, gradients = gradient(Line(), params, ["w"], batch, weights)
    expected = by_hand(0.3, batch, (0.5, 3.0))
    assert (loss, gradients["w"].item()) == pytest.approx(expected, rel=1e-13)
    losses, each = row_gradients(Line(), params, ["w"], batch, weights)
    assert (losses.shape, each["w"].shape) == ((6,), (6,))
    assert (losses.mean().item(), each["w"].mean().item()) == pytest.approx(expected, rel=1e-13)


def test_what_the_loss_does_not_reach_has_gradient_zero() -> None:
    """A trained tensor that takes no part has 0, not nothing; an unknown name is an error."""
    batch = pieces(1, ((2, 3),), classes=2)
    params = {"w": torch.tensor(0.3), "idle": torch.ones(2)}
    _, gradients = gradient(Line(), params, ["w", "idle"], batch)
    assert gradients["idle"].tolist() == [0.0, 0.0]
    assert row_gradients(Line(), params, ["w", "idle"], batch)[1]["idle"].tolist() == [[0.0, 0.0]] * 2
    with pytest.raises(ValueError, match="no rows"):
        row_gradients(Line(), params, ["w"], [])
    with pytest.raises(KeyError, match="absent"):
        gradient(Line(), params, ["absent"], batch)


def test_training_steps_by_the_schedule_and_clips_once() -> None:
    """Two updates by hand: slope, clipped to 0.1, times the step's rate; an empty batch between changes nothing."""
    batches: list[list[Piece]] = [pieces(1, ((3, 5), (1, 4)), classes=2), [], pieces(2, ((2, 5),), classes=2)]
    params = {"w": torch.tensor(0.3, dtype=torch.float64)}
    first, empty, last = train(Line(), params, ["w"], batches, Sgd(), lambda step: 0.1 * step, clip_norm=0.1)
    weight = 0.3
    for update, batch in ((first, batches[0]), (last, batches[2])):
        loss, slope = by_hand(weight, batch, (1.0, 1.0))
        assert (update.loss, update.gradients["w"].item()) == pytest.approx((loss, slope), rel=1e-12)
        assert update.grad_norm == pytest.approx(abs(slope), rel=1e-12)
        weight -= 0.1 * update.step * slope * min(1.0, 0.1 / (abs(slope) + 1e-6))
        assert update.weights["w"].item() == pytest.approx(weight, rel=1e-12)
    assert (empty.loss, empty.grad_norm, empty.weights["w"]) == (0.0, 0.0, first.weights["w"])
    assert last.state.updates == 2


def test_masks_are_those_of_the_step_and_the_piece() -> None:
    """A row's input dropped at (2, 1) only makes its gradient 0 there and nowhere else."""
    batch = pieces(3, ((2, 4), (2, 4)), classes=2)
    asked = []

    def masks(step: int, piece: int) -> Masks:
        asked.append((step, piece))
        factor = 0.0 if (step, piece) == (2, 1) else 1.0

        def mask(name: str, shape: tuple[int, ...]) -> Tensor:
            return torch.full(shape, factor)

        return mask

    params = {"w": torch.tensor(0.3, dtype=torch.float64)}
    updates = list(train(Line(), params, ["w"], [batch, batch], Sgd(), lambda _: 0.0, masks=masks))
    assert asked == [(1, 0), (1, 1), (2, 0), (2, 1)]
    whole, first_only = (update.gradients["w"].item() for update in updates)
    alone = gradient(Line(), params, ["w"], batch[:1])[1]["w"].item() / 2
    assert first_only == pytest.approx(alone, rel=1e-13)
    assert whole != pytest.approx(alone, rel=1e-3)
