"""GPUs that are there and do not work: the CPU where none was asked for by name, and all ranks decide alike."""

from __future__ import annotations

import pytest
import torch

from andon.config.load import load_config
from andon.console.problems import InputError
from andon.training.session import _usable
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine on which no GPU works")
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def decided(backend: str) -> tuple[str, str]:
    """What this rank of two comes to, where the first is to be on a GPU; of `nccl` both."""
    devices = (GPU, CPU) if backend == "mixed" else (GPU, torch.device("cuda", 1))
    config = load_config(None, [], {"run.backend": backend, "run.workers": 2})
    name, device = _usable(config, backend, devices, torch.distributed.get_rank())
    return name, device.type


@pytest.mark.parametrize(("backend", "instead"), [("nccl", "gloo"), ("mixed", "mixed")])
def test_all_ranks_go_to_the_cpu_where_no_gpu_works(backend: str, instead: str) -> None:
    assert [outcome.get() for outcome in run_ranks(2, decided, backend)] == [(instead, "cpu")] * 2


def refused() -> str:
    """What this rank of two is told, where both GPUs were asked for by name."""
    config = load_config(None, ["run.devices=[0, 1]"], {"run.backend": "nccl", "run.workers": 2})
    with pytest.raises(InputError) as caught:
        _usable(config, "nccl", (GPU, torch.device("cuda", 1)), torch.distributed.get_rank())
    return str(caught.value)


def test_gpus_that_were_asked_for_by_name_are_not_passed_over() -> None:
    for outcome in run_ranks(2, refused):
        assert "run.devices[0]: GPU 0 cannot be used" in outcome.get()
        assert "run.devices[1]: GPU 1 cannot be used" in outcome.get()
