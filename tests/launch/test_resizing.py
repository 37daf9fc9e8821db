"""Another number of workers: who asks last is heeded, and nobody who asked is left without an answer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

import pytest

from andon.console.exits import Exit
from andon.console.problems import InputError
from andon.launch import resizing
from andon.launch.elastic import Generation
from andon.launch.rank import Job
from andon.launch.sizes import Bounds, Ended, Next, Sizing
from andon.launch.worker_agents import Crew, Member
from andon.run.atomic import write_whole

BOUNDS = Bounds(2, 5)


@pytest.fixture
def generation(tmp_path: Path) -> Generation:
    """Four workers, of which nothing but their number is asked here, shown in the run folder."""
    job = Job("tests:none", b"{}", str(tmp_path), os.getpid(), {})
    crew = Crew(job, members=cast("list[Member]", [None] * 4))
    resizing.show(tmp_path, BOUNDS, 1, [])
    return Generation(crew, tmp_path, BOUNDS, 1, cast("Any", None))


def test_the_present_number_takes_back_another_that_was_asked_for(generation: Generation, tmp_path: Path) -> None:
    """Three were asked for, and before that was acted on four, which train now: it goes on with four, not with three.

    Workers that have been told to end already begin again at the same size: the run does not end with them.
    """
    for workers in (3, 4):
        resizing.ask(tmp_path, workers)
        generation.hear_last()
    assert generation.wanted == 4
    following = Sizing(BOUNDS).after(Ended(Exit.PREEMPTED, agents=4, wanted=generation.wanted))
    assert following == Next(4, "4 workers were asked for")


def test_the_present_number_alone_changes_nothing(generation: Generation, tmp_path: Path) -> None:
    """Nobody restarts workers to have as many as there are; another number is taken after it."""
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
    """Taken by the last generation, or asked for after it: one line says that it came too late, and no file stays."""
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
    """The launcher asks for nothing there and removes nothing; only to show new workers is refused, in words."""
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
