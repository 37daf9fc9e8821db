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
PER_START = 8
DEADLINE_S = 150.0
LIGHT = [name for name, kind in KINDS.items() if kind.weight == "light"]
HEAVY = [name for name, kind in KINDS.items() if kind.weight == "heavy"]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("first", range(0, len(LIGHT), PER_START), ids=lambda first: LIGHT[first])
def test_right_loops_raise_nothing(first: int) -> None:
    """No clause complains or suspects, and more than ten were evaluated at each update that was made.

    The kinds from the one of the test's name on, as many as one start of ranks takes.
    """
    part = LIGHT[first : first + PER_START]
    for outcome in run_ranks(2, run_kinds, part, STEPS, deadline_s=DEADLINE_S):
        seen: dict[str, Seen] = outcome.get()
        assert {name: one.violations for name, one in seen.items() if one.violations} == {}
        # Loops whose weights part are suspected once, until they have brought them together.
        suspected = {name: {said.partition(" ")[0] for said in one.suspicions} for name, one in seen.items()}
        assert suspected == {name: KINDS[name].suspected for name in part}
        assert [name for name, one in seen.items() if one.evaluations <= 10 * STEPS / 2] == []


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
