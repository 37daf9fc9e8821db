"""One forward pass of a sequence classifier: the precision it computes in, and a mask that nobody has to wait for."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from andon.step.task import Batch

_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Nature:
    """What a model is.

    half: the half precision of its matrix products; None: its own. causal: whether in every layer a token sees all
    those before it and no other. takes_kinds: whether it takes a mask for each kind of layer. takes_pairs: whether its
    attention takes a mask of booleans by pairs of tokens, and nothing else in it needs the mask of tokens.
    """

    half: torch.dtype | None
    causal: bool
    takes_kinds: bool
    takes_pairs: bool


_natures: weakref.WeakKeyDictionary[nn.Module, Nature] = weakref.WeakKeyDictionary()


def nature_of(model: nn.Module) -> Nature:
    """What `model` is, looked up once: its configuration and its attention layers say it."""
    if model not in _natures:
        config: Any = getattr(model, "config", None)
        stored = getattr(config, "dtype", None)
        flags = [bool(module.is_causal) for module in model.modules() if hasattr(module, "is_causal")]
        kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
        _natures[model] = Nature(
            half=stored if stored in _HALVES else None,
            causal=bool(flags) and all(flags) and kinds == {"full_attention"},
            takes_kinds=any(_makes_a_mask_by_kind(module) for module in model.modules()),
            takes_pairs=getattr(config, "_attn_implementation", None) == "sdpa"
            and not any(_counts_places(module) for module in model.modules()),
        )
    return _natures[model]


def _makes_a_mask_by_kind(module: nn.Module) -> bool:
    """Whether a backbone of transformers uses a mapping from kinds of layers to masks as it is given."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "causal_mask_mapping" in code.co_varnames


def _counts_places(module: nn.Module) -> bool:
    """Whether it is an embedding of places that it counts in the mask of tokens, as OPT's is."""
    return isinstance(module, nn.Embedding) and "attention_mask" in inspect.signature(module.forward).parameters


def logits_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """[rows, classes]: one forward pass, without the labels, so that the model computes no loss of its own.

    A model whose weights are stored in half precision computes its matrix products in it (autocast).
    """
    ids = batch["input_ids"]
    nature = nature_of(model)
    computing: AbstractContextManager[object] = nullcontext()
    if nature.half is not None:
        computing = torch.autocast(ids.device.type, dtype=nature.half)
    with computing:
        mask = mask_for(nature, batch["attention_mask"], ids.device)
        logits: torch.Tensor = model(input_ids=ids, attention_mask=mask).logits
    return logits


def mask_for(nature: Nature, mask: torch.Tensor, device: torch.device) -> torch.Tensor | Mapping[str, None]:
    """The mask [rows, length] of tokens as a model on `device` gets it.

    On a GPU transformers looks on the host whether a mask of tokens is needed, and the host waits for the device. It
    takes a mask by pairs of tokens as it is. Padding is behind the last token, where a causal model never looks from a
    token that counts: it needs no mask where it can be told so without another look.
    """
    if device.type != "cuda":
        return mask
    if nature.causal and nature.takes_kinds:
        return {"full_attention": None}
    if not nature.takes_pairs:
        return mask
    rows, length = mask.shape
    pairs = mask.bool()[:, None, None, :].expand(rows, 1, length, length)
    return pairs.tril() if nature.causal else pairs
