"""Reading tensors: checksums and word sums of flat memory, one digest of many tensors, extremes, norms."""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
from collections.abc import Callable, Sequence
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from andon_contracts.digest import (
    GOLDEN,
    ROW,
    STRIDE,
    checksum,
    hex64,
    join,
    mix64,
    mix_integer,
    row_digests,
    seal,
    tensor_digest,
    tree_digest,
    word_sum,
)
from andon_contracts.observe import (
    Extremes,
    Observer,
    finite_total,
    flat_norm,
    nonfinite,
    norm_of,
    sum_of_squares,
    word_sums,
)
from tests.support.memory import peak_bytes


@pytest.mark.parametrize("place", [0, 999, 1000])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_is_seen_anywhere(value: float, place: int) -> None:
    tensor = torch.full((1001,), 3e38)
    assert not nonfinite(tensor)
    tensor[place] = value
    seen = nonfinite(tensor)
    assert (seen.shape, seen.dtype, bool(seen)) == ((), torch.bool, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_finite_elements_are_finite_whatever_their_sum_is(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max if dtype.is_floating_point else 5
    assert not nonfinite(torch.full((2,), largest, dtype=dtype))
    assert math.isfinite(finite_total(torch.full((2,), 3e38)))
    assert not nonfinite(torch.zeros(0, dtype=dtype))


def test_sums_are_those_of_the_digest() -> None:
    first, second = torch.arange(5.0), torch.arange(7.0)
    plain = word_sums([first, second], finite=False).tolist()
    assert [value % 2**64 for value in plain] == [word_sum(first), word_sum(second)]
    assert word_sums([first, second], finite=True).tolist() == [plain[0], 0, plain[1]]
    first[2] = math.inf
    assert word_sums([first], finite=True).tolist()[1] == 1


_LARGE = 300_001


def test_another_layout_under_the_same_dtypes_is_read_anew() -> None:
    observer = Observer()
    dense = torch.tensor([0.0, 2.0, 0.0])
    observer.look([dense, dense])
    sparse = observer.look([dense, dense.to_sparse()]).digest
    assert sparse == Observer().look([dense, dense.to_sparse()]).digest
    assert sparse != observer.look([dense, torch.tensor([0.0, 3.0, 0.0]).to_sparse()]).digest


def test_a_sparse_tensor_may_have_more_values_than_before() -> None:
    observer, dense = Observer(), torch.arange(6.0)
    for count in (1, 300, 2):
        sparse = torch.zeros(300, 4)
        sparse[:count] = torch.arange(1.0, 1 + 4 * count).view(count, 4)
        assert observer.look([sparse.to_sparse(1), dense]).digest == Observer().look([sparse[:count], dense]).digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tensor_with_gaps_in_memory_has_the_digest_of_its_copy(dtype: torch.dtype) -> None:
    with_gaps = torch.arange(4_000).to(dtype)[::2]
    observer = Observer()
    for value in (1, 2):
        with_gaps[-1] = value
        assert observer.look([with_gaps]).digest == Observer().look([with_gaps.contiguous()]).digest


@pytest.mark.parametrize(
    "made",
    [lambda: torch.ones(300, 400).T, lambda: torch.ones(4, 5), lambda: torch.ones(90_000)],
    ids=["strided", "small", "large"],
)
def test_a_list_is_read_as_it_is_now(made: Callable[[], Tensor]) -> None:
    tensors = [made(), torch.zeros(3)]
    observer = Observer()
    seen = [observer.look(tensors).digest, observer.look(tensors).digest]
    tensors[0][1:2].fill_(2.0)
    seen.append(observer.look(tensors).digest)
    tensors[0].data = tensors[0].data + 1
    seen.append(observer.look(tensors).digest)
    tensors[1] = torch.ones(3)
    seen += [observer.look(tensors).digest, Observer().look(tensors).digest]
    assert seen[0] == seen[1]
    assert len({*seen[1:5]}) == 4
    assert seen[4] == seen[5]


SHAPES = ((), (0, 4), (3,), (5, 7), (64, 9), (8_000,), (31_000,), (70_001,), (150_000,))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)
_PIECE, _TOGETHER = 1 << 18, 1 << 19


def _raw(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _words(raw: bytes, length: int) -> np.ndarray:
    return np.frombuffer(raw.ljust(8 * length, b"\0"), dtype=np.uint64)


def _folded(sums: np.ndarray) -> int:
    weights = [mix_integer(index + 1) for index in range(2 * sums.size)]
    halves = sums.view(np.int32).tolist()
    return sum(half * weight for half, weight in zip(halves, weights, strict=True))


def _of_one(raw: bytes) -> int:
    words = _words(raw[: len(raw) // 8 * 8], len(raw) // 8)
    rows, lines = words.size // ROW, words.size // STRIDE
    if lines:
        by_row = words[: rows * ROW].reshape(rows, ROW).sum(1, dtype=np.uint64)
        by_line = words[: lines * STRIDE].reshape(lines, STRIDE).sum(0, dtype=np.uint64)
        words = np.concatenate([by_row, by_line, words[min(rows * ROW, lines * STRIDE) :]])
    found = mix_integer(_folded(words))
    over = len(raw) % 8
    return mix_integer(found + _folded(_words(raw[-over:], 1))) if over else found


def _by_definition(tensors: Sequence[Tensor], *, portable: bool) -> int:
    groups: list[list[Tensor]] = []
    last: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        mine = last.get(tensor.dtype)
        if mine is None or tensor.nbytes > _PIECE or sum(each.nbytes for each in mine) + tensor.nbytes > _TOGETHER:
            groups.append(mine := [])
            if tensor.nbytes <= _PIECE:
                last[tensor.dtype] = mine
        mine.append(tensor)
    held = [b"".join(map(_raw, group)) for group in groups]
    if portable:
        sums = [word_sum(torch.tensor(list(raw), dtype=torch.uint8)) for raw in held]
    else:
        sums = [_of_one(raw) for raw in held]
    digest = len(tensors)
    for value in sums:
        digest = mix_integer(digest + value)
    return digest


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), max_size=9), st.booleans(), st.integers(0, 9)
)
def test_the_digest_of_a_list_is_the_one_of_its_definition(
    made: list[tuple[tuple[int, ...], torch.dtype]], portable: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randint(0, 200, shape, generator=generator).to(dtype) for shape, dtype in made]
    observer = Observer(portable=portable)
    expected = _by_definition(tensors, portable=portable)
    assert [observer.look(tensors).digest, observer.look(tensors).digest] == [expected, expected]
    assert observer.look(tensors, extra=7).digest == (expected + 7) % 2**64


@pytest.mark.parametrize("portable", [False, True])
def test_what_was_looked_at_can_be_read_later(portable: bool) -> None:
    tensors = [torch.randn(50), torch.randn(3, 4), torch.randn(_LARGE)]
    observer = Observer(portable=portable)
    first = observer.look(tensors, norm=True)
    expected = _by_definition(tensors, portable=portable)
    norm = float(torch.cat([tensor.view(-1) for tensor in tensors]).double().norm())
    for tensor in tensors:
        tensor.zero_()
    assert observer.look(tensors, norm=True).norm == 0.0
    assert first.digest == expected
    assert first.norm == pytest.approx(norm, rel=1e-5)


# Extremes


def _add(*gradients: Tensor) -> list[tuple[int, float, float]]:
    seen = Extremes()
    for index, gradient in enumerate(gradients):
        seen.add(index, gradient)
    return seen.read()


def test_extremes_say_what_is_finite_and_what_is_zero() -> None:
    nan = torch.ones(50)
    nan[17] = float("nan")
    found = _add(torch.tensor([1e-30, -3.0]), nan, torch.tensor([2.0, float("-inf")]), torch.zeros(4), torch.zeros(0))
    assert found[0] == (0, -3.0, pytest.approx(1e-30))
    assert all(value != value for value in found[1][1:])
    assert found[2] == (2, float("-inf"), 2.0)
    assert {index: (low, high) for index, low, high in found[3:]} == {3: (0.0, 0.0), 4: (0.0, 0.0)}
    kinds = [torch.tensor([0.5, -1.5]).to_sparse(), torch.tensor([1 - 2j]), torch.tensor([4.0], dtype=torch.bfloat16)]
    assert sorted(_add(*kinds)) == [(0, -1.5, 0.5), (1, -2.0, 1.0), (2, 4.0, 4.0)]


def test_every_backward_pass_has_its_own_extremes() -> None:
    seen = Extremes()
    for _ in range(2):
        seen.add(0, torch.tensor([1.0, float("nan")]))
        seen.add(0, torch.tensor([1.0, 2.0]))
        seen.add(1, torch.ones(3))
        assert 0 in seen.added
        found = seen.read()
        assert sorted(index for index, _, _ in found) == [0, 0, 1]
        assert sum(low != low for _, low, _ in found) == 1
        seen.clear()
        assert not seen.added
        assert seen.read() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_tensors_that_moved_to_another_device_are_laid_out_anew() -> None:
    observer = Observer(portable=True)
    here = (torch.arange(6.0), torch.ones(3))
    first = observer.look(here).digest
    moved = observer.look(tuple(each.cuda() for each in here))
    assert all(found.is_cuda for found in moved.device_sums)
    assert moved.digest == observer.look(here).digest == first


def test_what_is_made_for_the_host_is_made_there_whatever_the_default_device_is() -> None:
    tensors = [
        torch.arange(float(size), device="cpu").to(dtype) for size, dtype in ((5, torch.float16), (9, torch.float))
    ]
    expected = Observer().look(tensors).digest
    with torch.device("meta"):
        assert Observer().look(tensors).digest == expected


# The checksum of flat memory.

LENGTHS = (0, 1, 2, ROW, STRIDE - 1, STRIDE, STRIDE + 1, 5 * ROW, 5 * STRIDE, ROW * STRIDE, (1 << 19) + 3)
"""In words: less than a row, whole rows or lines, with a rest of either, more than is folded at once."""


def _random(words: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 62), 1 << 62, (words,), generator=generator)


