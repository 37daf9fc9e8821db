"""What a micro-batch needs, found without memory: as the independent count finds it, and as a GPU would keep it."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F

from andon.model import causal
from andon.model.adapter import AdapterSpec, attach, trainable_parameters
from andon.model.build import ModelSpec, build_base, build_shape, checkpoint_layers
from andon.model.causal import collate_packs, loss_sum
from andon.model.memory import measure_peak_bytes, plan_bytes, rounded
from andon.model.memory_trace import KernelsOfCuda, checkpoint_hollow, hollow, traced_activations, traced_evaluation
from andon.step.flat import FlatParameters
from andon.step.keyed import KeyedRandomness
from tests.model.tiny import CAUSAL, CPU, spec, task

ADAPTER = AdapterSpec(r=4, dropout=0.1)
SHAPE = dataclasses.replace(spec(), hidden_size=64, intermediate_size=128, dropout=0.1, max_length=32)


def planned(shape: ModelSpec, adapter: AdapterSpec, rows: int, length: int, *, checkpointing: bool = False) -> int:
    """What lasts and one micro-batch, by the plan."""
    model = attach(build_shape(shape), adapter, 0)
    with hollow(model):
        if checkpointing:
            checkpoint_hollow(model, "cpu")
        plan = plan_bytes(model, trainable_parameters(model), "sgd", 1, traced_activations(model, rows, length, "cpu"))
    return plan.base + plan.weights + plan.gradient + plan.activations


def counted(shape: ModelSpec, adapter: AdapterSpec, rows: int, length: int, *, checkpointing: bool = False) -> int:
    """The same by the count of what lives, with the real model."""
    data = task([list(range(length)) for _ in range(rows)], [0] * rows)

    def train() -> None:
        model = attach(build_base(shape), adapter, 0)
        if checkpointing:
            checkpoint_layers(model, CPU)
        flat = FlatParameters(trainable_parameters(model), CPU)
        with KeyedRandomness(0, CPU).micro_batch(1, 0):
            data.loss_sum(model, data.load(range(rows), CPU)).loss_sum.backward()  # type: ignore[no-untyped-call]
        assert flat.attached()

    return measure_peak_bytes(train).peak


@pytest.mark.parametrize(
    ("architecture", "kind", "dtype"),
    [
        ("decoder", "lora", "bfloat16"),
        ("decoder", "none", "float32"),
        ("encoder", "lora", "float32"),
        ("encoder", "none", "bfloat16"),
    ],
)
def test_the_trace_is_what_lives(architecture: str, kind: str, dtype: str) -> None:
    shape = dataclasses.replace(SHAPE, architecture=architecture, dtype=dtype)
    adapter = dataclasses.replace(ADAPTER, kind=kind)
    assert planned(shape, adapter, 5, 32) == pytest.approx(counted(shape, adapter, 5, 32), rel=0.05)


def counted_causal(shape: ModelSpec, adapter: AdapterSpec, packs: int, length: int) -> int:
    """As `counted`, of next tokens in packs of two rows."""
    half = (torch.arange(length // 2) % shape.vocab_size, torch.ones(length // 2))

    def train() -> None:
        model = attach(build_base(shape), adapter, 0)
        flat = FlatParameters(trainable_parameters(model), CPU)
        batch = collate_packs([[half, half]] * packs, 0, 8, None)
        with KeyedRandomness(0, CPU).micro_batch(1, 0):
            loss_sum(model, batch).loss_sum.backward()  # type: ignore[no-untyped-call]
        assert flat.attached()

    return measure_peak_bytes(train).peak


@pytest.mark.parametrize(
    ("kind", "dtype", "words"),
    [("lora", "float32", 33), ("lora", "bfloat16", 200_000), ("none", "float32", 200_000), ("none", "float32", 33)],
)
def test_the_trace_of_next_tokens_is_what_lives(
    kind: str, dtype: str, words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within five hundredths of the count; where the vocabulary is large, its logits in chunks are most of it."""
    monkeypatch.setattr(causal, "_LOGITS", {"cpu": 40 * 200_000})
    shape = dataclasses.replace(CAUSAL, hidden_size=64, intermediate_size=128, vocab_size=words, dtype=dtype)
    adapter = dataclasses.replace(ADAPTER, kind=kind)
    assert planned(shape, adapter, 5, 32) == pytest.approx(counted_causal(shape, adapter, 5, 32), rel=0.05)


