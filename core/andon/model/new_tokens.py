"""New tokens of a causal language model: their rows in its embedding and in its head, tied or not.

The rows are parameters of the adapter, in peft's form (`trainable_token_indices`). All start as the mean of the rows
before them: nothing is drawn, and no new token starts likelier than another.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from andon.console.problems import InputError, Problem
from andon.model.build import seeded, vocabulary_head

_AT_ONCE = 4096
"""Rows that are added at a time."""


def add_rows(model: nn.Module, tokens: Sequence[int], kind: str) -> None:
    """Make `tokens` (ids, ascending, without a gap) rows of `model`'s embedding and head, in place.

    All other rows keep their bits. Rows that exist already, as in a vocabulary larger than its tokenizer, start as new
    ones do. kind: of the adapter. Raises `InputError` for a model that is no causal language model or, with an adapter,
    has logits with a bias, which peft would leave out.
    """
    built: Any = model
    head: Any = vocabulary_head(model)
    if head is None:
        raise InputError([Problem("model.new_tokens", f"{type(model).__name__} is no causal language model")])
    if kind != "none" and getattr(head, "bias", None) is not None:
        what = f"the logits of {type(model).__name__} have a bias, and rows beside an adapter have none"
        raise InputError([Problem("model.new_tokens", f"{what}: adapter.kind=none")])
    first, end = tokens[0], tokens[-1] + 1
    if built.get_input_embeddings().weight.shape[0] < end:
        with seeded(0):  # what it draws is overwritten
            built.resize_token_embeddings(end, mean_resizing=False)
    for layer in (built.get_input_embeddings(), built.get_output_embeddings()):
        for values in (layer.weight, getattr(layer, "bias", None)):
            if values is not None and not values.is_meta:
                values.data[first:end] = mean_row(values.data[:first]).to(values.dtype)


def mean_row(rows: torch.Tensor) -> torch.Tensor:
    """fp64: the mean of `rows` (or of numbers), added in one order on any number of threads."""
    total = torch.zeros((_AT_ONCE, *rows.shape[1:]), dtype=torch.float64)
    for part in torch.split(rows, _AT_ONCE):
        total[: len(part)] += part.double()
    while len(total) > 1:
        total = total[: len(total) // 2] + total[len(total) // 2 :]
    return total[0] / len(rows)


def layers_with_rows(model: Any, tokens: Sequence[int]) -> dict[str, list[int]] | None:
    """For peft: `tokens` by the name of each layer with its own rows for them; None without tokens."""
    if not tokens:
        return None
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    if layers[0].weight is layers[1].weight:  # peft has a head that is the embedding follow by itself
        del layers[1]
    return {name: list(tokens) for name, each in model.named_modules() if any(each is layer for layer in layers)}


def with_rows_put_in(adapted: Any) -> Any:
    """`adapted`, a peft model, whose layers put trained rows into their output. peft's own layers copy all weights, and
    compute a gradient as large, at each pass."""
    for layer in adapted.modules():
        if hasattr(layer, "trainable_tokens_delta"):
            layer.forward_adapters = functools.partial(_forward, layer)
    return adapted


def _forward(layer: Any, given: torch.Tensor, active: object = None) -> torch.Tensor:
    """A layer's embeddings of token ids, or its logits of hidden states, with trained rows in place of the base's."""
    base = layer.base_layer
    found: torch.Tensor = base(given)
    if layer.merged or layer.disable_adapters:
        return found
    rows = layer.trainable_tokens_delta["default"].to(base.weight.dtype)
    first, end = layer.token_indices["default"][0], layer.token_indices["default"][-1] + 1
    if isinstance(base, nn.Linear):
        found[..., first:end] = nn.functional.linear(given, rows)
        return found
    new = (given >= first) & (given < end)
    own = nn.functional.embedding((given - first).where(new, 0), rows)
    scale = layer._get_embed_scale()
    return torch.where(new[..., None], own if scale is None else own * scale.to(own.dtype), found)