@pytest.mark.parametrize("length", LENGTHS)
def test_one_bit_anywhere_is_seen(length: int) -> None:
    words = _random(length)
    seen = {checksum(words)}
    places = sorted({0, length // 2, length - 1}) if length else []
    for place in places:
        for bit in (1, -(1 << 63)):
            words[place] ^= bit
            seen.add(checksum(words))
            words[place] ^= bit
    assert len(seen) == 1 + 2 * len(places)
    assert checksum(words) in seen


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128])
def test_the_same_bytes_have_one_checksum_wherever_they_lie(dtype: torch.dtype) -> None:
    raw = _random(3 * ROW).view(torch.uint8)
    width = dtype.itemsize
    for count in (0, 1, 8 * STRIDE // width + 1, raw.numel() // width):
        size = count * width
        shifted = torch.empty(size + width, dtype=torch.uint8)
        shifted[width:] = raw[:size]
        assert checksum(raw[:size].clone().view(dtype)) == checksum(shifted.view(dtype)[1:])


# The 2-norm of long tensors.

BOUND = 8.5 * 2.0**-24


def _normal(count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count))


def _heavy(count: int) -> Tensor:
    return _normal(count) * _normal(count).mul_(3).exp_()


def _true(flat: Tensor) -> float:
    return math.sqrt(math.fsum(float(piece.double().square().sum()) for piece in flat.split(1 << 20)))


