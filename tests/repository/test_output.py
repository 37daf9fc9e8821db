"""What a passing run of the tests prints: nothing of what ranks say, which belongs to the test that fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.repository.sources import ROOT

RANKS_THAT_SPEAK = """
import sys
from tests.support.ranks import run_ranks


def speak(word):
    print(word, flush=True)
    print(word, file=sys.stderr, flush=True)


def test_right():
    assert len(run_ranks(1, speak, "of the passing test")) == 1


def test_wrong():
    assert len(run_ranks(1, speak, "of the failing test")) == 2
"""


def test_what_ranks_say_is_shown_with_the_test_that_fails_and_with_no_other(tmp_path: Path) -> None:
    """Standard output and error of processes that were forked before any test began, under xdist as tox has it."""
    file = tmp_path / "test_speaking.py"
    file.write_text(RANKS_THAT_SPEAK)
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", "-p", "tests.conftest", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200, check=False)
    assert "1 failed, 1 passed" in ended.stdout, ended.stdout + ended.stderr
    said = ended.stdout + ended.stderr
    assert said.count("\nof the failing test\n") == 2
    assert "\nof the passing test\n" not in said


SKIPPED = """
import pytest


@pytest.mark.skip(reason="no such thing")
@pytest.mark.parametrize("number", range(3))
def test_with(number):
    pass


def test_within():
    pytest.skip("no such thing")


def test_another():
    pytest.skip("for another reason")
"""


def test_reasons_of_skips_are_counted(tmp_path: Path) -> None:
    """A line for each reason, wherever it was given; no line for each place."""
    file = tmp_path / "test_skipped.py"
    file.write_text(SKIPPED)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "conftest", "-c", "pyproject.toml"]
    ended = subprocess.run([*command, str(file)], capture_output=True, text=True, cwd=ROOT, timeout=200, check=False)
    lines = ended.stdout.splitlines()
    assert [line for line in lines if line.startswith(("skipped", "SKIPPED"))] == [
        "skipped 4: no such thing",
        "skipped 1: for another reason",
    ], ended.stdout + ended.stderr
