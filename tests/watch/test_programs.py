"""`andon watch` of a folder or archive, a ledger that takes nothing, and models that nothing tells apart."""

from __future__ import annotations

import gc
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import andon
from andon_contracts.watch import script
from andon_contracts.watch.discovery import optimizer_of, outermost, trained_by

PROGRAM = """
import sys, torch, beside
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print(__name__, sys.argv, sys.path[0], beside.__file__)
"""


def _packed(folder: Path) -> Path:
    path = folder / "program.pyz"
    with zipfile.ZipFile(path, "w") as archive:
        for each in (folder / "program").iterdir():
            archive.write(each, each.name)
    return path


@pytest.mark.parametrize("packed", [False, True])
def test_a_folder_or_an_archive_runs_as_python_runs_it(tmp_path: Path, packed: bool) -> None:
    """Its `__main__`, with its own modules, arguments and path, and each update is watched."""
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "__main__.py").write_text(PROGRAM)
    (tmp_path / "program" / "beside.py").touch()
    path = str(_packed(tmp_path) if packed else tmp_path / "program")
    command = [sys.executable, "-m", "andon_contracts.watch", path, "--x"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"__main__ {[path, '--x']} {path} {path}/beside.py\n")
    assert "andon.watch: 2 steps" in done.stderr


@pytest.mark.parametrize("name", ["empty.zip", "empty"])
def test_what_has_no_main_is_refused_in_words(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As Python does, before anything runs."""
    zipfile.ZipFile(tmp_path / "empty.zip", "w").close()
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as ended:
        script.main([str(tmp_path / name)])
    assert ended.value.code == 2
    assert f"can't find '__main__' module in '{tmp_path / name}'\n" in capsys.readouterr().err


def test_a_device_without_room_is_said_once_and_the_loop_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """/dev/full has no lines that could be read, and takes none: that is a disk that refuses."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with andon.watch(model, optimizer, ledger="/dev/full") as w:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    told = [line for line in capsys.readouterr().err.splitlines() if ": andon.watch: ledger: " in line]
    assert len(told) == 1
    assert "the disk refuses: No space left on device" in told[0]
    assert w.evaluations["gradient-fresh"] == 2


# what nothing tells apart


def _sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Wrapped(nn.Module):
    """Holds a module under a name."""

    def __init__(self, model: nn.Module, name: str = "model") -> None:
        super().__init__()
        self.add_module(name, model)


def test_of_two_optimizers_that_nothing_tells_apart_none_is_guessed() -> None:
    """An older one of the same kind may still be there on one rank only: which one is used, its update says."""
    gc.collect()
    model = nn.Linear(2, 2)
    one = _sgd(model)
    assert optimizer_of(model.parameters()) is one
    two = _sgd(model)
    assert optimizer_of(model.parameters()) is None
    for optimizer in (one, two):
        assert trained_by(optimizer) == (model, [optimizer])
    both = nn.Sequential(nn.Linear(2, 2), model)
    assert trained_by(_sgd(both[0]))[1][1:] == []


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_modules_the_names_decide_and_not_who_was_made_first(order: int) -> None:
    """So that all ranks watch the same one."""
    model = nn.Linear(2, 2)
    gc.collect()
    made = {name: Wrapped(model, name) for name in ("b", "a")[::order]}
    assert outermost(model) is made["a"]
    assert trained_by(_sgd(model))[0] is made["a"]


@pytest.mark.parametrize("find", [outermost, lambda model: trained_by(_sgd(model))])
def test_two_modules_that_nothing_tells_apart_are_refused_in_words(find: Callable[[nn.Module], object]) -> None:
    """Their buffers and modes may differ, and nobody knows which one the loop calls."""
    model = nn.Linear(2, 2)
    gc.collect()
    made = [Wrapped(model), Wrapped(model)]
    with pytest.raises(ValueError, match=r"2 modules Wrapped hold what .* say which one by andon\.watch"):
        find(model)
    assert len(made) == 2
