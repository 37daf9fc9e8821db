"""Packed rows on a GPU: attended by where they begin and end, with the loss and gradients of a mask by pairs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import andon.model.masks
from andon.config.schema import Adapter
from andon.model.adapter import attach, trainable_parameters
from andon.model.build import checkpoint_layers
from andon.model.causal import check_packing_isolation, collate_packs, loss_sum
from andon.model.masks import Masking, masking_of
from andon.step.micro_batch import Batch
from tests.model.tiny import CAUSAL, base_of, changed, perturbed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
GPU = torch.device("cuda", 0)
LENGTHS = [[70, 3, 1, 50], [128], [5, 90]]


def model_of(dtype: str = "bfloat16", head: int = 32, *, dropout: float = 0.0) -> nn.Module:
    """A decoder with two heads of `head` values, one of keys, whose adapter is not at its start."""
    spec = changed(CAUSAL, hidden_size=2 * head, max_length=256, dtype=dtype)
    adapter = Adapter(r=4, alpha=8.0, dropout=dropout)
    return perturbed(attach(base_of(spec), adapter, seed=3), by=0.1).to(GPU)


def batch_of(lengths: list[list[int]]) -> Batch:
    draw = torch.Generator().manual_seed(5)
    packs = [
        [(torch.randint(1, 32, (length,), generator=draw), torch.arange(length).float() % 2) for length in pack]
        for pack in lengths
    ]
    return {name: value.to(GPU) for name, value in collate_packs(packs, 32, 8, None).items()}


def learned(model: nn.Module, lengths: list[list[int]]) -> tuple[float, torch.Tensor]:
    """The loss sum, and all gradients end to end."""
    model.zero_grad()
    loss = loss_sum(model, batch_of(lengths)).loss_sum
    loss.backward()
    return loss.item(), torch.cat([each.grad.flatten() for each in trainable_parameters(model).values()])


def test_spans_give_what_pairs_give(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    assert masking_of(model, GPU) is Masking.SPANS
    check_packing_isolation(model, GPU, 128)
    loss, gradient = learned(model, LENGTHS)
    monkeypatch.setitem(andon.model.masks._chosen, model, Masking.ROW_PAIRS)
    wanted, right = learned(model, LENGTHS)
    assert abs(loss - wanted) <= 0.01 * wanted
    assert (gradient - right).norm() <= 0.03 * right.norm()
    _, leaking = learned(model, [[sum(pack)] for pack in LENGTHS])
    assert (leaking - right).norm() > 0.1 * right.norm()


def test_the_same_bits_again() -> None:
    model = model_of()
    first = learned(model, LENGTHS)
    filled = [torch.full((1 + 1000 * turn,), float("nan"), device=GPU) for turn in range(300)]
    del filled
    again = learned(model, LENGTHS)
    assert first[0] == again[0]
    assert torch.equal(first[1], again[1])


@pytest.mark.parametrize("model", [("float32", 32), ("bfloat16", 20)])
def test_what_the_kernel_does_not_take_is_told_by_pairs(model: tuple[str, int]) -> None:
    built = model_of(*model)
    assert masking_of(built, GPU) is Masking.ROW_PAIRS
    check_packing_isolation(built, GPU, 128)
    assert learned(built, LENGTHS)[0] > 0


def test_layers_that_compute_again_attend_by_spans_again() -> None:
    first = learned(model_of(dropout=0.0), LENGTHS)
    model = model_of(dropout=0.0)
    checkpoint_layers(model)
    assert masking_of(model, GPU) is Masking.SPANS
    again = learned(model, LENGTHS)
    assert first[0] == again[0]
    assert torch.equal(first[1], again[1])
