"""What somebody meets first: a way in for contributors, the citation, an action for their CI."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.repository.sources import ROOT

ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STUB = """#!/bin/sh
printf '%s\\n' "$@" >"$SEEN"
echo 'gradient-law: said of it'
exit $CODE
"""


def test_contributors_are_sent_to_tests_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    commands = [line for line in text.splitlines() if line.startswith("    ")]
    named = re.findall(r"\S+\.py", commands[-1])
    assert len(commands) == 3
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_no_input_of_the_action_becomes_text_of_a_script() -> None:
    """Who fills in an input must not be able to run another command: expressions stand in `env` alone."""
    steps = ACTION["runs"]["steps"]
    assert all("${{" not in step["run"] for step in steps)
    given = {value for step in steps for value in step["env"].values()}
    assert {f"${{{{ inputs.{name} }}}}" for name in ACTION["inputs"]} <= given


@pytest.mark.parametrize(
    ("code", "title"), [(0, "or are excused"), (1, "a claim is falsified"), (64, "wrong arguments")]
)
def test_the_action_passes_arguments_on_and_gives_the_verdict(tmp_path: Path, code: int, title: str) -> None:
    """The script of the action, with a stub for `andon`: words in quotes stay together, the exit code is andon's."""
    command = tmp_path / "bin" / "andon"
    command.parent.mkdir()
    command.write_text(STUB)
    command.chmod(0o755)
    given = {
        "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}",
        "SUBJECT": "seed",
        "ARGUMENTS": "--budget quick --name 'two words'",
        "REPORTS": str(tmp_path / "reports"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        "SEEN": str(tmp_path / "seen"),
        "CODE": str(code),
    }
    script = ["bash", str(ROOT / ".github" / "falsify.sh")]
    ended = subprocess.run(script, env=os.environ | given, check=False, capture_output=True)
    assert ended.returncode == code
    said = (tmp_path / "summary.md").read_text()
    assert title in said
    assert "gradient-law: said of it" in said
    words = (tmp_path / "seen").read_text().splitlines()
    assert words[:7] == ["falsify", "--subject", "seed", "--budget", "quick", "--name", "two words"]
    assert words[7::2] == ["--json", "--junit", "--markdown", "--html"]
