"""Where ranks live, what cannot be tried here and why, and what devices rule out; without a GPU all of it but CUDA."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from andon.console.messages import InputError
from andon_falsify.campaign.trial import LAW
from andon_falsify.campaign.warm_bench import alone, cut_and_resume
from andon_falsify.claims import (
    claims_of,
    judged,
    judged_by,
    losses_close,
    memory_budget,
    resume_equal,
    same_everywhere,
)
from andon_falsify.claims.evidence import Evidence, of_trace
from andon_falsify.compliance.cases import BIG, PLAIN, SGD
from andon_falsify.ranks.pool import RankPool, RankPools
from andon_falsify.ranks.trainer import AndonTrainer
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.placing import devices_of, place_of_bits, room_for, why_not
from andon_falsify.subjects.trace import Trace
from andon_falsify.verdict import ExtraRun, Outcome, Verdict
from falsify.power.laboratory import untried
from falsify.power.registry import named

pytestmark = pytest.mark.xdist_group("test_placing")
HERE = "tests.falsify.rank_work"
PLACES = ((1, "mixed"), (1, "gloo"), (2, "mixed"), (2, "gloo"))


@pytest.fixture(scope="module")
def trainer(pools: RankPools) -> AndonTrainer:
    return AndonTrainer(pools)


def placed(trace: Trace, place: str) -> Trace:
    return replace(trace, parts=tuple(replace(part, place=place) for part in trace.parts))


@pytest.mark.parametrize(
    ("backend", "world", "gpus", "devices"),
    [
        ("inline", 2, 8, "cpu cpu"),
        ("gloo", 3, 8, "cpu cpu cpu"),
        ("nccl", 3, 4, "cuda:0 cuda:1 cuda:2"),
        ("mixed", 1, 4, "cpu"),
        ("mixed", 3, 1, "cpu cuda:0 cpu"),
        ("mixed", 6, 2, "cpu cuda:0 cpu cuda:1 cpu cuda:0"),
        ("mixed", 2, 0, "cpu cpu"),
    ],
)
def test_every_rank_has_its_device(backend: str, world: int, gpus: int, devices: str) -> None:
    assert [str(device) for device in devices_of(backend, world, gpus)] == devices.split()


def test_more_ranks_of_nccl_than_gpus_have_no_place() -> None:
    with pytest.raises(InputError, match="GPU 2 does not exist; this machine has 2"):
        devices_of("nccl", 3, 2)
    assert [room_for("nccl", 3, gpus) for gpus in (0, 1, 2, 4)] == [1, 1, 2, 3]
    assert [room_for(backend, 3, 1) for backend in ("gloo", "mixed")] == [3, 3]


@pytest.mark.parametrize(
    ("backend", "world", "gpus", "nccl", "said"),
    [
        ("gloo", 4, 0, False, ""),
        ("nccl", 1, 0, True, "nccl needs a GPU, and this machine has none that torch can use"),
        ("nccl", 3, 2, True, "nccl on 3 ranks needs 3 GPUs, and this machine has 2 that torch can use"),
        ("nccl", 2, 2, True, ""),
        ("nccl", 2, 2, False, "nccl needs NCCL, and this torch was built without it"),
        ("mixed", 3, 1, False, ""),
        ("mixed", 2, 0, False, "mixed needs a GPU, and this machine has none that torch can use"),
    ],
)
def test_what_has_no_place_says_what_is_missing(backend: str, world: int, gpus: int, nccl: bool, said: str) -> None:
    assert why_not(backend, world, gpus, nccl) == said


def test_pools_are_of_a_backend_and_a_number_of_ranks(pools: RankPools) -> None:
    mixed, gloo = pools.of(1, "mixed"), pools.of(1)
    assert [answer.value for answer in mixed.run(f"{HERE}:group_of", None)] == [("gloo", 1)]
    assert len({*mixed.pids, *gloo.pids}) == 2
    assert (pools.of(1, "mixed"), pools.of(1, "gloo")) == (mixed, gloo)


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="here it has one")
def test_a_rank_whose_gpu_is_not_there_says_so() -> None:
    pool = RankPool(1, backend="nccl")
    (answer,) = pool.run(f"{HERE}:group_of", None)
    pool.close()
    assert "GPU 0 does not exist; this machine has 0" in answer.error


def test_a_mixed_group_keeps_every_claim(trainer: AndonTrainer) -> None:
    case = Case(backend="mixed", world=2)
    trace = trainer.run(case)
    assert (trace.errors, trace.violation) == ({}, None)
    evidence = replace(of_trace(trace), others={"alone": of_trace(trainer.run(alone(case)))})
    found = judged(evidence, [claim for claim in claims_of("trainer") if claim.trial == LAW])
    assert {verdict.outcome for verdict in found.values()} <= {Outcome.HOLDS, Outcome.NOT_APPLICABLE}, found
    assert trace.place == place_of_bits(devices_of("mixed", 2))
    assert trace.place != "cpu" or found["same-everywhere"].outcome is Outcome.HOLDS


def test_a_mixed_group_resumes(trainer: AndonTrainer) -> None:
    case = Case(backend="mixed", world=2, epochs=2)
    cut, resumed = cut_and_resume(trainer, case, after=3, every=2)
    assert resumed.first.resumed_from == 2
    others: dict[ExtraRun, Evidence] = {"cut": of_trace(cut), "resumed": of_trace(resumed)}
    verdict = resume_equal.check(replace(of_trace(trainer.run(case)), others=others))
    assert verdict.outcome is Outcome.HOLDS, verdict


def test_other_devices_are_not_compared_to_the_bit(trainer: AndonTrainer) -> None:
    one, two = trainer.run(PLAIN.but(world=1)), trainer.run(PLAIN)
    assert same_everywhere.check_traces(one, two).outcome is Outcome.HOLDS
    verdict = same_everywhere.check_traces(one, placed(two, "cpu cuda"))
    assert (verdict.outcome, verdict.why) == (
        Outcome.NOT_APPLICABLE,
        "different kinds of devices round differently: cpu cuda against cpu",
    )
    assert same_everywhere.check_traces(placed(one, "cuda"), placed(two, "cuda")).outcome is Outcome.HOLDS
    backends = ("gloo", "mixed", "nccl")
    assert [alone(Case(backend=name)).backend for name in backends] == ["inline", "inline", "nccl"]


def test_a_run_goes_on_to_the_bit_on_the_same_devices_alone(trainer: AndonTrainer) -> None:
    whole, cut = trainer.run(PLAIN), trainer.run(PLAIN.but(stop_after=1))
    resumed = of_trace(placed(whole, "cpu cuda cpu"))
    others: dict[ExtraRun, Evidence] = {"cut": of_trace(placed(cut, "cpu cuda")), "resumed": resumed}
    verdict = resume_equal.check(replace(of_trace(placed(whole, "cpu cuda")), others=others))
    assert verdict.outcome is Outcome.NOT_APPLICABLE
    assert "ran on cpu cuda and was resumed on cpu cuda cpu" in verdict.why


@pytest.mark.parametrize(("off", "outcome"), [(0.5, Outcome.HOLDS), (2.0, Outcome.FALSIFIED)])
def test_mixed_losses_are_held_to_those_of_one_cpu(trainer: AndonTrainer, off: float, outcome: Outcome) -> None:
    case = SGD.but(dropout=0.0)
    base, trace, dropping = trainer.run(case.but(world=1)), trainer.run(case), trainer.run(SGD)
    told = [replace(each, loss=each.loss * (1 + off * losses_close.MIXED_TOLERANCE)) for each in base.first.reported]
    alone = of_trace(replace(base, parts=(replace(base.first, reported=told),)))

    def verdict(trace: Trace, backend: str = "mixed") -> Verdict:
        there = placed(replace(trace, case=trace.case.but(backend=backend)), "cpu cuda")
        return losses_close.check(replace(of_trace(there), others={"alone": alone}))

    assert verdict(trace).outcome is outcome
    assert verdict(trace).checked == 2 * len(told)
    assert verdict(trace, "gloo").checked == verdict(dropping).checked == len(told)


def test_bytes_on_gpus_are_not_counted(trainer: AndonTrainer) -> None:
    trace = trainer.run(BIG.but(max_steps=1))
    assert judged_by(memory_budget.CLAIM, of_trace(placed(trace, "cuda"))).outcome is Outcome.NOT_APPLICABLE
    assert judged_by(memory_budget.CLAIM, of_trace(trace)).checked > 0


@pytest.mark.parametrize(
    ("fault", "backend", "gpus", "said"),
    [
        ("no sync", "mixed", 1, ""),
        ("no sync", "nccl", 1, "nccl on 2 ranks needs 2 GPUs"),
        ("moments in fp64", "gloo", 0, ""),
        ("moments in fp64", "mixed", 1, ""),  # on one rank, which is on the CPU
        ("masks keyed by rank", "gloo", 0, ""),
        ("masks keyed by rank", "mixed", 1, "same-everywhere says nothing of ranks on cpu cuda"),
    ],
)
def test_a_fault_that_cannot_be_shown_says_why(fault: str, backend: str, gpus: int, said: str) -> None:
    """Its claim must be applicable there: a control that does not hold would be taken for a weakness of the suite."""
    reason = untried(named(fault), backend, gpus)
    assert reason.startswith(said)
    assert bool(reason) == bool(said)
