"""The soak finds a rank that leaks by its account of itself, and leaves one alone that does not."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("benchmarks.soak", reason="benchmarks/ is in the checkout only")

from benchmarks.soak_leak import A_STEP, LEAKS
from benchmarks.soak_ranks import ENVIRONMENT, EVERY, Look, looks, said_in
from benchmarks.soak_verdict import ALLOWED, GROWN, Row, judge
from tests.falsify.counted import BLOCKS, MIB

_IN_USE, _BESIDE = "ranks: memory in use once settled, KiB", "ranks: memory beside malloc once settled, KiB"


def _accounts(held: Callable[[int], int], until: int, pid: int = 7) -> list[Look]:
    """The account of one rank that holds `held(age)` bytes, and has mapped nothing anew."""
    return [Look(pid, 0, age, age + 1, held(age), 500 * MIB) for age in range(0, until, EVERY)]


def _row(what: str, accounts: list[Look]) -> Row:
    return next(row for row in judge([], accounts) if row.what == what)


def _settling(age: int) -> int:
    """300 MiB, of which 8 come in while buffers fill; then a few KiB more or less from look to look."""
    return 300 * MIB + 8 * MIB * min(age, GROWN) // GROWN + 4096 * (age // EVERY % 3)


def test_buffers_that_fill_and_looks_that_waver_are_no_leak() -> None:
    """Nothing before a rank is settled counts, and what comes and goes is not growth."""
    row = _row(_IN_USE, _accounts(_settling, 1300))
    assert row.flat
    assert row.slope <= 4096 / 1024  # it wavers by twice that, over ten times a hundred steps


@pytest.mark.parametrize(("bytes_a_step", "flat"), [(ALLOWED * 3 // 4, True), (A_STEP, False), (8 * A_STEP, False)])
def test_a_leak_is_judged_by_what_a_million_steps_make_of_it(bytes_a_step: int, flat: bool) -> None:
    """Above half a GiB it fails, what is planted by `--leak rank` included; a quarter below it does not."""
    assert (bytes_a_step * 1_000_000 > 2**29) is not flat
    assert _row(_IN_USE, _accounts(lambda age: _settling(age) + bytes_a_step * age, 460)).flat is flat


def test_a_leak_of_one_rank_and_one_of_each_epoch_are_found() -> None:
    """The rank that grows most is judged, not the median; and so is the whole of its growth, not the usual step."""
    clean = [look for pid in range(1, 9) for look in _accounts(_settling, 1300, pid)]
    assert _row(_IN_USE, clean).flat
    assert not _row(_IN_USE, clean + _accounts(lambda age: _settling(age) + A_STEP * age, 1300, 9)).flat
    assert not _row(_IN_USE, _accounts(lambda age: _settling(age) + 545 * A_STEP * (age // 545), 1300)).flat


def test_memory_that_malloc_does_not_see_is_found() -> None:
    """What a rank maps by itself counts as well."""
    grown = [Look(7, 0, age, age, 300 * MIB, 500 * MIB + A_STEP * age) for age in range(0, 600, EVERY)]
    assert _row(_IN_USE, grown).flat
    assert not _row(_BESIDE, grown).flat


def test_ranks_of_whom_too_little_was_seen_are_not_called_flat() -> None:
    """None that trained on for long enough after it had settled: nobody knows."""
    for until in (0, GROWN, GROWN + 200):
        row = _row(_IN_USE, _accounts(_settling, until))
        assert (row.series, row.flat) == (0, False)
    assert _row(_IN_USE, _accounts(_settling, GROWN + 200 + EVERY)).flat


def test_every_leak_that_can_be_planted_has_its_row() -> None:
    """What a control looks for is there."""
    assert set(LEAKS.values()) <= {row.what for row in judge([], [])}


def test_a_line_in_which_a_rank_was_killed_is_left_out(tmp_path: Path) -> None:
    """Of a torn line nothing counts, neither at the end nor where others wrote on."""
    whole = json.dumps(Look(7, 0, 10, 11, 5, 6).__dict__)
    said_in(tmp_path).write_text(f'{whole}\n{{"pid": 7, "ra\n{whole}\n{whole[:20]}')
    assert [look.age for look in looks(tmp_path)] == [10, 10]
    assert list(looks(tmp_path / "nowhere")) == []


def test_what_is_counted_is_what_was_given_out_or_mapped() -> None:
    """To the size of what malloc puts around it: small blocks and large ones are in use until they are given back, and
    what is mapped without malloc is beside it."""
    said = subprocess.run([sys.executable, "-m", "tests.falsify.counted"], capture_output=True, check=True).stdout
    *blocks, (held, apart, _) = json.loads(said)
    for (size, count), (given, mapped, kept) in zip(BLOCKS, blocks, strict=True):
        assert math.isclose(given, size * count, rel_tol=0.05)
        assert max(abs(mapped), abs(kept)) < 0.05 * size * count
    assert math.isclose(apart, 16 * MIB, rel_tol=0.05)
    assert abs(held) < MIB


def test_a_rank_that_trains_holds_no_more_and_one_with_a_leak_planted_does(tmp_path: Path) -> None:
    """Over 200 steps after it has settled, by its own account; the leak is the one that `--leak rank` plants.

    A rank settles again once the leak is planted: what wraps its steps has caches of its own, 0.1 to 0.5 KiB a step.
    What it grew by while it was clean is no part of what it leaks later, and is not taken off.
    """
    clean, leaking = GROWN + 200 + EVERY, 200 + 200 + EVERY
    line = [sys.executable, "-m", "tests.falsify.soaked", str(tmp_path), str(clean), str(leaking)]
    subprocess.run(line, env={**os.environ, **ENVIRONMENT}, check=True)
    said = list(looks(tmp_path))
    assert [look.age for look in said] == list(range(0, clean + leaking, EVERY))
    before = _row(_IN_USE, [look for look in said if look.age < clean])
    after = _row(_IN_USE, [look for look in said if look.age >= clean + 200])
    assert (before.flat, after.flat) == (True, False)
    assert before.slope < before.bound / 4
    assert 1.0 <= after.slope / (A_STEP * 100 / 1024) < 1.3  # malloc puts something around each
