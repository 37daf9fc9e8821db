"""`run.portable`: every process that trains computes as any CPU with AVX2 does, or says why it cannot.

torch and MKL choose their kernels once in a process, so that two new interpreters answer for all of it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from andon.config.schema import Run
from andon.console.messages import Exit, InputError
from andon.launch import portable
from andon.launch.portable import FORM, SETTINGS, portable_environment
from andon.run.folder import RunFolder
from andon_contracts.fingerprint import environment
from tests.cli.command import PATIENCE_S
from tests.training.runs import Runs, outcome, records

ON = "run.portable=true"
LATE = "comes too late: torch has computed in this process before"
pytestmark = [
    pytest.mark.skipif(
        "avx2" not in str(environment()["instructions"]).split(),
        reason="this CPU has no AVX2: nothing is portable here",
    ),
    pytest.mark.xdist_group("test_portable"),
]


def python(folder: Path, *arguments: str) -> str:
    """What a new interpreter prints, started in `folder` with an environment that says nothing of kernels."""
    plain = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**plain, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


# One program for two interpreters: the first has only loaded torch, the second has computed. The program trains,
# resumes and replays. It prints how each ended and which variables stay in its environment.
PROGRAM = """
import contextlib, io, json, os, sys
import torch

computes, overrides, settings = json.loads(sys.argv[1])
if computes:
    torch.randn(64, 64) @ torch.randn(64, 64)
from andon.cli.app import guarded
from andon.cli.train import run_training
from andon.inspection.replay import replay_run
from andon.training import run as session
from pathlib import Path

def train(backend, workers, folder, entry="andon.training.start:train_rank", resume="never"):
    flags = {"run.dir": folder, "run.backend": backend, "run.workers": workers, "run.resume": resume}
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = guarded(lambda: run_training(None, overrides, flags, entry=entry))
    return code, said.getvalue(), {name: os.environ[name] for name in settings if name in os.environ}

if computes:
    ranks = "tests.training.entries"
    found = {
        "inline": train("inline", 1, "refused"),
        "gloo": train("gloo", 2, "gloo", f"{ranks}:tell_kernels"),
        "interrupted": train("gloo", 2, "resumed", f"{ranks}:ask_to_end"),
        "resumed": train("gloo", 1, "resumed", resume="auto"),
        "replay": replay_run(Path("gloo"), "1:2", 1, "gloo").result.name,
    }
else:
    found = {"first": train("inline", 1, "first"), "second": train("inline", 1, "second")}
    found["replay"] = replay_run(Path("first"), "1:3", 1, "inline").result.name
    session.portable_kernels = contextlib.nullcontext
    found["without its products"] = train("inline", 1, "other")
print(json.dumps(found))
"""


def ended(runs: Runs, folder: Path, *, computes: bool) -> dict[str, Any]:
    asked = json.dumps([computes, runs.overrides(ON), list(SETTINGS)])
    found: dict[str, Any] = json.loads(python(folder, "-c", PROGRAM, asked).splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def fresh(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What an interpreter tells that had loaded torch, and the folder of its runs."""
    folder = tmp_path_factory.mktemp("fresh")
    return ended(runs, folder, computes=False), folder


@pytest.fixture(scope="module")
def used(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What an interpreter tells that had computed, and the folder of its runs."""
    folder = tmp_path_factory.mktemp("used")
    return ended(runs, folder, computes=True), folder


def test_an_interpreter_that_has_only_loaded_torch_computes_so(fresh: tuple[dict[str, Any], Path]) -> None:
    told, folder = fresh
    for name in ("first", "second"):
        assert (told[name][0], told[name][2]) == (Exit.OK, SETTINGS), told
    assert outcome(folder / "first") == outcome(folder / "second")
    assert told["replay"] == "SAME"
    assert told["without its products"][0] == Exit.OK
    assert outcome(folder / "other")["weights_digest"] != outcome(folder / "first")["weights_digest"]


def test_an_interpreter_that_has_computed_refuses(used: tuple[dict[str, Any], Path]) -> None:
    code, said, left = used[0]["inline"]
    assert (code, left) == (Exit.USAGE, {})
    assert f"run.portable: {LATE}" in said
    assert "ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=COMPATIBLE" in said
    assert "run.backend=gloo" in said


def test_every_rank_computes_so(fresh: tuple[dict[str, Any], Path], used: tuple[dict[str, Any], Path]) -> None:
    told, folder = used
    assert (told["gloo"][0], told["gloo"][2]) == (Exit.OK, {}), told
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert ranks == [{"capability": "AVX2", **SETTINGS}] * 2
    assert outcome(folder / "gloo") == outcome(fresh[1] / "first")
    assert told["replay"] == "SAME"


def test_a_resume_keeps_it(fresh: tuple[dict[str, Any], Path], used: tuple[dict[str, Any], Path]) -> None:
    told, folder = used
    assert (told["interrupted"][0], told["resumed"][0]) == (Exit.PREEMPTED, Exit.OK), told
    assert outcome(folder / "resumed") == outcome(fresh[1] / "first")


def test_another_value_is_another_run(runs: Runs, fresh: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(fresh[1] / "first", tmp_path / "run"))
    with pytest.raises(InputError, match=r"run\.portable: was True in the finished run in .*, is False"):
        runs.train(folder, resume="auto")


def test_the_ledger_is_that_of_any_such_cpu_and_the_card_names_the_setting(
    fresh: tuple[dict[str, Any], Path], whole: Path
) -> None:
    (ours,), (plain,) = (records(folder, "start") for folder in (fresh[1] / "first", whole))
    assert {name: ours.fingerprint[f"flag {name}"] for name in SETTINGS} == SETTINGS
    assert (ours.fingerprint["cpu"], ours.fingerprint["instructions"]) == ("any with AVX2", "avx2")
    assert ours.fingerprint["products"] == FORM
    assert "products" not in plain.fingerprint
    assert plain.fingerprint["cpu"] == environment()["cpu"]
    assert ours.identity != plain.identity
    cards = ((RunFolder(folder).adapter / "README.md").read_text() for folder in (fresh[1] / "first", whole))
    assert [card.count("--set run.portable=true") for card in cards] == [1, 0]


def test_an_environment_that_says_otherwise_is_refused(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "AVX2"}
    for name, value in other.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError) as caught:
        runs.train(tmp_path / "run", ON)
    for name, value in other.items():
        assert f"{name}: is {value!r} in the environment, run.portable needs {SETTINGS[name]!r}" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_cpu_without_avx2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would believe the variable, and crash at an instruction that is not there."""
    monkeypatch.setattr(portable, "environment", lambda: {"instructions": "avx fma"})
    with pytest.raises(InputError, match=r"run\.portable: needs a CPU with"), portable_environment(Run(portable=True)):
        pytest.fail("it went on")


def test_a_run_that_is_not_portable_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    with portable_environment(Run()):
        assert os.environ["MKL_CBWR"] == "AVX2"
        assert "ATEN_CPU_CAPABILITY" not in os.environ
