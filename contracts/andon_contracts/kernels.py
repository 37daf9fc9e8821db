"""Triton kernels of the digests and extremes: the CPU's values, at the speed of reading the memory once.

`andon_contracts.digest.kernels` gives this module, which can be imported only if Triton is installed.

Each program mixes a run of 64-bit words with their positions and adds one partial sum atomically. Sums modulo 2^64
commute, so the result depends neither on the grid nor on the order. The same pass can count the fp32 values that are
not finite, and one launch takes several tensors of one size. Rows of token ids have a program each.

The guards round every launch select the device of the tensors, because Triton launches on the current GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl

from andon_contracts.digest import WORD

_BLOCK = 1024
_ROUNDS_LARGE, _ROUNDS_SMALL, _SMALL_WORDS = 32, 4, 1 << 24
_WARPS = 4
_COLUMNS, _ROWS = 256, 64
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
MAX_TENSORS = 3
"""Tensors that one launch of `word_sums_and_nonfinite` takes."""


@triton.jit
def _mix(z):  # type: ignore[no-untyped-def]
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit  # type: ignore[untyped-decorator]
def _mixed_sums(  # type: ignore[no-untyped-def]
    words, out, second, third, count, start, BLOCK: tl.constexpr, ROUNDS: tl.constexpr, FINITE: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    which = tl.program_id(1)
    # The other tensors lie so many words from the first; where that is a multiple of 16, loads are wide.
    shift = tl.where(which == 0, 0, tl.where(which == 1, second, third)).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.uint64)
    nonfinite = tl.zeros([BLOCK], dtype=tl.int32)
    for turn in range(ROUNDS):
        place = (program * ROUNDS + turn) * BLOCK + tl.arange(0, BLOCK)
        inside = place < count
        word = tl.load(words + shift + place, mask=inside, other=0).to(tl.uint64, bitcast=True)
        total += tl.where(inside, _mix(word + (place + start).to(tl.uint64) * 0x9E3779B97F4A7C15), 0)
        if FINITE:
            low = (word.to(tl.uint32) & 0x7F800000) == 0x7F800000
            high = ((word >> 32).to(tl.uint32) & 0x7F800000) == 0x7F800000
            nonfinite += low.to(tl.int32) + high.to(tl.int32)
    tl.atomic_add(out + 2 * which, tl.sum(total, axis=0).to(tl.int64, bitcast=True))
    if FINITE:
        tl.atomic_add(out + 2 * which + 1, tl.sum(nonfinite.to(tl.int64), axis=0))


def word_sum_on_device(words: torch.Tensor, start: int = 0) -> torch.Tensor:
    """0-dim int64 on the device, with the bits of the word sum of int64 `words` (contiguous), first at `start`."""
    return _launch([words], start, finite=False)[0, 0]


def word_sums_and_nonfinite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64 [len(tensors), 2] on the device: of each int64 vector its word sum, and how many fp32 values (two a word)
    are NaN or infinite. Up to `MAX_TENSORS` vectors of one size."""
    return _launch(tensors, 0, finite=True)


def _rounds(total_bytes: int) -> int:
    return _ROUNDS_SMALL if total_bytes < _SMALL_WORDS * WORD else _ROUNDS_LARGE


