"""One forward pass: its precision, and masks that give what the mask of tokens gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, OPTConfig, OPTForSequenceClassification

from andon.model import forward
from andon.model.build import build_base
from andon.model.forward import Nature, logits_of, mask_for, nature_of, tried_nature_of
from tests.model.tiny import CPU, PAD, adapted, spec

LENGTHS = (12, 7, 1)


def _batch() -> dict[str, torch.Tensor]:
    """Three rows of 12, 7 and 1 tokens, padded behind."""
    ids = torch.arange(1, 37).view(3, 12) % 20 + 1
    mask = torch.zeros_like(ids)
    for row, length in enumerate(LENGTHS):
        mask[row, :length] = 1
    return {"input_ids": ids.where(mask == 1, torch.tensor(PAD)), "attention_mask": mask}


@pytest.mark.parametrize("architecture", ["decoder", "encoder"])
def test_the_masks_for_a_gpu_give_the_same_logits(architecture: str) -> None:
    """No mask for a decoder, one by pairs of tokens for an encoder: padding is as unseen as with the mask of tokens."""
    model = build_base(spec(architecture)).eval()
    batch, gpu = _batch(), torch.device("cuda")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    nature = nature_of(model)
    assert nature == Nature(None, causal=architecture == "decoder", takes_kinds=nature.causal, takes_pairs=True)
    others = [nature, dataclasses.replace(nature, takes_kinds=False)]
    with torch.no_grad():
        expected = logits_of(model, batch)
        for other in others:
            given = mask_for(other, mask, gpu)
            torch.testing.assert_close(model(input_ids=ids, attention_mask=given).logits, expected)
    assert mask_for(nature, mask, torch.device("cpu")) is mask


def test_a_model_that_counts_places_in_the_mask_gets_it() -> None:
    """OPT's positions are sums over the mask of tokens: on a GPU it gets that one, and gives what it gives on a CPU."""
    config = OPTConfig(  # type: ignore[call-arg]
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=16,
        vocab_size=33,
        pad_token_id=PAD,
        num_labels=3,
        max_position_embeddings=32,
        word_embed_proj_dim=16,
    )
    model = OPTForSequenceClassification(config).eval()
    batch = _batch()
    given = mask_for(nature_of(model), batch["attention_mask"], torch.device("cuda"))
    with torch.no_grad():
        found = model(input_ids=batch["input_ids"], attention_mask=given).logits
        torch.testing.assert_close(found, logits_of(model, batch))


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
OTHERS: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    "mistral": {"sliding_window": 4},
    "gemma3_text": {},
    "modernbert": {"local_attention": 4},
    "roberta": {},
    "eurobert": {},
    "esm": {},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_any_model_gets_a_mask_on_a_gpu_that_hides_what_a_cpu_hides(kind: str) -> None:
    """Layers with windows, layers of several kinds, encoders that use the mask of tokens elsewhere too."""
    config = AutoConfig.for_model(kind, **(SMALL | OTHERS[kind]))
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5.0)  # so that who sees whom shows
        batch = _batch()
        given = mask_for(tried_nature_of(model, CPU), batch["attention_mask"], torch.device("cuda"))
        found = model(input_ids=batch["input_ids"], attention_mask=given).logits
        torch.testing.assert_close(found, logits_of(model, batch), rtol=1e-4, atol=1e-4)
    assert not any(module.training for module in model.modules())


def test_a_mask_that_does_not_hold_is_found_by_trying() -> None:
    """A decoder that is taken for an encoder sees the future: it gets the mask of tokens, and keeps its mode."""
    model = build_base(spec("decoder")).train()
    natures = {model: dataclasses.replace(nature_of(model), causal=False, takes_kinds=False)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "_natures", natures)
        nature = tried_nature_of(model, CPU)
    assert (nature.takes_kinds, nature.takes_pairs) == (False, False)
    assert all(module.training for module in model.modules())


def test_a_model_in_bfloat16_computes_in_it_and_its_head_does_not() -> None:
    """Matrix products of the backbone are taken in half precision; the head's stay in its own, and so do the logits."""
    model = adapted("decoder", "bfloat16")
    seen: dict[str, torch.dtype] = {}

    def note(name: str) -> Callable[..., None]:
        def noted(_: nn.Module, given: object, output: torch.Tensor) -> None:
            seen[name] = output.dtype

        return noted

    for name, module in model.named_modules():
        if name.endswith(("q_proj.lora_A.default", "score.modules_to_save.default")):
            module.register_forward_hook(note(name))
    assert logits_of(model, _batch()).dtype == torch.float32
    assert {kind for name, kind in seen.items() if "score" in name} == {torch.float32}
    assert {kind for name, kind in seen.items() if "lora_A" in name} == {torch.bfloat16}
    assert not torch.is_autocast_enabled("cpu")
