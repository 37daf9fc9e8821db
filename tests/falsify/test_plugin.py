"""The suite as tests of pytest: no `-p`, one test a claim and place, xdist, JUnit, a last line that counts."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

# Loaded before `pytester` notes which modules to forget after a run: torch cannot be loaded twice.
import andon_falsify.campaign.warm_bench
import andon_falsify.compliance.plugin
import andon_falsify.ranks.trainer  # noqa: F401
from tests.falsify.written_runs import copying

pytest_plugins = ("pytester",)

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = any(point.value == "andon_falsify.compliance.entry" for point in entry_points(group="pytest11"))
PLUGIN = ("-q", "-p", "no:cacheprovider", "-p", "andon_falsify.compliance.plugin")
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
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        check=False,
    )


installed = pytest.mark.skipif(not INSTALLED, reason="needs Andon installed, since pytest finds it by its entry point")


@installed
# Deep: another process imports torch; what it reports is counted as here.
@pytest.mark.parametrize("xdist", [(), pytest.param(("-n", "1"), marks=pytest.mark.deep)], ids=["alone", "xdist"])
def test_a_subject_is_judged_claim_by_claim(tmp_path: Path, xdist: tuple[str, ...]) -> None:
    results = tmp_path / "r.xml"
    words = ("--script", copying(tmp_path, {"1": 1.0, "2": 1.0}), "--world", "2,3", "--accumulation", "1")
    done = run(tmp_path, "--pyargs", "andon_falsify", *words, *xdist, "--junitxml", str(results))
    assert done.returncode == 1, done.stdout + done.stderr
    ended: dict[str, dict[str, str]] = {"2": {}, "3": {}}
    for case in ElementTree.parse(results).iter("testcase"):
        place, _, claim = case.attrib["name"].removesuffix("]").partition(": ")
        said = [f"{child.tag}: {child.get('message')}" for child in case if child.tag != "properties"]
        ended[place.split()[2]][claim] = said[0] if said else "passed"
    resume = ended["2"].pop("resume-equal")
    assert resume.startswith("skipped: the command does not say how it resumes")
    assert {claim: said[:30] for claim, said in ended["2"].items()} == {
        "replicas-agree": "failure: Failed: replicas-agre",
        "samples-once": "skipped: the script does not r",
        "same-everywhere": "passed",
        "loss-finite": "passed",
        "chain-intact": "passed",
    }
    failed = [claim for claim, said in ended["3"].items() if f"{claim}: unknown (the command ended with 1" in said]
    assert {*failed, "resume-equal"} == ended["3"].keys()
    assert "checked 0 of 6 claims, 3 runs, 1 not applicable, 5 unknown" in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("norm", "more", "code", "said", "counted"),
    [
        (1.0, (), 0, "", "1 passed"),
        (2.0, (), 1, "same-everywhere: falsified", "1 failed"),
        (2.0, ("--expected-failed", "same-everywhere: padded"), 0, "falsified, as expected: padded", "1 xfailed"),
        (1.0, ("--expected-failed", "same-everywhere: padded"), 1, "expected to be falsified: padded", "1 passed"),
    ],
)
def test_a_named_claim_may_fall(
    pytester: pytest.Pytester, norm: float, more: tuple[str, ...], code: int, said: str, counted: str
) -> None:
    script = copying(pytester.path, {"1": 1.0, "2": norm})
    words = ("--script", script, "--world", "2", "--accumulation", "1", "--claim", "same-everywhere", *more)
    done = pytester.runpytest_inprocess(*PLUGIN, "--pyargs", "andon_falsify", *words)
    assert done.ret == code, done.outlines
    assert any(said in line for line in done.outlines)
    assert any(line.startswith("checked 1 of ") for line in done.outlines)
    assert any(counted in line for line in done.outlines)


def test_a_session_in_which_no_claim_applies_fails(pytester: pytest.Pytester) -> None:
    words = ("--script", copying(pytester.path, {}), "--world", "2", "--accumulation", "1", "--claim", "resume-equal")
    assert pytester.runpytest_inprocess(*PLUGIN, "--pyargs", "andon_falsify", *words).ret == 1


@installed
def test_other_suites_notice_nothing(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(OTHERS)
    (tmp_path / "test_other.py").write_text(NO_TORCH)
    done = run(tmp_path, "--seed", "5", "--backend", "mine", "-p", "no:randomly", "test_other.py")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--world", "2"], "--world: also give --subject or --script (--subject andon tests Andon's trainer)"),
        (["--subject", "andon", "--world", "two"], "--world: must be numbers from 1 to 64"),
        (["--subject", "plain", "--claim", "samples"], "there is no claim 'samples'; did you mean samples-once?"),
    ],
)
def test_options_that_mean_nothing_are_refused(pytester: pytest.Pytester, words: list[str], said: str) -> None:
    result = pytester.runpytest_inprocess("-p", "andon_falsify.compliance.plugin", *words)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert any(said in line for line in result.errlines)


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="needs a machine without a GPU")
def test_backends_that_cannot_run_here_end_at_once(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess("-p", "andon_falsify.compliance.plugin", "--backend", "nccl", "-n", "2")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    assert result.outlines == ["nothing was run: nccl needs a GPU, and this machine has none that torch can use"]


TESTS = """
from andon_falsify.claims import loss_finite, memory_budget
from andon_falsify.history import read_lines
from andon_falsify.verdict import not_applicable, unknown


def test_holds(runner):
    line = b'{"v":5,"kind":"step","step":1,"loss":1.0,"grad_norm":1.0}\\n'
    runner.require(loss_finite.check_history(read_lines([line], "it")))


def test_does_not_apply(runner):
    runner.require(not_applicable(memory_budget.CLAIM, "no plan"))


def test_is_open(runner):
    runner.record(unknown(memory_budget.CLAIM, "no end"))
"""


@pytest.mark.parametrize(
    ("options", "unknown"),
    [
        ([], 1),
        (["-k", "not open"], 0),
        # Deep: another process imports torch; what it reports is counted as here.
        pytest.param(["-n", "1"], 1, marks=pytest.mark.deep),
    ],
)
def test_an_unknown_claim_fails_the_session(pytester: pytest.Pytester, options: list[str], unknown: int) -> None:
    """Although every test passed; through pytest-xdist too."""
    pytester.makepyfile(test_claims=TESTS)
    done = pytester.runpytest_inprocess(*PLUGIN, *options)
    counted = f"checked 1 of 16 claims, 0 runs, {1 - unknown} not applicable, {unknown} unknown"
    assert counted in done.outlines, done.outlines
    assert done.ret == unknown
