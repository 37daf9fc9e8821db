"""Messages between ranks, through a group or through sockets: complete, in order, and an error if a rank is gone."""

from __future__ import annotations

import datetime
import math
import os
import re
import tempfile
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from andon_contracts.agree import (
    HEADER,
    MOST_RANKS,
    GroupGather,
    Observation,
    bits_of,
    connect,
    gather_observations,
    gather_short,
    own_group,
    real_of,
)
from andon_contracts.digest import signed
from tests.support.ranks import run_ranks

words = st.integers(0, (1 << 64) - 1)


@given(st.floats(allow_nan=False))
def test_reals_travel_as_their_bits(value: float) -> None:
    back = real_of(bits_of(value))
    assert back == value
    assert math.copysign(1.0, back) == math.copysign(1.0, value)
    assert math.isnan(real_of(bits_of(math.nan)))


@given(st.lists(st.tuples(words, words), min_size=1, max_size=5), st.integers(0, 1 << 40))
def test_values_arrive_by_rank_and_name(values: list[tuple[int, int]], step: int) -> None:
    sent = [
        Observation(rank, step, 9, "here", {"a": a, "b": b}, torch.tensor([[rank, 2], [3, 4]]))
        for rank, (a, b) in enumerate(values)
    ]
    for observation, rank in zip(gather_observations(sent, lambda vectors: vectors), range(len(values)), strict=True):
        assert (observation.rank, observation.step, observation.sequence, observation.point) == (rank, step, 9, "here")
        assert observation.values == {"a": signed(values[rank][0]), "b": signed(values[rank][1])}
        assert observation.payload is not None
        assert observation.payload.tolist() == [rank, 2, 3, 4]
        assert observation.names_match


def _gather_without_rank_1() -> list[str]:
    gather = GroupGather(dist.new_group(backend="gloo"), 1)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["rank 0 is connected"])
        os._exit(0)
    store.set("rank 0 is connected", "")
    told: list[str] = []
    gather.on_error = lambda error: told.append(str(error))
    with pytest.raises(RuntimeError):
        gather([torch.tensor([1])])
    return told


def test_a_gather_with_a_rank_that_is_gone_reports_the_closed_connection() -> None:
    """The error is that of the collective, not that of the short waits between which a rank looks for a halt."""
    (told,) = run_ranks(2, _gather_without_rank_1)[0].get()
    assert re.search("closed by peer|Connection reset", told)


def _leaves_a_gather() -> list[list[int]]:
    store = dist.distributed_c10d._get_default_store()
    timeout = datetime.timedelta(seconds=600)
    gather = GroupGather(own_group(None, timeout), 1)
    if dist.get_rank() == 0:
        gather.raise_if_halted = _stop
        with pytest.raises(InterruptedError):
            gather([torch.tensor([1])])
        gather.close()
        with pytest.raises(ValueError, match="the gather is closed"):
            gather([torch.tensor([1])])
        store.set("closed", "1")
    else:
        store.wait(["closed"])
    again = GroupGather(own_group(None, timeout), 1)
    return [row.tolist() for row in again([torch.tensor([dist.get_rank()])])]


def _stop() -> None:
    raise InterruptedError


def test_a_gather_that_was_left_keeps_nobody_from_going_on() -> None:
    for outcome in run_ranks(2, _leaves_a_gather, deadline_s=30.0):
        assert outcome.get() == [[0], [1]]


# Sockets between the ranks of one machine.

WIDTH = 64
ROUNDS = 50


def _gather() -> GroupGather:
    return GroupGather(dist.new_group(backend="gloo"), WIDTH)


def _exchanged() -> list[list[list[int]]]:
    gather = _gather()
    gather.connect()
    assert gather.fits_sockets(WIDTH - HEADER)
    rank = gather.rank
    # Short messages, one of the full width, and one too long for the sockets.
    lengths = [1, 7, WIDTH, 3 * WIDTH] + [5] * ROUNDS
    found = [
        [row.tolist() for row in gather([torch.arange(length) - 2 * number - 1000 * rank])]
        for number, length in enumerate(lengths)
    ]
    gather.close()
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_rank_has_what_every_rank_sent(world: int) -> None:
    if world == 1:
        gather = GroupGather(None, WIDTH)
        gather.connect()
        assert [row.tolist() for row in gather([torch.tensor([4, -5])])] == [[4, -5]]
        assert gather.fits_sockets(WIDTH - HEADER)
        assert gather.messages(b"12345678") == [b"12345678"]
        return
    lengths = [1, 7, WIDTH, 3 * WIDTH] + [5] * ROUNDS
    wanted = [
        [[place - 2 * number - 1000 * rank for place in range(length)] for rank in range(world)]
        for number, length in enumerate(lengths)
    ]
    for outcome in run_ranks(world, _exchanged):
        assert outcome.get() == wanted


