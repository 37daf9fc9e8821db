"""What an error means as the end of a rank."""

from __future__ import annotations

import pytest
from torch.distributed import DistNetworkError, DistStoreError

from andon.console.exits import Exit
from andon.console.problems import InputError, Problem
from andon.launch.ending import describe
from andon_contracts.violation import Violation

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
        (DistNetworkError("The client socket has failed to connect"), Exit.RANK_LOST),
        (RuntimeError(GLOO + "pair.cc:1] something of its own"), Exit.CRASHED),
        (RuntimeError("Connection closed by peer, says a data base"), Exit.CRASHED),
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
