"""Batches of rows: shapes, copies to the device, padding, and attention masks without synchronization of host and GPU.

A batch is padded to its longest row, so its shape depends on its rows and not on the rank that computes it.

transformers reads a padding mask on the host to see whether it can skip it, so the host waits for the device. Here
padding is on the right, where a causal model's real tokens never attend: its attention needs no mask. Other models get
a pairwise mask, which transformers does not inspect.

Packed rows must not attend to each other. A pairwise mask works for every model. On a GPU, a model gets the start and
end of each row instead, and attention between rows is not computed.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from andon.config.source import quiet_loading
from andon.fast.attention import causal_attention, fits, runs_on
from andon.model.build import (
    backbone_of,
    computing,
    evaluating,
    half_of,
    try_pass,
    using_attention,
    vocabulary_head,
    without_adapter,
)
from andon.step.micro_batch import Batch

WINDOWS = ("sliding_window", "local_attention", "attention_window", "attention_chunk_size", "window_size")
"""transformers settings that limit how far a token attends."""
_UNMASKED, _SPANS = "andon_unmasked_sdpa", "andon_packed_rows"
"""Names of registered attention functions: transformers' SDPA without a mask, and our attention for packs."""
_TRIED_LENGTHS = (12, 7, 1)
NOISE = {None: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.05}
"""By precision of matrix products: the relative difference, of the largest value or of the norm, that rounding may
cause. Attention to a wrong token causes a larger one."""


class Masking(Enum):
    """Ways to give a model its attention mask. Causal language models, which train on packs, use one of the last two.

    The choice depends only on the model and its device, so that it is the same for any number of workers.
    """

    UNMASKED = "no mask in its attention, which is causal"
    CAUSAL_PAIRS = "a mask by pairs of tokens, of those before"
    PAIRS = "a mask by pairs of tokens"
    TOKENS = "the mask of tokens, as on a CPU"
    SPANS = "where each row of a pack begins and ends"
    ROW_PAIRS = "a mask by pairs of tokens of one row"


_chosen: weakref.WeakKeyDictionary[nn.Module, Masking] = weakref.WeakKeyDictionary()


def masking_of(model: nn.Module, device: torch.device) -> Masking:
    """The cached masking of `model` on `device`, on a GPU by `choose_masking`. That depends on the weights, so a run
    calls this before it restores a checkpoint's."""
    if device.type != "cuda":
        return Masking.TOKENS if vocabulary_head(model) is None else Masking.ROW_PAIRS
    if model not in _chosen:
        _chosen[model] = choose_masking(model, device)
    return _chosen[model]


def possible_maskings(model: nn.Module) -> tuple[Masking, ...]:
    """Maskings that the configuration and layers of `model` allow, cheapest first; the last works for every model."""
    config: Any = getattr(without_adapter(model), "config", None)
    torch_attends = getattr(config, "_attn_implementation", None) == "sdpa"
    if vocabulary_head(model) is not None:
        return (Masking.SPANS, Masking.ROW_PAIRS) if torch_attends and half_of(model) else (Masking.ROW_PAIRS,)
    if _has_windows(config) or not torch_attends:
        return (Masking.TOKENS,)
    flags = [bool(module.is_causal) for module in model.modules() if hasattr(module, "is_causal")]
    causal = bool(flags) and all(flags) and getattr(config, "is_causal", True)
    allowed = [Masking.UNMASKED] if causal else []
    # Some position embeddings, such as OPT's, need the padding mask.
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if not any("attention_mask" in inspect.signature(each.forward).parameters for each in embeddings):
        allowed.append(Masking.CAUSAL_PAIRS if causal else Masking.PAIRS)
    return (*allowed, Masking.TOKENS)


def _has_windows(config: Any) -> bool:
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ()]
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
    limited = kinds != {"full_attention"} or any(getattr(config, name, None) for name in WINDOWS)
    return limited or any(_has_windows(part) for part in parts if part is not None)


