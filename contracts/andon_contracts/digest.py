"""A digest of tensors that is equal on all devices, and a faster checksum for CPUs. Neither is cryptographic.

The bytes of a tensor in row-major order are little-endian 64-bit words w_0, w_1, ...; zero bytes pad the last. With
G = 0x9E3779B97F4A7C15 and mix the finalizer of splitmix64 (Steele, Lea and Flood, 2014), all modulo 2^64:

    word_sum(t, start) = sum over i of mix(w_i + (i + start) * G)
    tensor_digest(t)   = mix(word_sum(t, 0) + header(byte length, dtype, shape))
    tree_digest(tree)  = mix(sum over names of mix(tensor_digest + header(name)) + header(number of names))

The header is the first 8 bytes, little-endian, of SHA-256 of a canonical text. The words are mixed before the sum,
because in a weighted sum two opposite sign flips can cancel, and a tensor of a million elements has thousands of
pairs where they would. mix is a bijection, so the digest shows any change of a single word. It misses another
accidental change with probability about 2^-64.
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

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio, made odd
WORD = 8  # bytes
_MASK = (1 << 64) - 1
_CPU_WORDS = 1 << 16  # two buffers and the ramp fit a second-level cache
_ACCELERATOR_WORDS = 1 << 20  # fewer, larger launches


@functools.cache
def has_triton() -> bool:
    """True if Triton is installed, even if it is broken. Otherwise warns once: torch then computes the same digests."""
    installed = importlib.util.find_spec("triton") is not None
    if not installed:
        what = "Andon computes digests on GPUs with slower torch operations"
        warnings.warn(f"Triton is not installed: {what}", RuntimeWarning, stacklevel=2)
    return installed


@functools.cache
def kernels() -> ModuleType | None:
    """The module `andon_contracts.kernels`, or None without Triton. The first call imports Triton (about 1 s)."""
    if not has_triton():
        return None
    from andon_contracts import kernels as module

    return module


def signed(value: int) -> int:
    """The int64 with the bits of `value` modulo 2^64."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = signed(GOLDEN)
# The shift and the factor of each round of the finalizer.
_ROUNDS = ((30, signed(0xBF58476D1CE4E5B9)), (27, signed(0x94D049BB133111EB)), (31, None))


def _mix_in_place(words: Tensor, scratch: Tensor) -> None:
    for shift, factor in _ROUNDS:
        # torch shifts int64 arithmetically; the mask makes the shift a logical one.
        torch.bitwise_right_shift(words, shift, out=scratch)
        words.bitwise_xor_(scratch.bitwise_and_((1 << (64 - shift)) - 1))
        if factor is not None:
            words.mul_(factor)


def mix64(words: Tensor) -> Tensor:
    """The splitmix64 finalizer of each int64 (any shape). 0 stays 0. Raises `TypeError` for another dtype."""
    if words.dtype != torch.int64:
        raise TypeError(f"mix64 takes int64 words, not {words.dtype}")
    mixed = words.clone(memory_format=torch.contiguous_format)
    _mix_in_place(mixed, torch.empty_like(mixed))
    return mixed


def mix_integer(value: int) -> int:
    """`mix64` of one integer modulo 2^64, in [0, 2^64)."""
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
    return torch.arange(words, dtype=torch.int64, device=device).mul_(_GOLDEN)


