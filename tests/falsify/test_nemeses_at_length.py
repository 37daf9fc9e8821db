"""Nemeses at single system calls, and by other users of the machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from falsify.nemesis import tracing
from falsify.nemesis.attacked import WORKERS, bits_of, train, watch
from falsify.nemesis.crash_points import EIO, ENOSPC, KILL, Found, Point, points, table, tried
from falsify.nemesis.disk_acts import ACTS, CONTROL
from falsify.nemesis.left_behind import Undisturbed

# By default tests/run/test_atomic.py and test_checkpoint.py show that a reader finds the old state or the new one;
# tests/contracts/test_signed.py, tests/launch/test_heartbeat_alone.py and tests/launch/test_joining.py that values
# which no rank has signed are dropped and counted.
pytestmark = pytest.mark.deep


@pytest.fixture(scope="module")
def strace() -> None:
    reason = tracing.missing()
    if reason is not None:
        pytest.skip(reason)


def chosen(found: Sequence[Point], *wanted: tuple[str, str]) -> list[Point]:
    return [[point for point in found if (point.call, point.fault) == each][-1] for each in wanted]


@pytest.mark.usefixtures("strace")
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
    every = points(act, tmp_path)
    assert len(every) > 15
    found = [tried(point, tmp_path) for point in chosen(every, *wanted)]
    assert [each.wrong for each in found] == [()] * len(wanted)
    assert [each.code is None for each in found] == [fault == KILL for _, fault in wanted]


@pytest.mark.usefixtures("strace")
def test_a_writer_without_a_temporary_name_is_caught(tmp_path: Path) -> None:
    every = points(CONTROL, tmp_path, (KILL,))
    half = tried(chosen(every, ("write", KILL))[0], tmp_path)
    assert half.code is None
    assert any("CORRUPT" in what and "step-00000002" in what for what in half.wrong)
    never = tried(Point("write a file", "rename", 99, KILL), tmp_path)
    assert never.wrong == ("the fault did not happen there",)
    assert "| write a file | rename | 1 | 0 | 0 | 0 | 1 | 1 |" in table([Found(never.point, 0, never.wrong)])
    assert CONTROL not in ACTS


def test_a_run_ends_with_its_bits_whatever_is_said_where_it_listens(tmp_path: Path) -> None:
    """Four ranks of `andon train`, called from before they meet until they end. Only gloo listens, on the loopback."""
    alone, attacked = train(tmp_path / "alone", None), train(tmp_path / "attacked", 1)
    assert (alone.loss, attacked.loss) == ("", "")
    assert attacked.said.total() > 100
    whole = Undisturbed(tmp_path / "alone" / "run")
    assert Undisturbed(tmp_path / "attacked" / "run").result == whole.result


def test_a_watch_believes_nobody_who_is_no_rank(tmp_path: Path) -> None:
    """The loop has its bits, each rank says how much it dropped, and what is wrong afterwards halts all."""
    alone = watch(tmp_path / "alone", None)
    attacked = watch(tmp_path / "attacked", 1, bits_of(tmp_path / "alone"))
    assert (alone.loss, attacked.loss, attacked.halted) == ("", "", "")
    assert min(attacked.said[kind] for kind in ("left", "pulled", "beat", "unguarded", "deleted", "replayed")) >= 3
    for rank in range(WORKERS):
        assert f"andon: rank {rank} dropped " in (tmp_path / "attacked" / "said").read_text()
        assert "dropped" not in (tmp_path / "alone" / "said").read_text()
