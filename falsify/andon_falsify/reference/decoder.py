"""A Qwen3 decoder in float64, with a head for classes or for next tokens.

Source: Qwen3 technical report, section 2 (architecture); RMSNorm (Zhang and Sennrich 2019), RoPE (Su et al. 2021),
SwiGLU (Shazeer 2020), LoRA (Hu et al. 2021).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from andon_falsify.reference.params import Layers, Lora, Masks, Params, join_heads, no_dropout, split_heads


@dataclass(frozen=True)
class Decoder:
    """The architecture's numbers. pad: the token id that pooling skips. theta: the base of the rotary angles."""

    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    pad: int
    theta: float = 1e6
    epsilon: float = 1e-6
    lora: Lora | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, object], lora: Lora | None = None) -> Decoder:
        """From the values of a `config.json`. Raises `ValueError` for what this reference does not compute."""
        rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta")}
        names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "pad_token_id")
        numbers = [config.get(name) for name in names]
        if (
            not isinstance(rope, Mapping)
            or rope.get("rope_type", "default") != "default"
            or config.get("hidden_act", "silu") != "silu"
            or {*cast(Iterable[str], config.get("layer_types") or ())} - {"full_attention"}
        ):
            msg = "the reference computes a Qwen3 decoder with silu, plain rotary angles and full attention only"
            raise ValueError(msg)
        theta, epsilon = rope.get("rope_theta"), config.get("rms_norm_eps")
        if not all(isinstance(number, int) for number in numbers) or not isinstance(epsilon, float) or not theta:
            msg = f"{', '.join(names)} are {numbers}, rope_theta {theta} and rms_norm_eps {epsilon}"
            raise ValueError(msg)
        layers, heads, key_value_heads, head_dim, pad = cast(list[int], numbers)
        return cls(layers, heads, key_value_heads, head_dim, pad, float(theta), epsilon, lora)

    def logits(self, params: Params, tokens: Tensor, attention: Tensor, masks: Masks = no_dropout) -> Tensor:
        """The class scores of each row.

        params: by canonical name. tokens: int64 [rows, length]. attention: [rows, length], 0 for padding.
        Returns float64 [rows, classes], read at each row's last token that is not `pad`.
        """
        final = self._final(params, tokens, attention, masks)
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        last = torch.where(tokens == self.pad, 0, places).amax(-1)  # 0 in a row of padding only
        return Layers(params, self.lora, masks).linear(final[torch.arange(len(tokens)), last], "score")

    def next_token_logits(self, params: Params, tokens: Tensor) -> Tensor:
        """float64 [length, vocabulary]: the scores of the token after each token of one row (int64 [length]).

        A model without `lm_head` uses its embedding.
        """
        final = self._final(params, tokens[None], torch.ones_like(tokens)[None], no_dropout)[0]
        if "lm_head.weight" in params:
            return Layers(params, self.lora).linear(final, "lm_head")
        return final @ params["model.embed_tokens.weight"].T

    def _final(self, params: Params, tokens: Tensor, attention: Tensor, masks: Masks) -> Tensor:
        """[rows, length, hidden]: after the last layer and its norm."""
        with_lora = Layers(params, self.lora, masks)
        hidden = params["model.embed_tokens.weight"][tokens]
        length = tokens.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        allowed = causal & attention.bool()[:, None, None, :]
        for index in range(self.layers):
            hidden = self._layer(with_lora, hidden, allowed, f"model.layers.{index}")
        return _rms(hidden, params["model.norm.weight"], self.epsilon)

    def _layer(self, layers: Layers, hidden: Tensor, allowed: Tensor, name: str) -> Tensor:
        params = layers.params
        normed = _rms(hidden, params[f"{name}.input_layernorm.weight"], self.epsilon)
        hidden = hidden + self._attention(layers, normed, allowed, f"{name}.self_attn")
        normed = _rms(hidden, params[f"{name}.post_attention_layernorm.weight"], self.epsilon)
        gate = layers.linear(normed, f"{name}.mlp.gate_proj")
        gated = gate * gate.sigmoid() * layers.linear(normed, f"{name}.mlp.up_proj")
        return hidden + layers.linear(gated, f"{name}.mlp.down_proj")

    def _attention(self, layers: Layers, inputs: Tensor, allowed: Tensor, name: str) -> Tensor:
        params = layers.params
        query = split_heads(layers.linear(inputs, f"{name}.q_proj"), self.heads)
        key = split_heads(layers.linear(inputs, f"{name}.k_proj"), self.key_value_heads)
        value = split_heads(layers.linear(inputs, f"{name}.v_proj"), self.key_value_heads)
        query = self._rotate(_rms(query, params[f"{name}.q_norm.weight"], self.epsilon))
        key = self._rotate(_rms(key, params[f"{name}.k_norm.weight"], self.epsilon))
        group = self.heads // self.key_value_heads
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        return layers.linear(join_heads(layers.attend(query, key, value, allowed, name)), f"{name}.o_proj")

    def _rotate(self, values: Tensor) -> Tensor:
        """Turn the pairs (i, i + head_dim / 2) of position p by the angle p / theta^(2 i / head_dim)."""
        half = self.head_dim // 2
        speeds = self.theta ** (-2.0 * torch.arange(half, dtype=torch.float64) / self.head_dim)
        angles = torch.arange(values.shape[-2], dtype=torch.float64)[:, None] * speeds
        cosine, sine = angles.cos(), angles.sin()
        left, right = values[..., :half], values[..., half:]
        return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)


def _rms(values: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """values / sqrt(mean of squares + epsilon) * weight, over the last dimension."""
    return values * (values.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight
