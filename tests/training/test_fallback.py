"""What ranks find out together at the start: GPUs that do not work, clocks that are apart."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist

from andon.backend.group import GroupBackend
from andon.backend.inprocess import InlineBackend
from andon.config.load import load_config
from andon.console.problems import InputError
from andon.training.run import clocks_apart
from andon.training.session import _usable
from tests.repository.sources import ROOT
from tests.support.ranks import run_ranks

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine on which no GPU works")
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def decided(backend: str) -> tuple[str, str]:
    devices = (GPU, CPU) if backend == "mixed" else (GPU, torch.device("cuda", 1))
    config = load_config(None, [], {"run.backend": backend, "run.workers": 2})
    name, device = _usable(config, backend, devices, torch.distributed.get_rank())
    return name, device.type


@without_gpu
@pytest.mark.parametrize(("backend", "instead"), [("nccl", "gloo"), ("mixed", "mixed")])
def test_all_ranks_go_to_the_cpu_where_no_gpu_works(backend: str, instead: str) -> None:
    assert [outcome.get() for outcome in run_ranks(2, decided, backend)] == [(instead, "cpu")] * 2


def refused() -> str:
    config = load_config(None, ["run.devices=[0, 1]"], {"run.backend": "nccl", "run.workers": 2})
    with pytest.raises(InputError) as caught:
        _usable(config, "nccl", (GPU, torch.device("cuda", 1)), torch.distributed.get_rank())
    return str(caught.value)


@without_gpu
def test_gpus_that_were_asked_for_by_name_are_not_passed_over() -> None:
    for outcome in run_ranks(2, refused):
        assert "run.devices[0]: GPU 0 cannot be used" in outcome.get()
        assert "run.devices[1]: GPU 1 cannot be used" in outcome.get()


def _late_clock(seconds: float) -> str:
    if dist.get_rank() == 1:
        true = time.time_ns
        time.time_ns = lambda: true() - int(seconds * 1e9)
    return clocks_apart(GroupBackend("gloo", torch.device("cpu")))


@pytest.mark.parametrize(("seconds", "words"), [(0.0, ""), (20.0, "rank 1's is 20.0 s behind"), (-3600.0, "ahead")])
def test_clocks_that_are_apart_are_told(seconds: float, words: str) -> None:
    """Every rank reports the same: which clock, by how much and in which direction."""
    said = [outcome.get() for outcome in run_ranks(3, _late_clock, seconds)]
    assert len(set(said)) == 1
    assert (words in said[0]) if words else said[0] == ""


def test_one_process_has_one_clock() -> None:
    assert clocks_apart(InlineBackend([torch.device("cpu")] * 2)) == ""


# Deep: two real agents of torchrun. `test_clocks_that_are_apart_are_told` shows by default what ranks say then, and
# tests/cli/test_commands.py what a rank says that torchrun started alone.
def test_the_lines_of_the_docs_name_the_number_of_workers() -> None:
    text = (ROOT / "docs" / "multi-node.md").read_text()
    blocks = [part for part in re.split(r"\n(?! {4})", text) if re.search(r"torchrun.*andon", part, re.DOTALL)]
    lines = [block for block in blocks if block.count("\n    ") and not re.search(r"--nnodes \d+:\d+", block)]
    assert len(lines) == 2
    lines += re.findall(
        r"(?m)^[^#\n]*\bandon train\b(?:.*\\\n)*.*", (ROOT / "examples" / "engines" / "andon.sbatch").read_text()
    )
    assert len(lines) == 3
    assert [block for block in lines if "--workers" not in block] == []
