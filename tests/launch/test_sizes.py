"""How many workers go on after each end of a generation: decided without a process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.console.exits import Exit
from andon.console.problems import InputError
from andon.launch.sizes import Bounds, Ended, Sizing, parse_workers, sized

DIED = Ended(Exit.RANK_LOST, agents=3, checkpoint="step-00000007")


def workers_after(*ends: Ended, bounds: tuple[int, int] = (2, 4), max_restarts: int = 3) -> list[int]:
    sizing = Sizing(Bounds(*bounds), max_restarts)
    return [sizing.after(ended).workers for ended in ends]


def test_a_number_and_a_range_are_read() -> None:
    assert parse_workers("4") == 4
    assert sized("2:4", None) == (4, Sizing(Bounds(2, 4), 3))
    assert sized("2:4", 0) == (4, Sizing(Bounds(2, 4), 0))
    assert sized(None, None) == (None, None)


@pytest.mark.parametrize("text", ["", ":", "2:", ":4", "4:2", "0:4", "-1:2", "two", "2:4:6", "2.0"])
def test_what_is_no_number_of_workers_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(InputError, match=r"^--workers: ") as caught:
        parse_workers(text)
    assert repr(text) in str(caught.value)


def test_restarts_of_a_fixed_number_are_refused() -> None:
    """A run with fewer ranks than asked for never goes on, unless elasticity was asked for."""
    with pytest.raises(InputError, match=r"--max-restarts: needs --workers MIN:MAX"):
        sized("4", 2)


LATER = Ended(Exit.RANK_LOST, agents=3, checkpoint="step-00000014")
FEWER = Ended(Exit.RANK_LOST, agents=2, checkpoint="step-00000014")


@pytest.mark.parametrize(
    ("ends", "max_restarts", "workers"),
    [
        ([DIED], 3, [3]),
        ([Ended(Exit.PREEMPTED, agents=2, wanted=4), Ended(Exit.RANK_LOST, 3, lost=1, wanted=4)], 3, [4, 4]),
        ([DIED, DIED, LATER, LATER, LATER, FEWER, FEWER, FEWER], 2, [3, 3, 3, 3, 2, 2, 2, 0]),
    ],
    ids=["the same size", "the requested number", "restarts counted anew at each checkpoint"],
)
def test_so_many_workers_go_on(ends: list[Ended], max_restarts: int, workers: list[int]) -> None:
    """Two restarts at step 7, two more after step 14; then one worker less, then the minimum."""
    assert workers_after(*ends, max_restarts=max_restarts) == workers


def test_a_lost_agent_shrinks_the_world_and_not_below_the_minimum() -> None:
    """Of 3 agents one is lost: 2; then another: 1 is fewer than 2, an error that says so and ends with 71."""
    sizing = Sizing(Bounds(2, 4))
    assert sizing.after(Ended(Exit.RANK_LOST, agents=2, lost=1)).workers == 2
    last = sizing.after(Ended(Exit.RANK_SILENT, agents=1, lost=1))
    assert (last.workers, last.exit) == (0, Exit.RANK_LOST)
    assert last.why == "1 agent lost; 1 left, fewer than the 2 of --workers 2:4"


@pytest.mark.parametrize("end", [Exit.OK, Exit.USAGE, Exit.VIOLATION, Exit.PREEMPTED])
def test_an_end_that_would_come_again_is_final(end: Exit) -> None:
    """Success, a user's mistake, a broken contract and a preemption keep their exit code and are not repeated."""
    following = Sizing(Bounds(1, 4)).after(Ended(end, agents=4))
    assert (following.workers, following.exit, following.why) == (0, end, "")


def test_a_signal_that_ended_the_run_ends_it() -> None:
    following = Sizing(Bounds(1, 4)).after(Ended(Exit.PREEMPTED, agents=0, leaving=4, stopped=True))
    assert (following.workers, following.exit) == (0, Exit.PREEMPTED)


def test_an_error_of_the_program_takes_no_worker_with_it() -> None:
    crashed = Ended(Exit.CRASHED, agents=3)
    sizing = Sizing(Bounds(1, 4), max_restarts=1)
    assert sizing.after(crashed).workers == 3
    last = sizing.after(crashed)
    assert (last.workers, last.exit) == (0, Exit.CRASHED)


ENDS = st.builds(
    Ended,
    exit=st.sampled_from(Exit),
    agents=st.integers(0, 5),
    lost=st.integers(0, 2),
    leaving=st.integers(0, 2),
    wanted=st.none() | st.integers(2, 4),
    stopped=st.booleans(),
    checkpoint=st.sampled_from(["", "step-00000007"]),
)


@given(st.lists(ENDS, max_size=8), st.integers(0, 3))
def test_the_number_never_leaves_its_bounds(ends: list[Ended], max_restarts: int) -> None:
    sizing = Sizing(Bounds(2, 4), max_restarts)
    for ended in ends:
        following = sizing.after(ended)
        assert following.workers in (0, 2, 3, 4, ended.agents)
        assert following.workers or following.exit is not Exit.OK or ended.exit is Exit.OK
