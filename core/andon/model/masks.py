"""Who sees whom in a model's attention, said so that no host has to wait for a GPU.

Given a mask of tokens, transformers looks on the host whether it is needed at all, and the host waits for the device.
Padding is behind the last token here, where a causal model never looks from a token that counts: its attention needs
no mask. Others take one by pairs of tokens as it is.

Rows that are packed end to end must not see each other. Pairs of tokens say so to every model; on a GPU a model takes
where each row begins and ends instead, and attention between rows then is not computed in the first place.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from andon.config.source import quiet_loading
from andon.fast.attention import causal_attention, fits, runs_on
from andon.model.build import attending_as, backbone_of, computing, half_of, vocabulary_head, without_adapter

WINDOWS = ("sliding_window", "local_attention", "attention_window", "attention_chunk_size", "window_size")
"""What configurations of transformers call a limit to how far a token sees."""
_UNMASKED = "andon_unmasked_sdpa"
"""What transformers knows its own attention under a second time: it makes no mask for names it has no masks of."""
_SPANS = "andon_packed_rows"
"""What transformers knows our attention of packed rows under; the mask that it is handed has their spans."""
_TRIED_LENGTHS = (12, 7, 1)
NOISE = {None: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.05}
"""How far values may be off by rounding, of the largest or of their norm, by the precision of products; what must not
be seen is more."""


MISFITS = (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError)
"""How models fail on a mask by pairs or on none: those that use the mask of tokens for more than attention."""


def require_misfit(error: Exception) -> None:
    """Raise `error`, one of `MISFITS`, again where it is of the device: that says nothing of the model."""
    if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError) or "CUDA error" in str(error):
        raise error


class Masking(Enum):
    """How a model on a GPU is told who sees whom; the first that it takes is the cheapest. A causal language model,
    which is given packs, takes one of the last two."""

    UNMASKED = "no mask in its attention, which is causal"
    CAUSAL_PAIRS = "a mask by pairs of tokens, of those before"
    PAIRS = "a mask by pairs of tokens"
    TOKENS = "the mask of tokens, as on a CPU"
    SPANS = "where each row of a pack begins and ends"
    ROW_PAIRS = "a mask by pairs of tokens of one row"


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
    packed = vocabulary_head(model) is not None
    if device.type != "cuda":
        return Masking.ROW_PAIRS if packed else Masking.TOKENS
    if model not in _tried:
        _tried[model] = (tried_for_packs if packed else tried_masking)(model, device)
    return _tried[model]


def tried_masking(model: nn.Module, device: torch.device) -> Masking:
    """The first of `possible_maskings` that gives what the mask of tokens gives, on `device`."""
    return next(each for each in possible_maskings(model) if each is Masking.TOKENS or _holds(model, each, device))


def _holds(model: nn.Module, masking: Masking, device: torch.device) -> bool:
    """Whether padding is as unseen with `masking` as with the mask of tokens.

    Tried on three rows of tokens that differ, the same on every rank, one row of a single token.
    """
    ids, mask = _tokens(model, device)
    noise = NOISE[half_of(model)]
    with torch.no_grad(), evaluating(model), computing(model, device):
        wanted = _values(model, ids, mask, mask)
        with masked(model, masking, mask) as given:
            found = _values(model, ids, given, mask)
    if wanted is None or found is None or len(wanted) != len(found):
        return False
    return all(
        bool((one - other).abs().max() <= noise * other.abs().max()) for one, other in zip(found, wanted, strict=True)
    )


@dataclass(frozen=True)
class Padding:
    """Where rows are padded. change: how far a row's logits move by its padding, in parts of the largest logit; 0.0 if
    only by rounding, or if the model could not be tried."""

    side: str = "right"
    change: float = 0.0


def padding_of(model: nn.Module, device: torch.device) -> Padding:
    """The side on which `model` needs its rows padded, so that a row's logits do not depend on the rows beside it.

    The right suits most models, but XLNet classifies by the last position, padding or not. So the logits of three rows
    are computed once without padding and once with it on each side. The left is used if only there they stay the same.
    A causal language model gets the spans of its rows and is not tried.
    """
    base: Any = without_adapter(model)
    if not hasattr(base, "config") or vocabulary_head(model) is not None:
        return Padding()
    if not hasattr(base, "andon_padding"):  # kept on the model, so that copies of it have the same
        # On a copy with the same tensors: BigBird attends otherwise for ever after a short row.
        tensors = itertools.chain(model.parameters(), model.buffers())
        base.andon_padding = _tried_padding(copy.deepcopy(model, {id(each): each for each in tensors}), device)
    found: Padding = base.andon_padding
    return found


def _tried_padding(model: nn.Module, device: torch.device) -> Padding:
    ids, mask = _tokens(model, device)
    end = getattr(model.config, "eos_token_id", None)  # some classify by their token for the end
    if isinstance(end, int):
        ids = ids.scatter(1, mask.sum(dim=1, keepdim=True) - 1, end)
    lengths = mask.sum(dim=1).tolist()
    with torch.no_grad(), evaluating(model), computing(model, device), quiet_loading():
        try:
            alone = [_logits(model, ids[row : row + 1, :length]) for row, length in enumerate(lengths)]
            size = max(float(logits.abs().max()) for logits in alone)
            changes = {}
            for side in ("right", "left"):
                shift = mask.sum(dim=1) * (side == "left")
                logits = _logits(model, rolled(ids, shift), rolled(mask, shift))
                if logits.shape[:2] == mask.shape:
                    logits = rolled(logits, -shift)
                    padded = [logits[row : row + 1, :length] for row, length in enumerate(lengths)]
                else:
                    padded = [logits[row : row + 1] for row in range(len(lengths))]
                moved = max(float((one - other).abs().max()) for one, other in zip(padded, alone, strict=True))
                changes[side] = moved / size if size else 0.0
                if changes[side] <= NOISE[half_of(model)]:
                    return Padding(side)
        except MISFITS as error:
            require_misfit(error)
            return Padding()
    return Padding("right", changes["right"])


def _logits(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    mask = torch.ones_like(ids) if mask is None else mask
    found: torch.Tensor = model(input_ids=ids, attention_mask=mask).logits
    return found.float()


def rolled(values: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """`values` [rows, length, ...], each row rotated to the left by its own `shift`, int64 [rows].

    A shift by a row's number of tokens moves its padding from the right to the left; its negative moves it back.
    """
    places = torch.arange(values.shape[1], device=values.device)
    order = (places + shift[:, None]) % values.shape[1]
    return values.gather(1, order.view(*order.shape, *[1] * (values.dim() - 2)).expand_as(values))


def padding_note(model: nn.Module, device: torch.device) -> str:
    """A sentence that says how much padding changes what `model` says, if it does on either side; else empty."""
    change = padding_of(model, device).change
    if not change:
        return ""
    return (
        f"{type(without_adapter(model)).__name__} mixes padding into its rows: padding a short row moves its logits by "
        f"up to {change:.1e} of the largest, so what is said of a text depends on the texts in its batch"
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
    except MISFITS as error:
        require_misfit(error)
        return None
    return (logits.float(), *seen)


def _tokens(model: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their mask, [rows, length]."""
    room = getattr(model.config, "max_position_embeddings", None) or 0
    room = room if room > 0 else 2 * _TRIED_LENGTHS[0]  # XLNet says -1 for no limit
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
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    with _attending(model, _UNMASKED, sdpa_attention_forward):
        yield


