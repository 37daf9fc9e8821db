"""A BERT encoder with a pooled classification head, in float64.

Source: Devlin et al. 2019, after Vaswani et al. 2017 (post-norm layers, GELU by the error function).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from andon_falsify.reference.params import Layers, Lora, Masks, Params, join_heads, no_dropout, split_heads


@dataclass(frozen=True)
class Encoder:
    """The architecture's numbers. A hidden dropout has the name of its module, that of the head is `dropout`."""

    layers: int
    heads: int
    epsilon: float = 1e-12
    lora: Lora | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, object], lora: Lora | None = None) -> Encoder:
        """From the values of a `config.json`. Raises `ValueError` for what this reference does not compute."""
        numbers = [config.get(name) for name in ("num_hidden_layers", "num_attention_heads", "layer_norm_eps")]
        layers, heads, epsilon = numbers
        if config.get("hidden_act", "gelu") != "gelu" or config.get("is_decoder") or config.get("add_cross_attention"):
            msg = "the reference computes a BERT encoder with gelu and nothing else"
            raise ValueError(msg)
        if not isinstance(layers, int) or not isinstance(heads, int) or not isinstance(epsilon, float):
            msg = f"layers, heads and epsilon of the layer norm are {numbers!r}"
            raise ValueError(msg)
        return cls(layers, heads, epsilon, lora)

    def logits(self, params: Params, tokens: Tensor, attention: Tensor, masks: Masks = no_dropout) -> Tensor:
        """The class scores of each row, all of segment 0.

        params: by canonical name. tokens: int64 [rows, length]. attention: [rows, length], 0 for padding.
        Returns float64 [rows, classes], read at each row's first token.
        """
        layers = Layers(params, self.lora, masks)
        place = "bert.embeddings"
        hidden = params[f"{place}.word_embeddings.weight"][tokens]
        hidden = hidden + params[f"{place}.token_type_embeddings.weight"][0]
        hidden = hidden + params[f"{place}.position_embeddings.weight"][: tokens.shape[1]]
        hidden = layers.dropped(self._norm(layers, hidden, f"{place}.LayerNorm"), f"{place}.dropout")
        allowed = attention.bool()[:, None, None, :]
        for index in range(self.layers):
            hidden = self._layer(layers, hidden, allowed, f"bert.encoder.layer.{index}")
        pooled = layers.linear(hidden[:, 0], "bert.pooler.dense").tanh()
        return layers.linear(layers.dropped(pooled, "dropout"), "classifier")

    def _layer(self, layers: Layers, hidden: Tensor, allowed: Tensor, name: str) -> Tensor:
        attended = self._attention(layers, hidden, allowed, f"{name}.attention.self")
        hidden = self._output(layers, attended, hidden, f"{name}.attention.output")
        inner = layers.linear(hidden, f"{name}.intermediate.dense")
        inner = 0.5 * inner * (1.0 + torch.erf(inner / math.sqrt(2.0)))
        return self._output(layers, inner, hidden, f"{name}.output")

    def _attention(self, layers: Layers, inputs: Tensor, allowed: Tensor, name: str) -> Tensor:
        query, key, value = (
            split_heads(layers.linear(inputs, f"{name}.{part}"), self.heads) for part in ("query", "key", "value")
        )
        return join_heads(layers.attend(query, key, value, allowed, name))

    def _output(self, layers: Layers, values: Tensor, residual: Tensor, name: str) -> Tensor:
        projected = layers.dropped(layers.linear(values, f"{name}.dense"), f"{name}.dropout")
        return self._norm(layers, projected + residual, f"{name}.LayerNorm")

    def _norm(self, layers: Layers, values: Tensor, name: str) -> Tensor:
        centred = values - values.mean(-1, keepdim=True)
        spread = (centred.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()
        return centred * spread * layers.params[f"{name}.weight"] + layers.params[f"{name}.bias"]
