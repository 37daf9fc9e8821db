"""The 64-bit digest of tensors: one value on every device, additive over shards. It is not a cryptographic digest.

Definition. The bytes of a tensor in row-major order are read as little-endian 64-bit words w_0, w_1, ..., the last
one padded with zero bytes. With G = 0x9E3779B97F4A7C15 and mix the finaliser of splitmix64 (Steele, Lea and Flood,
2014), all modulo 2^64:

    word_sum(t, start) = sum over i of mix(w_i + (i + start) * G)
    tensor_digest(t)   = mix(word_sum(t, 0) + header(byte length, dtype, shape))
    tree_digest(tree)  = mix(sum over names of mix(tensor_digest + header(name)) + header(number of names))

where header is the first 8 bytes, little-endian, of SHA-256 of a canonical text. The words are mixed before they are
summed, so the sum is not linear in them: a sum of words times odd weights misses pairs of opposite sign flips, of which
a tensor of some million elements has thousands. mix is a bijection, so a change of a single word is always seen. Any
other change that nobody made on purpose is missed with probability about 2^-64.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
"""The odd constant that spaces positions: 2^64 divided by the golden ratio."""
WORD = 8
"""Bytes of a word."""
_MASK = (1 << 64) - 1
# Two buffers and the ramp of 65,536 words stay in a second-level cache; an accelerator wants fewer, larger launches.
_CPU_WORDS = 1 << 16
_ACCELERATOR_WORDS = 1 << 20


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed. If not, torch computes the same, and one warning says so.

    A broken installation counts as one: its own error ends what uses it.
    """
    found = importlib.util.find_spec("triton") is not None
    if not found:
        warnings.warn(
            "Triton is not installed: what Andon checks on GPUs is computed by more and slower operations of torch",
            RuntimeWarning,
            stacklevel=2,
        )
    return found


@functools.cache
def kernels() -> ModuleType | None:
    """`andon_contracts.kernels`; None where Triton is not installed."""
    if not has_triton():
        return None
    # Optional, and a second to import: only a process that has something on a GPU pays for it.
    from andon_contracts import kernels as found

    return found


