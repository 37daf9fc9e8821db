"""What a list of devices means, on machines with any number of GPUs."""

from __future__ import annotations

import logging
import os
import re
from typing import Any

import pytest
import torch

from andon.backend.devices import (
    Accelerator,
    demand_determinism,
    named_devices,
    none_works,
    of_all_ranks,
    placement,
    refuse_unfit,
    refuse_without_nccl,
)
from andon.backend.host import free_ram
from andon.config.schema import Run
from andon.console.messages import InputError
from tests.support.ranks import run_ranks
from tests.support.toy import CPU


def _gpu(index: int) -> torch.device:
    return torch.device("cuda", index)


def test_names_of_devices() -> None:
    assert named_devices(["cpu", 1, "cuda:0", "cpu:0"], gpus=2) == (CPU, _gpu(1), _gpu(0), CPU)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(InputError) as caught:
        named_devices(["cuda:0", "tpu", 0, 2, -1, 4321], gpus=2)
    assert [(problem.where, problem.what.split(";")[0]) for problem in caught.value.problems] == [
        ("run.devices[1]", "'tpu' is not a device"),
        ("run.devices[2]", "GPU 0 is named twice"),
        ("run.devices[3]", "GPU 2 does not exist"),
        ("run.devices[4]", "-1 is not a device"),
        ("run.devices[5]", "GPU 4321 does not exist"),
    ]


def test_an_absent_gpu_is_the_cpu_only_where_that_was_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    """F-DP-004: each is named in the log; one that is named twice is refused all the same, there or not."""
    with caplog.at_level(logging.WARNING):
        assert named_devices([0, 5, "cpu"], gpus=1, absent="cpu") == (_gpu(0), CPU, CPU)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("cuda:5 does not exist: replica 1 trains on the CPU")
    with pytest.raises(InputError, match=r"^devices\[1\]: GPU 5 is named twice"):
        named_devices([5, "cuda:5"], gpus=1, where="devices", absent="cpu")
    with pytest.raises(InputError, match=r"^run\.devices\[0\]: GPU 5 does not exist; this machine has 1$"):
        named_devices([5], gpus=1)


NOT_USED = "4 GPUs are here and not used (--backend auto)"


@pytest.mark.parametrize(
    ("backend", "workers", "gpus", "used", "devices", "note"),
    [
        ("inline", 2, 0, "inline", (CPU, CPU), "^$"),
        ("gloo", 3, 0, "gloo", (CPU, CPU, CPU), "^$"),
        ("nccl", 2, 4, "nccl", (_gpu(0), _gpu(1)), "^$"),
        ("mixed", 3, 1, "mixed", (_gpu(0), CPU, CPU), "^$"),
        ("mixed", 2, 4, "mixed", (_gpu(0), CPU), "^$"),
        *((backend, 2, 4, backend, (CPU, CPU), re.escape(NOT_USED) + "$") for backend in ("gloo", "inline")),
        ("nccl", 2, 0, "gloo", (CPU, CPU), ".*cpu-fallback"),
        ("mixed", 2, 0, "mixed", (CPU, CPU), ".*cpu-fallback"),
    ],
)
def test_default_placement(
    backend: Any, workers: int, gpus: int, used: str, devices: tuple[torch.device, ...], note: str
) -> None:
    """Without named devices. F-DP-004: without a GPU, `fallback` trains on the CPU and says so."""
    *found, said = placement(Run(backend=backend, workers=workers, cpu_fallback=True), gpus)
    assert found == [used, devices]
    assert re.match(note, said)


@pytest.mark.parametrize(
    ("backend", "workers", "names", "gpus", "message"),
    [
        ("nccl", 3, None, 2, "3 workers for 2 GPUs of this host"),
        ("nccl", 2, None, 0, "nccl needs a GPU, and torch sees none on .*; use --backend auto"),
        ("gloo", 3, ["cpu", "cpu"], 0, "names 2 devices for the 3 workers of this host"),
        ("nccl", 2, [0, "cpu"], 1, "nccl needs a GPU for each worker"),
        ("nccl", 1, [0], 0, "GPU 0 does not exist"),
    ],
)
def test_what_cannot_be_placed_is_refused(
    backend: str, workers: int, names: list[str | int] | None, gpus: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        placement(Run().model_copy(update={"backend": backend, "devices": names}), gpus, on_host=workers)


@pytest.mark.parametrize(
    ("on_host", "gpus", "devices"),
    [(2, 2, (_gpu(0), _gpu(1))), (2, 8, (_gpu(0), _gpu(1))), (2, 1, (_gpu(0), _gpu(0))), (1, 1, (_gpu(0),))],
    ids=["a host of two", "more GPUs than ranks", "each process sees its own", "one GPU a host"],
)
def test_workers_of_several_hosts_are_placed_host_by_host(
    on_host: int, gpus: int, devices: tuple[torch.device, ...]
) -> None:
    assert placement(Run(backend="nccl", workers=4), gpus, on_host=on_host) == ("nccl", devices, "")


def test_more_workers_than_gpus_are_planned_for_several_hosts() -> None:
    _, devices, note = placement(Run(backend="nccl", workers=3), 2)
    assert devices == (_gpu(0), _gpu(1), _gpu(0))
    assert note == "3 workers for 2 GPUs of this host: the run needs further hosts (torchrun --nnodes), or --workers 2"


# Deterministic kernels are demanded before anything is computed.


NAME = "CUBLAS_WORKSPACE_CONFIG"
GPU = _gpu(0)


def test_cublas_is_told_before_a_gpu_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "")
    monkeypatch.delenv(NAME)
    demand_determinism([CPU])
    assert NAME not in os.environ
    demand_determinism([CPU, GPU])
    assert os.environ[NAME] == ":4096:8"
    assert torch.are_deterministic_algorithms_enabled()


