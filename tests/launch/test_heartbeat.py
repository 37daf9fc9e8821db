"""Slow, hung and dead are told apart by ranks themselves: what they say, in which order, and how they end."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from andon.console.exits import Exit
from tests.launch.beating import AT, own_store, world

SHORT_S = 1.0
"""How long gloo waits where that is to end in vain."""


def test_a_rank_that_hangs_is_named_and_ends_itself(tmp_path: Path) -> None:
    with world(tmp_path, 2) as ranks:
        waited, hung = ranks.start([0, 1], {"rank 1": "hangs", "timeout_s": SHORT_S}).ended(0, 1)
        said = ranks.said(0).splitlines()
    assert (waited.exit, hung.exit) == (Exit.RANK_SILENT, Exit.RANK_SILENT)
    assert f"rank 1 of 2 hangs in the update of step {AT} " in waited.cause
    assert "hang_here" in waited.cause
    assert "Timed out waiting" in waited.cause
    assert hung.cause.startswith(f"rank 1 of 2 hangs in the update of step {AT} ")
    assert "rank 0 of 2 ended: " in hung.cause
    assert "in hang_here" in hung.message
    words = [f"rank 1 of 2 is slow: in the update of step {AT} ", "rank 0: rank 1 of 2 hangs "]
    told = [word for line in said for word in words if word in line]
    assert list(dict.fromkeys(told)) == words, said


def test_a_slow_rank_is_named_once_and_the_run_goes_on(tmp_path: Path) -> None:
    with world(tmp_path, 3) as ranks:
        options = {"rank 1": "dawdles", "bound_s": SHORT_S}
        ends = ranks.start([0, 1, 2], options).ended(0, 1, 2)
        said = [ranks.said(rank) for rank in range(3)]
    assert [end.exit for end in ends] == [Exit.OK] * 3
    assert re.search(
        rf"andon: rank 1 of 3 is slow: in the update of step {AT} for [\d.]+ s, .*; 2 wait for it", said[0]
    )
    assert said[1] + said[2] == ""


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("SIGKILL", Exit.RANK_LOST, "rank 1 of 2 is gone without a word, last seen in "),
        ("fails", Exit.RANK_LOST, "rank 1 of 2 ended: LookupError: its own error"),
        ("SIGSTOP", Exit.RANK_SILENT, "rank 1 of 2 is stopped (by a signal, a debugger), last seen in "),
    ],
)
def test_what_became_of_the_other_rank_is_in_the_line(tmp_path: Path, what: str, code: Exit, words: str) -> None:
    with world(tmp_path, 2) as ranks:
        (waited,) = ranks.start([0, 1], {"rank 1": what, "timeout_s": 2 * SHORT_S}).ended(0)
        said = ranks.said(0)
    assert waited.exit == code
    assert waited.cause.startswith(words)
    assert f"rank 0: {words}" in said


def test_a_rank_does_not_go_on_where_nobody_looks_after_its_agent(tmp_path: Path) -> None:
    words = "the watch over this rank failed: LookupError: nobody foresaw this"
    with world(tmp_path, 2) as ranks:
        waited, unguarded = ranks.start([0, 1], {"rank 1": "is unguarded", "timeout_s": 20.0}).ended(0, 1)
        said = ranks.said(1)
    assert (unguarded.exit, unguarded.cause) == (Exit.CRASHED, words)
    assert waited.exit == Exit.RANK_LOST
    assert waited.cause.startswith(f"rank 1 of 2 ended: {words}")
    assert f"rank 1: {words}" in said


def test_a_step_that_takes_too_long_ends_the_run_if_asked(tmp_path: Path) -> None:
    with world(tmp_path, 2) as ranks:
        ends = ranks.start([0, 1], {"rank 1": "hangs", "step_s": SHORT_S}).ended(0, 1)
    late = f"the update of step {AT} took longer than run.step_deadline_s, {SHORT_S:g} s: rank 1 of 2 is slow: "
    assert {Exit.RANK_SILENT} <= {end.exit for end in ends} <= {Exit.RANK_SILENT, Exit.RANK_LOST}
    assert all(end.cause.startswith(late) for end in ends if end.exit == Exit.RANK_SILENT)


@pytest.mark.parametrize(("there", "missing"), [(0, 1), (1, 0)])
def test_a_rank_that_does_not_come_is_named(tmp_path: Path, there: int, missing: int) -> None:
    with world(tmp_path, 2) as ranks:
        (waited,) = ranks.start([there], {"timeout_s": SHORT_S}).ended(there)
    assert waited.exit == Exit.RANK_SILENT
    assert waited.cause.startswith(f"Absent: rank {missing} of 2 did not come within {SHORT_S:g} s")


def test_an_interface_that_is_not_there_is_named_on_every_rank(tmp_path: Path) -> None:
    wrong = {"variables of 1": {"GLOO_SOCKET_IFNAME": "nowhere0"}}
    with world(tmp_path, 2) as ranks:
        told, mistaken = ranks.start([0, 1], wrong).ended(0, 1)
    assert (told.exit, mistaken.exit) == (Exit.RANK_LOST, Exit.USAGE)
    assert mistaken.cause.startswith(
        f"GLOO_SOCKET_IFNAME: nowhere0: no such interface on {os.uname().nodename}, only lo"
    )
    assert "rank 1 of 2 cannot join: GLOO_SOCKET_IFNAME: nowhere0" in told.cause


def test_a_store_that_an_earlier_world_used_can_be_met_in_again(tmp_path: Path) -> None:
    """torchrun keeps one store for all attempts: nobody takes the dead of an earlier one for those that are to come."""
    store = own_store()
    attempts: list[tuple[list[int], dict[str, object], Exit]] = [
        ([0, 1], {"rank 1": "SIGKILL"}, Exit.RANK_LOST),
        ([0], {"timeout_s": SHORT_S}, Exit.RANK_SILENT),
        ([0, 1], {}, Exit.OK),
    ]
    for number, (there, options, code) in enumerate(attempts):
        folder = tmp_path / str(number)
        folder.mkdir()
        with world(folder, 2, store) as ranks:
            (end,) = ranks.start(there, options).ended(0)
        assert end.exit == code, end.cause
        assert ("rank 1 of 2 did not come" in end.cause) == (there == [0])