def choose_masking(model: nn.Module, device: torch.device) -> Masking:
    """The first of `possible_maskings` with which `model` on `device` has the outputs that it has with the last one."""
    *cheaper, last = possible_maskings(model)
    packs = last is Masking.ROW_PAIRS
    if not cheaper or (packs and not runs_on(device)):
        return last
    outputs_with, order = (_outputs_of_pack, 2) if packs else (_outputs_of_rows, float("inf"))
    noise, size = NOISE[half_of(model)], partial(torch.linalg.vector_norm, ord=order)
    with evaluating(model, device):
        expected = outputs_with(model, last, device)
        for masking in cheaper if expected else ():
            got = outputs_with(model, masking, device)
            same = len(got) == len(expected)
            if same and all(size(one - other) <= noise * size(other) for one, other in zip(got, expected, strict=True)):
                return masking
    return last


def _outputs_of_rows(model: Any, masking: Masking, device: torch.device) -> list[Tensor]:
    ids, mask = _tokens(model, device)
    outputs: list[Tensor] = []

    def note(_: nn.Module, __: object, output: Any) -> None:
        hidden = getattr(output, "last_hidden_state", None)
        if isinstance(hidden, Tensor) and hidden.shape[:2] == mask.shape:
            outputs.append(hidden.float() * mask[..., None])

    with masked(model, masking, mask) as model_mask, backbone_of(model).register_forward_hook(note):
        logits = try_pass(lambda: model(input_ids=ids, attention_mask=model_mask).logits.float())
    return [] if isinstance(logits, Exception) else [*outputs, logits]


def _outputs_of_pack(model: nn.Module, masking: Masking, device: torch.device) -> list[Tensor]:
    base: Any = without_adapter(model)
    room = getattr(base.config, "max_position_embeddings", None) or 2 * _TRIED_LENGTHS[0]
    lengths = [max(1, min(length, room)) for length in _TRIED_LENGTHS]
    rows = torch.tensor([[number + 1 for number, length in enumerate(lengths) for _ in range(length)] + [0] * 4])
    positions = torch.tensor([[place for length in (*lengths, 1, 1, 1, 1) for place in range(length)]])
    rows, positions = rows.to(device), positions.to(device)
    ids = torch.arange(1, rows.shape[1] + 1, device=device)[None] % base.get_input_embeddings().weight.shape[0]
    with packed_inputs(model, masking, {"input_ids": ids, "rows": rows, "positions": positions}) as inputs:
        hidden = try_pass(lambda: backbone_of(model)(**inputs).last_hidden_state[rows > 0].float())
    return [] if isinstance(hidden, Exception) else [hidden]