def test_memory_is_not_filled_before_a_gpu_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, ":16:8")
    demand_determinism([CPU])
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    demand_determinism([GPU])
    assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert os.environ[NAME] == ":16:8"  # a workspace that is right is kept


@pytest.mark.parametrize("given", [":0:0", ":2048:8", ""])
def test_another_workspace_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(NAME, given)
    with pytest.raises(InputError, match=r"CUBLAS_WORKSPACE_CONFIG.*set :4096:8 or :16:8"):
        demand_determinism([GPU])


# Every rank decides from the facts of all ranks which GPUs can be used, so all ranks decide the same.


GIB = 2**30
BIG = Accelerator(0, "H200", 140 * GIB, 139 * GIB)
NEXT = Accelerator(1, "H200", 140 * GIB, 139 * GIB)


def refusal(backend: str, found: dict[int, Accelerator], needed: int | None) -> list[str]:
    with pytest.raises(InputError) as caught:
        refuse_unfit(backend, found, needed, "take a larger one")
    return [str(problem) for problem in caught.value.problems]


def test_what_is_fit_is_taken() -> None:
    refuse_unfit("nccl", {0: BIG, 1: NEXT}, 139 * GIB)
    refuse_unfit("nccl", {0: BIG, 1: NEXT}, None)
    refuse_unfit("mixed", {}, 10**15)


def test_a_busy_one_and_a_small_one_are_different_findings() -> None:
    busy = Accelerator(3, "H200", 140 * GIB, 20 * GIB - 1)
    small = Accelerator(1, "T4", 15 * GIB, 15 * GIB)
    first, second = refusal("mixed", {0: small, 2: busy}, 20 * GIB)
    assert first.startswith("run.devices[0]: GPU 1 (T4) has 15.00 GiB of 15.00 GiB free, too small for the 20.00 GiB")
    assert first.endswith("that the run needs; take a larger one")
    assert second.startswith("run.devices[2]: GPU 3 (H200) has 20.00 GiB of 140.00 GiB free and the run needs 20.00")
    assert second.endswith("another process may hold the rest")


def test_two_ranks_do_not_share_a_gpu_whatever_index_they_see_it_under() -> None:
    mine = Accelerator(0, "H200", 140 * GIB, 139 * GIB, host="a", uuid="one")
    elsewhere = Accelerator(0, "H200", 140 * GIB, 139 * GIB, host="b", uuid="two")
    refuse_unfit("nccl", {0: mine, 1: elsewhere}, None)
    (said,) = refusal("nccl", {0: mine, 1: elsewhere, 2: mine}, None)
    assert said == "rank 2 on a: GPU 0 is also used by rank 0; nccl needs one for each"


def test_unequal_models_are_refused_where_bits_are_promised() -> None:
    other = Accelerator(1, "A100", 80 * GIB, 79 * GIB)
    (said,) = refusal("nccl", {0: BIG, 1: other}, GIB)
    assert "rank 0 H200, rank 1 A100" in said
    assert "mixed" in said
    refuse_unfit("mixed", {0: BIG, 1: other}, GIB)


def test_a_driver_that_fails_is_said_in_its_own_words_beside_the_rest() -> None:
    broken = Accelerator(0, "", 0, 0, "CUDA driver version is insufficient")
    full = Accelerator(1, "H200", 140 * GIB, GIB)
    first, second = refusal("nccl", {0: broken, 1: full, 2: BIG}, 2 * GIB)
    assert first == "run.devices[0]: GPU 0 cannot be used: CUDA driver version is insufficient"
    assert second.startswith("run.devices[1]: GPU 1 (H200) has 1.00 GiB")


def test_the_cpu_is_the_way_out_only_where_no_gpu_works() -> None:
    broken = Accelerator(1, "", 0, 0, "an illegal instruction")
    worse = Accelerator(0, "", 0, 0, "no driver")
    assert none_works({0: worse, 1: broken}) == "no driver"
    assert none_works({1: broken}) == "an illegal instruction"
    assert none_works({0: BIG, 1: broken}) == ""
    assert none_works({}) == ""


def test_a_build_without_nccl_is_refused_where_it_is_asked_for() -> None:
    with pytest.raises(InputError, match=r"^run\.backend: this torch was built without NCCL; choose gloo, or mixed$"):
        refuse_without_nccl("nccl", available=False)
    refuse_without_nccl("nccl", available=True)
    refuse_without_nccl("mixed", available=False)


def test_memory_of_this_machine_is_some() -> None:
    found = free_ram()
    assert found is None or 0 < found < 2**50


def _facts() -> list[str]:
    rank = torch.distributed.get_rank()
    broken = Accelerator(3, "", 0, 0, "\u00fc" * 200)
    found = of_all_ranks([None, BIG, broken][rank])
    assert found == {1: BIG, 2: broken}
    with pytest.raises(InputError) as caught:
        refuse_unfit("mixed", found, None)
    return [str(problem) for problem in caught.value.problems]


def test_every_rank_hears_of_a_gpu_that_cannot_be_used() -> None:
    said = ["run.devices[2]: GPU 3 cannot be used: " + "\u00fc" * 200]
    assert [outcome.get() for outcome in run_ranks(3, _facts)] == [said] * 3
