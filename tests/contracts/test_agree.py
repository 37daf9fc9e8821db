"""What every rank observed, by rank, with step and sequence in every message."""

from __future__ import annotations

import datetime
import math
import os
import re
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from andon_contracts.agree import GroupGather, Observation, bits_of, gather_observations, own_group, real_of
from andon_contracts.digest import signed
from tests.support.ranks import run_ranks

words = st.integers(0, (1 << 64) - 1)


def _wire(vectors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return vectors


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
    for observation, rank in zip(gather_observations(sent, _wire), range(len(values)), strict=True):
        assert (observation.rank, observation.step, observation.sequence, observation.point) == (rank, step, 9, "here")
        assert observation.values == {"a": signed(values[rank][0]), "b": signed(values[rank][1])}
        assert observation.payload is not None
        assert observation.payload.tolist() == [rank, 2, 3, 4]
        assert observation.names_match


def _gather_without_rank_1() -> list[str]:
    gather = GroupGather(dist.new_group(backend="gloo"), 1)
    if dist.get_rank() == 1:
        os._exit(0)
    told: list[str] = []
    gather.lost = lambda error: told.append(str(error))
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
        gather.heed = _stop
        with pytest.raises(InterruptedError):
            gather([torch.tensor([1])])
        gather.close()
        with pytest.raises(ValueError, match="nothing is gathered any more"):
            gather([torch.tensor([1])])
        store.set("closed", "1")
    else:
        store.wait(["closed"])
    again = GroupGather(own_group(None, timeout), 1)
    return [row.tolist() for row in again([torch.tensor([dist.get_rank()])])]


def _stop() -> None:
    raise InterruptedError


def test_a_gather_that_was_left_keeps_nobody_from_going_on() -> None:
    """The end of a group waits for its collectives: one that a halt left unfinished must not hold up who closes it."""
    for outcome in run_ranks(2, _leaves_a_gather, deadline_s=30.0):
        assert outcome.get() == [[0], [1]]
