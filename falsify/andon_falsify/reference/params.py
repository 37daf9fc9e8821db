"""Parameters by the names of the bare architecture, and what a layer does with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Lora:
    """An adapter adds alpha / r times B @ A. Its rank r is read from A's shape."""

    alpha: float


def canonical_name(name: str, adapter: str = "default") -> str | None:
    """The name in the bare architecture of a tensor of a PEFT model, or None for the frozen copy of a trained head.

    A prefix of DDP is dropped too. Names of a bare model stay as they are.
    """
    parts = name.split(".")
    if "original_module" in parts:
        return None
    if parts[0] == "module":
        parts = parts[1:]
    if parts[:2] == ["base_model", "model"]:
        parts = parts[2:]
    kept = []
    for index, part in enumerate(parts):
        wrapped = index > 0 and parts[index - 1] in ("lora_A", "lora_B", "modules_to_save")
        if part in ("base_layer", "modules_to_save") or (part == adapter and wrapped):
            continue
        kept.append(part)
    return ".".join(kept)


def canonical(state: Mapping[str, Tensor], adapter: str = "default") -> dict[str, Tensor]:
    """A copy of `state` in float64 under canonical names. Integer buffers keep their type.

    Raises `ValueError` if two tensors have one canonical name.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        short = canonical_name(name, adapter)
        if short is None:
            continue
        if short in found:
            msg = f"{name} and another tensor are both {short}"
            raise ValueError(msg)
        held = tensor.detach().cpu().clone()
        found[short] = held.double() if held.is_floating_point() else held
    return found


@dataclass(frozen=True)
class Layers:
    """The parameters of one forward pass, its adapters and its dropout masks."""

    params: Params
    lora: Lora | None = None
    masks: Masks = no_dropout

    def linear(self, inputs: Tensor, name: str) -> Tensor:
        """inputs @ W^T + b of the module `name`, and its LoRA: alpha / r * (mask * inputs) @ A^T @ B^T.

        Raises `ValueError` for an adapter without a `lora`.
        """
        result = inputs @ self.params[f"{name}.weight"].T
        bias = self.params.get(f"{name}.bias")
        if bias is not None:
            result = result + bias
        down, up = self.params.get(f"{name}.lora_A.weight"), self.params.get(f"{name}.lora_B.weight")
        if down is None or up is None:
            return result
        if self.lora is None:
            raise ValueError(f"{name} has an adapter, and no alpha to scale it")
        return result + self.dropped(inputs, f"{name}.lora_dropout") @ down.T @ up.T * (self.lora.alpha / down.shape[0])

    def dropped(self, values: Tensor, name: str) -> Tensor:
        """`values` times the mask of the dropout `name`. Raises `ValueError` for a mask of another shape."""
        mask = self.masks(name, tuple(values.shape))
        if mask is None:
            return values
        if mask.shape != values.shape:
            msg = f"the mask of {name} has shape {list(mask.shape)}, its input {list(values.shape)}"
            raise ValueError(msg)
        return values * mask.double()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, name: str) -> Tensor:
        """Softmax attention, all of [rows, heads, length, head_dim]; `allowed` is bool [rows, 1, queries, keys].

        A query that may attend to nothing (padding on the left) attends evenly, which keeps it finite. It is not used.
        """
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        scores = scores.masked_fill(~allowed, torch.finfo(torch.float64).min)
        return self.dropped(scores.softmax(-1), f"{name}.attention_dropout") @ value


def split_heads(values: Tensor, heads: int) -> Tensor:
    """[rows, length, heads * head_dim] -> [rows, heads, length, head_dim]."""
    rows, length, width = values.shape
    return values.view(rows, length, heads, width // heads).transpose(1, 2)


def join_heads(values: Tensor) -> Tensor:
    """[rows, heads, length, head_dim] -> [rows, length, heads * head_dim]."""
    return values.transpose(1, 2).flatten(-2)