def signed(value: int) -> int:
    """The int64 with the bits of `value` modulo 2^64, as torch holds a 64-bit pattern."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


_STRIDE = signed(GOLDEN)
_ROUNDS = ((30, signed(0xBF58476D1CE4E5B9)), (27, signed(0x94D049BB133111EB)), (31, None))
"""Of the finaliser: by how much a word is shifted and xored with itself, and by what it is then multiplied."""


def _mix_in_place(words: Tensor, scratch: Tensor) -> None:
    for shift, factor in _ROUNDS:
        # torch shifts int64 arithmetically; the mask makes the shift a logical one.
        torch.bitwise_right_shift(words, shift, out=scratch)
        words.bitwise_xor_(scratch.bitwise_and_((1 << (64 - shift)) - 1))
        if factor is not None:
            words.mul_(factor)


def mix64(words: Tensor) -> Tensor:
    """The splitmix64 finaliser of each int64 (any shape), as the bits of a uint64. A bijection; 0 stays 0.

    Raises `TypeError` for another dtype.
    """
    if words.dtype != torch.int64:
        msg = f"mix64 takes int64 words, not {words.dtype}"
        raise TypeError(msg)
    mixed = words.clone(memory_format=torch.contiguous_format)
    _mix_in_place(mixed, torch.empty_like(mixed))
    return mixed


def mix_integer(value: int) -> int:
    """`mix64` of one integer, taken modulo 2^64; in [0, 2^64). Also the `word_sum` of a tensor of this one word."""
    value &= _MASK
    for shift, factor in _ROUNDS:
        value ^= value >> shift
        if factor is not None:
            value = value * factor & _MASK
    return value


@functools.lru_cache(maxsize=4096)
def _header(*parts: object) -> int:
    text = "\x1f".join(map(str, ("andon-digest-1", *parts)))
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:WORD], "little")


@functools.lru_cache(maxsize=8)
def _ramp(device: torch.device, words: int) -> Tensor:
    return torch.arange(words, dtype=torch.int64, device=device).mul_(_STRIDE)


def _row_major_bytes(tensor: Tensor) -> Tensor:
    # A contiguous tensor of one element may have any stride, which `view` to a smaller dtype refuses.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _pieces(tensor: Tensor, elements: int) -> Iterator[Tensor]:
    """The row-major bytes of `tensor` as contiguous uint8 pieces; copies at most `elements` elements at a time."""
    if tensor.is_contiguous() or tensor.numel() <= elements:
        yield _row_major_bytes(tensor.contiguous())
    elif tensor.shape[0] == 1:
        yield from _pieces(tensor[0], elements)
    else:
        for part in torch.split(tensor, max(1, elements // (tensor.numel() // tensor.shape[0]))):
            yield from _pieces(part, elements)


def _words(tensor: Tensor, chunk: int) -> Iterator[Tensor]:
    """The bytes of `tensor` as int64 words, at most `chunk` at a time, the last one padded with zeros.

    Where they are aligned to words they are views, else all come in one buffer, which is filled anew each time.
    """
    pieces: Iterable[Tensor] = _pieces(tensor, chunk)
    if tensor.is_contiguous():
        raw = _row_major_bytes(tensor)
        whole = 0 if raw.storage_offset() % WORD or raw.data_ptr() % WORD else raw.numel() - raw.numel() % WORD
        for first in range(0, whole, chunk * WORD):
            yield raw[first : min(first + chunk * WORD, whole)].view(torch.int64)
        if whole == raw.numel():
            return
        pieces = [raw[whole:]]
    buffer = torch.empty(chunk * WORD, dtype=torch.uint8, device=tensor.device)
    filled = 0
    for piece in pieces:
        left = piece
        while left.numel():
            part = left[: buffer.numel() - filled]
            buffer[filled : filled + part.numel()].copy_(part)
            left, filled = left[part.numel() :], filled + part.numel()
            if filled == buffer.numel():
                yield buffer.view(torch.int64)
                filled = 0
    if filled:
        padded = -(-filled // WORD) * WORD
        buffer[filled:padded].zero_()
        yield buffer[:padded].view(torch.int64)


def word_sum_tensor(tensor: Tensor, start: int = 0) -> Tensor:
    """The `word_sum` as 0-dim int64 with its bits, on the device of `tensor`: an accelerator is not waited for."""
    if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
        what = "quantized" if tensor.is_quantized else f"{tensor.layout} on {tensor.device}"
        msg = f"only dense tensors with memory have a digest, not a {what} tensor"
        raise TypeError(msg)
    tensor = tensor.detach().resolve_conj().resolve_neg()
    size = tensor.numel() * tensor.element_size()
    offset = tensor.storage_offset() * tensor.element_size()
    total: Tensor | None = None
    there = kernels() if tensor.is_cuda and size >= WORD and tensor.is_contiguous() else None
    if there is not None and not (offset % WORD or tensor.data_ptr() % WORD):
        raw, whole = _row_major_bytes(tensor), size - size % WORD
        total = there.word_sum_on_device(raw[:whole].view(torch.int64), start)
        if whole == size:
            return total
        tensor, start, size = raw[whole:], start + whole // WORD, size - whole
    if total is None:
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    limit = _CPU_WORDS if tensor.device.type == "cpu" else _ACCELERATOR_WORDS
    chunk = max(1, min(limit, -(-size // WORD)))
    ramp = _ramp(tensor.device, limit)
    mixed = torch.empty(chunk, dtype=torch.int64, device=tensor.device)
    scratch = torch.empty_like(mixed)
    for words in _words(tensor, chunk):
        count = words.numel()
        here = torch.add(words, ramp[:count], out=mixed[:count])
        here.add_(signed(start * GOLDEN))
        _mix_in_place(here, scratch[:count])
        total.add_(here.sum())
        start += count
    return total


def word_sum(tensor: Tensor, start: int = 0) -> int:
    """The sum in [0, 2^64) of the mixed words of `tensor` (any shape, dtype, stride), its first at position `start`.

    Additive: the sums of consecutive shards, each started at the number of words before it, add up modulo 2^64 to the
    sum of the whole, provided that every shard but the last is a multiple of 8 bytes. Reads the tensor once and
    allocates a few chunks at most. Raises `TypeError` for sparse, quantized and meta tensors.
    """
    return int(word_sum_tensor(tensor, start)) & _MASK


def seal(total: int, dtype: torch.dtype, shape: Sequence[int]) -> int:
    """The `tensor_digest` of a tensor of `dtype` and `shape` whose `word_sum` from 0 is `total`, as of its shards."""
    return mix_integer(total + _header("tensor", dtype.itemsize * math.prod(shape), dtype, *shape))


def tensor_digest(tensor: Tensor) -> int:
    """The digest in [0, 2^64) of the bits, byte length, dtype and shape of `tensor`.

    The same on every device and for every stride. Bits count, not values: 0.0 and -0.0 differ, so do NaN payloads.
    Raises `TypeError` for sparse, quantized and meta tensors.
    """
    return seal(word_sum(tensor), tensor.dtype, tensor.shape)


def join(digests: Mapping[str, int]) -> int:
    """The `tree_digest` of a tree from the `tensor_digest` of each of its names."""
    total = sum(mix_integer(digest + _header("name", name)) for name, digest in digests.items())
    return mix_integer(total + _header("tree", len(digests)))


def tree_digest(tree: Mapping[str, Tensor]) -> int:
    """The digest in [0, 2^64) of named tensors. Binds names to tensors; insertion order is irrelevant."""
    return join(digests_by_name(tree))


def digests_by_name(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The `tensor_digest` of each tensor. A device is waited for once, not for each tensor."""
    sums = [word_sum_tensor(tensor) for tensor in tensors.values()]
    one_device = len({total.device for total in sums}) == 1
    totals: list[int] = torch.stack(sums).tolist() if one_device else [int(total) for total in sums]
    named = zip(tensors.items(), totals, strict=True)
    return {name: seal(total, tensor.dtype, tensor.shape) for (name, tensor), total in named}


