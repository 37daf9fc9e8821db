"""The four verbs mean the same on every backend: lists in, lists out, bits unchanged."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from andon.backend.base import Backend, GroupBackend, InlineBackend
from andon.step.plan import rank_leaves
from andon.step.reduce import TreeReduction
from tests.support.ranks import run_ranks
from tests.support.toy import CPU

SPECIAL = torch.tensor([0.0, -0.0, 1e-42, float("inf"), float("nan"), 3.5])


def _gathered(backend: Backend) -> list[list[int]]:
    local = [SPECIAL * (rank + 1) for rank in backend.ranks]
    return [tensor.view(torch.int32).tolist() for tensor in backend.gather(local)]


def _sent(source: int, destination: int, rows: int) -> torch.Tensor:
    return torch.full((rows, 3), float(100 * source + destination))


def _exchanged(backend: Backend, rows: Sequence[int]) -> list[list[list[list[float]]]]:
    world = backend.world_size
    local = [torch.stack([_sent(rank, to, rows[rank]) for to in range(world)]) for rank in backend.ranks]
    return [[part.tolist() for part in parts] for parts in backend.exchange(local, rows)]


def _expected_exchange(rows: Sequence[int]) -> list[list[list[list[float]]]]:
    return [[_sent(source, to, rows[source]).tolist() for source in range(len(rows))] for to in range(len(rows))]


ROWS = {1: (2,), 2: (1, 3), 3: (2, 0, 1), 4: (1, 1, 0, 2)}
"""Rows that each rank sends, by world size: uneven, and none from some."""


@pytest.mark.parametrize("world", ROWS)
def test_verbs_in_one_process(world: int) -> None:
    backend = InlineBackend([CPU] * world)
    assert _gathered(backend) == [(SPECIAL * (rank + 1)).view(torch.int32).tolist() for rank in range(world)]
    assert _exchanged(backend, ROWS[world]) == _expected_exchange(ROWS[world])


def _verbs() -> tuple[int, list[list[int]], list[list[list[list[float]]]]]:
    backend = GroupBackend("gloo", CPU)
    return backend.ranks[0], _gathered(backend), _exchanged(backend, ROWS[backend.world_size])


@pytest.mark.parametrize("world", [1, 4])
def test_verbs_in_a_group(world: int) -> None:
    for rank, outcome in enumerate(run_ranks(world, _verbs)):
        assert outcome.get() == (
            rank,
            [(SPECIAL * (other + 1)).view(torch.int32).tolist() for other in range(world)],
            [_expected_exchange(ROWS[world])[rank]],
        )


def _unequal() -> list[torch.Tensor]:
    backend = GroupBackend("gloo", CPU)
    try:
        return backend.gather([torch.zeros(1 + backend.ranks[0], dtype=torch.int64)])
    finally:
        backend.close()


def test_messages_of_unequal_length_are_an_error() -> None:
    first, second = run_ranks(2, _unequal)
    assert "rank 1 sends 16 bytes and this rank 8" in str(first.error)
    assert "rank 0 sends 8 bytes and this rank 16" in str(second.error)


def _changed() -> list[list[float]]:
    backend = GroupBackend("gloo", CPU)
    try:
        mine = torch.ones(3)
        gathered = backend.gather([mine])
        mine.fill_(7.0)
        empty = backend.gather([torch.empty(0)])
        return [*(row.tolist() for row in gathered), *(row.tolist() for row in empty)]
    finally:
        backend.close()


def test_what_was_gathered_is_a_copy() -> None:
    for outcome in run_ranks(2, _changed):
        assert outcome.get() == [[1.0] * 3, [1.0] * 3, [], []]


def test_a_group_backend_needs_a_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="not initialised"):
        GroupBackend("gloo", CPU)


@pytest.mark.parametrize("size", [1, 3, 64, 65])
@pytest.mark.parametrize("leaves", [1, 5, 8])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 9])
def test_reduction_alone(world: int, leaves: int, size: int) -> None:
    backend = InlineBackend([CPU] * world)
    values = torch.randn(leaves, size, generator=torch.Generator().manual_seed(leaves))

    def total(low: int, high: int) -> torch.Tensor:
        middle = (low + high) // 2
        return values[low] if high - low == 1 else total(low, middle) + total(middle, high)

    reduction = TreeReduction(leaves, size, backend)
    owned = rank_leaves(leaves, world)
    local = [{node: total(*node) for node in reduction.roots_of_rank[rank]} for rank in range(world)]
    assert [sum(high - low for low, high in roots) for roots in local] == [len(run) for run in owned]
    for pieces in reduction(local):
        assert torch.equal(torch.cat(pieces), total(0, leaves))


@pytest.mark.parametrize(("leaves", "size"), [(0, 4), (4, 0)])
def test_nothing_to_reduce_is_refused(leaves: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"{leaves} leaves of {size} elements"):
        TreeReduction(leaves, size, InlineBackend([CPU]))
