"""The plan is what lives, within a tenth, and the count would see what the plan leaves out (F-HET-002)."""

from __future__ import annotations

import dataclasses
import gc
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from andon.model.adapter import AdapterSpec, attach, trainable_parameters
from andon.model.build import build_base
from andon.model.memory import MemoryPlan, activation_bytes, kept_partials, measure_peak_bytes, plan_bytes
from andon.step.flat import FlatParameters
from andon.step.plan import rank_leaves
from tests.model.tiny import CPU, LORA, adapted, spec, task

MIB = 1 << 20


def zeros(mebibytes: int) -> torch.Tensor:
    return torch.zeros(mebibytes * MIB // 4)


def test_the_count_is_of_what_lives_at_once() -> None:
    """3 and then 2 MiB, the first dropped before: 3 at most. Both kept: 5."""

    def one_after_the_other() -> None:
        zeros(3)
        zeros(2)

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        return zeros(3), zeros(2)

    assert measure_peak_bytes(one_after_the_other).peak == 3 * MIB
    assert measure_peak_bytes(both).peak == 5 * MIB


def test_views_share_and_copies_do_not() -> None:
    def views() -> torch.Tensor:
        whole = zeros(2)
        return whole[:100].view(10, 10)

    def copies() -> tuple[torch.Tensor, torch.Tensor]:
        whole = zeros(2)
        return whole, whole.clone()

    assert measure_peak_bytes(views).peak == 2 * MIB
    assert measure_peak_bytes(copies).peak == 4 * MIB


def test_what_was_made_before_counts_when_it_is_touched() -> None:
    before = zeros(4)
    assert measure_peak_bytes(before.sum).peak >= 4 * MIB


def test_the_count_sees_the_backward_pass_and_a_graph_that_is_kept() -> None:
    """A loss that is held holds its graph: each round adds 1 MiB and the loss itself."""
    weight = nn.Parameter(torch.ones(MIB // 4))

    def rounds(count: int) -> list[torch.Tensor]:
        return [(weight * 2).exp().sum() for _ in range(count)]

    few = measure_peak_bytes(lambda: rounds(2)).peak
    many = measure_peak_bytes(lambda: rounds(7)).peak
    assert many - few == 5 * (MIB + 4)

    def dropped() -> None:
        for _ in range(7):
            (weight * 2).exp().sum().backward()  # type: ignore[no-untyped-call]

    assert measure_peak_bytes(dropped).peak < many


@given(leaves=st.integers(1, 70), world=st.integers(1, 9))
def test_partial_sums_grow_with_the_logarithm(leaves: int, world: int) -> None:
    """One rank keeps at most ceil(log2 M) + 1 buffers; any rank at most its roots besides, never one a leaf."""
    depth = math.ceil(math.log2(leaves)) if leaves > 1 else 1
    assert 1 <= kept_partials(leaves, range(leaves)) <= depth
    assert all(kept_partials(leaves, run) <= 2 * depth + 1 for run in rank_leaves(leaves, world))


def test_partial_sums_of_eight_leaves_by_hand() -> None:
    """Before the last leaf the left halves [0,4), [4,6) and [6,7) wait. A run of [1,4) has the roots [1,2), [2,4)."""
    assert kept_partials(8, range(8)) == 3
    assert kept_partials(8, range(1, 4)) == 2
    assert kept_partials(8, range(5, 6)) == 1
    assert kept_partials(8, range(0)) == 0


def plan(optimizer: str = "adamw", **options: float) -> MemoryPlan:
    model = adapted()
    return plan_bytes(model, trainable_parameters(model), optimizer, 8, 1000, **options)  # type: ignore[arg-type]


def test_the_parts_of_the_plan_by_hand() -> None:
    """29 tensors, each rounded up to 16 elements; two moments for AdamW, none or one for SGD."""
    model = adapted()
    trainable = trainable_parameters(model)
    size = 4 * sum(-(-value.numel() // 16) * 16 for value in trainable.values())
    frozen = 4 * sum(value.numel() for value in model.parameters() if not value.requires_grad)
    buffers = {value.data_ptr(): value.numel() * value.element_size() for value in model.buffers()}
    found = plan()
    assert (found.weights, found.gradient, found.moments, found.partials) == (size, size, 2 * size, 3 * size)
    assert found.base == frozen + sum(buffers.values())
    assert plan("sgd").moments == 0
    assert plan("sgd", momentum=0.9).moments == size
    assert found.reduction == 0
    assert plan(world_size=2).reduction > 0
    with pytest.raises(ValueError, match="unknown optimizer 'adam'"):
        plan("adam")


def test_only_the_largest_phase_counts() -> None:
    parts = dict.fromkeys((field.name for field in dataclasses.fields(MemoryPlan)), 1)
    assert MemoryPlan(**parts).total == 8
    assert MemoryPlan(**parts | {"reduction": 10, "activations": 8}).total == 17
    assert MemoryPlan(**parts).as_dict() == parts | {"total": 8, "needed": 10}


@pytest.mark.parametrize("architecture", ["decoder", "encoder"])
@pytest.mark.parametrize("kind", ["lora", "none"])
def test_forward_and_backward_stay_within_the_plan(architecture: str, kind: str) -> None:
    """Counted independently: model, flat buffers and one micro-batch, within a tenth of what the plan says of them."""
    shape = dataclasses.replace(spec(architecture), hidden_size=64, intermediate_size=128, dropout=0.1, max_length=32)
    rows = task([list(range(32)), list(range(27)), list(range(30))], [0, 1, 2])
    adapter = AdapterSpec(kind=kind, r=4, dropout=0.1)

    def make() -> nn.Module:
        return attach(build_base(shape), adapter, 0)

    def train() -> None:
        model = make()
        flat = FlatParameters(trainable_parameters(model), CPU)
        for _ in range(2):
            rows.loss_sum(model, rows.load([0, 1, 2], CPU)).loss_sum.backward()  # type: ignore[no-untyped-call]
        assert flat.attached()

    model = make()
    planned = plan_bytes(
        model, trainable_parameters(model), "sgd", 1, activation_bytes(model, rows, rows.load([0, 1, 2], CPU))
    )
    expected = planned.base + planned.weights + planned.gradient + planned.activations
    del model
    gc.collect()
    peak = measure_peak_bytes(train).peak
    assert 0.85 * expected <= peak <= 1.1 * expected


def test_the_dry_forward_leaves_no_trace() -> None:
    model = attach(build_base(dataclasses.replace(spec(), dropout=0.2)), LORA, 0).eval()
    rows = task([[1, 2, 3]], [0])
    before = torch.get_rng_state()
    assert activation_bytes(model, rows, rows.load([0], CPU)) > 0
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
