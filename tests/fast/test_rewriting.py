"""A traced decoder computes the same after it was rewritten, and each rewriting finds what it is for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from transformers import LlamaConfig, LlamaForSequenceClassification, Qwen3Config, Qwen3ForSequenceClassification

from andon.fast.rewrites import exchanged_halves, hashed_dropout, last_real, rewrite
from andon.model.adapter import AdapterSpec, attach
from andon.model.build import backbone_of
from andon.model.compiled import traced
from andon.model.masks import masked, possible_maskings

PAD = 0
LAYERS = 2
IDS = torch.tensor([[5, 6, 7, 8, 9, 3, 2, 4], [5, 9, 2, PAD, PAD, PAD, PAD, PAD], [7, 1, 1, 1, 1, 1, 1, PAD]])


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What one test traced is not found by another, and the compiler's bar of progress leaves no thread."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    yield
    torch._dynamo.reset()


def decoder(kind: str = "qwen3", *, dropout: float = 0.0, targets: tuple[str, ...] = ("q_proj", "v_proj")) -> nn.Module:
    """Two layers, fewer heads of keys than of queries, an adapter whose second factor is not zero."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "vocab_size": 16,
        "pad_token_id": PAD,
        "use_cache": False,
        "num_labels": 3,
    }
    torch.manual_seed(3)
    base: nn.Module
    if kind == "qwen3":
        base = Qwen3ForSequenceClassification(Qwen3Config(**sizes))
    else:
        base = LlamaForSequenceClassification(LlamaConfig(**sizes))
    model = attach(base, AdapterSpec(r=4, alpha=6.0, dropout=dropout, targets=targets), 1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    return model.train()


def calls(graph: torch.fx.Graph) -> list[str]:
    return [getattr(node.target, "__name__", str(node.target)) for node in graph.nodes if node.op == "call_function"]


def rewritten(model: nn.Module) -> tuple[Callable[..., Any], list[list[str]]]:
    """The model's backbone traced and rewritten, run without kernels of its own; the calls of each of its graphs."""
    graphs: list[list[str]] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        rewrite(module)
        module.graph.lint()
        graphs.append(calls(module.graph))
        return aot_eager(module, inputs)

    return traced(model, backend), graphs


def passed(model: nn.Module, forward: Callable[..., Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    backbone = backbone_of(model)
    before = backbone.forward
    backbone.forward = forward
    model.zero_grad()
    try:
        with masked(model, possible_maskings(model)[0], (IDS != PAD).long()) as mask:
            logits = model(input_ids=IDS, attention_mask=mask).logits
        logits.square().sum().backward()
    finally:
        backbone.forward = before
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("kind", "targets"), [("qwen3", ("q_proj", "v_proj")), ("llama", ("q_proj", "o_proj", "down_proj"))]
)
def test_a_rewritten_decoder_computes_what_it_did(kind: str, targets: tuple[str, ...]) -> None:
    model = decoder(kind, targets=targets)
    logits, gradients = passed(model, backbone_of(model).forward)
    forward, _ = rewritten(model)
    again, others = passed(model, forward)

    torch.testing.assert_close(again, logits, rtol=1e-5, atol=1e-6)
    assert others.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (others[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_each_rewriting_finds_its_part() -> None:
    """In a decoder as transformers writes it and peft adapts it: two adapters, rotations and dropouts a layer."""
    model = decoder(dropout=0.1)
    forward, graphs = rewritten(model)
    passed(model, forward)
    (found,) = graphs
    counts = {name: found.count(name) for name in ("adapted_product", "exchanged_halves", "hashed_dropout", "picked")}
    assert counts == {
        "adapted_product": 2 * LAYERS,
        "exchanged_halves": 2 * LAYERS,
        "hashed_dropout": 2 * LAYERS,
        "picked": 2,  # the last attention's output, and what is added to it
    }
    assert found.count("kept.default") == 2  # one cosine and one sine for all layers
    assert "dropout" not in found


@given(
    st.lists(st.integers(0, 2**31 - 2), min_size=2, max_size=2),
    st.floats(0.01, 0.99),
    st.integers(1, 40),
)
def test_what_is_dropped_is_a_law_of_keys_and_place(keys: list[int], rate: float, count: int) -> None:
    """The documented hash in Python's integers: masks are part of a run's result and must not change by accident."""
    dropped = hashed_dropout(torch.ones(count), torch.tensor(keys, dtype=torch.int32), rate) == 0
    for place in range(count):
        bits = (place ^ keys[0]) * 0x9E3779B1 % 2**32
        bits = ((bits ^ bits >> 15) + keys[1]) * 0x85EBCA6B % 2**32
        bits = (bits ^ bits >> 13) * 0xC2B2AE35 % 2**32
        bits ^= bits >> 16
        assert bool(dropped[place]) == (bits % 2**31 < round(rate * 2**31))


def test_dropout_is_keyed_by_the_stream_and_differs_by_its_place() -> None:
    """The same stream gives the same result, another another; no two dropouts of a pass share a mask."""
    model = decoder(dropout=0.5)
    forward, _ = rewritten(model)

    def seeded(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return passed(model, forward)[0]

    assert torch.equal(seeded(1), seeded(1))
    assert not torch.equal(seeded(1), seeded(2))
    keys = torch.ops.andon.drawn_keys(50, torch.device("cpu"))
    assert len(set(map(tuple, keys.tolist()))) == 50


@given(st.integers(1, 5), st.integers(1, 7))
def test_halves_are_exchanged_to_the_bit(rows: int, half: int) -> None:
    x = torch.randn(rows, 2 * half, requires_grad=True)
    a, b = x[..., :half], x[..., half:]
    stands_for = torch.cat((-b, a), dim=-1)
    weights = torch.randn(rows, 2 * half)
    assert torch.equal(exchanged_halves(x), stands_for)
    (gradient,) = torch.autograd.grad((exchanged_halves(x) * weights).sum(), x)
    (expected,) = torch.autograd.grad((stands_for * weights).sum(), x)
    assert torch.equal(gradient, expected)


@given(st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=5))
def test_the_last_real_token_is_the_one_that_the_head_reads(rows: list[list[int]]) -> None:
    chosen = last_real(torch.tensor(rows), PAD)
    for row, mask in zip(rows, chosen.tolist(), strict=True):
        real = [place for place, token in enumerate(row) if token != PAD]
        assert [place for place, yes in enumerate(mask) if yes] == [real[-1] if real else 0]


COUNT = 200_000


def keys_of(seed: int, count: int) -> torch.Tensor:
    """int32 [count, 2]."""
    return torch.randint(2**31 - 1, (count, 2), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.5, 0.9])
def test_dropout_drops_its_share_and_divides_the_rest(rate: float) -> None:
    """Of 200,000 values within six standard deviations, for each of 20 pairs of keys."""
    deviation = math.sqrt(rate * (1 - rate) * COUNT)
    for keys in keys_of(1, 20):
        values = hashed_dropout(torch.full((COUNT,), 3.0), keys, rate)
        dropped = int((values == 0).sum())
        assert abs(dropped - rate * COUNT) < 6 * deviation
        assert torch.allclose(values[values != 0], torch.tensor(3.0 / (1 - rate)))


def test_masks_of_different_keys_and_places_are_unrelated() -> None:
    """Correlations of masks with each other, and with themselves shifted, are those of independent draws.

    Keys of which the first are equal, and both differ by one bit or by one, are among them. A correlation of 200,000
    pairs has a standard deviation of 1/sqrt(200,000); six of them are allowed, for some three thousand pairs.
    """
    near = torch.tensor([[77, 5], [77, 4], [76, 6], [78, 7], [77 ^ 2**20, 8], [5, 77]], dtype=torch.int32)
    keys = torch.cat([near, keys_of(2, 40)])
    masks = torch.stack([hashed_dropout(torch.ones(COUNT), each, 0.1) for each in keys])
    centred = masks - masks.mean(dim=1, keepdim=True)
    unit = centred / centred.norm(dim=1, keepdim=True)
    limit = 6 / math.sqrt(COUNT)
    assert (unit @ unit.t() - torch.eye(len(keys))).abs().max() < limit
    for lag in (1, 2, 3, 7, 64, 128, 2560, 4096, 65_536):
        assert (unit[:, lag:] @ unit[:, :-lag].t()).abs().max() < limit, lag


def test_masks_of_keys_that_differ_in_the_first_alone_are_unrelated() -> None:
    """They are each other's with places exchanged, so that at one place they agree as often as by chance."""
    keys = torch.tensor([[first, 5] for first in (0, 1, 2, 64, 4096, 12_345_678)], dtype=torch.int32)
    masks = torch.stack([hashed_dropout(torch.ones(COUNT), each, 0.5) - 1 for each in keys])
    # A pair of places that are exchanged counts twice, which makes the deviation of independent draws 2^0.5 of it.
    assert (masks @ masks.t() / COUNT - torch.eye(len(keys))).abs().max() < 6 * math.sqrt(2 / COUNT)


def test_what_is_not_finite_is_not_hidden_by_dropping_it() -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf]).repeat(100)
    for keys in keys_of(3, 5):
        assert not hashed_dropout(values, keys, 0.5).isfinite().any()
