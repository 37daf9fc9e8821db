"""Which tokens a head reads, and that one of which that is not known is given all of them."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from andon.fast.rewrites import picked, reading_last_tokens


def test_a_picked_token_keeps_its_type() -> None:
    """Autocast on a GPU sums in fp32 unless it is told not to; what follows would then round otherwise."""
    x = torch.randn(3, 5, 8, dtype=torch.bfloat16)
    chosen = torch.eye(5, dtype=torch.bool)[[2, 4, 0]]
    given: list[object] = []

    class Sums(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.sum:
                given.append((kwargs or {}).get("dtype"))
            return func(*args, **(kwargs or {}))

    with Sums():
        one = picked(x, chosen)
    assert given == [torch.bfloat16]
    assert torch.equal(one[:, 0], x[chosen])


class Mean(Qwen3ForSequenceClassification):
    """Somebody's own head, which reads every token."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs).last_hidden_state.mean(1)


def decoder(kind: type[Qwen3ForSequenceClassification] = Qwen3ForSequenceClassification) -> Any:
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 16}
    heads: dict[str, Any] = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "num_labels": 3}
    torch.manual_seed(3)
    return kind(Qwen3Config(**sizes, **heads, pad_token_id=0, use_cache=False))


class Mixing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(1, keepdim=True))


def test_a_head_that_mixes_tokens_is_given_all_of_them() -> None:
    mixing, replaced, scored = decoder(), decoder(), decoder()
    mixing.score = Mixing(8, 3)
    replaced.forward = types.MethodType(lambda self, ids: self.model(ids).last_hidden_state.mean(1), replaced)
    scored.score.forward = types.MethodType(Mixing.forward, Mixing(8, 3))
    for head in (mixing, replaced, scored, decoder(Mean)):
        forward = head.model.forward
        assert reading_last_tokens(forward, head) is forward
    assert reading_last_tokens(forward, nn.Linear(1, 1)) is forward
    plain = decoder()
    assert reading_last_tokens(plain.model.forward, plain) is not plain.model.forward


def test_hidden_states_of_other_tokens_than_those_given_are_kept() -> None:
    """A backbone that adds tokens of its own, or is given embeddings, has no token that is known to be the last."""
    head = decoder().eval()
    real = head.model.forward

    def longer(*args: Any, **kwargs: Any) -> Any:
        output = real(*args, **kwargs)
        output.last_hidden_state = functional.pad(output.last_hidden_state, (0, 0, 1, 0), value=2.0)
        return output

    ids = torch.tensor([[5, 6, 0]])
    reading = reading_last_tokens(longer, head)
    assert torch.equal(reading(ids).last_hidden_state, longer(ids).last_hidden_state)
    embeddings = head.model.embed_tokens(ids).detach()
    reading = reading_last_tokens(real, head)
    kept = reading(inputs_embeds=embeddings).last_hidden_state
    assert torch.equal(kept, real(inputs_embeds=embeddings).last_hidden_state)


def test_the_padding_is_that_which_the_head_looks_for() -> None:
    head = decoder().eval()
    text = Qwen3Config(pad_token_id=6)
    head.config.get_text_config = lambda *_, **__: text
    ids = torch.tensor([[5, 6, 0], [5, 7, 6]])
    hidden = reading_last_tokens(head.model.forward, head)(ids).last_hidden_state
    assert hidden.ne(0).any(-1).tolist() == [[False, False, True], [False, True, False]]
