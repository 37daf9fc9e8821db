"""How a watch reads many tensors: one digest of bits and order, extremes of gradients, frozen weights part by part."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from andon_contracts.digest import mix_integer
from andon_contracts.watch.base import ROUND, SMALL_BYTES, Buffers, FrozenBase
from andon_contracts.watch.checksum import MOST_SUMS, ROW, STRIDE, Summed, room_of
from andon_contracts.watch.extremes import Extremes
from andon_contracts.watch.kept import Kept
from andon_contracts.watch.reading import Reader, norm_of_chunks, plain

# Small and large, of several dtypes, empty, 0-dim, strided, sparse, and enough for several chunks.
_LARGE = 300_001


def _tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    made = [torch.randn(shape, generator=generator) for shape in ((3, 5), (), (0, 4), (7,), (_LARGE,), (64, 1030))]
    made += [torch.randn(9, generator=generator).to(dtype) for dtype in (torch.bfloat16, torch.float64)]
    made += [torch.arange(5), torch.randn(6, 4, generator=generator).T, torch.randn(4, generator=generator).to_sparse()]
    return made + [torch.randn(60_000, generator=generator) for _ in range(20)]


def _flip(tensor: Tensor, place: int) -> None:
    raw = plain(tensor).reshape(-1)[place : place + 1].view(torch.uint8)
    raw[0] ^= 1


@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("portable", [False, True])
def test_one_bit_of_any_tensor_changes_the_digest(portable: bool, stable: bool) -> None:
    """Wherever the bit is, also behind what was kept from the look before."""
    reader = Reader(portable=portable, stable=stable)
    tensors = _tensors()
    before = reader.read(tensors).digest
    assert reader.read(_tensors()).digest == before
    for index, tensor in enumerate(tensors):
        held = plain(tensor)
        if not held.numel() or not held.is_contiguous():
            continue
        _flip(tensor, held.numel() - 1)
        assert reader.read(tensors).digest != before, index
        _flip(tensor, held.numel() - 1)
    assert reader.read(tensors).digest == before


def test_the_order_counts_and_a_new_reader_sees_the_same() -> None:
    """Two tensors exchanged are another digest; what was kept of the layout is no part of it."""
    tensors = _tensors()
    reader = Reader()
    reader.read(tensors[:3])
    assert reader.read(tensors).digest == Reader().read(tensors).digest
    exchanged = [*tensors[:-2], tensors[-1], tensors[-2]]
    assert reader.read(exchanged).digest != reader.read(tensors).digest


def test_another_layout_under_the_same_dtypes_is_read_anew() -> None:
    """A gradient that comes sparse after it came dense is read as what it holds."""
    reader = Reader()
    dense = torch.tensor([0.0, 2.0, 0.0])
    reader.read([dense, dense])
    sparse = reader.read([dense, dense.to_sparse()]).digest
    assert sparse == Reader().read([dense, dense.to_sparse()]).digest
    assert sparse != reader.read([dense, torch.tensor([0.0, 3.0, 0.0]).to_sparse()]).digest


@pytest.mark.parametrize(
    "made",
    [lambda: torch.ones(300, 400).T, lambda: torch.ones(4, 5), lambda: torch.ones(90_000)],
    ids=["strided", "small", "large"],
)
def test_a_stable_list_is_read_as_it_is_now(made: Callable[[], Tensor]) -> None:
    """Changed in place, moved to other memory, replaced: what is kept of a tensor is where it is, not what it was."""
    tensors = [made(), torch.zeros(3)]
    reader = Reader(stable=True)
    seen = [reader.read(tensors).digest, reader.read(tensors).digest]
    tensors[0][1:2].fill_(2.0)
    seen.append(reader.read(tensors).digest)
    tensors[0].data = tensors[0].data + 1
    seen.append(reader.read(tensors).digest)
    tensors[1] = torch.ones(3)
    seen += [reader.read(tensors).digest, Reader().read(tensors).digest]
    assert seen[0] == seen[1]
    assert len({*seen[1:5]}) == 4
    assert seen[4] == seen[5]


SIZES = (8 * ROW * STRIDE, 5, 8 * STRIDE, 8 * ROW * 2 + 3)
"""Bytes: whole rows and lines, less than a word, one line, rows with a rest."""


def _summed(pieces: Sequence[Tensor]) -> int:
    """The checksum of `pieces` (uint8) that are copied one after the other into a room, with zeros behind."""
    sizes = [piece.numel() for piece in pieces]
    room = torch.full((max(map(room_of, sizes)),), -1)
    summed = Summed(sizes, room)
    for index, piece in enumerate(pieces):
        room[: room_of(piece.numel())] = 0
        room.view(torch.uint8)[: piece.numel()] = piece
        summed.take(index)
    return summed.fold()


def _pieces() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(256, (size,), generator=generator).to(torch.uint8) for size in SIZES]


def test_a_bit_of_any_piece_that_is_summed_as_it_is_copied_is_seen() -> None:
    """At the begin and at the end of each; so is a piece that exchanges a word with another."""
    before = _summed(_pieces())
    assert _summed(_pieces()) == before
    seen = {before}
    for index in range(len(SIZES)):
        for place in (0, -1):
            changed = _pieces()
            changed[index][place] ^= 1
            seen.add(_summed(changed))
    words = _pieces()
    words[0][:8], words[2][:8] = words[2][:8].clone(), words[0][:8].clone()
    seen.add(_summed(words))
    assert len(seen) == 1 + 2 * len(SIZES) + 1


def test_the_sums_of_pieces_are_those_of_their_definition() -> None:
    """Rows and lines of each piece with zeros behind it, folded by halves with one list of weights: in integers."""
    weights = [mix_integer(index + 1) for index in range(2 * MOST_SUMS)]
    halves: list[int] = []
    for piece in _pieces():
        filled = bytes(piece.tolist()).ljust(8 * ROW * STRIDE, b"\0")
        words = [int.from_bytes(filled[place : place + 8], "little") for place in range(0, len(filled), 8)]
        rows = [sum(words[place : place + ROW]) for place in range(0, -(-piece.numel() // 8), ROW)]
        for value in [*rows, *(sum(words[place::STRIDE]) for place in range(STRIDE))]:
            bits = (value % (1 << 64)).to_bytes(8, "little")
            halves += [int.from_bytes(half, "little", signed=True) for half in (bits[:4], bits[4:])]
    total = sum(half * weight for half, weight in zip(halves, weights, strict=False))
    assert _summed(_pieces()) == mix_integer(total)


def test_many_groups_are_folded_in_several_turns() -> None:
    """More tensors than one fold takes: the first and the last element count."""
    tensors = [torch.zeros(60_000) for _ in range(160)]
    reader = Reader(stable=True)
    seen = {reader.read(tensors).digest}
    for tensor in (tensors[0], tensors[80], tensors[-1]):
        _flip(tensor, 59_999)
        seen.add(reader.read(tensors).digest)
    assert len(seen) == 4


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128])
def test_what_was_copied_before_is_not_seen(dtype: torch.dtype) -> None:
    """Readers share the memory into which they copy: a long list read in between leaves nothing in a short one's."""
    short = [torch.ones(3).to(dtype), torch.zeros(5).to(dtype)]
    reader = Reader()
    before = reader.read(short).digest
    for value in (1, 2):
        Reader().read([torch.full((9_000,), value).to(dtype) for _ in range(7)])
        assert reader.read(short).digest == Reader().read(short).digest == before