def _launch(tensors: Sequence[torch.Tensor], start: int, *, finite: bool) -> torch.Tensor:
    words = tensors[0]
    count, rounds = words.numel(), _rounds(words.nbytes)
    shifts = [(tensor.data_ptr() - words.data_ptr()) // WORD for tensor in tensors] + [0] * (MAX_TENSORS - len(tensors))
    programs = max(1, triton.cdiv(count, _BLOCK * rounds))
    out = torch.zeros((len(tensors), 2), dtype=torch.int64, device=words.device)
    with torch.cuda.device_of(words):
        _mixed_sums[(programs, len(tensors))](
            words, out, shifts[1], shifts[2], count, start, _BLOCK, rounds, finite, num_warps=_WARPS
        )
    return out


@triton.jit(do_not_specialize=["columns", "stride"])  # type: ignore[untyped-decorator]
def _row_sums(values, lengths, out, columns, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row)
    total = tl.zeros([BLOCK], dtype=tl.uint64)
    for first in range(0, columns, BLOCK):
        place = first + tl.arange(0, BLOCK).to(tl.int64)
        inside = (place < columns) & (place < length)
        word = tl.load(values + row * stride + place, mask=inside, other=0).to(tl.uint64, bitcast=True)
        total += tl.where(inside, _mix(word + place.to(tl.uint64) * 0x9E3779B97F4A7C15), 0)
    ending = _mix(length.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    tl.store(out + row, _mix(tl.sum(total, axis=0) + ending).to(tl.int64, bitcast=True))


@triton.jit  # type: ignore[untyped-decorator]
def _bound_sums(rows, runs, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    run = tl.program_id(0)
    start = tl.load(runs + 3 * run)
    first = tl.load(runs + 3 * run + 1)
    count = tl.load(runs + 3 * run + 2)
    total = tl.zeros([BLOCK], dtype=tl.uint64)
    for turn in range(0, count, BLOCK):
        place = turn + tl.arange(0, BLOCK).to(tl.int64)
        inside = place < count
        row = tl.load(rows + start + place, mask=inside, other=0).to(tl.uint64, bitcast=True)
        total += tl.where(inside, _mix(row + _mix((first + place + 1).to(tl.uint64))), 0)
    tl.store(out + run, tl.sum(total, axis=0).to(tl.int64, bitcast=True))


def row_digests_on_device(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """int64 [rows] on the device: what `andon_contracts.digest.row_digests` gives of these."""
    rows, columns = values.shape
    values, lengths = values.contiguous(), lengths.contiguous()
    out = torch.empty(rows, dtype=torch.int64, device=values.device)
    if rows:
        with torch.cuda.device_of(values):
            _row_sums[(rows,)](values, lengths, out, columns, columns, _COLUMNS)
    return out


def bound_sums_on_device(rows: torch.Tensor, runs: torch.Tensor) -> torch.Tensor:
    """int64 [n] on the device: by run, the sum modulo 2^64 of mix(row + mix(place + 1)) over its rows.

    rows: int64 [all rows]. runs: int64 [n, 3]: where a run starts in `rows`, the place of its first row, its length.
    """
    out = torch.empty(runs.shape[0], dtype=torch.int64, device=rows.device)
    if runs.shape[0]:
        with torch.cuda.device_of(rows):
            _bound_sums[(runs.shape[0],)](rows.contiguous(), runs.contiguous(), out, _ROWS)
    return out


# Lists of tensors. Each has a row in an int64 table on the device, of `LIST_COLUMNS` numbers: its address, its size (in
# bytes for sums, in elements for extremes), the position of its first word, the place of its result, its first program.

LIST_COLUMNS = 5
NO_EXTREMES = (0x7FFFFFFF, -0x80000000)
"""The keys of the smallest and the largest of no elements."""


@triton.jit  # type: ignore[untyped-decorator]
def _row_of(rows, count, program, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    # The last row whose first program is not behind this one, by halving.
    low = program * 0
    high = low + count
    for _ in range(STEPS):
        middle = (low + high) // 2
        right = tl.load(rows + middle * 5 + 4) <= program
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    return rows + low * 5


@triton.jit
def _placed(word, place, start, inside):  # type: ignore[no-untyped-def]
    return tl.where(inside, _mix(word + (place + start).to(tl.uint64) * 0x9E3779B97F4A7C15), 0)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _list_sums(rows, out, count, STEPS: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0).to(tl.int64)
    row = _row_of(rows, count, program, STEPS)
    address = tl.load(row)
    size = tl.load(row + 1)
    start = tl.load(row + 2)
    chunk = program - tl.load(row + 4)
    whole = size // 8
    total = tl.zeros([BLOCK], dtype=tl.uint64)
    first = chunk * ROUNDS * BLOCK
    if (address % 16 == 0) & (first + ROUNDS * BLOCK <= whole):
        # Only without a mask are loads wide.
        words = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)
        for turn in range(ROUNDS):
            place = first + turn * BLOCK + tl.arange(0, BLOCK)
            word = tl.load(words + place).to(tl.uint64, bitcast=True)
            total += _mix(word + (place + start).to(tl.uint64) * 0x9E3779B97F4A7C15)
    elif address % 4 == 0:
        halves = address.to(tl.pointer_type(tl.uint32))
        for turn in range(ROUNDS):
            place = first + turn * BLOCK + tl.arange(0, BLOCK)
            inside = place < whole
            low = tl.load(halves + 2 * place, mask=inside, other=0).to(tl.uint64)
            high = tl.load(halves + 2 * place + 1, mask=inside, other=0).to(tl.uint64)
            total += _placed(low | (high << 32), place, start, inside)
    else:
        octets = address.to(tl.pointer_type(tl.uint8))
        for turn in range(ROUNDS):
            place = first + turn * BLOCK + tl.arange(0, BLOCK)
            inside = place < whole
            word = tl.zeros([BLOCK], dtype=tl.uint64)
            for octet in tl.static_range(8):
                octet_here = tl.load(octets + 8 * place + octet, mask=inside, other=0).to(tl.uint64)
                word = word | (octet_here << (8 * octet))
            total += _placed(word, place, start, inside)
    found = tl.sum(total, axis=0)
    if (size % 8 != 0) & (chunk == whole // (BLOCK * ROUNDS)):
        # The last word, filled up with zeros.
        octet = tl.arange(0, 8)
        inside = whole * 8 + octet < size
        parts = tl.load(address.to(tl.pointer_type(tl.uint8)) + whole * 8 + octet, mask=inside, other=0)
        word = tl.sum(parts.to(tl.uint64) << (8 * octet).to(tl.uint64), axis=0)
        found += _mix(word + (whole + start).to(tl.uint64) * 0x9E3779B97F4A7C15)
    tl.atomic_add(out + tl.load(row + 3), found.to(tl.int64, bitcast=True))


@triton.jit
def _key(value):  # type: ignore[no-untyped-def]
    # In the order of these keys the floats are in theirs, and a NaN is beyond the infinity of its sign.
    bits = value.to(tl.float32).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _list_extremes(  # type: ignore[no-untyped-def]
    rows, out, count, STEPS: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr, TYPE: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    row = _row_of(rows, count, program, STEPS)
    address = tl.load(row)
    size = tl.load(row + 1)
    keys = out + 2 * tl.load(row + 3)
    chunk = program - tl.load(row + 4)
    first = chunk * ROUNDS * BLOCK
    low = tl.full([BLOCK], 0x7FFFFFFF, dtype=tl.int32)
    high = tl.full([BLOCK], -0x80000000, dtype=tl.int32)
    if (address % 16 == 0) & (first + ROUNDS * BLOCK <= size):
        values = tl.multiple_of(address.to(tl.pointer_type(TYPE)), 16)
        for turn in range(ROUNDS):
            key = _key(tl.load(values + first + turn * BLOCK + tl.arange(0, BLOCK)))
            low = tl.minimum(low, key)
            high = tl.maximum(high, key)
    else:
        values = address.to(tl.pointer_type(TYPE))
        for turn in range(ROUNDS):
            place = first + turn * BLOCK + tl.arange(0, BLOCK)
            inside = place < size
            key = _key(tl.load(values + place, mask=inside, other=0.0))
            low = tl.minimum(low, tl.where(inside, key, 0x7FFFFFFF))
            high = tl.maximum(high, tl.where(inside, key, -0x80000000))
    tl.atomic_min(keys, tl.min(low, axis=0))
    tl.atomic_max(keys + 1, tl.max(high, axis=0))


def first_programs(counts: Sequence[int], total_bytes: int) -> list[int]:
    """The first program of each of a list of tensors with so many words or elements, and behind them how many there
    are. None of the counts is 0."""
    most = _BLOCK * _rounds(total_bytes)
    return list(accumulate((-(-count // most) for count in counts), initial=0))


def _sizes(rows: torch.Tensor, total_bytes: int) -> tuple[int, int, int, int]:
    count = rows.shape[0]
    # So many halvings find one row of `count`. They come in fours, so that few kernels are compiled.
    return count, -(-count.bit_length() // 4) * 4, _BLOCK, _rounds(total_bytes)


def list_sums_on_device(rows: torch.Tensor, out: torch.Tensor, programs: int, total_bytes: int) -> None:
    """Add to `out` (int64 on the device) the word sum of each row's tensor, at its place there.

    rows: int64 [n, `LIST_COLUMNS`] on the device, with the `first_programs` of all words, begun ones among them.
    """
    with torch.cuda.device_of(out):
        _list_sums[(programs,)](rows, out, *_sizes(rows, total_bytes), num_warps=_WARPS)


def list_extremes_on_device(
    rows: torch.Tensor, out: torch.Tensor, programs: int, total_bytes: int, dtype: torch.dtype
) -> None:
    """Put the keys of the smallest and the largest element of each row's tensor into `out`, int32 [n, 2] on the device.

    It holds `NO_EXTREMES` before. rows: int64 [n, `LIST_COLUMNS`] on the device. A key is the bits of the element in
    fp32, all but the sign turned over where that is set: in the order of the keys a NaN is beyond the infinities.
    """
    with torch.cuda.device_of(out):
        _list_extremes[(programs,)](rows, out, *_sizes(rows, total_bytes), _TYPES[dtype], num_warps=_WARPS)
