"""The forward passes of a Qwen3 decoder and a BERT encoder in float64, from parameters by canonical name.

Sources: Qwen3 technical report, section 2; RMSNorm (Zhang and Sennrich 2019), RoPE (Su et al. 2021), SwiGLU (Shazeer
2020), LoRA (Hu et al. 2021); BERT (Devlin et al. 2019), after Vaswani et al. 2017 (post-norm layers, GELU by the error
function).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

Params = Mapping[str, Tensor]
"""Canonical name (`model.layers.0.self_attn.q_proj.lora_A.weight`) -> float64 tensor."""
Masks = Callable[[str, tuple[int, ...]], Tensor | None]
"""(name of a dropout, shape of its input) -> factors, 0 or 1 / (1 - p); None drops nothing.

Names: `<module>.lora_dropout` for a LoRA's input [rows, length, features], `<module>.attention_dropout` for attention
probabilities [rows, heads, queries, keys], and in an encoder the names of its hidden dropouts.
"""


def no_dropout(name: str, shape: tuple[int, ...]) -> Tensor | None:
    """The mask of evaluation."""
    del name, shape
    return None


def canonical_name(name: str) -> str | None:
    """The name in the bare architecture of a tensor of a PEFT model, or None for the frozen copy of a trained head.

    A prefix of DDP is dropped too. Names of a bare model stay as they are.
    """
    parts = name.split(".")
    if "original_module" in parts:
        return None
    parts = parts[1:] if parts[0] == "module" else parts
    parts = parts[2:] if parts[:2] == ["base_model", "model"] else parts
    kept = []
    for before, part in zip(["", *parts], parts, strict=False):
        of_adapter = part == "default" and before in ("lora_A", "lora_B", "modules_to_save")
        if part not in ("base_layer", "modules_to_save") and not of_adapter:
            kept.append(part)
    return ".".join(kept)


def canonical(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of `state` in float64 under canonical names. Integer buffers keep their type.

    Raises `ValueError` if two tensors have one canonical name.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if (short := canonical_name(name)) is None:
            continue
        if short in found:
            raise ValueError(f"{name} and another tensor are both {short}")
        held = tensor.detach().cpu().clone()
        found[short] = held.double() if held.is_floating_point() else held
    return found


@dataclass(frozen=True)
class Layers:
    """The parameters of one forward pass, its adapters and its dropout masks.

    alpha: of LoRA. An adapter adds alpha / r times B @ A; its rank r is read from A's shape.
    """

    params: Params
    alpha: float | None = None
    masks: Masks = no_dropout

    def linear(self, inputs: Tensor, name: str) -> Tensor:
        """inputs @ W^T + b of the module `name`, and its LoRA: alpha / r * (mask * inputs) @ A^T @ B^T.

        Raises `ValueError` for an adapter without an `alpha`.
        """
        result = inputs @ self.params[f"{name}.weight"].T
        bias = self.params.get(f"{name}.bias")
        result = result if bias is None else result + bias
        down, up = self.params.get(f"{name}.lora_A.weight"), self.params.get(f"{name}.lora_B.weight")
        if down is None or up is None:
            return result
        if self.alpha is None:
            raise ValueError(f"{name} has an adapter, and no alpha to scale it")
        return result + self.dropped(inputs, f"{name}.lora_dropout") @ down.T @ up.T * (self.alpha / down.shape[0])

    def dropped(self, values: Tensor, name: str) -> Tensor:
        """`values` times the mask of the dropout `name`. Raises `ValueError` for a mask of another shape."""
        mask = self.masks(name, tuple(values.shape))
        if mask is None:
            return values
        if mask.shape != values.shape:
            raise ValueError(f"the mask of {name} has shape {list(mask.shape)}, its input {list(values.shape)}")
        return values * mask.double()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, name: str) -> Tensor:
        """Softmax attention of [rows, heads, length, head_dim]; `allowed` is bool [rows, 1, queries, keys].

        Returns [rows, length, heads * head_dim]. A query that may attend to nothing (padding on the left) attends
        evenly, which keeps it finite. It is not used.
        """
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        scores = scores.masked_fill(~allowed, torch.finfo(torch.float64).min)
        attended = self.dropped(scores.softmax(-1), f"{name}.attention_dropout") @ value
        return attended.transpose(1, 2).flatten(-2)


def _heads(values: Tensor, heads: int) -> Tensor:
    """[rows, length, heads * head_dim] -> [rows, heads, length, head_dim]."""
    return values.view(*values.shape[:2], heads, -1).transpose(1, 2)


def _rms(values: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """values / sqrt(mean of squares + epsilon) * weight, over the last dimension."""
    return values * (values.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight


@dataclass(frozen=True)
class Decoder:
    """A Qwen3 decoder, with a head for classes or for next tokens.

    pad: the token id that pooling skips. theta: the base of the rotary angles.
    """

    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    pad: int
    theta: float = 1e6
    epsilon: float = 1e-6
    alpha: float | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, object], alpha: float | None = None) -> Decoder:
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
            known = "a Qwen3 decoder with silu, plain rotary angles and full attention only"
            raise ValueError(f"unsupported model configuration: the reference computes {known}")
        theta, epsilon = rope.get("rope_theta"), config.get("rms_norm_eps")
        if not all(isinstance(number, int) for number in numbers) or not isinstance(epsilon, float) or not theta:
            raise ValueError(f"{', '.join(names)} are {numbers}, rope_theta {theta} and rms_norm_eps {epsilon}")
        layers, heads, key_value_heads, head_dim, pad = cast(list[int], numbers)
        return cls(layers, heads, key_value_heads, head_dim, pad, float(theta), epsilon, alpha)

    def logits(self, params: Params, tokens: Tensor, attention: Tensor, masks: Masks = no_dropout) -> Tensor:
        """The class scores of each row.

        params: by canonical name. tokens: int64 [rows, length]. attention: [rows, length], 0 for padding.
        Returns float64 [rows, classes], read at each row's last token that is not `pad`.
        """
        layers = Layers(params, self.alpha, masks)
        final = self._final(layers, tokens, attention)
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        last = torch.where(tokens == self.pad, 0, places).amax(-1)  # 0 in a row of padding only
        return layers.linear(final[torch.arange(len(tokens)), last], "score")

    def next_token_logits(self, params: Params, tokens: Tensor) -> Tensor:
        """float64 [length, vocabulary]: the scores of the token after each token of one row (int64 [length]).

        A model without `lm_head` uses its embedding.
        """
        layers = Layers(params, self.alpha)
        final = self._final(layers, tokens[None], torch.ones_like(tokens)[None])[0]
        if "lm_head.weight" in params:
            return layers.linear(final, "lm_head")
        return final @ params["model.embed_tokens.weight"].T

    def _final(self, layers: Layers, tokens: Tensor, attention: Tensor) -> Tensor:
        params, length = layers.params, tokens.shape[1]
        hidden = params["model.embed_tokens.weight"][tokens]
        allowed = torch.ones(length, length, dtype=torch.bool).tril() & attention.bool()[:, None, None, :]
        for name in (f"model.layers.{index}" for index in range(self.layers)):
            normed = _rms(hidden, params[f"{name}.input_layernorm.weight"], self.epsilon)
            hidden = hidden + self._attention(layers, normed, allowed, f"{name}.self_attn")
            normed = _rms(hidden, params[f"{name}.post_attention_layernorm.weight"], self.epsilon)
            gate = layers.linear(normed, f"{name}.mlp.gate_proj")
            gated = gate * gate.sigmoid() * layers.linear(normed, f"{name}.mlp.up_proj")
            hidden = hidden + layers.linear(gated, f"{name}.mlp.down_proj")
        return _rms(hidden, params["model.norm.weight"], self.epsilon)

    def _attention(self, layers: Layers, inputs: Tensor, allowed: Tensor, name: str) -> Tensor:
        query = _heads(layers.linear(inputs, f"{name}.q_proj"), self.heads)
        key = _heads(layers.linear(inputs, f"{name}.k_proj"), self.key_value_heads)
        value = _heads(layers.linear(inputs, f"{name}.v_proj"), self.key_value_heads)
        query = self._rotate(_rms(query, layers.params[f"{name}.q_norm.weight"], self.epsilon))
        key = self._rotate(_rms(key, layers.params[f"{name}.k_norm.weight"], self.epsilon))
        group = self.heads // self.key_value_heads
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        return layers.linear(layers.attend(query, key, value, allowed, name), f"{name}.o_proj")

    def _rotate(self, values: Tensor) -> Tensor:
        """Turn the pairs (i, i + head_dim / 2) of position p by the angle p / theta^(2 i / head_dim)."""
        half = self.head_dim // 2
        speeds = self.theta ** (-2.0 * torch.arange(half, dtype=torch.float64) / self.head_dim)
        angles = torch.arange(values.shape[-2], dtype=torch.float64)[:, None] * speeds
        cosine, sine = angles.cos(), angles.sin()
        left, right = values[..., :half], values[..., half:]
        return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)


@dataclass(frozen=True)
class Encoder:
    """A BERT encoder with a pooled head.

    The dropout mask of a hidden layer has the name of its module; that of the head is named `dropout`.
    """

    layers: int
    heads: int
    epsilon: float = 1e-12
    alpha: float | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, object], alpha: float | None = None) -> Encoder:
        """From the values of a `config.json`. Raises `ValueError` for what this reference does not compute."""
        numbers = [config.get(name) for name in ("num_hidden_layers", "num_attention_heads", "layer_norm_eps")]
        layers, heads, epsilon = numbers
        if config.get("hidden_act", "gelu") != "gelu" or config.get("is_decoder") or config.get("add_cross_attention"):
            raise ValueError("unsupported model configuration: the reference computes a BERT encoder with gelu only")
        if not isinstance(layers, int) or not isinstance(heads, int) or not isinstance(epsilon, float):
            raise ValueError(f"layers, heads and epsilon of the layer norm are {numbers!r}")
        return cls(layers, heads, epsilon, alpha)

    def logits(self, params: Params, tokens: Tensor, attention: Tensor, masks: Masks = no_dropout) -> Tensor:
        """As `Decoder.logits`, all of segment 0, read at each row's first token."""
        layers, place = Layers(params, self.alpha, masks), "bert.embeddings"
        hidden = params[f"{place}.word_embeddings.weight"][tokens]
        hidden = hidden + params[f"{place}.token_type_embeddings.weight"][0]
        hidden = hidden + params[f"{place}.position_embeddings.weight"][: tokens.shape[1]]
        hidden = layers.dropped(self._norm(layers, hidden, f"{place}.LayerNorm"), f"{place}.dropout")
        allowed = attention.bool()[:, None, None, :]
        for name in (f"bert.encoder.layer.{index}" for index in range(self.layers)):
            within = f"{name}.attention.self"
            query, key, value = (
                _heads(layers.linear(hidden, f"{within}.{part}"), self.heads) for part in ("query", "key", "value")
            )
            attended = layers.attend(query, key, value, allowed, within)
            hidden = self._output(layers, attended, hidden, f"{name}.attention.output")
            inner = layers.linear(hidden, f"{name}.intermediate.dense")
            inner = 0.5 * inner * (1.0 + torch.erf(inner / math.sqrt(2.0)))
            hidden = self._output(layers, inner, hidden, f"{name}.output")
        pooled = layers.linear(hidden[:, 0], "bert.pooler.dense").tanh()
        return layers.linear(layers.dropped(pooled, "dropout"), "classifier")

    def _output(self, layers: Layers, values: Tensor, residual: Tensor, name: str) -> Tensor:
        projected = layers.dropped(layers.linear(values, f"{name}.dense"), f"{name}.dropout")
        return self._norm(layers, projected + residual, f"{name}.LayerNorm")

    def _norm(self, layers: Layers, values: Tensor, name: str) -> Tensor:
        centred = values - values.mean(-1, keepdim=True)
        spread = (centred.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()
        return centred * spread * layers.params[f"{name}.weight"] + layers.params[f"{name}.bias"]