@pytest.mark.parametrize("drawn", [_normal, _heavy, lambda count: torch.full((count,), 1.1)])
@pytest.mark.parametrize("count", [1, 63, 65, 1_000, 65_537, (1 << 20) + 3])
def test_the_norm_is_that_of_float64_at_any_length(drawn: Callable[[int], Tensor], count: int) -> None:
    flat = drawn(count)
    assert float(flat_norm(flat)) == pytest.approx(_true(flat), rel=BOUND)


@pytest.mark.parametrize("count", [1, 64, 65, 1_000])
def test_squares_are_added_by_halves(count: int) -> None:
    flat = _normal(count)
    squares = [element * element for element in flat.unbind()]
    while len(squares) > 64:
        kept = (len(squares) + 1) // 2
        pairs = itertools.zip_longest(squares[:kept], squares[kept:])
        squares = [one if other is None else one + other for one, other in pairs]
    assert sum_of_squares(flat) == math.fsum(map(float, squares))


@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1e-12, 1e19, 1e30, 2e35])
def test_no_square_overflows_or_is_lost(scale: float) -> None:
    flat = _normal(1_000_003).clamp(-5, 5) * scale
    assert float(flat_norm(flat)) == pytest.approx(_true(flat), rel=BOUND)


def test_what_is_not_finite() -> None:
    huge = torch.full((100,), 3e38)
    assert float(flat_norm(huge[:1])) == float(huge[0])
    assert float(flat_norm(huge)) == math.inf
    assert float(flat_norm(torch.tensor([1.0, math.inf]))) == math.inf
    assert math.isnan(float(flat_norm(torch.tensor([math.inf, math.nan]))))
    assert float(flat_norm(torch.zeros(3))) == float(flat_norm(torch.empty(0))) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_watch_measures_long_tensors_as_well(dtype: torch.dtype) -> None:
    tensors = [_normal(10_000_000).to(dtype), _normal(7).to(dtype)]
    wanted = _true(torch.cat(tensors))
    assert norm_of(tensors) == pytest.approx(wanted, rel=1e-6)
    assert Observer().look(tensors, norm=True).norm == pytest.approx(wanted, rel=1e-6)
    if dtype != torch.float16:
        assert norm_of([tensors[0] * 1e20]) == math.inf