def test_the_norm_is_the_one_of_all_elements() -> None:
    """The 2-norm over tensors of several dtypes, as one double-precision norm of all of them gives it."""
    tensors = [t for t in _tensors() if t.is_floating_point()]
    whole = torch.cat([plain(t).double().reshape(-1) for t in tensors])
    assert Reader().read(tensors, norm=True).norm == pytest.approx(float(whole.norm()), rel=1e-5)
    assert norm_of_chunks([]) == 0.0


# extremes


def _add(*gradients: Tensor) -> list[tuple[int, float, float]]:
    seen = Extremes([nn.Parameter(torch.zeros_like(g.to_dense())) for g in gradients])
    for index, gradient in enumerate(gradients):
        seen.add(index, gradient)
    return seen.read()


def test_extremes_say_what_is_finite_and_what_is_zero() -> None:
    """NaN anywhere makes both NaN, an infinity shows at its end; dense, sparse, complex, empty, 16 bits alike."""
    nan = torch.ones(50)
    nan[17] = float("nan")
    found = _add(torch.tensor([1.0, -3.0]), nan, torch.tensor([2.0, float("-inf")]), torch.zeros(4), torch.zeros(0))
    assert found[0] == (0, -3.0, 1.0)
    assert all(value != value for value in found[1][1:])
    assert found[2] == (2, float("-inf"), 2.0)
    assert {index: (low, high) for index, low, high in found[3:]} == {3: (0.0, 0.0), 4: (0.0, 0.0)}
    kinds = [torch.tensor([0.5, -1.5]).to_sparse(), torch.tensor([1 - 2j]), torch.tensor([4.0], dtype=torch.bfloat16)]
    assert sorted(_add(*kinds)) == [(0, -1.5, 0.5), (1, -2.0, 1.0), (2, 4.0, 4.0)]


