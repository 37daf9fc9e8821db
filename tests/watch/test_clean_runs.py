"""A watch says nothing of a loop that is right, and it did look."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.watch.clean import Seen
from tests.watch.clean_kinds import KINDS, installed, run_kinds

STEPS = 20
PER_START = 16
DEADLINE_S = 300.0
LIGHT = [name for name, kind in KINDS.items() if kind.weight == "light"]
HEAVY = [name for name, kind in KINDS.items() if kind.weight == "heavy"]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def seen() -> dict[str, list[Seen]]:
    """By kind, then by rank: what the watch saw."""
    found: dict[str, list[Seen]] = {}
    for first in range(0, len(LIGHT), PER_START):
        part = LIGHT[first : first + PER_START]
        by_rank = [outcome.get() for outcome in run_ranks(2, run_kinds, part, STEPS, deadline_s=DEADLINE_S)]
        found |= {name: [one[name] for one in by_rank] for name in part}
    return found


@pytest.mark.parametrize("name", LIGHT)
def test_a_right_loop_raises_nothing(seen: dict[str, list[Seen]], name: str) -> None:
    """No clause complains or suspects, and more than ten were evaluated at each update that was made."""
    for one in seen[name]:
        assert one.violations == ()
        # Loops whose weights part are suspected once, until they have brought them together.
        assert {said.partition(" ")[0] for said in one.suspicions} == KINDS[name].suspected
        assert one.evaluations > 10 * STEPS / 2


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """By kind, what the benchmark measures; it loads the libraries once for all ranks."""
    path = tmp_path_factory.mktemp("clean") / "table.json"
    wanted = [word for name in HEAVY for word in ("--kind", name)]
    command = [sys.executable, "-m", "benchmarks.clean_runs", "--steps", str(STEPS), "--json", str(path), *wanted]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {row["kind"]: row for row in json.loads(path.read_text())["kinds"]}


@pytest.mark.parametrize("name", HEAVY)
def test_a_right_loop_with_the_help_of_others_raises_nothing(measured: dict[str, dict[str, object]], name: str) -> None:
    """The same of loops that others drive."""
    if not installed(KINDS[name]):
        pytest.skip(f"needs {', '.join(KINDS[name].needs)}")
    row = measured[name]
    assert (row["violations"], row["suspicions"]) == (0, 0)
    assert int(str(row["evaluations"])) > 10 * STEPS / 2