Shown = tuple[int, int, int, str, dict[str, int], bool]
OBSERVED: dict[str, Callable[[int], Observation]] = {
    "the same": lambda rank: Observation(rank, 3, 5, "here", {"a": (1 << 63) + 7, "b": -1}),
    "values": lambda rank: Observation(rank, 3, 5, "here", {"a": 1, "b": rank % 2}),
    "steps": lambda rank: Observation(rank, 3 + rank // 2, 5, "here", {"a": 1}),
    "messages": lambda rank: Observation(rank, 3, 5 + rank // 2, "here", {"a": 1}),
    "points": lambda rank: Observation(rank, 3, 5, "there" if rank else "here", {"a": 1}),
    "names": lambda rank: Observation(rank, 3, 5, "here", {"ab"[rank % 2]: 1}),
    "speakers": lambda rank: Observation(0, 3, 5, "here", {"a": 1}),
}
"""What three ranks see, by what differs."""


def _both_ways() -> dict[str, tuple[list[Shown], list[Shown]]]:
    gather = _gather()
    mine = {name: make(gather.rank) for name, make in OBSERVED.items()}
    assert not gather.fits_sockets(1)
    slow = {name: gather_observations([each], gather) for name, each in mine.items()}
    gather.connect()
    assert gather.fits_sockets(WIDTH - HEADER)
    assert not gather.fits_sockets(WIDTH - HEADER + 1)
    found = {name: ([*map(_shown, slow[name])], [*map(_shown, gather_short(mine[name], gather))]) for name in mine}
    gather.close()
    return found


def _shown(seen: Observation) -> Shown:
    return seen.rank, seen.step, seen.sequence, seen.point, dict(seen.values), seen.names_match


def test_observations_are_the_same_either_way() -> None:
    for rank, outcome in enumerate(run_ranks(3, _both_ways)):
        found = outcome.get()
        assert set(found) == set(OBSERVED)
        for name, (slow, short) in found.items():
            assert slow == short, name
            assert [one[0] for one in short] == ([0, 0, 0] if name == "speakers" else [0, 1, 2])
            assert all(one[5] for one in short) == (name not in ("points", "names")), rank


def _left(how: str) -> str:
    gather = _gather()
    gather.connect()
    gather([torch.tensor([1])])
    if gather.rank == 1:
        gather.close()
        return "left"
    heard: list[str] = []
    gather.on_error = lambda error: heard.append(str(error))
    with pytest.raises(dist.DistNetworkError) as caught:
        gather([torch.tensor([2])])
    assert heard == [str(caught.value)]
    return heard[0]


def test_a_rank_that_is_gone_is_an_error_that_says_so() -> None:
    texts = [outcome.get() for outcome in run_ranks(3, _left, "")]
    assert texts[1] == "left"
    assert all(text.startswith("Connection closed by peer") for text in (texts[0], texts[2]))


def _waits() -> str:
    gather = _gather()
    gather.connect()
    if gather.rank == 1:
        dist.barrier()
        return "late"
    gather.raise_if_halted = _stop
    with pytest.raises(InterruptedError):
        gather([torch.tensor([1])])
    dist.barrier()
    return "heeded"


def test_a_rank_that_waits_heeds() -> None:
    assert [outcome.get() for outcome in run_ranks(2, _waits)] == ["heeded", "late"]


def _silent() -> str:
    gather = _gather()
    mesh = connect(gather.rank, 2, _numbers(gather), timeout_s=0.1)
    assert mesh is not None
    if gather.rank == 0:
        with pytest.raises(dist.DistNetworkError, match=r"Timed out waiting 0\.1 s for rank 1"):
            mesh.gather(b"12345678")
    dist.barrier()
    return "told"


def _numbers(gather: GroupGather) -> Callable[[Sequence[int]], list[list[int]]]:
    return lambda mine: [row.tolist() for row in gather([torch.tensor(mine)])]


def test_a_rank_that_stays_silent_is_an_error_after_the_timeout() -> None:
    assert [outcome.get() for outcome in run_ranks(2, _silent)] == ["told", "told"]


def _nowhere() -> list[list[int]]:
    if dist.get_rank() == 1:
        tempfile.tempdir = "/nowhere"
    gather = _gather()
    gather.connect()
    assert not gather.fits_sockets(1)
    return [row.tolist() for row in gather([torch.tensor([dist.get_rank()])])]


def test_where_one_rank_cannot_listen_all_go_through_the_group() -> None:
    assert [outcome.get() for outcome in run_ranks(3, _nowhere)] == [[[0], [1], [2]]] * 3


def test_more_ranks_than_are_connected_are_not_asked() -> None:
    def never(_: Sequence[int]) -> Sequence[Sequence[int]]:
        raise AssertionError

    assert connect(0, 1, never, 1.0) is None
    assert connect(0, MOST_RANKS + 1, never, 1.0) is None
