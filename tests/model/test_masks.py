"""Ways to tell a model on a GPU who sees whom: each gives what the mask of tokens gives, or is not taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
)

from andon.model import masks
from andon.model.build import backbone_of
from andon.model.masks import (
    Masking,
    Padding,
    choose_masking,
    collate,
    masked,
    masking_of,
    padding_note,
    padding_of,
    possible_maskings,
    predictions,
)
from andon_contracts.digest import tree_digest
from tests.model.tiny import CPU, PAD, adapted, base_of, padded_batch, spec

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 33,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_labels": 3,
    "max_position_embeddings": 64,
}
UNMASKED, TOKENS = Masking.UNMASKED, Masking.TOKENS
OTHERS: dict[str, tuple[dict[str, object], Masking]] = {
    "llama": ({}, UNMASKED),
    "qwen3": ({}, UNMASKED),
    "mistral": ({"sliding_window": None}, UNMASKED),
    "opt": ({"ffn_dim": 48, "word_embed_proj_dim": 32}, UNMASKED),
    "qwen2": ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}, TOKENS),
    "gemma3_text": ({}, TOKENS),
    "modernbert": ({"local_attention": 4}, TOKENS),
    "bert": ({}, Masking.PAIRS),
    "eurobert": ({}, TOKENS),
}
"""Kinds of models: their settings, and how one is told who sees whom."""


class Nested(PreTrainedConfig):
    """A configuration with that of a model of text in it."""

    sub_configs = {"text_config": PreTrainedConfig}  # noqa: RUF012 - as transformers has it


def _model(kind: str, settings: dict[str, object]) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **_sizes(kind, settings))
    model: nn.Module = AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5.0)
    return model


def _sizes(kind: str, settings: dict[str, object]) -> dict[str, object]:
    """XLNet refuses to be told a number of positions."""
    sizes = SMALL | settings
    return {name: size for name, size in sizes.items() if kind != "xlnet" or name != "max_position_embeddings"}


def _logits(model: nn.Module, masking: Masking) -> torch.Tensor:
    batch = padded_batch()
    with torch.no_grad(), masked(model, masking, batch["attention_mask"]) as mask:
        logits: torch.Tensor = model(input_ids=batch["input_ids"], attention_mask=mask).logits
    return logits


@pytest.mark.parametrize("kind", OTHERS)
def test_any_model_is_told_on_a_gpu_what_it_is_told_on_a_cpu(kind: str) -> None:
    settings, expected = OTHERS[kind]
    model = _model(kind, settings)
    found = choose_masking(model, CPU)
    assert found is expected
    torch.testing.assert_close(_logits(model, found), _logits(model, TOKENS), rtol=1e-4, atol=1e-4)
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("architecture", ["decoder", "encoder"])
def test_every_way_that_a_model_should_take_gives_the_same_logits(architecture: str) -> None:
    model = adapted(architecture).eval()
    several = possible_maskings(model)
    assert len(several) == (3 if architecture == "decoder" else 2)
    for masking in several:
        torch.testing.assert_close(_logits(model, masking), _logits(model, TOKENS))


def test_no_mask_is_made_for_a_model_that_needs_none() -> None:
    model = base_of(spec("decoder")).eval()
    seen: list[object] = []
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(
                lambda _, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
            )
    before = model.config._attn_implementation
    _logits(model, UNMASKED)
    assert seen
    assert all(each is None for each in seen)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("wrong", [UNMASKED, Masking.CAUSAL_PAIRS])
def test_a_way_that_does_not_hold_is_found_by_trying(
    wrong: Masking, zeros: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of a head of zeros are equal under every mask: a trial by logits would accept anything."""
    model = _model("bert", {}).train()
    if zeros:
        with torch.no_grad():
            model.get_submodule("classifier").weight.zero_()
    monkeypatch.setattr(masks, "possible_maskings", lambda _: (wrong, TOKENS))
    assert choose_masking(model, CPU) is TOKENS
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_by_which_some_see_more_does_not_hold_in_any_precision(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model("llama", {}).to(dtype)
    model.config.dtype = dtype
    monkeypatch.setattr(masks, "possible_maskings", lambda _: (Masking.PAIRS, TOKENS))
    assert choose_masking(model, CPU) is TOKENS
    monkeypatch.setattr(masks, "possible_maskings", lambda _: (UNMASKED, TOKENS))
    assert choose_masking(model, CPU) is UNMASKED


def test_what_was_tried_on_a_gpu_is_used_and_nothing_is_tried_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tried = base_of(spec("decoder")), list[nn.Module]()

    def trying(model: nn.Module, _: torch.device) -> Masking:
        tried.append(model)
        return Masking.CAUSAL_PAIRS

    monkeypatch.setattr(masks, "choose_masking", trying)
    assert masking_of(model, CPU) is TOKENS
    for _ in range(2):
        assert masking_of(model, torch.device("cuda", 0)) is Masking.CAUSAL_PAIRS
    assert tried == [model]


@pytest.mark.parametrize(
    ("name", "value"), [*((name, 4) for name in masks.WINDOWS), ("layer_types", ["full_attention", "linear_attention"])]
)
@pytest.mark.parametrize("nested", [False, True])
def test_windows_and_layers_of_another_kind_need_the_mask_of_tokens(name: str, value: object, nested: bool) -> None:
    model, text = base_of(spec("decoder")), PreTrainedConfig()
    if nested:
        model.config = Nested(attn_implementation="sdpa")
        model.config.text_config = text
    assert possible_maskings(model) != (TOKENS,)
    setattr(text if nested else model.config, name, value)
    assert possible_maskings(model) == (TOKENS,)


def test_a_decoder_that_is_told_to_see_all_is_not_causal() -> None:
    model = _model("llama", {"is_causal": False})
    assert possible_maskings(model) == (Masking.PAIRS, TOKENS)
    found = choose_masking(model, CPU)
    torch.testing.assert_close(_logits(model, found), _logits(model, TOKENS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")])
def test_a_fault_of_the_device_is_not_the_mask_s(error: Exception) -> None:
    """It ends what it happens to; another rank would go on with another mask."""
    model, calls = base_of(spec("decoder")), list[int]()

    def failing(*_: object) -> None:
        calls.append(1)
        if len(calls) > 1:
            raise error

    model.register_forward_pre_hook(failing)
    with pytest.raises(type(error)):
        choose_masking(model, CPU)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_a_model_that_cannot_be_tried_gets_the_mask_of_tokens(kind: str) -> None:
    sizes: dict[str, object] = {"d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    if kind == "bart":
        sizes = {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_layers": 2, "decoder_layers": 2}
        sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = AutoConfig.for_model(
        kind, d_model=32, vocab_size=33, pad_token_id=PAD, eos_token_id=2, max_position_embeddings=64, **sizes
    )
    model = AutoModelForSequenceClassification.from_config(config)
    assert choose_masking(model, CPU) is TOKENS
    assert not backbone_of(model)._forward_hooks


def answers(model: nn.Module, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """What is said of a row of each length, by itself and beside the others; types of tokens as XLNet's are."""
    rows = [torch.arange(3, 3 + length) for length in lengths]
    batch = collate(rows, PAD, 8)
    batch["token_type_ids"] = (torch.arange(batch["input_ids"].shape[1]) % 2).expand_as(batch["input_ids"])
    together = predictions(model, batch)
    for row, length in enumerate(lengths):
        alone = predictions(model, {name: values[row : row + 1, :length] for name, values in batch.items()})[0]
        said = together[row] if together.dim() == 2 else together[row, :length]
        torch.testing.assert_close(said, alone, atol=1e-5, rtol=1e-4)
    return [*together]


XLNET = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "hidden_size": 32}


@pytest.mark.parametrize("kind", ["xlnet", "bert", "qwen3", "modernbert"])
def test_what_is_said_of_a_row_does_not_depend_on_the_rows_beside_it(kind: str) -> None:
    """XLNet classifies by the last position: padded on the right it would read a padding token there."""
    model = _model(kind, XLNET if kind == "xlnet" else OTHERS[kind][0])
    assert padding_of(model, CPU) == Padding("left" if kind == "xlnet" else "right")
    assert padding_note(model, CPU) == ""
    answers(model, (9, 4, 1))


def test_the_trial_of_padding_leaves_the_model_as_it_is() -> None:
    """BigBird goes over to another attention at its first short row, and keeps to it."""
    sparse = {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1}
    model: Any = _model("big_bird", sparse)
    before = tree_digest(dict(model.named_parameters()))
    assert padding_of(model, CPU) == Padding("right")
    assert model.bert.attention_type == "block_sparse"
    assert tree_digest(dict(model.named_parameters())) == before
    assert not model.training


def test_tags_stand_where_their_tokens_stand_when_rows_are_padded_on_the_left() -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("xlnet", **_sizes("xlnet", XLNET))
    model: Any = AutoModelForTokenClassification.from_config(config).eval()
    right = answers(model, (9, 4, 1))
    model.andon_padding = Padding("left")
    left = answers(model, (9, 4, 1))
    for one, other, length in zip(left, right, (9, 4, 1), strict=True):
        torch.testing.assert_close(one[:length], other[:length], atol=1e-5, rtol=1e-4)


def test_a_model_that_mixes_padding_in_is_said_to() -> None:
    model = _model("fnet", {"max_position_embeddings": 64})
    assert padding_of(model, CPU).change > 0.01
    assert "FNetForSequenceClassification mixes padding into its rows" in padding_note(model, CPU)


def test_an_error_of_our_own_is_not_taken_for_the_model_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when transformers names something otherwise: it must not end in a slower mask without a word."""

    @contextmanager
    def broken(*_: object) -> Iterator[None]:
        raise AttributeError
        yield

    monkeypatch.setattr(masks, "using_own_attention", broken)
    with pytest.raises(AttributeError):
        choose_masking(base_of(spec("decoder")), CPU)