def _tokens(model: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    room = getattr(model.config, "max_position_embeddings", None) or 0
    room = room if room > 0 else 2 * _TRIED_LENGTHS[0]  # -1 means no limit in XLNet
    pad = getattr(model.config, "pad_token_id", None) or 0
    size = model.get_input_embeddings().weight.shape[0]
    places = torch.arange(max(1, min(_TRIED_LENGTHS[0], room // 2)), device=device)
    mask = (places < torch.tensor(_TRIED_LENGTHS, device=device)[:, None]).long()
    return ((pad + 1 + places % max(1, size - 1)) % size).where(mask == 1, pad), mask


@dataclass(frozen=True)
class Padding:
    """The side on which rows are padded. change: the largest change of a row's logits by padding, relative to the
    largest logit; 0.0 if it is only rounding, or if the trial failed."""

    side: str = "right"
    change: float = 0.0


def padding_of(model: nn.Module, device: torch.device) -> Padding:
    """The padding side that leaves the logits of a row unchanged: right for most models, cached on the model.

    XLNet pools the last position even if it is padding. Left is chosen if padding on the left, but not on the right,
    keeps the logits of three trial rows. Causal language models train on packs and need no trial.
    """
    base: Any = without_adapter(model)
    if not hasattr(base, "config") or vocabulary_head(model) is not None:
        return Padding()
    if not hasattr(base, "andon_padding"):  # on the model, so that copies inherit it
        # On a copy that shares the tensors: a short row switches BigBird's attention permanently.
        tensors = itertools.chain(model.parameters(), model.buffers())
        trial = copy.deepcopy(model, {id(each): each for each in tensors})
        with evaluating(trial, device), quiet_loading():
            result = try_pass(lambda: _tried_padding(trial, device))
        base.andon_padding = Padding() if isinstance(result, Exception) else result
    padding: Padding = base.andon_padding
    return padding


def _tried_padding(model: Any, device: torch.device) -> Padding:
    ids, mask = _tokens(model, device)
    end = getattr(model.config, "eos_token_id", None)  # some models pool the end-of-text token
    if isinstance(end, int):
        ids = ids.scatter(1, mask.sum(dim=1, keepdim=True) - 1, end)
    cuts = [(slice(row, row + 1), slice(length)) for row, length in enumerate(mask.sum(dim=1).tolist())]
    alone = [model(input_ids=ids[cut], attention_mask=mask[cut]).logits.float() for cut in cuts]
    size = max(float(logits.abs().max()) for logits in alone)
    changes = []
    for side in ("right", "left"):
        shift = mask.sum(dim=1) * (side == "left")
        inputs = {"input_ids": rotate_rows(ids, shift), "attention_mask": rotate_rows(mask, shift)}
        logits = model(**inputs).logits.float()
        by_token = logits.shape[:2] == mask.shape
        logits = rotate_rows(logits, -shift) if by_token else logits
        padded = [logits[cut if by_token else cut[0]] for cut in cuts]
        moved = max(float((one - other).abs().max()) for one, other in zip(padded, alone, strict=True))
        changes.append(moved / size if size else 0.0)
        if changes[-1] <= NOISE[half_of(model)]:
            return Padding(side)
    return Padding("right", changes[0])


def rotate_rows(values: Tensor, shift: Tensor) -> Tensor:
    """Rotate each row of `values` [rows, length, ...] to the left by its `shift`, int64 [rows]. A shift by a row's
    number of tokens moves its padding from the right to the left; the negative shift moves it back."""
    places = torch.arange(values.shape[1], device=values.device)
    order = (places + shift[:, None]) % values.shape[1]
    return values.gather(1, order.view(*order.shape, *[1] * (values.dim() - 2)).expand_as(values))


def padding_note(model: nn.Module, device: torch.device) -> str:
    """A warning with the change of logits by padding, if padding on either side changes them; else empty."""
    change = padding_of(model, device).change
    what = f"padding a short row moves its logits by up to {change:.1e} of the largest"
    what += ", so its outputs for a text depend on the other texts in the batch"
    return f"{type(without_adapter(model)).__name__} mixes padding into its rows: {what}" if change else ""


@contextmanager
def masked(model: nn.Module, masking: Masking, mask: Tensor) -> Iterator[Tensor]:
    """Context manager with the mask to pass to `model`. mask: [rows, length], 1 for a token, 0 for padding."""
    if masking is Masking.UNMASKED:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        with using_own_attention(model, _UNMASKED, sdpa_attention_forward):
            yield mask
    elif masking is Masking.TOKENS:
        yield mask
    else:
        rows, length = mask.shape
        pairs = mask.bool()[:, None, None, :].expand(rows, 1, length, length)
        yield pairs.tril() if masking is Masking.CAUSAL_PAIRS else pairs


@contextmanager
def using_own_attention(model: nn.Module, name: str, attention: Callable[..., Any]) -> Iterator[None]:
    """Context manager: register `attention` in transformers as `name`, for which it builds no mask, and use it."""
    from transformers import AttentionInterface

    AttentionInterface.register(name, attention)
    with using_attention(model, name):
        yield


@contextmanager
def packed_inputs(model: nn.Module, masking: Masking, batch: Mapping[str, Tensor]) -> Iterator[dict[str, Any]]:
    """Context manager with the arguments of the backbone of `model`, under `computing`. Each token attends to its own
    row up to itself.

    masking: `SPANS` or `ROW_PAIRS`. batch: int64 [packs, length] input_ids, rows (1 for a pack's first row, 2, ... and
    0 for padding at the end), and positions (from 0 in each row, 0 for padding).
    """
    rows, positions = batch["rows"], batch["positions"]
    inputs = {"input_ids": batch["input_ids"], "position_ids": positions, "use_cache": False}
    with computing(model, rows.device):
        if masking is Masking.SPANS:
            with using_own_attention(model, _SPANS, _attend_by_spans):
                yield inputs | {"attention_mask": _spans(rows, positions)}
            return
        seen = (rows[:, None, :, None] == rows[:, None, None, :]).tril()
        config: Any = without_adapter(model).config
        if config._attn_implementation != "sdpa":  # other implementations add the mask to the scores
            seen = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, torch.finfo(torch.float32).min)
        yield inputs | {"attention_mask": seen}


def _spans(rows: Tensor, positions: Tensor) -> Tensor:
    """int32 [packs, 1, length, 2]: start and end (exclusive) of each position's row; padding is rows of one token."""
    length = rows.shape[1]
    places = torch.arange(length, device=rows.device).expand_as(rows)
    last = torch.ones_like(rows, dtype=torch.bool)
    last[:, :-1] = positions[:, 1:] == 0
    ends = (places + 1).masked_fill(~last, length).flip(1).cummin(1).values.flip(1)
    return torch.stack([places - positions, ends], dim=2).int()[:, None]


def _attend_by_spans(
    _: nn.Module, query: Tensor, key: Tensor, value: Tensor, spans: Tensor, dropout: float = 0.0, **more: Any
) -> tuple[Tensor, None]:
    """Attention of packed rows with transformers' signature; spans from `_spans`. Returns [packs, length, heads, size].

    Raises `ValueError` for shapes that our kernel does not support. With dropout, which it lacks, torch computes it.
    """
    scale = more.get("scaling") or query.shape[-1] ** -0.5
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast, rotary embeddings return fp32
    if dropout:
        places = torch.arange(query.shape[2], device=query.device)
        seen = (spans[..., :1] <= places) & (places <= places[:, None])
        shared: dict[str, Any] = {"scale": scale, "enable_gqa": key.shape[1] != query.shape[1]}
        output = nn.functional.scaled_dot_product_attention(query, key, value, seen, dropout, **shared)
    elif fits(query, key, value):
        output = causal_attention(query, key, value, scale, spans.squeeze(1))
    else:
        raise ValueError(f"heads of {tuple(query.shape)} {query.dtype} are not attended by spans")
    return output.transpose(1, 2).contiguous(), None


_MOST_ROWS, _MOST_TOKENS = 64, 4096
Shape = tuple[int, int]
"""Rows and padded length of a micro-batch."""


def padded_length(longest: int, multiple: int, limit: int | None = None) -> int:
    """`longest` rounded up to `multiple`, but not beyond `limit`."""
    length = -(-longest // multiple) * multiple
    return length if limit is None else max(longest, min(length, limit))


def shapes_of(batch_size: int, micro_batches: int, lengths: Collection[int]) -> frozenset[Shape]:
    """The shapes of micro-batches of a full global batch: its one or two row counts, with each of `lengths`."""
    rows = {batch_size // micro_batches, -(-batch_size // micro_batches)} - {0}
    return frozenset((count, length) for count in rows for length in lengths)


def length_step(max_length: int, count: int, multiple: int = 8) -> int:
    """The padding step, a multiple of `multiple`, that gives at most `count` padded lengths up to `max_length`."""
    return padded_length(-(-max_length // count), multiple)


def padded_lengths(max_length: int, step: int) -> tuple[int, ...]:
    """All padded lengths of rows of up to `max_length` tokens, for padding to multiples of `step`."""
    return tuple(padded_length(length, step, max_length) for length in range(1, max_length + 1, step))


def collate(rows: Sequence[Tensor], pad_id: int, multiple: int, limit: int | None = None) -> dict[str, Tensor]:
    """Pad `rows` (integer vectors, not empty) on the right: input_ids and attention_mask, int64 [rows, length].
    length: the longest row's, rounded up to `multiple` but not beyond `limit`."""
    lengths = torch.tensor([row.numel() for row in rows])
    length = padded_length(int(lengths.max()), multiple, limit)
    ids = nn.utils.rnn.pad_sequence([*rows], batch_first=True, padding_value=pad_id)
    ids = nn.functional.pad(ids, (0, length - ids.shape[1]), value=pad_id).long()
    return {"input_ids": ids, "attention_mask": (torch.arange(length) < lengths[:, None]).long()}


def placed(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """The batch's int64 tensors on `device`. A GPU gets them in one asynchronous copy from pinned memory."""
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in batch.items()}
    joined = torch.cat([tensor.flatten() for tensor in batch.values()]).pin_memory().to(device, non_blocking=True)
    parts = torch.split(joined, [tensor.numel() for tensor in batch.values()])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(batch.items(), parts, strict=True)}


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """[rows, classes], or [rows, length, classes] by token: one forward pass in the weights' precision (autocast)."""
    device, names = batch["input_ids"].device, ["input_ids", "attention_mask"]
    if "token_type_ids" in batch:
        base = without_adapter(model)
        has_types = getattr(getattr(base, "config", None), "type_vocab_size", 2) > 1
        if has_types and "token_type_ids" in inspect.signature(type(base).forward).parameters:
            names.append("token_type_ids")
    inputs = {name: batch[name] for name in names}
    on_left = padding_of(model, device).side == "left"
    if on_left:
        shift = batch["attention_mask"].sum(dim=1)
        inputs = {name: rotate_rows(values, shift) for name, values in inputs.items()}
    masking = Masking.TOKENS if on_left else masking_of(model, device)
    with computing(model, device), masked(model, masking, inputs.pop("attention_mask")) as mask:
        logits: Tensor = model(attention_mask=mask, **inputs).logits
    return rotate_rows(logits, -shift) if on_left and logits.dim() == 3 else logits


def predictions(model: nn.Module, batch: Batch) -> Tensor:
    """`logits_of` in evaluation mode and fp32, without a graph."""
    with evaluating(model, batch["input_ids"].device):
        return logits_of(model, batch).float()


@dataclass(frozen=True)
class EvaluationBatching:
    """Splits rows into evaluation batches of at most 64 rows and max(`tokens`, 4,096) tokens with padding.

    tokens: padded tokens of the largest training micro-batch, which needs more memory than a pass without gradients.
    multiple, limit: see `padded_length`. The batches do not depend on the number of workers.
    """

    tokens: int = 0
    multiple: int = 8
    limit: int | None = None

    def of(self, lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Indices of rows of these lengths, longest first, in batches. One rank computes a whole batch."""
        places = sorted(range(len(lengths)), key=lambda place: -lengths[place])
        batches, first = [], 0
        while first < len(places):
            rows = max(self.tokens, _MOST_TOKENS) // self.padded(lengths[places[first]])
            batches.append(tuple(places[first : first + max(1, min(rows, _MOST_ROWS))]))
            first += len(batches[-1])
        return tuple(batches)

    def padded(self, length: int) -> int:
        """The padded length of a batch whose longest row has `length` tokens."""
        return padded_length(length, self.multiple, self.limit)

    def largest(self, lengths: Sequence[int]) -> Shape:
        """The shape with the most padded tokens among the batches of rows of these lengths (at least one)."""
        shapes = [(len(batch), self.padded(lengths[batch[0]])) for batch in self.of(lengths)]
        return max(shapes, key=lambda shape: (shape[0] * shape[1], shape[1]))
