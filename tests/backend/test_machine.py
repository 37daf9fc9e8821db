"""What GPUs are fit for, judged alike on every rank from facts that all of them have."""

from __future__ import annotations

import pytest
import torch

from andon.backend.machine import Accelerator, free_ram, none_works, of_all_ranks, refuse_unfit, refuse_without_nccl
from andon.console.problems import InputError
from tests.support.ranks import run_ranks

GIB = 2**30
BIG = Accelerator(0, "H200", 140 * GIB, 139 * GIB)
NEXT = Accelerator(1, "H200", 140 * GIB, 139 * GIB)


def refusal(backend: str, found: dict[int, Accelerator], needed: int | None) -> list[str]:
    with pytest.raises(InputError) as caught:
        refuse_unfit(backend, found, needed)
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
    assert "andon plan" in first
    assert second.startswith("run.devices[2]: GPU 3 (H200) has 20.00 GiB of 140.00 GiB free and the run needs 20.00")
    assert second.endswith("another process may hold the rest")


def test_unequal_models_are_refused_where_bits_are_promised() -> None:
    """Named with their ranks in a group of GPUs; `mixed` promises a tolerance, and takes them."""
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
    """Where one of two works the run is refused: its owner has to hear of the other."""
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
    """One rank of three is on a CPU and one has a broken GPU: all refuse alike, though only one of them saw it."""
    said = ["run.devices[2]: GPU 3 cannot be used: " + "\u00fc" * 200]
    assert [outcome.get() for outcome in run_ranks(3, _facts)] == [said] * 3