@contextmanager
def _attending(model: nn.Module, name: str, attention: Callable[..., Any]) -> Iterator[None]:
    """Inside, `model` attends by `attention`, which transformers knows under `name`."""
    from transformers import AttentionInterface

    AttentionInterface.register(name, attention)
    with attending_as(model, name):
        yield


@contextmanager
def rows_apart(
    model: nn.Module, masking: Masking, rows: torch.Tensor, positions: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Inside, the mask to give `model` so that each token sees those of its own row up to itself, and no other.

    masking: `SPANS` or `ROW_PAIRS`. rows: int64 [packs, length], 1 for a pack's first row, 2, ... and 0 for padding,
    which is behind all rows. positions: likewise, from 0 in each row, and 0 for padding. What padding sees says
    nothing, but it sees something.
    """
    if masking is Masking.SPANS:
        with _attending(model, _SPANS, _attend_by_spans):
            yield _spans(rows, positions)
    else:
        yield _pairs(model, rows)


def _pairs(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """The mask by pairs of tokens, as attention takes it: sdpa a boolean one, others what they add to their scores."""
    seen = (rows[:, None, :, None] == rows[:, None, None, :]).tril()
    config: Any = without_adapter(model).config
    if config._attn_implementation == "sdpa":
        return seen
    return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, torch.finfo(torch.float32).min)


def _spans(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """int32 [packs, 1, length, 2]: of each place where its row begins, and where that ends, one behind its last place.

    Each place of padding is a row of its own.
    """
    length = rows.shape[1]
    places = torch.arange(length, device=rows.device).expand_as(rows)
    last = torch.ones_like(rows, dtype=torch.bool)
    last[:, :-1] = positions[:, 1:] == 0
    behind = (places + 1).masked_fill(~last, length)  # and of any other place the least that follows it
    ends = behind.flip(1).cummin(1).values.flip(1)
    return torch.stack([places - positions, ends], dim=2).int()[:, None]


def _attend_by_spans(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attention of packed rows as transformers calls it: query [packs, heads, length, size], key and value with as many
    heads or fewer, attention_mask what `_spans` gives; returns [packs, length, heads, size].

    Raises `ValueError` for what our kernel does not take. Weights that are dropped, which it cannot do, torch drops.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key = query.to(value.dtype), key.to(value.dtype)  # autocast leaves turned ones in fp32
    if dropout:
        places = torch.arange(query.shape[2], device=query.device)
        seen = (attention_mask[..., :1] <= places) & (places <= places[:, None])
        shared = key.shape[1] != query.shape[1]
        found = nn.functional.scaled_dot_product_attention(
            query, key, value, seen, dropout, scale=scale, enable_gqa=shared
        )
        return found.transpose(1, 2).contiguous(), None
    if not fits(query, key, value):
        msg = f"heads of {tuple(query.shape)} {query.dtype} are not attended by spans"
        raise ValueError(msg)
    return causal_attention(query, key, value, scale, attention_mask.squeeze(1)).transpose(1, 2).contiguous(), None


def tried_for_packs(model: nn.Module, device: torch.device) -> Masking:
    """`SPANS` where `model` on the GPU `device` gives for them what it gives for pairs, else `ROW_PAIRS`."""
    taken = may_take_spans(model) and runs_on(device) and _spans_hold(model, device)
    return Masking.SPANS if taken else Masking.ROW_PAIRS


def may_take_spans(model: nn.Module) -> bool:
    """Whether a GPU's run of `model` tries `SPANS` at all: it computes in half precision, with torch's attention."""
    config: Any = without_adapter(model).config
    return half_of(model) is not None and config._attn_implementation == "sdpa"


def _spans_hold(model: nn.Module, device: torch.device) -> bool:
    base: Any = without_adapter(model)
    room = getattr(base.config, "max_position_embeddings", None) or 2 * _TRIED_LENGTHS[0]
    lengths = [max(1, min(length, room)) for length in _TRIED_LENGTHS]
    rows = torch.tensor([number + 1 for number, length in enumerate(lengths) for _ in range(length)] + [0] * 4)
    positions = torch.tensor([place for length in (*lengths, 1, 1, 1, 1) for place in range(length)])
    rows, positions = rows[None].to(device), positions[None].to(device)
    ids = torch.arange(1, rows.shape[1] + 1, device=device)[None] % base.get_input_embeddings().weight.shape[0]

    def hidden(mask: torch.Tensor) -> torch.Tensor:
        found: Any = backbone_of(model)(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
        ).last_hidden_state
        return torch.as_tensor(found)[rows > 0].float()

    with torch.no_grad(), evaluating(model), computing(model, device):
        try:
            wanted = hidden(_pairs(model, rows))
            with rows_apart(model, Masking.SPANS, rows, positions) as spans:
                found = hidden(spans)
        except MISFITS as error:
            require_misfit(error)
            return False
    return bool((found - wanted).norm() <= NOISE[half_of(model)] * wanted.norm())
