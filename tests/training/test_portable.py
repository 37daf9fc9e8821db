"""`run.portable`: every process that trains computes as any CPU with AVX2 does, or says why it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from andon.backend.products import FORM
from andon.config.schema import Run
from andon.console.problems import InputError
from andon.launch import portable
from andon.launch.portable import SETTINGS, chosen
from andon.run.folder import RunFolder
from andon_contracts.fingerprint import environment
from tests.launch.pipes import PATIENCE_S
from tests.training.runs import Runs, outcome, records

ON = "run.portable=true"
pytestmark = pytest.mark.skipif(
    "avx2" not in str(environment()["instructions"]).split(), reason="this CPU has no AVX2: nothing is portable here"
)


def python(folder: Path, *arguments: str, more: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A new interpreter in `folder`, in whose environment nothing is said of kernels but `more`."""
    plain = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**plain, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **(more or {})},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def command(runs: Runs, folder: Path, *more: str) -> list[str]:
    """The words of `andon train` on the small run in `folder`."""
    return ["train", "--run-dir", str(folder), *(f"--set={each}" for each in runs.overrides(*more))]


@pytest.fixture(scope="module")
def portable_run(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a portable run of one worker in the process of the command."""
    folder = tmp_path_factory.mktemp("portable") / "run"
    ended = python(folder.parent, "-m", "andon", *command(runs, folder, ON, "run.backend=inline", "run.workers=1"))
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_rank_computes_so(runs: Runs, portable_run: Path, tmp_path: Path, workers: int) -> None:
    """Torch says it in each rank, the variables are there, and the bits are those of one process."""
    flags = {"run.dir": str(tmp_path / "run"), "run.backend": "gloo", "run.workers": workers}
    asked = {"entry": "tell_kernels", "overrides": runs.overrides(ON), "flags": flags}
    ended = python(tmp_path, "-m", "tests.training.driver", json.dumps(asked))
    assert ended.returncode == 0, ended.stderr
    told = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(workers)]
    assert told == [{"capability": "AVX2", **SETTINGS}] * workers
    assert outcome(tmp_path / "run") == outcome(portable_run)


def test_ranks_of_torchrun_compute_so(runs: Runs, portable_run: Path, tmp_path: Path) -> None:
    """They set it themselves, before torch is loaded in them."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "andon")
    ended = python(tmp_path, *torchrun, *command(runs, tmp_path / "run", ON))
    assert ended.returncode == 0, ended.stderr
    assert outcome(tmp_path / "run") == outcome(portable_run)


def test_the_ledger_is_that_of_any_such_cpu(portable_run: Path, whole: Path) -> None:
    """Its fingerprint names no CPU, the variables, and how products add; a plain run names its own CPU."""
    (ours,), (plain,) = (records(folder, "start") for folder in (portable_run, whole))
    assert {name: ours.fingerprint[f"flag {name}"] for name in SETTINGS} == SETTINGS
    assert (ours.fingerprint["cpu"], ours.fingerprint["instructions"]) == ("any with AVX2", "avx2")
    assert ours.fingerprint["products"] == FORM
    assert "products" not in plain.fingerprint
    assert plain.fingerprint["cpu"] == environment()["cpu"]
    assert ours.identity != plain.identity


def test_the_card_has_it_in_the_command_that_gives_the_same_weights(portable_run: Path, whole: Path) -> None:
    """Without it they would be others."""
    ours, plain = ((RunFolder(folder).adapter / "README.md").read_text() for folder in (portable_run, whole))
    assert "--set run.portable=true" in ours
    assert "portable" not in plain


def test_a_resume_keeps_it(runs: Runs, portable_run: Path, whole: Path, tmp_path: Path) -> None:
    """An interrupted run goes on to the same bits; with another value it is refused, either way, in words."""
    folder = tmp_path / "run"
    flags = {"run.dir": str(folder), "run.backend": "gloo", "run.workers": 2}
    asked = {"entry": "ask_to_end", "overrides": runs.overrides(ON), "flags": flags}
    assert python(tmp_path, "-m", "tests.training.driver", json.dumps(asked)).returncode == 75
    inline = ("run.backend=inline", "run.workers=1", "run.resume=auto")
    for at, values, more in ((folder, "was True when the run began, is False", ()), (whole, "was False", (ON,))):
        refused = python(tmp_path, "-m", "andon", *command(runs, at, *inline, *more))
        assert refused.returncode == 2
        assert f"run.portable: {values}" in refused.stderr
    ended = python(tmp_path, "-m", "andon", *command(runs, folder, *inline, ON))
    assert ended.returncode == 0, ended.stderr
    assert outcome(folder) == outcome(portable_run)


@pytest.mark.parametrize("place", [("inline", "1"), ("gloo", "2")], ids=["inline", "gloo"])
def test_a_replay_computes_so(portable_run: Path, place: tuple[str, str]) -> None:
    """Steps are done again as they were done, in this process and in ranks."""
    where = ("--steps", "1:3", "--backend", place[0], "--workers", place[1])
    again = python(portable_run.parent, "-m", "andon", "replay", str(portable_run), *where)
    assert again.returncode == 0, again.stdout + again.stderr


USED = """
import os, sys
import torch
import andon

x = torch.randn(64, 64) @ torch.randn(64, 64)
said = []
for backend in ("inline", "gloo"):
    try:
        run = andon.train(sys.argv[1], backend=backend, workers=1, run_dir=backend, config="small.yaml")
        said.append(run.summary.weights_digest)
    except ValueError as error:
        said.append(str(error))
    said.append(str(sorted({"ATEN_CPU_CAPABILITY", "MKL_CBWR"} & os.environ.keys())))
print("\\n".join(said))
"""
FRESH = """
import os, sys
import torch
import andon

for folder in ("first", "second"):
    run = andon.train(sys.argv[1], backend="inline", workers=1, run_dir=folder, config="small.yaml")
    print(run.summary.weights_digest, *(os.environ[name] for name in sys.argv[2:]))
"""


@pytest.fixture
def small(portable_run: Path, tmp_path: Path) -> Path:
    """A folder with the settings of the portable run."""
    (tmp_path / "small.yaml").write_bytes(RunFolder(portable_run).config.read_bytes())
    return tmp_path


def test_an_interpreter_that_has_computed_refuses(runs: Runs, portable_run: Path, small: Path) -> None:
    """It says what to do, of which ranks are one, and those leave its environment as it was."""
    ended = python(small, "-c", USED, str(runs.data))
    refused, kept, digest, left = ended.stdout.splitlines()
    assert "run.portable: comes too late" in refused
    assert "ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=COMPATIBLE" in refused
    assert "run.backend=gloo" in refused
    assert kept == left == "[]"
    assert digest == outcome(portable_run)["weights_digest"]


def test_an_interpreter_that_has_only_loaded_torch_does_not(runs: Runs, portable_run: Path, small: Path) -> None:
    """Nor does it a second time: it keeps the variables, as torch keeps what they said."""
    ended = python(small, "-c", FRESH, str(runs.data), *SETTINGS)
    assert ended.stdout.split() == [outcome(portable_run)["weights_digest"], *SETTINGS.values()] * 2, ended.stderr


WITHOUT = """
import contextlib, sys
import andon
from andon.training import session

session.portable_kernels = contextlib.nullcontext
print(andon.train(sys.argv[1], backend="inline", workers=1, run_dir="run", config="small.yaml").summary.weights_digest)
"""


def test_a_run_computes_by_the_products_that_its_fingerprint_names(runs: Runs, portable_run: Path, small: Path) -> None:
    """Without them it has other bits."""
    ended = python(small, "-c", WITHOUT, str(runs.data))
    assert len(ended.stdout.strip()) == len(outcome(portable_run)["weights_digest"]), ended.stderr
    assert ended.stdout.strip() != outcome(portable_run)["weights_digest"]


def test_an_environment_that_says_otherwise_is_refused(runs: Runs, tmp_path: Path) -> None:
    """Both variables at once, with what is there and what is needed; nothing is begun."""
    other = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "AVX2"}
    ended = python(tmp_path, "-m", "andon", *command(runs, tmp_path / "run", ON), more=other)
    assert ended.returncode == 2
    for name, value in other.items():
        assert f"{name}: is {value!r} in the environment, run.portable needs {SETTINGS[name]!r}" in ended.stderr
    assert not (tmp_path / "run").exists()


def test_a_cpu_without_avx2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would believe the variable, and crash at an instruction that is not there."""
    monkeypatch.setattr(portable, "environment", lambda: {"instructions": "avx fma"})
    with pytest.raises(InputError, match=r"run\.portable: needs a CPU with AVX2"), chosen(Run(portable=True)):
        pytest.fail("it went on")


def test_a_run_that_is_not_portable_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user has set stands."""
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    with chosen(Run()):
        assert os.environ["MKL_CBWR"] == "AVX2"
        assert "ATEN_CPU_CAPABILITY" not in os.environ
