"""New tokens have rows of their own that start alike and train; no other row changes a bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPTJConfig, GPTJForCausalLM

from andon.console.problems import InputError
from andon.model.adapter import AdapterSpec, attach, trainable_parameters
from andon.model.build import without_adapter
from andon.model.causal import Row, loss_sum, require_apart
from andon.model.new_tokens import mean_row
from tests.model.test_causal import FAMILIES, PACKED, SEPARATE, batch_of, distances, gradients, moved, row, wanted
from tests.model.tiny import CPU, LORA, adapted, causal_base

KNOWN = 33
NEW = (33, 34)
WITH_NEW = dataclasses.replace(LORA, new_tokens=NEW)
WHOLE = AdapterSpec(kind="none", new_tokens=NEW)
ROWS = (row([1, 33, 3, 34, 5, 33, 31], 2), row([34, 34, 8, 31], 1))
"""Read and written, in prompts and in answers."""


def tables(model: nn.Module) -> list[torch.Tensor]:
    base: Any = without_adapter(model)
    layers = [base.get_input_embeddings(), base.get_output_embeddings()]
    return [getattr(layer, "original_module", layer).weight.detach() for layer in layers]


def packs(of: list[list[Row]]) -> list[list[Row]]:
    """`of`, with rows of new tokens packed to its first pack, and one alone."""
    return [[*of[0], ROWS[0]], *of[1:], [ROWS[1]]]


@pytest.mark.parametrize("of", [PACKED, SEPARATE], ids=["packed", "separate"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_that_of_a_float64_loop(family: str, of: list[list[Row]]) -> None:
    model = moved(attach(causal_base(family), WITH_NEW, seed=3))
    given = packs(of)
    total, exact = wanted(model, (each for pack in given for each in pack))
    loss = loss_sum(model, batch_of(given))
    assert float(loss.loss_sum.detach()) == pytest.approx(total, rel=1e-6)
    assert max(distances(gradients(model, loss), exact).values()) <= 2e-6
    rows = [tuple(value.shape) for name, value in exact.items() if "trainable_tokens" in name]
    assert rows == [(2, 16)] * (2 if family == "llama" else 1)
    require_apart(model, CPU)


@pytest.mark.parametrize("spec", [WITH_NEW, WHOLE], ids=["lora", "whole"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_start_as_the_mean_of_the_others_which_keep_their_bits(family: str, spec: AdapterSpec) -> None:
    before = tables(causal_base(family))
    state = torch.get_rng_state()
    for seed in (3, 4):
        found = tables(attach(causal_base(family), spec, seed))
        for was, now in zip(before, found, strict=True):
            assert now.shape == (35, 16)
            assert torch.equal(now[:KNOWN], was)
            mean = was.double().mean(0).float()
            assert all(torch.allclose(now[id_], mean, rtol=1e-6, atol=1e-9) for id_ in NEW)
            assert torch.equal(now[33], now[34])
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_that_are_there_already_are_taken() -> None:
    """Vocabularies are often larger than their tokenizers: nothing grows, and other rows to spare stay as they are."""
    before = tables(causal_base("llama", words=40))
    for was, now in zip(before, tables(attach(causal_base("llama", words=40), WITH_NEW, 3)), strict=True):
        changed = (was != now).any(1).nonzero().flatten().tolist()
        assert (now.shape, changed) == (was.shape, [33, 34])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_the_rows_of_new_tokens_are_trained_of_a_vocabulary(dtype: str) -> None:
    model = attach(causal_base("llama", dtype=dtype), WITH_NEW, seed=3)
    trained = {name: value for name, value in trainable_parameters(model).items() if ".lora_" not in name}
    assert [name.split(".")[-2] for name in trained] == ["trainable_tokens_delta"] * 2
    assert all(value.dtype == torch.float32 for value in trained.values())
    found = gradients(model, loss_sum(model, batch_of(packs(SEPARATE))))
    assert all((found[name] != 0).any(1).all() for name in trained)


def test_a_mean_is_of_all_rows_in_one_order() -> None:
    rows = torch.randn(10_001, 3, generator=torch.Generator().manual_seed(1)) * torch.tensor([1.0, 1e-3, 1e6])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        once = mean_row(rows)
        torch.set_num_threads(2)
        assert torch.equal(mean_row(rows), once)
    finally:
        torch.set_num_threads(threads)
    assert torch.allclose(once, rows.double().mean(0), rtol=1e-12, atol=0)


def test_models_without_such_rows_are_refused() -> None:
    with pytest.raises(InputError, match=r"model.new_tokens: Qwen3ForSequenceClassification is no causal language"):
        adapted(adapter=WITH_NEW)
    biased = GPTJConfig(vocab_size=KNOWN, n_embd=16, n_layer=1, n_head=2, rotary_dim=4, n_positions=32)
    with pytest.raises(InputError, match=r"model.new_tokens: the logits of GPTJForCausalLM have a bias"):
        attach(GPTJForCausalLM(biased), WITH_NEW, 3)
    whole: Any = attach(GPTJForCausalLM(biased), WHOLE, 3)
    assert whole.lm_head.bias.shape == (35,)
