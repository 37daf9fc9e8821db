"""The plan is what lives, within a tenth, and the count would see what the plan leaves out (F-HET-002)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from andon.config.schema import Adapter
from andon.model import causal
from andon.model.adapter import attach, trainable_parameters
from andon.model.build import checkpoint_layers
from andon.model.causal import collate_packs, loss_sum
from andon.model.memory import KernelsOfCuda, MemoryPlan, kept_partials, plan_bytes, traced_bytes
from andon.step.flat import FlatParameters
from andon.step.micro_batch import keyed_randomness
from andon.step.plan import rank_leaves
from andon.tasks.text import ClassificationTask
from andon_falsify.subjects.meter import activation_bytes
from tests.model.tiny import CAUSAL, CPU, LORA, Shape, adapted, base_of, changed, hollow_base, spec, task
from tests.support.memory import peak_bytes

MIB = 1 << 20


def zeros(mebibytes: int) -> torch.Tensor:
    return torch.zeros(mebibytes * MIB // 4)


@pytest.mark.parametrize(
    ("work", "mebibytes"),
    [
        (lambda: [zeros(each) is None for each in (3, 2)], 3),
        (lambda: [zeros(each) for each in (3, 2)], 5),
        (lambda: zeros(2)[:100].view(10, 10), 2),
        (lambda: (whole := zeros(2), whole.clone()), 4),
        (zeros(4).exp, 8),
    ],
    ids=["one after the other", "both", "views", "copies", "made before and touched"],
)
def test_the_count_is_of_what_lives_at_once(work: Callable[[], object], mebibytes: int) -> None:
    assert peak_bytes(work) == mebibytes * MIB


def test_the_count_sees_the_backward_pass_and_a_graph_that_is_kept() -> None:
    weight = nn.Parameter(torch.ones(MIB // 4))

    def rounds(count: int) -> list[torch.Tensor]:
        return [(weight * 2).exp().sum() for _ in range(count)]

    few = peak_bytes(lambda: rounds(2))
    many = peak_bytes(lambda: rounds(7))
    assert many - few == 5 * (MIB + 4)

    def dropped() -> None:
        for _ in range(7):
            (weight * 2).exp().sum().backward()  # type: ignore[no-untyped-call]

    assert peak_bytes(dropped) < many


@given(leaves=st.integers(1, 70), world=st.integers(1, 9))
def test_partial_sums_grow_with_the_logarithm(leaves: int, world: int) -> None:
    """One rank keeps at most ceil(log2 M) + 1 buffers; any rank at most its roots besides, never one a leaf."""
    depth = math.ceil(math.log2(leaves)) if leaves > 1 else 1
    assert 1 <= kept_partials(leaves, range(leaves)) <= depth
    assert all(kept_partials(leaves, run) <= 2 * depth + 1 for run in rank_leaves(leaves, world))


def plan(optimizer: str = "adamw", **options: Any) -> MemoryPlan:
    model = adapted()
    return plan_bytes(model, trainable_parameters(model), optimizer, 8, 1000, **options)


def test_the_parts_of_the_plan_by_hand() -> None:
    model = adapted()
    trainable = trainable_parameters(model)
    size = 4 * sum(-(-value.numel() // 16) * 16 for value in trainable.values())
    frozen = 4 * sum(value.numel() for value in model.parameters() if not value.requires_grad)
    buffers = {value.data_ptr(): value.numel() * value.element_size() for value in model.buffers()}
    found = plan()
    assert (found.weights, found.gradient, found.moments, found.partials) == (size, size, 2 * size, 3 * size)
    assert found.base == frozen + sum(buffers.values())
    storages = [*(value.nbytes for value in model.parameters() if not value.requires_grad), *buffers.values()]
    assert plan(kind="cuda").base == sum(-(-held // 512) * 512 for held in storages)
    assert plan("sgd").moments == 0
    assert plan("sgd", momentum=0.9).moments == size
    assert found.reduction == 0
    assert plan(world_size=2).reduction > 0


def test_only_the_largest_phase_counts() -> None:
    parts = dict.fromkeys((field.name for field in dataclasses.fields(MemoryPlan)), 1)
    assert MemoryPlan(**parts).total == 10  # six that last, the graphs' workspace, and an audit beside activations
    assert MemoryPlan(**parts | {"graphs": 0}).total == 9
    assert MemoryPlan(**parts | {"reduction": 10, "activations": 8}).total == 18
    assert MemoryPlan(**parts | {"reduction": 10, "activations": 11}).total == 20
    assert MemoryPlan(**parts | {"reduction": 10, "recomputed": 11}).total == 20
    assert MemoryPlan(**parts).as_dict() == parts | {"total": 10, "needed": 12}


def test_the_dry_forward_leaves_no_trace() -> None:
    model = attach(base_of(changed(spec(), dropout=0.2)), LORA, 0).eval()
    rows = task([[1, 2, 3]], [0])
    before = torch.get_rng_state()
    assert activation_bytes(model, rows, rows.load([0], CPU)) > 0
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


# What a micro-batch needs, found without memory: as the independent count finds it, and as a GPU would keep it.


ADAPTER = Adapter(r=4, dropout=0.1)
SHAPE = changed(spec(), hidden_size=64, intermediate_size=128, dropout=0.1, max_length=32)


def planned(shape: Shape, adapter: Adapter, rows: int, length: int, **options: Any) -> int:
    """What lasts and one micro-batch, by the plan."""
    model = attach(hollow_base(shape), adapter, 0)
    activations, _ = traced_bytes(model, "cpu", (rows, length), (1, 1), **options)
    plan = plan_bytes(model, trainable_parameters(model), "sgd", 1, activations)
    return plan.base + plan.weights + plan.gradient + plan.activations


def counted(
    shape: Shape, adapter: Adapter, rows: int, length: int, *, checkpointing: bool = False, terms: int = 1 << 30
) -> int:
    """The same by the count of what lives, with the real model; of next tokens in packs of two rows."""
    half = (torch.arange(length // 2) % shape.interface.vocab_size, (torch.arange(length // 2) <= terms // 2).float())
    packs, data = collate_packs([[half, half]] * rows, 0, 8, None), rows_of(rows, length)

    def train() -> None:
        model = attach(base_of(shape), adapter, 0)
        if checkpointing:
            checkpoint_layers(model)
        flat = FlatParameters(trainable_parameters(model), CPU)
        with keyed_randomness(0, 1, 0, CPU):
            plain = shape.interface.head != "causal"
            loss = data.loss_sum(model, data.load(range(rows), CPU)) if plain else loss_sum(model, packs)
            loss.loss_sum.backward()  # type: ignore[no-untyped-call]
        assert flat.attached()

    return peak_bytes(train)


def rows_of(count: int, length: int) -> ClassificationTask:
    return task([list(range(length))] * count, [0] * count)


@pytest.mark.parametrize("architecture", ["decoder", "encoder"])
@pytest.mark.parametrize("kind", ["lora", "none"])
def test_forward_and_backward_stay_within_the_plan(architecture: str, kind: str) -> None:
    shape, adapter = changed(SHAPE, architecture=architecture), ADAPTER.model_copy(update={"kind": kind})
    model, rows = attach(base_of(shape), adapter, 0), rows_of(3, 32)
    activations = activation_bytes(model, rows, rows.load(range(3), CPU))
    plan = plan_bytes(model, trainable_parameters(model), "sgd", 1, activations)
    expected = plan.base + plan.weights + plan.gradient + plan.activations
    assert 0.85 * expected <= counted(shape, adapter, 3, 32) <= 1.1 * expected


NEXT_TOKENS = changed(CAUSAL, hidden_size=64, intermediate_size=128)


@pytest.mark.parametrize(
    ("shape", "kind", "changes"),
    [
        (SHAPE, "lora", {"architecture": "decoder", "dtype": "bfloat16"}),
        (SHAPE, "none", {"architecture": "decoder", "dtype": "float32"}),
        (SHAPE, "lora", {"architecture": "encoder", "dtype": "float32"}),
        (SHAPE, "none", {"architecture": "encoder", "dtype": "bfloat16"}),
        (NEXT_TOKENS, "lora", {"vocab_size": 33, "dtype": "float32"}),
        (NEXT_TOKENS, "lora", {"vocab_size": 200_000, "dtype": "bfloat16"}),
        (NEXT_TOKENS, "none", {"vocab_size": 200_000, "dtype": "float32"}),
        (NEXT_TOKENS, "none", {"vocab_size": 33, "dtype": "float32"}),
    ],
)
def test_the_trace_is_what_lives(
    shape: Shape, kind: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causal, "_LOGITS", {"cpu": 40 * 200_000})
    shape, adapter = changed(shape, **changes), ADAPTER.model_copy(update={"kind": kind})
    assert planned(shape, adapter, 5, 32) == pytest.approx(counted(shape, adapter, 5, 32), rel=0.05)


@pytest.mark.parametrize("shape", [SHAPE, NEXT_TOKENS], ids=["rows", "packs"])
def test_attention_on_a_gpu_keeps_no_matrix_of_pairs(shape: Shape) -> None:
    """Packs are attended by their spans there, in half precision."""
    grown = {}
    for dtype, kind in (("bfloat16", "cuda"), ("float32", "cuda"), ("bfloat16", "cpu")):
        model = attach(hollow_base(changed(shape, dtype=dtype, max_length=1024)), ADAPTER, 0)
        short, long = (traced_bytes(model, kind, (2, length), (1, 1))[0] for length in (512, 1024))
        grown[dtype, kind] = long / short
    assert grown["bfloat16", "cuda"] == pytest.approx(2, rel=0.02)
    assert grown["bfloat16", "cpu"] > 2.3
    assert (grown["float32", "cuda"] > 2.3) == (shape is NEXT_TOKENS)


def test_only_trained_tokens_have_logits() -> None:
    shape, few = changed(NEXT_TOKENS, vocab_size=20_000, dtype="float32"), {"terms": 4}
    assert planned(shape, ADAPTER, 5, 32, **few) == pytest.approx(counted(shape, ADAPTER, 5, 32, **few), rel=0.05)
    assert planned(shape, ADAPTER, 5, 32, **few) < 0.7 * planned(shape, ADAPTER, 5, 32)


def test_a_backward_pass_that_is_captured_frees_no_saved_activation() -> None:
    assert planned(SHAPE, ADAPTER, 6, 32) < planned(SHAPE, ADAPTER, 6, 32, retained=True)


def test_the_trace_follows_layers_that_compute_again() -> None:
    shape = changed(SHAPE, num_hidden_layers=4)
    less = planned(shape, ADAPTER, 6, 32, checkpointing=True)
    assert less == pytest.approx(counted(shape, ADAPTER, 6, 32, checkpointing=True), rel=0.05)
    assert less < 0.8 * planned(shape, ADAPTER, 6, 32)


def test_nothing_is_allocated() -> None:
    shape = changed(
        SHAPE, hidden_size=2**17, intermediate_size=2**19, num_hidden_layers=2, num_attention_heads=1024,
        num_key_value_heads=1024, dtype="bfloat16", max_length=512,
    )  # fmt: skip
    model = attach(hollow_base(shape), ADAPTER, 0)
    frozen = sum(2 * value.numel() for value in model.parameters() if not value.requires_grad)
    activations, _ = traced_bytes(model, "cuda", (4, 512), (1, 1))
    plan = plan_bytes(model, trainable_parameters(model), "adamw", 8, activations, kind="cuda")
    assert frozen > 1e12
    assert plan.base == pytest.approx(frozen, rel=1e-3)
    assert plan.activations > 2 * 4 * 512 * 2**19 * 2


def held_by_dropout(kind: str) -> int:
    """Bytes that dropout of 4096 fp32 numbers keeps for its backward pass."""
    seen: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.nbytes)
        return tensor

    vector = torch.ones(4096, requires_grad=True)
    kernels = KernelsOfCuda() if kind == "cuda" else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), kernels:
        F.dropout(vector, 0.5)
    return sum(seen)


def test_a_gpu_keeps_masks_as_booleans() -> None:
    assert held_by_dropout("cuda") == 4096
    assert held_by_dropout("cpu") == 4 * 4096


def test_a_model_takes_what_it_took_before() -> None:
    """What is tried of a model before its first trace is no part of it: of one row of two tokens it would be most."""
    for shape in (SHAPE, CAUSAL):
        model = attach(hollow_base(shape), ADAPTER, 0)
        found = [traced_bytes(model, "cuda", (1, 2), (1, 2)) for _ in range(2)]
        assert found[0] == found[1] < traced_bytes(model, "cuda", (2, 5), (2, 5))


@pytest.mark.parametrize(("shape", "length"), [(SHAPE, 32), (CAUSAL, 16)], ids=["classifier", "next tokens"])
def test_an_evaluation_keeps_nothing(shape: Shape, length: int) -> None:
    found = []
    for layers in (2, 4):
        model = attach(hollow_base(changed(shape, num_hidden_layers=layers)), ADAPTER, 0)
        activations, evaluation = traced_bytes(model, "cpu", (8, length), (8, length))
        found.append(evaluation)
        assert model.training
        assert evaluation < activations
    assert found[0] == pytest.approx(found[1], rel=0.01)
