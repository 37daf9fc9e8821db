"""The last line of a session counts claims, and a claim that checked nothing fails it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
from __future__ import annotations

import pytest

from andon_falsify.checkers import loss_finite, schedule
from andon_falsify.notation import history
from andon_falsify.verdict import not_applicable


@pytest.mark.claim("schedule")
def test_forgets_to_hold(court):
    pass


@pytest.mark.claim("loss-finite")
def test_holds(court):
    court.hold(loss_finite.check(history("start | 1: 0[a] loss=1 | end")))


@pytest.mark.claim("memory-budget")
def test_does_not_apply(court):
    from andon_falsify.checkers import memory_within

    court.hold(not_applicable(memory_within.CLAIM, "no plan"))
"""


@pytest.mark.parametrize(
    ("options", "code", "line"),
    [
        ([], 1, "checked 1 of 21 claims, 0 runs, 1 not applicable, 1 unknown"),
        (["-k", "not forgets"], 0, "checked 1 of 21 claims, 0 runs, 1 not applicable, 0 unknown"),
        (["-n", "1"], 1, "checked 1 of 21 claims, 0 runs, 1 not applicable, 1 unknown"),
    ],
)
def test_a_claim_that_checked_nothing_is_unknown_and_fails(
    tmp_path: Path, options: list[str], code: int, line: str
) -> None:
    """Every test passed, yet the session fails; through pytest-xdist too. What was not selected is not unknown."""
    (tmp_path / "test_claims.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "andon_falsify.compliance.plugin"]
    done = subprocess.run(
        [*command, f"--rootdir={tmp_path}", *options, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert line in done.stdout, done.stdout + done.stderr
    assert done.returncode == code