def hex64(value: int) -> str:
    """`value` in [0, 2^64) as 16 lower-case hexadecimal digits. Raises `ValueError` outside that range."""
    if not 0 <= value <= _MASK:
        msg = f"{value} is not in [0, 2^64)"
        raise ValueError(msg)
    return f"{value:016x}"


def row_digests(values: Tensor, lengths: Tensor) -> Tensor:
    """The digest of the first `lengths[r]` of each row of `values`, whatever stands after them.

    `values` is int64 [rows, columns], `lengths` int64 [rows]; returns int64 [rows] with the bits of
    mix(word_sum(row) + mix(length + G)), so that rows of one content have one digest in any batch and at any padding.
    Allocates a few times the size of `values`. Raises `TypeError` for other dtypes and `ValueError` for other shapes
    and, on a CPU, for lengths outside [0, columns]; elsewhere such a length is only mixed in.
    """
    if values.dtype != torch.int64 or lengths.dtype != torch.int64:
        msg = f"row_digests takes int64 values and lengths, not {values.dtype} and {lengths.dtype}"
        raise TypeError(msg)
    if values.dim() != 2 or lengths.shape != values.shape[:1]:
        msg = f"values must be [rows, columns] and lengths [rows], not {list(values.shape)} and {list(lengths.shape)}"
        raise ValueError(msg)
    columns = values.shape[1]
    # An accelerator would be waited for at every micro-batch; the length is part of the digest in any case.
    if values.device.type == "cpu" and bool(((lengths < 0) | (lengths > columns)).any()):
        msg = f"lengths must be in [0, {columns}], got {lengths.tolist()}"
        raise ValueError(msg)
    there = kernels() if values.is_cuda else None
    if there is not None:
        found: Tensor = there.row_digests_on_device(values, lengths)
        return found
    positions = torch.arange(columns, dtype=torch.int64, device=values.device)
    mixed = values + positions * _STRIDE
    _mix_in_place(mixed, torch.empty_like(mixed))
    mixed.masked_fill_(positions >= lengths.unsqueeze(1), 0)
    return mix64(mixed.sum(dim=1) + mix64(lengths + _STRIDE))