def test_packs_on_a_gpu_are_attended_by_their_spans() -> None:
    """In half precision what they need grows with their length, and with its square where pairs of tokens are told."""
    shape = dataclasses.replace(CAUSAL, hidden_size=64, max_length=1024, dtype="bfloat16")
    grown = {}
    for dtype in ("bfloat16", "float32"):
        model = attach(build_shape(dataclasses.replace(shape, dtype=dtype)), ADAPTER, 0)
        with hollow(model):
            short, long = (traced_activations(model, 2, length, "cuda") for length in (512, 1024))
        grown[dtype] = long / short
    assert grown["bfloat16"] == pytest.approx(2, rel=0.02)
    assert grown["float32"] > 2.3


def test_the_trace_follows_layers_that_compute_again() -> None:
    shape = dataclasses.replace(SHAPE, num_hidden_layers=4)
    less = planned(shape, ADAPTER, 6, 32, checkpointing=True)
    assert less == pytest.approx(counted(shape, ADAPTER, 6, 32, checkpointing=True), rel=0.05)
    assert less < 0.8 * planned(shape, ADAPTER, 6, 32)


def test_nothing_is_allocated() -> None:
    """A model of a terabyte is planned where no such memory is; its base is 2 bytes for each frozen weight."""
    shape = dataclasses.replace(
        SHAPE, hidden_size=2**17, intermediate_size=2**19, num_hidden_layers=2, num_attention_heads=1024,
        num_key_value_heads=1024, dtype="bfloat16", max_length=512,
    )  # fmt: skip
    model = attach(build_shape(shape), ADAPTER, 0)
    frozen = sum(2 * value.numel() for value in model.parameters() if not value.requires_grad)
    with hollow(model):
        activations = traced_activations(model, 4, 512, "cuda")
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


def test_attention_on_a_gpu_keeps_no_matrix_of_pairs() -> None:
    """A GPU's fused attention grows with the length, not with its square, with dropout too; nor does it draw here."""
    model = attach(build_shape(dataclasses.replace(SHAPE, max_length=512, dtype="bfloat16")), ADAPTER, 0)
    with hollow(model):
        short, long = (traced_activations(model, 2, length, "cuda") for length in (256, 512))
        pairs = traced_activations(model, 2, 512, "cpu")
    assert long == pytest.approx(2 * short, rel=0.02)
    assert pairs > 1.5 * long


def test_sizes_of_a_gpu_are_multiples_of_its_unit() -> None:
    assert [rounded(size) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]


def test_a_model_takes_what_it_took_before() -> None:
    """What is tried of a model before its first trace is no part of it: of one row of two tokens it would be most."""
    for shape in (SHAPE, CAUSAL):
        model = attach(build_shape(shape), ADAPTER, 0)
        with hollow(model):
            found = [
                (traced_evaluation(model, 1, 2, "cuda"), traced_activations(model, 1, 2, "cuda")) for _ in range(2)
            ]
        assert found[0] == found[1]


@pytest.mark.parametrize(("shape", "length"), [(SHAPE, 32), (CAUSAL, 16)], ids=["classifier", "next tokens"])
def test_an_evaluation_keeps_nothing(shape: ModelSpec, length: int) -> None:
    """Without a graph two more layers need no more, and the model is in training mode afterwards."""
    found = []
    for layers in (2, 4):
        model = attach(build_shape(dataclasses.replace(shape, num_hidden_layers=layers)), ADAPTER, 0)
        with hollow(model):
            found.append(traced_evaluation(model, 8, length, "cpu"))
            assert model.training
            assert found[-1] < traced_activations(model, 8, length, "cpu")
    assert found[0] == pytest.approx(found[1], rel=0.01)