@pytest.mark.parametrize("scale", [1.0, 1e-30])
@pytest.mark.parametrize("count", [1_000, 3_000_000])
def test_it_needs_a_piece_of_memory_and_no_copy(count: int, scale: float) -> None:
    flat = _normal(count) * scale
    peak = peak_bytes(lambda: flat_norm(flat)) - flat.nbytes
    assert peak <= min(4 << 20, flat.nbytes) + 64


# The digest: its definition against a plain-integer reference, and what it must see.


M64 = 2**64
EVERY_DTYPE = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex128,
    torch.float8_e4m3fn,
]


def reference_mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % M64
    return z ^ (z >> 31)


def reference_sum(data: bytes, start: int = 0) -> int:
    padded = data + bytes(-len(data) % 8)
    words = struct.unpack(f"<{len(padded) // 8}Q", padded)
    return sum(reference_mix((w + (i + start) * GOLDEN) % M64) for i, w in enumerate(words)) % M64


def from_bytes(data: bytes, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone().view(dtype)


def as_unsigned(tensor: torch.Tensor) -> list[int]:
    return [int(v) % M64 for v in tensor.tolist()]


@given(st.binary(max_size=200), st.integers(0, 2**40))
def test_word_sum_is_its_definition(data: bytes, start: int) -> None:
    assert word_sum(from_bytes(data), start) == reference_sum(data, start)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_mix64_is_splitmix64(values: list[int]) -> None:
    mixed = as_unsigned(mix64(torch.tensor(values, dtype=torch.int64)))
    assert mixed == [reference_mix(v % M64) for v in values]
    assert as_unsigned(mix64(torch.tensor([GOLDEN - M64]))) == [0xE220A8397B1DCDAF]  # as published


def test_header_binds_length_dtype_and_shape() -> None:
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    text = "\x1f".join(["andon-digest-1", "tensor", "24", "torch.float32", "2", "3"]).encode()
    header = int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
    data = struct.pack("<6f", *range(6))
    assert tensor_digest(tensor) == reference_mix((reference_sum(data) + header) % M64)


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
def test_every_dtype_counts_its_bytes(dtype: torch.dtype) -> None:
    data = bytes(range(48)) if dtype != torch.bool else bytes([1, 0, 1] * 16)
    tensor = from_bytes(data, dtype)
    assert word_sum(tensor) == reference_sum(data)
    cut = tensor[:-1]
    assert word_sum(cut) == reference_sum(data[: cut.numel() * dtype.itemsize])


@pytest.mark.parametrize("words", [65535, 65536, 65537, 131073])
def test_chunks_do_not_show(words: int) -> None:
    tensor = torch.randint(-(2**62), 2**62, (words,), generator=torch.Generator().manual_seed(words))
    expected = sum(as_unsigned(mix64(tensor + torch.arange(words) * (GOLDEN - M64)))) % M64
    assert word_sum(tensor) == expected


def test_sealed_shards_are_the_tensor() -> None:
    tensor = torch.randn(10, 4)
    total = word_sum(tensor[:3]) + word_sum(tensor[3:], start=6)
    assert seal(total % M64, tensor.dtype, tensor.shape) == tensor_digest(tensor)


@given(st.integers(0, 3), st.integers(1, 5), st.integers(1, 5), st.integers(1, 4))
def test_strides_do_not_show(offset: int, rows: int, columns: int, depth: int) -> None:
    base = torch.arange(offset + rows * columns * depth * 2, dtype=torch.float32)
    view = base[offset : offset + rows * columns * depth].view(rows, columns, depth)
    expanded = view[:1].expand(3, -1, -1)
    for tensor in (view, view.transpose(0, 2), view.permute(1, 2, 0), base[offset::2], expanded):
        assert tensor_digest(tensor) == tensor_digest(tensor.contiguous().clone())


def test_large_views_do_not_show() -> None:
    base = torch.randn(2, 90_000)
    for tensor in (base.t(), base[:, 1:], base[:, ::2], base.t()[None], base.view(-1)[1:], base[None].transpose(1, 2)):
        assert tensor_digest(tensor) == tensor_digest(tensor.contiguous().clone())


@pytest.mark.parametrize("shape", [(100_000,), (1, 100_000), (2, 70_000)])
def test_allocates_less_than_the_tensor(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(8, *shape, dtype=torch.int64).transpose(0, -1)
    largest = 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        word_sum(tensor)
    for event in profile.events() or ():
        largest = max(largest, int(event.self_cpu_memory_usage))
    assert 0 < largest <= 2 * 65536 * 8


def test_lazy_views_are_resolved() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    assert tensor_digest(z.conj()) == tensor_digest(z.conj().resolve_conj().clone()) != tensor_digest(z)
    assert tensor_digest(z.conj().imag) == tensor_digest(torch.tensor([-2.0, 4.0]))
    assert tensor_digest(torch.nn.Parameter(torch.ones(3))) == tensor_digest(torch.ones(3))


@pytest.mark.parametrize("tensor", [torch.ones(2, 2).to_sparse(), torch.ones(2, device="meta")], ids=["sparse", "meta"])
def test_what_has_no_bytes_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="dense tensors"):
        tensor_digest(tensor)


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.empty(0), torch.empty(0, 3), torch.empty(3, 0), torch.empty(0, dtype=torch.int64), torch.zeros(1)],
        # Constant tensors of even length, which an XOR hashes to 0.
        [torch.full((n,), value) for n in (2, 4, 64) for value in (0.0, 1.0, -1.0, 2.0)],
        # The same bytes.
        [
            each
            for data in [torch.arange(12, dtype=torch.int32)]
            for each in (data, data.view(3, 4), data.view(4, 3), data.view(12, 1), data.view(torch.float32))
        ],
        # The same values in another order, at the distance of half a word, a word and more.
        [
            torch.tensor(values).float()
            for values in ([1, 2, 3, 4, 5], [2, 1, 3, 4, 5], [3, 2, 1, 4, 5], [5, 2, 3, 4, 1])
        ],
    ],
    ids=["empty", "constant", "shape and dtype", "order"],
)
def test_different_tensors_have_different_digests(tensors: list[torch.Tensor]) -> None:
    assert len({tensor_digest(tensor) for tensor in tensors}) == len(tensors)


