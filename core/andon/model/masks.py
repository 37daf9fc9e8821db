"""Who sees whom in a model's attention, said so that no host has to wait for a GPU.

Given a mask of tokens, transformers looks on the host whether it is needed at all, and the host waits for the device.
Padding is behind the last token here, where a causal model never looks from a token that counts: its attention needs
no mask. Others take one by pairs of tokens as it is.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn

from andon.model.build import backbone_of, computing, half_of

WINDOWS = ("sliding_window", "local_attention", "attention_window", "attention_chunk_size", "window_size")
"""What configurations of transformers call a limit to how far a token sees."""
_UNMASKED = "andon_unmasked_sdpa"
"""What transformers knows its own attention under a second time: it makes no mask for names it has no masks of."""
_TRIED_LENGTHS = (12, 7, 1)
_NOISE = {None: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.05}
"""How far values may be off by rounding, of the largest, by the precision of products; padding seen is more."""


MISFITS = (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError)
"""How models fail on a mask by pairs or on none: those that use the mask of tokens for more than attention."""


class Masking(Enum):
    """How a model on a GPU is told who sees whom; the first that it takes is the cheapest."""

    UNMASKED = "no mask in its attention, which is causal"
    CAUSAL_PAIRS = "a mask by pairs of tokens, of those before"
    PAIRS = "a mask by pairs of tokens"
    TOKENS = "the mask of tokens, as on a CPU"


_tried: weakref.WeakKeyDictionary[nn.Module, Masking] = weakref.WeakKeyDictionary()


def possible_maskings(model: nn.Module) -> tuple[Masking, ...]:
    """Those that `model` should take, as its configuration and its layers say: cheapest first, `TOKENS` last.

    One with a layer whose tokens do not see all others, or all before them, takes the mask of tokens alone.
    """
    config: Any = getattr(model, "config", None)
    if _has_windows(config) or getattr(config, "_attn_implementation", None) != "sdpa":
        return (Masking.TOKENS,)
    flags = [bool(module.is_causal) for module in model.modules() if hasattr(module, "is_causal")]
    causal = bool(flags) and all(flags) and getattr(config, "is_causal", True)
    found = [Masking.UNMASKED] if causal else []
    if not any(_counts_places(module) for module in model.modules()):
        found.append(Masking.CAUSAL_PAIRS if causal else Masking.PAIRS)
    return (*found, Masking.TOKENS)


def _has_windows(config: Any) -> bool:
    """Whether some layer has another kind of attention than the full one, or a limit to how far a token sees."""
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ()]
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
    limited = kinds != {"full_attention"} or any(getattr(config, name, None) for name in WINDOWS)
    return limited or any(_has_windows(part) for part in parts if part is not None)


def _counts_places(module: nn.Module) -> bool:
    """Whether it is an embedding of places that it counts in the mask of tokens, as OPT's is."""
    return isinstance(module, nn.Embedding) and "attention_mask" in inspect.signature(module.forward).parameters


def masking_of(model: nn.Module, device: torch.device) -> Masking:
    """How `model` on `device` is told. On a GPU the first of `possible_maskings` that holds: each is tried, once.

    What a model cannot be given, or gives other values for than for the mask of tokens, it is not given. A trial of
    other weights may come out otherwise, so a run asks before any are restored, and a resumed one comes to the same.
    """
    if device.type != "cuda":
        return Masking.TOKENS
    if model not in _tried:
        _tried[model] = tried_masking(model, device)
    return _tried[model]


def tried_masking(model: nn.Module, device: torch.device) -> Masking:
    """The first of `possible_maskings` that gives what the mask of tokens gives, on `device`."""
    return next(each for each in possible_maskings(model) if each is Masking.TOKENS or _holds(model, each, device))


def _holds(model: nn.Module, masking: Masking, device: torch.device) -> bool:
    """Whether padding is as unseen with `masking` as with the mask of tokens.

    Tried on three rows of tokens that differ, the same on every rank, one row of a single token.
    """
    ids, mask = _tokens(model, device)
    noise = _NOISE[half_of(model)]
    with torch.no_grad(), evaluating(model), computing(model, device):
        wanted = _values(model, ids, mask, mask)
        with masked(model, masking, mask) as given:
            found = _values(model, ids, given, mask)
    if wanted is None or found is None or len(wanted) != len(found):
        return False
    return all(
        bool((one - other).abs().max() <= noise * other.abs().max()) for one, other in zip(found, wanted, strict=True)
    )


def _values(model: Any, ids: torch.Tensor, given: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """The logits, and what the backbone gives for tokens, 0 for padding: a head of zeros hides who saw whom.

    None: `model` fails on `given`, or on such tokens. An error of the device is no answer.
    """
    seen: list[torch.Tensor] = []

    def note(_: nn.Module, __: object, output: Any) -> None:
        hidden = getattr(output, "last_hidden_state", None)
        if isinstance(hidden, torch.Tensor) and hidden.shape[:2] == mask.shape:
            seen.append(hidden.float() * mask[..., None])

    try:
        hook = backbone_of(model).register_forward_hook(note)
        try:
            logits: torch.Tensor = model(input_ids=ids, attention_mask=given).logits
        finally:
            hook.remove()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except MISFITS as error:
        if "CUDA error" in str(error):
            raise
        return None
    return (logits.float(), *seen)


def _tokens(model: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their mask, [rows, length]."""
    room = getattr(model.config, "max_position_embeddings", None) or 2 * _TRIED_LENGTHS[0]
    pad = getattr(model.config, "pad_token_id", None) or 0
    size = model.get_input_embeddings().weight.shape[0]
    places = torch.arange(max(1, min(_TRIED_LENGTHS[0], room // 2)), device=device)
    mask = (places < torch.tensor(_TRIED_LENGTHS, device=device)[:, None]).long()
    return ((pad + 1 + places % max(1, size - 1)) % size).where(mask == 1, pad), mask


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, nothing is dropped; every module is then in the mode in which it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def masked(model: nn.Module, masking: Masking, mask: torch.Tensor) -> Iterator[torch.Tensor]:
    """Inside, what `model` has to be given as its mask; mask: that of tokens [rows, length], 1 where there is one."""
    if masking is Masking.UNMASKED:
        with _attention_without_mask(model):
            yield mask
    elif masking is Masking.TOKENS:
        yield mask
    else:
        rows, length = mask.shape
        pairs = mask.bool()[:, None, None, :].expand(rows, 1, length, length)
        yield pairs.tril() if masking is Masking.CAUSAL_PAIRS else pairs


@contextmanager
def _attention_without_mask(model: nn.Module) -> Iterator[None]:
    """Inside, transformers makes no mask for `model`, whose attention then is causal by itself."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(_UNMASKED, sdpa_attention_forward)
    config: Any = model.config
    before = config._attn_implementation
    config._attn_implementation = _UNMASKED
    try:
        yield
    finally:
        config._attn_implementation = before
