"""What a list of devices means, on machines with any number of GPUs."""

from __future__ import annotations

import logging
import re

import pytest
import torch

from andon.backend.devices import named_devices, placement
from andon.console.problems import InputError
from tests.support.toy import CPU


def _gpu(index: int) -> torch.device:
    return torch.device("cuda", index)


def test_names_of_devices() -> None:
    assert named_devices(["cpu", 1, "cuda:0", "cpu:0"], gpus=2) == (CPU, _gpu(1), _gpu(0), CPU)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(InputError) as caught:
        named_devices(["cuda:0", "tpu", 0, 2, -1, 4321], gpus=2)
    assert [(problem.where, problem.what.split(";")[0]) for problem in caught.value.problems] == [
        ("run.devices[1]", "'tpu' is no device"),
        ("run.devices[2]", "GPU 0 is named twice"),
        ("run.devices[3]", "there is no GPU 2"),
        ("run.devices[4]", "-1 is no device"),
        ("run.devices[5]", "there is no GPU 4321"),
    ]


def test_an_absent_gpu_is_the_cpu_only_where_that_was_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    """F-DP-004: each is named in the log; one that is named twice is refused all the same, there or not."""
    with caplog.at_level(logging.WARNING):
        assert named_devices([0, 5, "cpu"], gpus=1, absent="cpu") == (_gpu(0), CPU, CPU)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("there is no cuda:5: replica 1 trains on the CPU")
    with pytest.raises(InputError, match=r"^devices\[1\]: GPU 5 is named twice"):
        named_devices([5, "cuda:5"], gpus=1, where="devices", absent="cpu")
    with pytest.raises(InputError, match=r"^run\.devices\[0\]: there is no GPU 5; this machine has 1$"):
        named_devices([5], gpus=1)


NOT_USED = "4 GPUs are here and not used (--backend nccl, or mixed)"


@pytest.mark.parametrize(
    ("backend", "workers", "gpus", "used", "devices", "note"),
    [
        ("inline", 2, 0, "inline", (CPU, CPU), "^$"),
        ("gloo", 3, 0, "gloo", (CPU, CPU, CPU), "^$"),
        ("nccl", 2, 4, "nccl", (_gpu(0), _gpu(1)), "^$"),
        ("mixed", 3, 1, "mixed", (_gpu(0), CPU, CPU), "^$"),
        ("mixed", 2, 4, "mixed", (_gpu(0), CPU), "^$"),
        *((backend, 2, 4, backend, (CPU, CPU), re.escape(NOT_USED) + "$") for backend in ("gloo", "inline", "threads")),
        ("nccl", 2, 0, "gloo", (CPU, CPU), ".*cpu-fallback"),
        ("mixed", 2, 0, "mixed", (CPU, CPU), ".*cpu-fallback"),
    ],
)
def test_default_placement(
    backend: str, workers: int, gpus: int, used: str, devices: tuple[torch.device, ...], note: str
) -> None:
    """Without named devices: CPUs, or for nccl a GPU each, or for mixed GPUs and at least one CPU.

    GPUs that are not used are named in the note. F-DP-004: without a GPU the run goes on on the CPU, and says so.
    """
    *found, said = placement(backend, workers, None, gpus)
    assert found == [used, devices]
    assert re.match(note, said)


@pytest.mark.parametrize(
    ("backend", "workers", "names", "gpus", "message"),
    [
        ("nccl", 3, None, 2, "3 workers for 2 GPUs"),
        ("nccl", 128, None, 4096, "at most 127 GPUs of one host"),
        ("gloo", 3, ["cpu", "cpu"], 0, "2 devices for 3 workers"),
        ("nccl", 2, [0, "cpu"], 1, "nccl needs a GPU for each worker"),
        ("nccl", 1, [0], 0, "there is no GPU 0"),
    ],
)
def test_what_cannot_be_placed_is_refused(
    backend: str, workers: int, names: list[str | int] | None, gpus: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        placement(backend, workers, names, gpus)
