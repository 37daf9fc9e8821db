"""Parameters and gradients as views of flat buffers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from andon.backend.inprocess import InlineBackend
from andon.step.flat import FlatParameters, layout_of
from andon.step.optimizer import OptimizerSpec
from tests.support.toy import CPU, Settings, build, rate

SHAPES = {"a": (3, 7), "b": (16,), "c": (1,), "d": (5, 2, 2)}
"""21, 16, 1 and 20 elements: from multiples of 16 they start at 0, 32, 48 and 64, and the buffer has 96."""


def _parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def test_layout_by_hand() -> None:
    slots, size = layout_of(_parameters())
    assert [(slot.name, slot.start, slot.end) for slot in slots] == [
        ("a", 0, 21),
        ("b", 32, 48),
        ("c", 48, 49),
        ("d", 64, 84),
    ]
    assert size == 96


def test_views_share_storage_both_ways() -> None:
    parameters = _parameters()
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    flat = FlatParameters(parameters, CPU)
    assert flat.attached()
    assert flat.count == 21 + 16 + 1 + 20
    assert all(torch.equal(parameters[name], before[name]) for name in SHAPES)
    flat.weights.data[64] = 5.0
    assert parameters["d"].flatten()[0].item() == 5.0
    parameters["c"].data.fill_(7.0)
    assert flat.weights[48].item() == 7.0
    assert flat.weight_views()["c"].item() == 7.0
    (2.0 * parameters["c"]).sum().backward()  # type: ignore[no-untyped-call]
    assert flat.gradient[48].item() == 2.0
    assert flat.views(flat.gradient)["c"].item() == 2.0


@pytest.mark.parametrize("what", ["weight", "gradient", "no gradient"])
def test_a_parameter_that_left_is_noticed(what: str) -> None:
    parameters = _parameters()
    flat = FlatParameters(parameters, CPU)
    if what == "weight":
        parameters["b"].data = torch.zeros(16)
    else:
        parameters["b"].grad = torch.zeros(16) if what == "gradient" else None
    assert not flat.attached()
    flat.attach_gradient()
    assert flat.attached() is (what != "weight")


@pytest.mark.parametrize("spec", [OptimizerSpec("adamw", weight_decay=0.1), OptimizerSpec("sgd", momentum=0.9)])
def test_gaps_stay_zero(spec: OptimizerSpec) -> None:
    """After updates with decay, momentum and clipping, what lies between the tensors is 0.0, or digests would drift."""
    step, (replica,) = build(InlineBackend([CPU]), Settings(8, optimizer=spec, clip_norm=0.1))
    for batch in Settings(8).batches():
        step(batch, rate(batch.step), batch.step)
    flat = replica.parameters
    gap = torch.ones(flat.size, dtype=torch.bool)
    for slot in flat.slots:
        gap[slot.start : slot.end] = False
    assert gap.any()
    states = [s for s in replica.optimizer_state().values() if s.numel() == flat.size]
    for tensor in [flat.weights, flat.gradient, *states]:
        assert not tensor[gap].view(torch.int32).any()
        assert tensor[~gap].any()


def test_half_precision_weights_are_refused() -> None:
    """F44: small updates to bf16 weights are rounded away, so training them is refused by name and type."""
    parameters = _parameters() | {"half": nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))}
    with pytest.raises(ValueError, match=r"half is torch\.bfloat16"):
        FlatParameters(parameters, CPU)


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="no trainable parameters"):
        FlatParameters({}, CPU)