def test_tree_binds_names_and_not_order() -> None:
    a, b = torch.zeros(3), torch.ones(3)
    tree = tree_digest({"a": a, "b": b})
    assert tree == tree_digest({"b": b, "a": a}) == join({"a": tensor_digest(a), "b": tensor_digest(b)})
    others = [{"a": b, "b": a}, {"a": a, "c": b}, {"a": a}, {"a": a, "b": b, "c": b}, {}, {"b": a, "a\x1f": b}]
    assert len({tree, *(tree_digest(other) for other in others)}) == 1 + len(others)


@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6), min_size=1, max_size=5), st.data())
def test_rows_do_not_see_their_padding(rows: list[list[int]], draw: st.DataObject) -> None:
    width = max(map(len, rows)) + draw.draw(st.integers(0, 3))
    pad = draw.draw(st.integers(-5, 5))
    values = torch.tensor([row + [pad] * (width - len(row)) for row in rows], dtype=torch.int64).view(len(rows), width)
    digests = as_unsigned(row_digests(values, torch.tensor([len(row) for row in rows])))
    for row, digest in zip(rows, digests, strict=True):
        total = reference_sum(struct.pack(f"<{len(row)}q", *row))
        assert digest == reference_mix((total + reference_mix((len(row) + GOLDEN) % M64)) % M64)


@pytest.mark.parametrize(
    ("values", "lengths", "error"),
    [
        (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), TypeError),
        (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), ValueError),
        (torch.zeros(6, dtype=torch.int64), torch.zeros(6, dtype=torch.int64), ValueError),
        (torch.zeros(2, 3, dtype=torch.int64), torch.tensor([1, 4]), ValueError),
        (torch.zeros(2, 3, dtype=torch.int64), torch.tensor([-1, 3]), ValueError),
    ],
)
def test_rows_refuse_what_they_cannot_read(values: torch.Tensor, lengths: torch.Tensor, error: type[Exception]) -> None:
    with pytest.raises(error):
        row_digests(values, lengths)


def test_hex64_is_sixteen_digits() -> None:
    assert (hex64(0), hex64(M64 - 1), hex64(-1), hex64(0xAB)) == ("0" * 16, "f" * 16, "f" * 16, "00000000000000ab")


def test_an_observer_without_memory_does_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Mock(side_effect=[torch.OutOfMemoryError("CUDA out of memory")])
    monkeypatch.setattr(Observer, "_read", reads)
    with pytest.raises(torch.OutOfMemoryError):
        Observer().look([torch.ones(2)])
