"""How many workers go on after each end of a generation: decided without a process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.console.exits import Exit
from andon.console.problems import InputError
from andon.launch import resizing
from andon.launch.elastic import Generation
from andon.launch.rank import Job
from andon.launch.sizes import Bounds, Ended, Next, Sizing, parse_workers, sized
from andon.launch.worker_agents import Crew, Member
from andon.run.atomic import write_whole

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
    assert workers_after(*ends, max_restarts=max_restarts) == workers


def test_a_lost_agent_shrinks_the_world_and_not_below_the_minimum() -> None:
    sizing = Sizing(Bounds(2, 4))
    assert sizing.after(Ended(Exit.RANK_LOST, agents=2, lost=1)).workers == 2
    last = sizing.after(Ended(Exit.RANK_SILENT, agents=1, lost=1))
    assert (last.workers, last.exit) == (0, Exit.RANK_LOST)
    assert last.why == "1 agent lost; 1 left, fewer than the 2 of --workers 2:4"


@pytest.mark.parametrize("end", [Exit.OK, Exit.USAGE, Exit.VIOLATION, Exit.PREEMPTED])
def test_an_end_that_would_come_again_is_final(end: Exit) -> None:
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


# Another number of workers: who asks last is heeded, and nobody who asked is left without an answer.


BOUNDS = Bounds(2, 5)


@pytest.fixture
def generation(tmp_path: Path) -> Generation:
    job = Job("tests:none", b"{}", str(tmp_path), os.getpid(), {})
    crew = Crew(job, members=cast("list[Member]", [None] * 4))
    resizing.show(tmp_path, BOUNDS, 1, [])
    return Generation(crew, tmp_path, BOUNDS, 1, cast("Any", None))


def test_the_present_number_takes_back_another_that_was_asked_for(generation: Generation, tmp_path: Path) -> None:
    for workers in (3, 4):
        resizing.ask(tmp_path, workers)
        generation.hear_last()
    assert generation.wanted == 4
    following = Sizing(BOUNDS).after(Ended(Exit.PREEMPTED, agents=4, wanted=generation.wanted))
    assert following == Next(4, "4 workers were asked for")


def test_the_present_number_alone_changes_nothing(generation: Generation, tmp_path: Path) -> None:
    resizing.ask(tmp_path, 4)
    generation.hear_last()
    assert generation.wanted is None
    resizing.ask(tmp_path, 5)
    generation.hear_last()
    assert generation.wanted == 5


@pytest.mark.parametrize(("pending", "last", "named"), [(3, None, "3"), (3, 5, "5"), (None, 5, "5")])
def test_what_was_asked_of_a_run_that_ends_is_answered(
    generation: Generation,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    pending: int | None,
    last: int | None,
    named: str,
) -> None:
    if last is not None:
        resizing.ask(tmp_path, last)
    resizing.give_up(tmp_path, pending)
    assert capfd.readouterr().err == (
        f"andon: elastic: {named} workers were asked for, and the run has ended before it could go on with them\n"
    )
    assert list((tmp_path / "reports").iterdir()) == []


def test_a_run_of_which_nothing_was_asked_says_nothing(
    generation: Generation, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    resizing.give_up(tmp_path, None)
    assert capfd.readouterr().err == ""
    with pytest.raises(InputError, match="trains here"):
        resizing.ask(tmp_path, 3)


def test_whoever_asks_while_a_run_ends_is_told(
    generation: Generation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_late(path: Path, data: bytes) -> None:
        resizing.give_up(tmp_path, None)
        write_whole(path, data)

    monkeypatch.setattr("andon.launch.resizing.write_whole", too_late)
    with pytest.raises(InputError, match="the run has just ended"):
        resizing.ask(tmp_path, 3)
    assert list((tmp_path / "reports").iterdir()) == []


def test_a_run_whose_folder_was_replaced_by_a_file_ends_as_its_ranks_say(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.write_text("another's")
    assert resizing.taken(folder) is None
    resizing.hide(folder)
    resizing.give_up(folder, None)
    with pytest.raises(InputError, match=r"run/reports/agents\.json: cannot be written"):
        resizing.show(folder, BOUNDS, 1, [])
    assert folder.read_text() == "another's"


def test_nobody_can_be_asked_for_more_where_nobody_trains(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run that was started with --workers MIN:MAX trains here"):
        resizing.ask(tmp_path, 3)
    resizing.show(tmp_path, BOUNDS, 1, [])
    shown = tmp_path / "reports" / "agents.json"
    seen = json.loads(shown.read_text())
    assert seen["launcher"]["pid"] == os.getpid()
    seen["launcher"]["started"] += 1
    shown.write_text(json.dumps(seen))
    with pytest.raises(InputError, match="trains here"):
        resizing.ask(tmp_path, 3)


@pytest.mark.parametrize("workers", [1, 6])
def test_a_number_outside_of_the_bounds_is_refused(generation: Generation, tmp_path: Path, workers: int) -> None:
    with pytest.raises(InputError, match=f"{workers} is outside of --workers 2:5"):
        resizing.ask(tmp_path, workers)
    assert not (tmp_path / "reports" / "resize").exists()
