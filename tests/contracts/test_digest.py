"""The digest: its definition against a plain-integer reference, and what it must see."""

from __future__ import annotations

import hashlib
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from andon_contracts.digest import GOLDEN, hex64, join, mix64, row_digests, seal, tensor_digest, tree_digest, word_sum

M64 = 2**64
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
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


def test_mix64_is_published_splitmix64() -> None:
    assert as_unsigned(mix64(torch.tensor([GOLDEN - M64]))) == [0xE220A8397B1DCDAF]


def test_mix64_leaves_its_input() -> None:
    words = torch.arange(5)
    mix64(words)
    assert words.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(TypeError, match="int32"):
        mix64(words.int())


def test_header_binds_length_dtype_and_shape() -> None:
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    text = "\x1f".join(["andon-digest-1", "tensor", "24", "torch.float32", "2", "3"]).encode()
    header = int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
    data = struct.pack("<6f", *range(6))
    assert tensor_digest(tensor) == reference_mix((reference_sum(data) + header) % M64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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
    assert (hex64(0), hex64(M64 - 1), hex64(0xAB)) == ("0" * 16, "f" * 16, "00000000000000ab")
    for value in (-1, M64):
        with pytest.raises(ValueError, match="2\\^64"):
            hex64(value)
