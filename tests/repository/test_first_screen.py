"""What somebody meets first: a README of two screens, a way in for contributors, an action for their CI."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.repository.sources import ROOT

ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))


def test_the_readme_is_two_screens() -> None:
    """At most 120 lines: figures and details have pages of their own."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_contributors_are_sent_to_what_exists() -> None:
    """Three commands, of which the last runs tests that are there; every page that is linked is there."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    commands = [line for line in text.splitlines() if line.startswith("    ")]
    assert len(commands) == 3
    named = re.findall(r"\S+\.py", commands[-1])
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []
    assert [link for link in re.findall(r"\]\(([^)#]+)\)", text) if not (ROOT / link).exists()] == []


def test_the_citation_has_the_version() -> None:
    """CITATION.cff names the version and the licence of the project."""
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{found["version"]}"' in project
    assert f'license = "{found["license"]}"' in project


def test_no_input_of_the_action_becomes_text_of_a_script() -> None:
    """Whoever fills in an input must not be able to run another command: expressions stand in `env` alone."""
    steps = ACTION["runs"]["steps"]
    assert all("${{" not in step["run"] for step in steps)
    given = {value for step in steps for value in step["env"].values()}
    assert {f"${{{{ inputs.{name} }}}}" for name in ACTION["inputs"]} <= given


@pytest.mark.parametrize(("subject", "claim", "code"), [("plain", "schedule", 0), ("seed", "gradient-law", 1)])
def test_the_action_gives_the_verdict_and_its_reports(tmp_path: Path, subject: str, claim: str, code: int) -> None:
    """As a job runs it: exit code, summary in Markdown, JSON and JUnit, for a trainer that holds and one that falls."""
    command = tmp_path / "bin" / "andon"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m andon "$@"\n')
    command.chmod(0o755)
    summary, reports = tmp_path / "summary.md", tmp_path / "reports"
    given = {
        "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}",
        "SUBJECT": subject,
        "SCRIPT": "",
        "ARGUMENTS": f"--budget quick --claim {claim} --world 2 --accumulation 1",
        "REPORTS": str(reports),
        "GITHUB_STEP_SUMMARY": str(summary),
    }
    script = ["bash", str(ROOT / ".github" / "falsify.sh")]
    ended = subprocess.run(script, env=os.environ | given, check=False, cwd=tmp_path)
    assert ended.returncode == code
    assert claim in summary.read_text()
    assert {path.name for path in reports.iterdir()} == {f"falsify.{kind}" for kind in ("json", "xml", "html", "txt")}
    assert json.loads((reports / "falsify.json").read_text())
