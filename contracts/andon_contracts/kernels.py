"""Triton kernels of the digests, imported through `andon_contracts.digest.kernels`.

Each program mixes a run of 64-bit words with their positions and adds one partial sum atomically. Sums modulo 2^64
commute, so the result depends neither on the grid nor on the order. Triton launches on the current GPU, so a guard
around every launch selects the GPU of the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORD = 8  # bytes; `digest` imports this module, so that it cannot import `digest.WORD`
_BLOCK = 1024
_ROUNDS_LARGE, _ROUNDS_SMALL, _SMALL_WORDS = 32, 4, 1 << 24
_WARPS = 4
_COLUMNS, _ROWS = 256, 64


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
    # The distance of the other tensors from the first, in words. Loads are wide if it is a multiple of 16.
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


def word_sums(tensors: Sequence[Tensor], start: int = 0, *, finite: bool = False) -> Tensor:
    """int64 [n, 2]: the word sums and, if `finite`, nonfinite fp32 values of 1 to 3 int64 vectors of one size."""
    words = tensors[0]
    count, rounds = words.numel(), _rounds(words.nbytes)
    shifts = [(tensor.data_ptr() - words.data_ptr()) // _WORD for tensor in tensors] + [0] * 2
    programs = max(1, triton.cdiv(count, _BLOCK * rounds))
    out = torch.zeros((len(tensors), 2), dtype=torch.int64, device=words.device)
    with torch.cuda.device_of(words):
        launch = _mixed_sums[(programs, len(tensors))]
        launch(words, out, shifts[1], shifts[2], count, start, _BLOCK, rounds, finite, num_warps=_WARPS)
    return out


def _rounds(total_bytes: int) -> int:
    return _ROUNDS_SMALL if total_bytes < _SMALL_WORDS * _WORD else _ROUNDS_LARGE


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


def row_digests_on_device(values: Tensor, lengths: Tensor) -> Tensor:
    """The result of `andon_contracts.digest.row_digests`."""
    rows, columns = values.shape
    values, lengths = values.contiguous(), lengths.contiguous()
    out = torch.empty(rows, dtype=torch.int64, device=values.device)
    if rows:
        with torch.cuda.device_of(values):
            _row_sums[(rows,)](values, lengths, out, columns, columns, _COLUMNS)
    return out


def bound_sums_on_device(rows: Tensor, runs: Tensor) -> Tensor:
    """int64 [n] on the device: for each run, the sum modulo 2^64 of mix(row + mix(place + 1)) over its rows.

    rows: int64 [all rows]. runs: int64 [n, 3], the start of a run in `rows`, the place of its first row, its length.
    """
    out = torch.empty(runs.shape[0], dtype=torch.int64, device=rows.device)
    if runs.shape[0]:
        with torch.cuda.device_of(rows):
            _bound_sums[(runs.shape[0],)](rows.contiguous(), runs.contiguous(), out, _ROWS)
    return out


# Lists of tensors. Each tensor has a row of five numbers in an int64 table on the device: its address, its size (in
# bytes for sums, in elements for extremes), the position of its first word, the place of its result, its first program.
@triton.jit  # type: ignore[untyped-decorator]
def _row_of(rows, count, program, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    # Binary search for the last row whose first program is at most this one.
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
        # Loads are wide only without a mask.
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
        # The last word, padded with zeros.
        octet = tl.arange(0, 8)
        inside = whole * 8 + octet < size
        parts = tl.load(address.to(tl.pointer_type(tl.uint8)) + whole * 8 + octet, mask=inside, other=0)
        word = tl.sum(parts.to(tl.uint64) << (8 * octet).to(tl.uint64), axis=0)
        found += _mix(word + (whole + start).to(tl.uint64) * 0x9E3779B97F4A7C15)
    tl.atomic_add(out + tl.load(row + 3), found.to(tl.int64, bitcast=True))


class ListSums:
    """The word sums of tensors on `device`, whose sizes never change. Several tensors may add up to one sum.

    rows: for each tensor its bytes, the position of its first word and the index of its sum.
    """

    def __init__(self, device: torch.device, rows: Sequence[tuple[int, int, int]]) -> None:
        self._device = device
        self._count = 1 + max((place for _, _, place in rows), default=-1)
        self._rounds = _rounds(sum(size for size, _, _ in rows))
        self._nonempty = [index for index, (size, _, _) in enumerate(rows) if size]
        filled = [rows[index] for index in self._nonempty]
        per_program = _WORD * _BLOCK * self._rounds
        *first, self._programs = accumulate((-(-size // per_program) for size, _, _ in filled), initial=0)
        table = [(0, *row, begin) for row, begin in zip(filled, first, strict=True)]
        self._rows = torch.tensor(table, device="cpu").view(-1, 5)
        self._addresses: list[int] = []
        self._table = self._rows

    def read(self, tensors: Sequence[Tensor]) -> Tensor:
        """int64 [sums] on the device: the sums of the present contents of `tensors`, which are contiguous."""
        out = torch.zeros(self._count, dtype=torch.int64, device=self._device)
        if not self._programs:
            return out
        addresses = [tensors[index].data_ptr() for index in self._nonempty]
        if addresses != self._addresses:
            self._rows[:, 0] = torch.tensor(addresses, device="cpu")
            # A copy, because the rows may change before the device has read them.
            rows, self._addresses = self._rows.clone(), addresses
            is_gpu = self._device.type == "cuda"  # then it waits for no copy
            self._table = (rows.pin_memory() if is_gpu else rows).to(self._device, non_blocking=is_gpu)
        with torch.cuda.device_of(out):
            # The halvings that find one row of `count`, rounded up to fours, so that few kernels are compiled.
            count = len(self._table)
            sizes = count, -(-count.bit_length() // 4) * 4, _BLOCK, self._rounds
            _list_sums[(self._programs,)](self._table, out, *sizes, num_warps=_WARPS)
        return out
