"""System calls at which a writer dies or is refused: it happens where it is said to, and what is left is judged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from falsify.nemesis import tracing
from falsify.nemesis.crash_points import EIO, ENOSPC, KILL, Found, Point, points, table, tried
from falsify.nemesis.disk_acts import ACTS, CONTROL

# By default tests/run/test_atomic.py and test_checkpoint.py show that a reader finds the old state or the new one.
pytestmark = pytest.mark.deep


@pytest.fixture(scope="module", autouse=True)
def strace() -> None:
    reason = tracing.missing()
    if reason is not None:
        pytest.skip(reason)


def chosen(found: Sequence[Point], *wanted: tuple[str, str]) -> list[Point]:
    return [[point for point in found if (point.call, point.fault) == each][-1] for each in wanted]


@pytest.mark.parametrize(
    ("act", "wanted"),
    [
        ("save a step again", [("rename", KILL), ("write", KILL), ("fsync", EIO), ("rename", ENOSPC)]),
        ("prune", [("unlinkat", KILL), ("getdents64", EIO)]),
        ("append to the ledger", [("write", KILL), ("close", EIO)]),
        ("own the folder", [("flock", EIO), ("write", KILL)]),
        ("load", [("openat", EIO), ("read", EIO)]),
    ],
)
def test_a_call_that_fails_leaves_old_or_new(tmp_path: Path, act: str, wanted: list[tuple[str, str]]) -> None:
    """Killed in a call or refused by it, the act leaves what the next process can use, and strace's log proves it."""
    every = points(act, tmp_path)
    assert len(every) > 15
    found = [tried(point, tmp_path) for point in chosen(every, *wanted)]
    assert [each.wrong for each in found] == [()] * len(wanted)
    assert [each.code is None for each in found] == [fault == KILL for _, fault in wanted]


def test_a_writer_without_a_temporary_name_is_caught(tmp_path: Path) -> None:
    """The control: half a checkpoint under its final name is found, and a fault that did not happen is no success."""
    every = points(CONTROL, tmp_path, (KILL,))
    half = tried(chosen(every, ("write", KILL))[0], tmp_path)
    assert half.code is None
    assert any("CORRUPT" in what and "step-00000002" in what for what in half.wrong)
    never = tried(Point("write a file", "rename", 99, KILL), tmp_path)
    assert never.wrong == ("the fault did not happen there",)
    assert "| write a file | rename | 1 | 0 | 0 | 0 | 1 | 1 |" in table([Found(never.point, 0, never.wrong)])
    assert CONTROL not in ACTS
