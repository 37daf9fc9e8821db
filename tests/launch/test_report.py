"""Reports of ranks, and which of several failures is named as the first."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import DistStoreError

from andon.console.messages import Exit, InputError, Problem
from andon.launch.report import Report, clear, describe, exit_of, first_cause, path_of, write_for_torch
from andon_contracts.violation import Violation

NOTICED = [Exit.RANK_LOST, Exit.RANK_SILENT, Exit.PREEMPTED]
ROOTS = [Exit.CRASHED, Exit.USAGE, Exit.VIOLATION]


@settings(deadline=None)
@given(
    text=st.text(max_size=40),
    rank=st.integers(0, 4096),
    exit_code=st.sampled_from(list(Exit)),
    step=st.integers(0, 10**9),
    when=st.floats(0, 4e9),
)
def test_a_report_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, text: str, rank: int, exit_code: Exit, step: int, when: float
) -> None:
    folder = tmp_path_factory.mktemp("run")
    report = Report(rank, int(exit_code), text, when, clause=text, step=step, message=text * 2)
    report.write(folder)
    assert Report.read(folder, rank) == report
    assert [path.name for path in path_of(folder, rank).parent.iterdir()] == [f"rank-{rank}.json"]


def test_a_lone_surrogate_does_not_cost_the_report(tmp_path: Path) -> None:
    Report(0, 2, "bad byte \udcff", 1.0).write(tmp_path)
    found = Report.read(tmp_path, 0)
    assert found is not None
    assert found.cause.startswith("bad byte ")


def test_reports_of_an_earlier_launch_are_removed(tmp_path: Path) -> None:
    Report(3, 70, "old", 1.0).write(tmp_path)
    other = path_of(tmp_path, 3).with_name("notes.txt")
    other.write_text("mine")
    clear(tmp_path)
    assert Report.read(tmp_path, 3) is None
    assert other.read_text() == "mine"


def test_a_place_where_no_report_can_be_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "reports").write_text("a file")
    assert Report.read(tmp_path, 0) is None


def test_a_file_that_is_no_report_is_named(tmp_path: Path) -> None:
    path_of(tmp_path, 0).parent.mkdir()
    path_of(tmp_path, 0).write_text('{"rank": 0}')
    with pytest.raises(ValueError, match=r"rank-0\.json"):
        Report.read(tmp_path, 0)


@settings(deadline=None)
@given(st.data())
def test_a_rank_that_only_noticed_never_hides_the_one_that_failed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("run")
    world = data.draw(st.integers(2, 6))
    root = data.draw(st.integers(0, world - 1))
    exits, died, ended = {}, {}, set()
    for rank in data.draw(st.permutations(range(world))):
        died[rank] = data.draw(st.floats(0, 100))
        kind = "root" if rank == root else data.draw(st.sampled_from(["noticed", "ended", "terminated"]))
        if kind == "ended":
            exits[rank] = -signal.SIGKILL
            ended.add(rank)
        elif kind == "terminated":
            exits[rank] = -signal.SIGTERM
        else:
            exits[rank] = int(data.draw(st.sampled_from(ROOTS if kind == "root" else NOTICED)))
            Report(rank, exits[rank], kind, data.draw(st.floats(0, 100))).write(folder)
    first = first_cause(folder, exits, died=died, ended=ended)
    assert first is not None
    assert (first.rank, first.exit) == (root, exits[root])
    assert first.text == f"rank {root} of {world}: root"


@settings(deadline=None)
@given(times=st.lists(st.floats(0, 1e9), min_size=2, max_size=5, unique=True))
def test_among_errors_of_their_own_the_earliest_is_named(
    tmp_path_factory: pytest.TempPathFactory, times: list[float]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    for rank, when in enumerate(times):
        Report(rank, 1, f"error at {when}", when).write(folder)
    first = first_cause(folder, dict.fromkeys(range(len(times)), 1))
    assert first is not None
    assert first.rank == times.index(min(times))


LOST, SILENT = int(Exit.RANK_LOST), int(Exit.RANK_SILENT)
CLOSED, TIMED_OUT = "Connection closed by peer", "Timed out waiting 5000ms"
KILLED = -int(signal.SIGKILL)


@pytest.mark.parametrize(
    ("reports", "exits", "ended", "exit_", "text"),
    [
        ([(0, LOST, CLOSED)], {0: LOST, 2: KILLED, 1: 0, 3: 0}, [], LOST, "rank 2 of 4 was killed by SIGKILL ("),
        (
            [(0, SILENT, TIMED_OUT)],
            {0: SILENT, 1: KILLED},
            [1],
            SILENT,
            "rank 1 of 2 gave no answer; rank 0 of 2: Timed",
        ),
        # Rank 2 is stopped; rank 0 times out on it, and rank 1, which writes first, only saw that rank 0 had gone.
        (
            [(1, LOST, CLOSED), (0, SILENT, TIMED_OUT)],
            {0: SILENT, 1: LOST, 2: KILLED},
            [2],
            SILENT,
            "rank 2 of 3 gave no answer; ",
        ),
        # Rank 0 died of a signal from outside; rank 2 did not end in time and was killed: rank 0 is to blame.
        ([(1, LOST, CLOSED)], {0: KILLED, 1: LOST, 2: KILLED}, [2], LOST, "rank 0 of 3 was killed by SIGKILL ("),
        ([(1, 70, "weights agree broken")], {0: LOST, 1: -6}, [], Exit.VIOLATION, "rank 1 of 2: weights agree"),
    ],
    ids=["killed", "silent", "silent, and lost by a third", "killed, and a third ended late", "aborts on its way out"],
)
def test_the_rank_that_ended_for_its_own_reason_is_named(
    tmp_path: Path, reports: list[tuple[int, int, str]], exits: dict[int, int], ended: list[int], exit_: int, text: str
) -> None:
    for number, (reporter, code, cause) in enumerate(reports):
        Report(reporter, code, cause, 5.0 + number).write(tmp_path)
    died = {rank: 6.0 + number for number, rank in enumerate(exits)}
    first = first_cause(tmp_path, exits, died=died, ended=ended)
    assert first is not None
    assert first.exit == exit_
    assert first.text.startswith(text)
    assert first.rank == int(text.split()[1])
    if exit_ is Exit.VIOLATION:  # the code that it chose outlives its abort
        assert first.report == Report.read(tmp_path, first.rank)


def test_a_rank_whose_report_no_disk_took_is_said_to_have_named_the_fault(tmp_path: Path) -> None:
    """Exit code 2 is chosen by a rank that has said what is wrong; a folder that is read-only takes no report of it."""
    first = first_cause(tmp_path, {0: 2, 1: 71})
    assert first is not None
    assert first.text == (
        f"rank 0 of 2 ended with exit code 2; it could not write why to {tmp_path / 'reports'}, and says it above: "
        "make that folder writable, then resume"
    )
    assert first.exit == Exit.USAGE


@pytest.mark.parametrize(
    ("code", "expected"),
    [(int(code), code) for code in Exit]
    + [(-9, Exit.RANK_LOST), (-11, Exit.RANK_LOST), (255, Exit.RANK_LOST), (3, Exit.CRASHED)],
)
def test_every_exit_code_means_one_exit(code: int, expected: Exit) -> None:
    assert exit_of(code) == expected


def test_torch_reads_our_error_file_and_picks_the_root(tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    write_for_torch(Report(0, 71, "lost a peer", 1000.1, message="traceback 0"), tmp_path / "0")
    write_for_torch(Report(1, 70, "weights agree broken", 1000.9, message="traceback 1"), tmp_path / "1")
    failures = {rank: ProcessFailure(rank, 1, 1, str(tmp_path / str(rank))) for rank in (0, 1)}
    rank, failure = ChildFailedError("andon", failures).get_first_failure()
    assert rank == 1
    assert "weights agree broken" in str(failure.message)
    assert json.loads((tmp_path / "1").read_text())["message"]["errorCode"] == 70


@pytest.mark.parametrize("code", [0, KILLED])
def test_a_report_of_another_launch_is_not_believed(tmp_path: Path, code: int) -> None:
    for rank in (0, 1):
        Report(rank, int(Exit.OK), "finished", 1.0, launch="a" * 32).write(tmp_path)
    assert first_cause(tmp_path, {0: 0, 1: 0}, launch="a" * 32) is None
    Report(0, int(Exit.VIOLATION), "of another launch", 1.0, launch="b" * 32).write(tmp_path)
    assert Report.read(tmp_path, 0, "a" * 32) is None
    assert Report.read(tmp_path, 0, "b" * 32) == Report.read(tmp_path, 0)
    first = first_cause(tmp_path, {0: code, 1: 0}, launch="a" * 32)
    assert first is not None
    assert (first.exit, first.report) == (Exit.RANK_LOST, None)


# What an error means as the end of a rank.


GLOO = "[/x/gloo/transport/tcp/"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InputError([Problem("a.csv:1", "is empty")]), Exit.USAGE),
        (Violation("weights agree broken"), Exit.VIOLATION),
        (RuntimeError(GLOO + "pair.cc:553] Connection closed by peer [127.0.0.1]:1"), Exit.RANK_LOST),
        (RuntimeError(GLOO + "pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer"), Exit.RANK_LOST),
        (RuntimeError(GLOO + "unbound_buffer.cc:78] Timed out waiting 5000ms for recv"), Exit.RANK_SILENT),
        (DistStoreError("Timed out after 6 seconds waiting for clients. 1/2 clients joined."), Exit.RANK_SILENT),
        (ValueError("no good"), Exit.CRASHED),
        (MemoryError(), Exit.CRASHED),
        (KeyboardInterrupt(), Exit.CRASHED),
        (SystemExit(None), Exit.RANK_LOST),
        (SystemExit(0), Exit.RANK_LOST),
        (SystemExit(75), Exit.PREEMPTED),
        (SystemExit("a message"), Exit.CRASHED),
        (SystemExit(256), Exit.CRASHED),
    ],
)
def test_every_error_means_one_exit(error: BaseException, expected: Exit) -> None:
    report = describe(error, rank=3)
    assert (report.rank, report.exit) == (3, expected)
    assert report.cause
    assert "\n" not in report.cause
    assert type(report.exit) is int or isinstance(report.exit, Exit)


def test_all_of_a_users_mistakes_are_kept_and_no_traceback() -> None:
    report = describe(InputError([Problem("a.csv:1", "is empty"), Problem("b.csv:2", "is not UTF-8")]), rank=0)
    assert report.cause == "a.csv:1: is empty"
    assert report.message == "a.csv:1: is empty\nb.csv:2: is not UTF-8"


def test_a_line_that_announces_another_is_not_the_cause_alone() -> None:
    """torch's compiler says in the second line what went wrong."""
    report = describe(RuntimeError("backend='inductor' raised:\nKeyError: 'x'\n\nSet TORCHDYNAMO_VERBOSE=1"), rank=1)
    assert report.cause == "RuntimeError: backend='inductor' raised: KeyError: 'x'"