def test_every_backward_pass_has_its_own_extremes() -> None:
    """A second pass does not hide the first; what is cleared is gone, and places are used again."""
    seen = Extremes([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))])
    for _ in range(2):
        seen.add(0, torch.tensor([1.0, float("nan")]))
        seen.add(0, torch.tensor([1.0, 2.0]))
        seen.add(1, torch.ones(3))
        assert seen.has(0)
        assert seen.any
        found = seen.read()
        assert sorted(index for index, _, _ in found) == [0, 0, 1]
        assert sum(low != low for _, low, _ in found) == 1
        seen.clear()
        assert not seen.has(0)
        assert seen.read() == []


def test_a_gradient_of_another_dtype_than_its_parameter_is_seen() -> None:
    """Torch allows it, and then the place that was kept does not fit."""
    seen = Extremes([nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))])
    seen.add(0, torch.tensor([1.0, 1e-30]))
    ((index, low, high),) = seen.read()
    assert (index, high) == (0, 1.0)
    assert low == pytest.approx(1e-30)


# frozen weights


@pytest.mark.parametrize("sizes", [[3], [5, 700_000, 2], [10] * 200])
def test_a_frozen_weight_that_changes_below_torch_is_seen_within_a_round(sizes: list[int]) -> None:
    """No version counter moves; every weight is read again within `ROUND` looks, wherever the round is."""
    for late in (0, 7):
        frozen = [nn.Parameter(torch.ones(size), requires_grad=False) for size in sizes]
        base = FrozenBase(frozen)
        assert all(base.digest() == base.first for _ in range(ROUND + late))
        frozen[-1].data.view(torch.int32)[-1] ^= 1
        assert [base.digest() for _ in range(ROUND)][-1] != base.first


def _in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight[0] += 1


def _replaced(weight: nn.Parameter) -> None:
    weight.data = weight.data + 1


@pytest.mark.parametrize("change", [_in_place, _replaced])
def test_a_frozen_weight_that_torch_changes_is_seen_at_once(change: Callable[[nn.Parameter], None]) -> None:
    """A version counter or the memory is another one; and back at what it was, the digest is the first again."""
    frozen = [nn.Parameter(torch.ones(size), requires_grad=False) for size in (4, 400_000)]
    base = FrozenBase(frozen)
    before = frozen[1].data.clone()
    change(frozen[1])
    assert base.digest() != base.first
    frozen[1].data = before
    assert base.digest() == base.first


# buffers


def _written_below_torch(buffer: Tensor) -> None:
    buffer.data.view(torch.int32)[-1] ^= 1


@pytest.mark.parametrize(("elements", "looks"), [(5, 1), (SMALL_BYTES // 4 + 1, ROUND), (2_000_000, ROUND)])
def test_a_buffer_that_changes_below_torch_is_seen(elements: int, looks: int) -> None:
    """No version counter moves. A small buffer is seen at the next look, a large one within `ROUND` updates."""
    pairs = [[torch.ones(3), torch.zeros(0), torch.ones(elements)] for _ in range(2)]
    ranks = [Buffers(), Buffers()]
    assert all(ranks[0].digest(pairs[0], update) == ranks[1].digest(pairs[1], update) for update in range(9))
    _written_below_torch(pairs[1][-1])
    seen = [ranks[0].digest(pairs[0], update) != ranks[1].digest(pairs[1], update) for update in range(9, 9 + looks)]
    assert any(seen)


def test_ranks_that_miss_looks_compare_the_same_parts_of_buffers() -> None:
    """A rank without rows has no forward pass; what is read at an update depends on the update alone."""
    made = [[torch.ones(2_000_000)], [torch.ones(2_000_000)]]
    ranks = [Buffers(), Buffers()]
    for update in range(1, 12):
        for (buffer,) in made:
            buffer.data[:] = float(update)  # alike on both, below every counter
        digests = [
            rank.digest(own, update) for rank, own in zip(ranks, made, strict=True) if update != 4 or own is made[0]
        ]
        assert len(set(digests)) == 1, update


# what an optimizer keeps


def test_any_difference_in_what_an_optimizer_keeps_is_seen() -> None:
    """A moment, a count, a name: each is another digest, as is nothing at all; the order of insertion is not."""
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    optimizer = torch.optim.AdamW(parameters)
    kept = Kept(optimizer, parameters)
    empty = kept.digest()
    sum(p.sum() for p in parameters).backward()  # type: ignore[union-attr]
    optimizer.step()
    first = kept.digest()
    state = optimizer.state[parameters[1]]
    optimizer.state[parameters[1]] = dict(reversed(copy.deepcopy(state).items()))
    assert kept.digest() == first
    found = {empty, first}
    for name, value in (("exp_avg", torch.zeros(2, 2)), ("step", torch.tensor(2.0)), ("more", 1), ("step", 1.0)):
        optimizer.state[parameters[1]] = {**state, name: value}
        found.add(kept.digest())
    optimizer.state[parameters[1]] = {"steps" if name == "step" else name: value for name, value in state.items()}
    found.add(kept.digest())
    assert len(found) == 7
