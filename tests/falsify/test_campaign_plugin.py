"""The suite as tests of pytest, against a subject that is named: no `-p`, one test a claim and place, xdist, JUnit."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from xml.etree import ElementTree

import pytest

import andon_falsify.campaign.loop_bench
import andon_falsify.campaign.trainer_bench

# Loaded before `pytester` notes which modules to forget after a run: torch cannot be loaded twice.
import andon_falsify.compliance.plugin  # noqa: F401

pytest_plugins = ("pytester",)

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = any(point.value == "andon_falsify.compliance.entry" for point in entry_points(group="pytest11"))
OTHERS = """
import sys

def pytest_addoption(parser):
    for name in ("--seed", "--backend", "--world", "--subject", "--budget", "--script", "--accumulation"):
        parser.addoption(name)
"""
NO_TORCH = """
import sys

def test_nothing_heavy_was_loaded(request):
    assert request.config.getoption("--seed") == "5"
    assert not {"torch", "andon_falsify.compliance.plugin"} & set(sys.modules)
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """pytest in a process of its own, in a folder of somebody else's."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        check=False,
    )


@pytest.mark.skipif(not INSTALLED, reason="Andon is not installed, so that pytest knows nothing of its entry point")
def test_a_subject_is_judged_claim_by_claim(tmp_path: Path) -> None:
    """Through xdist: unknown fails and says why, what holds passes, what does not apply is skipped and says why."""
    results = tmp_path / "r.xml"
    subject = "tests.falsify.misbehaving.dying:make_killed_on_three"
    words = ("--pyargs", "andon_falsify", "--subject", subject, "--world", "2,3", "--accumulation", "1")
    done = run(tmp_path, *words, "--seed", "3", "-n", "1", "--junitxml", str(results))
    assert done.returncode == 1, done.stdout + done.stderr
    cases = {case.attrib["name"]: case for case in ElementTree.parse(results).iter("testcase")}
    on_two, on_three = (
        {name.partition(": ")[2].removesuffix("]"): case for name, case in cases.items() if f"world {world} " in name}
        for world in (2, 3)
    )
    assert len(on_two) == len(on_three) == 14
    assert all("killed by SIGKILL" in (case.findtext("failure") or "") for case in on_three.values())
    assert [name for name, case in on_two.items() if case.find("failure") is not None] == []
    skipped = {name: case.find("skipped") for name, case in on_two.items()}
    reasons = {name: each.attrib["message"] for name, each in skipped.items() if each is not None}
    assert list(reasons) == ["evaluation-law"]
    assert "does not evaluate" in reasons["evaluation-law"]
    assert "claims, " in done.stdout
    assert " 14 unknown" in done.stdout


@pytest.mark.skipif(not INSTALLED, reason="Andon is not installed, so that pytest knows nothing of its entry point")
@pytest.mark.parametrize(
    ("claim", "code", "said"),
    [("samples-once", 0, "falsified, as expected"), ("replicas-agree", 1, "holds, but expected to fall")],
)
def test_only_a_named_claim_is_judged_and_may_fall(claim: str, code: int, said: str) -> None:
    """One test; the example repeats rows, which the reason excuses, and where there is nothing to excuse it fails."""
    words = ("--subject", "mytrainer:make", "--backend", "gloo", "--world", "2", "--accumulation", "1")
    expected = ("--claim", claim, "--expected-failed", f"{claim}: padded", "--name", "mine")
    done = run(ROOT / "examples", "--pyargs", "andon_falsify", *words, *expected)
    assert done.returncode == code, done.stdout + done.stderr
    assert f"{claim}: {said}: padded" in done.stdout
    assert "checked 1 of 14 claims, " in done.stdout
    assert ("1 xfailed" if code == 0 else "1 passed") in done.stdout


@pytest.mark.skipif(not INSTALLED, reason="Andon is not installed, so that pytest knows nothing of its entry point")
def test_other_suites_notice_nothing(tmp_path: Path) -> None:
    """A suite with options of the same names runs where Andon is installed, and no torch is loaded for it."""
    (tmp_path / "conftest.py").write_text(OTHERS)
    (tmp_path / "test_other.py").write_text(NO_TORCH)
    done = run(tmp_path, "--seed", "5", "--backend", "mine", "-p", "no:randomly", "test_other.py")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--world", "2"], "--world: of which trainer? add --subject or --script (--subject andon for our own)"),
        (["--subject", "andon", "--world", "two"], "--world: must be numbers from 1 to 64"),
        (["--subject", "plane", "--budget", "big"], "--budget: must be one of"),
        (["--claim", "samples-once"], "--claim: of which trainer? add"),
        (["--subject", "plain", "--claim", "samples"], "there is no claim 'samples'; did you mean samples-once?"),
        (["--subject", "plain", "--backend", "nccl"], "there is no backend 'nccl'"),
    ],
)
def test_options_that_mean_nothing_are_refused(pytester: pytest.Pytester, words: list[str], said: str) -> None:
    """As bad usage, in words, before anything is collected."""
    result = pytester.runpytest_inprocess("-p", "andon_falsify.compliance.plugin", *words)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert any(said in line for line in result.errlines)
