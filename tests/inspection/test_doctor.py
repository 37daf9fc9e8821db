"""`andon doctor`: what keeps a run from this machine is found where it really is so, and named with what to do.

What is wrong is made wrong for real: an interface that is not there, a folder that takes no file, a library that cannot
be imported, one whose import never ends.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from andon.console.messages import install_hint
from andon.inspection import doctor as module

PATIENCE_S = 240


@dataclass(frozen=True)
class Told:
    code: int
    can_train: bool
    checks: dict[str, dict[str, str]]

    @property
    def problems(self) -> set[str]:
        return {name for name, check in self.checks.items() if check["level"] == "problem"}


def doctor(*arguments: str | Path, temporary: Path, **variables: str) -> Told:
    """What `andon doctor --json` says with these variables; nothing may be on standard error, or left."""
    temporary.mkdir()
    command = [sys.executable, "-m", "andon", "doctor", "--json", *map(str, arguments)]
    variables = os.environ | {"TMPDIR": str(temporary)} | variables
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        out, said = running.communicate(timeout=PATIENCE_S)
    assert said == b""
    assert list(temporary.iterdir()) == list(Path("/tmp").glob(f"ad-{running.pid}-*")) == []
    found = json.loads(out)
    return Told(running.returncode, found["can_train"], {check["name"]: check for check in found["checks"]})


def hiding(folder: Path, *names: str) -> str:
    """A path for modules with which these cannot be imported, as if they were not installed."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {names!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
    )
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


# Deep: the command starts three processes, most of which import torch. `test_each_probe_finds_what_is_there` makes the
# same probes in this process.
@pytest.mark.deep
def test_all_is_well(tmp_path: Path) -> None:
    told = doctor(tmp_path / "runs" / "new", temporary=tmp_path / "t")
    assert (told.code, told.can_train, told.problems) == (0, True, set())
    assert told.checks["backend gloo"]["found"] == "2 ranks started and exchanged data"
    assert not (tmp_path / "runs").exists()
    assert str(tmp_path) in told.checks["folder"]["found"]


@pytest.mark.parametrize("probe", ["libraries", "folder", "gloo"])
def test_each_probe_finds_what_is_there(probe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert module.main([probe, *([str(tmp_path)] if probe == "folder" else [])]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found
    assert "problem" not in {level for _, level, *_ in found}


def test_what_keeps_a_run_from_this_machine_is_found(tmp_path: Path) -> None:
    """No torch, and folders that take no file. A socket's path has at most 107 bytes."""
    path = hiding(tmp_path / "h", "torch")
    told = doctor("/proc/runs", temporary=tmp_path / ("n" * 107), PYTHONPATH=path)
    assert (told.code, told.can_train) == (1, False)
    needs_torch = {"library torch", "library transformers", "library peft", "library safetensors"}
    assert told.problems - needs_torch == {"backend gloo", "folder"}
    assert "No module named 'torch'" in told.checks["library torch"]["found"]
    assert told.checks["library torch"]["todo"] == install_hint("train")
    assert "TMPDIR: no socket can be made" in told.checks["backend gloo"]["found"]
    assert "/proc" in told.checks["folder"]["found"]
    assert "--run-dir" in told.checks["folder"]["todo"]


def test_a_check_that_never_ends_is_ended(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "m" / "torch").mkdir(parents=True)
    (tmp_path / "m" / "torch" / "__init__.py").write_text(f"import os\nos.read(os.open({str(pipe)!r}, os.O_RDWR), 1)\n")
    path = os.pathsep.join([str(tmp_path / "m"), os.environ.get("PYTHONPATH", "")])
    told = doctor("--timeout", "1", tmp_path, temporary=tmp_path / "t", PYTHONPATH=path)
    assert told.code == 1
    assert "no answer within 1 s" in told.checks["libraries"]["found"]
    with pytest.raises(OSError, match=os.strerror(errno.ENXIO)):  # nobody has it open any more
        os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
