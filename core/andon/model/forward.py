"""One forward pass of a sequence classifier: the precision it computes in, and a mask that nobody has to wait for."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from andon.step.task import Batch

_HALVES = (torch.bfloat16, torch.float16)
_WINDOWS = ("sliding_window", "local_attention", "attention_window", "attention_chunk_size", "window_size")
"""What configurations of transformers call a limit to how far a token sees."""
_TRIED_LENGTHS = (12, 7, 1)
_NOISE = {None: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.05}
"""How far logits may be off by rounding, of the largest, by the precision of products; padding seen is more."""


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
_tried: weakref.WeakKeyDictionary[nn.Module, Nature] = weakref.WeakKeyDictionary()


def nature_of(model: nn.Module) -> Nature:
    """What `model` is, looked up once: its configuration and its attention layers say it.

    One with a layer whose tokens do not see all others, or all before them, takes the mask of tokens alone.
    """
    if model not in _natures:
        config: Any = getattr(model, "config", None)
        stored = getattr(config, "dtype", None)
        flags = [bool(module.is_causal) for module in model.modules() if hasattr(module, "is_causal")]
        everywhere = not _has_windows(config)
        _natures[model] = Nature(
            half=stored if stored in _HALVES else None,
            causal=bool(flags) and all(flags) and everywhere,
            takes_kinds=everywhere and any(_makes_a_mask_by_kind(module) for module in model.modules()),
            takes_pairs=everywhere
            and getattr(config, "_attn_implementation", None) == "sdpa"
            and not any(_counts_places(module) for module in model.modules()),
        )
    return _natures[model]


def _has_windows(config: Any) -> bool:
    """Whether some layer has another kind of attention than the full one, or a limit to how far a token sees."""
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
    return kinds != {"full_attention"} or any(getattr(config, name, None) for name in _WINDOWS)


def tried_nature_of(model: nn.Module, device: torch.device) -> Nature:
    """`nature_of` a model on `device`, without what does not hold: masks that are made of it are tried, once.

    What a model cannot be given, or gives other logits for than for the mask of tokens, it is not given.
    """
    if model not in _tried:
        known = nature_of(model)
        without_kinds = replace(known, takes_kinds=False)
        forms = [known, without_kinds] if known.takes_pairs or known.takes_kinds else []
        plain = replace(without_kinds, takes_pairs=False)
        _tried[model] = next((form for form in forms if _gives_the_same(model, form, device)), plain)
    return _tried[model]


def _gives_the_same(model: Any, nature: Nature, device: torch.device) -> bool:
    """Whether padding is as unseen with the masks of a GPU that `nature` says as with the mask of tokens.

    Tried on three rows of tokens that differ, the same on every rank, one row of a single token.
    """
    room = getattr(model.config, "max_position_embeddings", None) or 2 * _TRIED_LENGTHS[0]
    pad = getattr(model.config, "pad_token_id", None) or 0
    size = model.get_input_embeddings().weight.shape[0]
    places = torch.arange(max(1, min(_TRIED_LENGTHS[0], room // 2)), device=device)
    mask = (places < torch.tensor(_TRIED_LENGTHS, device=device)[:, None]).long()
    ids = ((pad + 1 + places % (size - 1)) % size).where(mask == 1, pad)
    with torch.no_grad(), _evaluating(model), _computing(nature, device):
        wanted = model(input_ids=ids, attention_mask=mask).logits.float()
        try:
            found = model(input_ids=ids, attention_mask=_mask_on_gpu(nature, mask)).logits.float()
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError):
            return False  # as models do that use the mask of tokens for more than attention
    return bool((found - wanted).abs().max() <= _NOISE[nature.half] * wanted.abs().max())


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, nothing is dropped; every module is then in the mode in which it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _computing(nature: Nature, device: torch.device) -> AbstractContextManager[object]:
    return nullcontext() if nature.half is None else torch.autocast(device.type, dtype=nature.half)


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
    nature = tried_nature_of(model, ids.device) if ids.device.type == "cuda" else nature_of(model)
    with _computing(nature, ids.device):
        mask = mask_for(nature, batch["attention_mask"], ids.device)
        logits: torch.Tensor = model(input_ids=ids, attention_mask=mask).logits
    return logits


def mask_for(nature: Nature, mask: torch.Tensor, device: torch.device) -> torch.Tensor | Mapping[str, None]:
    """The mask [rows, length] of tokens as a model on `device` gets it.

    On a GPU transformers looks on the host whether a mask of tokens is needed, and the host waits for the device. It
    takes a mask by pairs of tokens as it is. Padding is behind the last token, where a causal model never looks from a
    token that counts: it needs no mask where it can be told so without another look.
    """
    return _mask_on_gpu(nature, mask) if device.type == "cuda" else mask


def _mask_on_gpu(nature: Nature, mask: torch.Tensor) -> torch.Tensor | Mapping[str, None]:
    if nature.causal and nature.takes_kinds:
        return {"full_attention": None}
    if not nature.takes_pairs:
        return mask
    rows, length = mask.shape
    pairs = mask.bool()[:, None, None, :].expand(rows, 1, length, length)
    return pairs.tril() if nature.causal else pairs