def _row_major_bytes(tensor: Tensor) -> Tensor:
    # `view` to a smaller dtype refuses the arbitrary stride that a contiguous tensor of one element may have.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _pieces(tensor: Tensor, elements: int) -> Iterator[Tensor]:
    # Row-major bytes as contiguous uint8 pieces; copies at most `elements` elements at a time.
    if tensor.is_contiguous() or tensor.numel() <= elements:
        yield _row_major_bytes(tensor.contiguous())
    elif tensor.shape[0] == 1:
        yield from _pieces(tensor[0], elements)
    else:
        for part in torch.split(tensor, max(1, elements // (tensor.numel() // tensor.shape[0]))):
            yield from _pieces(part, elements)


def _words(tensor: Tensor, chunk: int) -> Iterator[Tensor]:
    # At most `chunk` words at a time: views of aligned memory, otherwise one buffer that the next words overwrite.
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
        while piece.numel():
            part = piece[: buffer.numel() - filled]
            buffer[filled : filled + part.numel()].copy_(part)
            piece, filled = piece[part.numel() :], filled + part.numel()
            if filled == buffer.numel():
                yield buffer.view(torch.int64)
                filled = 0
    if filled:
        padded = -(-filled // WORD) * WORD
        buffer[filled:padded].zero_()
        yield buffer[:padded].view(torch.int64)


def word_sum_tensor(tensor: Tensor, start: int = 0) -> Tensor:
    """The bits of `word_sum` as 0-dim int64 on the device of `tensor`. Does not wait for the device."""
    if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
        what = "quantized" if tensor.is_quantized else f"{tensor.layout} on {tensor.device}"
        raise TypeError(f"only dense tensors with memory have a digest, not a {what} tensor")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    size = tensor.nbytes
    total: Tensor | None = None
    triton = kernels() if tensor.is_cuda and size >= WORD and tensor.is_contiguous() else None
    if triton is not None and not (tensor.storage_offset() * tensor.itemsize % WORD or tensor.data_ptr() % WORD):
        raw, whole = _row_major_bytes(tensor), size - size % WORD
        total = triton.word_sums([raw[:whole].view(torch.int64)], start)[0, 0]
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
        chunk_words = torch.add(words, ramp[:count], out=mixed[:count]).add_(signed(start * GOLDEN))
        _mix_in_place(chunk_words, scratch[:count])
        total.add_(chunk_words.sum())
        start += count
    return total


def word_sum(tensor: Tensor, start: int = 0) -> int:
    """The sum in [0, 2^64) of the mixed words of `tensor`, from position `start`, for any shape, dtype and stride.

    The sums of consecutive shards add up modulo 2^64 to the sum of the whole if `start` counts the words before a shard
    and every shard except the last is a multiple of 8 bytes. Raises `TypeError` for sparse, quantized and meta tensors.
    """
    return int(word_sum_tensor(tensor, start)) & _MASK


def seal(total: int, dtype: torch.dtype, shape: Sequence[int]) -> int:
    """The `tensor_digest` of a tensor of `dtype` and `shape` from its `word_sum`."""
    return mix_integer(total + _header("tensor", dtype.itemsize * math.prod(shape), dtype, *shape))


def tensor_digest(tensor: Tensor) -> int:
    """The digest in [0, 2^64) of the bits, byte length, dtype and shape, for any device and stride. 0.0 is not -0.0."""
    return seal(word_sum(tensor), tensor.dtype, tensor.shape)


def join(digests: Mapping[str, int]) -> int:
    """The `tree_digest` from the `tensor_digest` of each name."""
    total = sum(mix_integer(digest + _header("name", name)) for name, digest in digests.items())
    return mix_integer(total + _header("tree", len(digests)))


def tree_digest(tree: Mapping[str, Tensor]) -> int:
    """The digest in [0, 2^64) of named tensors. It does not depend on the insertion order."""
    return join(digests_by_name(tree))


def digests_by_name(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The `tensor_digest` of each tensor, with one wait if all are on one device."""
    sums = [word_sum_tensor(tensor) for tensor in tensors.values()]
    one_device = len({total.device for total in sums}) == 1
    totals: list[int] = torch.stack(sums).tolist() if one_device else [int(total) for total in sums]
    named = zip(tensors.items(), totals, strict=True)
    return {name: seal(total, tensor.dtype, tensor.shape) for (name, tensor), total in named}


def hex64(value: int) -> str:
    """`value`, a signed or unsigned integer of 64 bits, as 16 lower-case hexadecimal digits."""
    return f"{value & _MASK:016x}"


def row_digests(values: Tensor, lengths: Tensor) -> Tensor:
    """The digest of the first `lengths[r]` tokens of each row, which does not depend on the batch or the padding.

    `values` is int64 [rows, columns], `lengths` int64 [rows]. Returns int64 [rows] with the bits of
    mix(word_sum(row) + mix(length + G)). Raises `TypeError` for other dtypes and `ValueError` for other shapes and, on
    a CPU, for lengths outside [0, columns].
    """
    if values.dtype != torch.int64 or lengths.dtype != torch.int64:
        raise TypeError(f"row_digests takes int64 values and lengths, not {values.dtype} and {lengths.dtype}")
    if values.dim() != 2 or lengths.shape != values.shape[:1]:
        raise ValueError(
            f"values must be [rows, columns] and lengths [rows], not {list(values.shape)} and {list(lengths.shape)}"
        )
    columns = values.shape[1]
    # On an accelerator this check would wait at every micro-batch. A wrong length changes the digest in any case.
    if values.device.type == "cpu" and bool(((lengths < 0) | (lengths > columns)).any()):
        raise ValueError(f"lengths must be in [0, {columns}], got {lengths.tolist()}")
    triton = kernels() if values.is_cuda else None
    if triton is not None:
        digests: Tensor = triton.row_digests_on_device(values, lengths)
        return digests
    positions = torch.arange(columns, dtype=torch.int64, device=values.device)
    mixed = values + positions * _GOLDEN
    _mix_in_place(mixed, torch.empty_like(mixed))
    mixed.masked_fill_(positions >= lengths.unsqueeze(1), 0)
    return mix64(mixed.sum(dim=1) + mix64(lengths + _GOLDEN))


# A checksum for comparisons between CPUs: two additions a word, while `mix` needs a dozen passes without a kernel. It
# sums the 64-bit words modulo 2^64, each `ROW` consecutive ones and all that are `STRIDE` apart. It folds these sums,
# and the words at the end that one of the two layouts leaves over, into one integer by multilinear hashing of their
# halves (Carter and Wegman, 1979; Lemire and Kaser, 2014), in any order of summation.
#
# Two words of a row never share a stride. Therefore a difference in up to three words always changes a sum, and so does
# a flip of the top bit of every word of a row, because their number is odd. A larger difference is lost only if it
# cancels in every row and in every stride, which are odd lengths, unlike those of anything in memory. The fold misses a
# changed sum with a probability of at most 2^-33.

ROW, STRIDE = 129, 131
_FOLD_WORDS = 1 << 19  # 4 MiB
_MAX_SUMS = _FOLD_WORDS // ROW + 3 * STRIDE  # of one fold


@functools.cache
def _fold_weights() -> Tensor:
    return mix64(torch.arange(1, 2 * _MAX_SUMS + 1, dtype=torch.int64, device="cpu"))


def _fold(words: Tensor) -> int:
    rows, lines = words.numel() // ROW, words.numel() // STRIDE
    if lines:
        by_row = words.as_strided((rows, ROW), (ROW, 1)).sum(1)
        by_line = words.as_strided((lines, STRIDE), (STRIDE, 1)).sum(0)
        words = torch.cat([by_row, by_line, words[min(rows * ROW, lines * STRIDE) :]])
    halves = words.view(torch.int32).to(torch.int64)
    return int(torch.dot(halves, _fold_weights()[: halves.numel()]))


def checksum(flat: Tensor) -> int:
    """The checksum in [0, 2^64) of the bytes of `flat`: 1-dim, contiguous, of any dtype, on a CPU."""
    rest = flat.nbytes % WORD
    aligned = not (flat.storage_offset() * flat.element_size() % WORD or flat.data_ptr() % WORD)
    if aligned and not rest:
        words = flat.view(torch.int64)
    else:
        raw = flat.view(torch.uint8)
        whole = raw[: raw.numel() - rest]
        words = (whole if aligned else whole.clone()).view(torch.int64)
    total = 0
    for block in torch.split(words, _FOLD_WORDS) if words.numel() > _FOLD_WORDS else (words,):
        total = mix_integer(total + _fold(block))
    if rest:
        last = torch.zeros(WORD, dtype=torch.uint8, device="cpu")
        last[:rest] = raw[-rest:]
        total = mix_integer(total + _fold(last.view(torch.int64)))
    return total
