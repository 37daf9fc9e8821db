"""One forward pass: its precision."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from andon.model.forward import logits_of
from tests.model.tiny import adapted, padded_batch


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
    assert logits_of(model, padded_batch()).dtype == torch.float32
    assert {kind for name, kind in seen.items() if "score" in name} == {torch.float32}
    assert {kind for name, kind in seen.items() if "lora_A" in name} == {torch.bfloat16}
    assert not torch.is_autocast_enabled("cpu")
