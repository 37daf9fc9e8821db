"""Loops of other libraries, with their known figures, and loops that misbehave, which leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from andon_falsify.campaign.loop_bench import LoopBench
from andon_falsify.campaign.trial import LAW, Trial
from andon_falsify.claims.of_loop import verdicts
from andon_falsify.loops.subject import LoopSubject
from andon_falsify.loops.task import loop_case
from andon_falsify.peers.registry import PEERS, Peer
from andon_falsify.ranks.pool import RankPools
from andon_falsify.subjects.case import Case, make_rows
from andon_falsify.verdict import Outcome, Verdict
from tests.falsify.loop_subjects import COMMAND

WORLDS = (1, 2)
pytestmark = pytest.mark.xdist_group("test_peers")
SGD = {"optimizer": "sgd", "lr": 0.05, "clip_norm": None, "weight_decay": 0.0, "epochs": 1}
EVEN = loop_case(rows=make_rows(24), **SGD)
"""24 rows in two batches of 12: 2 ranks x 2 micro-batches of 3 rows, nothing ragged."""


def judged(name: str, case: Case, pools: RankPools) -> dict[str, Verdict]:
    peer = PEERS[name]
    if not peer.as_measured:
        pytest.skip(_why(peer))
    trace = LoopSubject(peer.make, name, pools).run(case)
    assert not trace.errors, trace.errors
    return verdicts(trace)


def _why(peer: Peer) -> str:
    wanted = ", ".join(f"{name} {version}" for name, version in peer.measured.items())
    return peer.missing or f"the figures are those of {wanted}; installed is {peer.version}"


def test_hf_trainer_multiplies_by_accumulation_and_world(pools: RankPools) -> None:
    """With default arguments the gradient of a classifier is 2 x 2 times the law, and so is the loss that is logged."""
    found = judged("hf_trainer", EVEN, pools)
    for claim in ("gradient-law", "losses-close"):
        assert found[claim].outcome is Outcome.FALSIFIED
        assert "ratio 4.000 = accumulation 2 x world 2" in str(found[claim])
    assert found["evaluation-law"].counterexamples[0].ratio == pytest.approx(2.0, rel=1e-3)


# By default the accelerate loop with sums, and test_loops.py, show these verdicts.
@pytest.mark.deep
def test_hf_trainer_mended_is_right_on_even_batches(pools: RankPools) -> None:
    found = judged("hf_trainer_mended", EVEN, pools)
    held = [found[claim].outcome for claim in ("gradient-law", "losses-close", "samples-once", "update-law")]
    assert held == [Outcome.HOLDS] * 4, found


@pytest.mark.deep
def test_hf_trainer_mended_still_averages_means_in_a_ragged_window(pools: RankPools) -> None:
    """One rank, 11 rows as 2 x 4 and the rest: the rest's window is 2 rows and 1, and their means are averaged."""
    case = loop_case(rows=make_rows(11), batch_size=8, micro_batches=4, world=1, **SGD)
    found = judged("hf_trainer_mended", case, pools)["gradient-law"]
    assert found.outcome is Outcome.FALSIFIED
    assert [each.where for each in found.counterexamples] == ["step 2"]
    assert "mean of the means of 2 micro-batches (of 2, 1 rows)" in str(found)


def test_accelerate_visits_sixteen_rows_of_ten(pools: RankPools) -> None:
    case = loop_case(rows=make_rows(10), batch_size=8, micro_batches=2, **SGD)
    found = judged("accelerate", case, pools)["samples-once"]
    assert found.outcome is Outcome.FALSIFIED
    assert "16 visits of 10 rows" in str(found)
    assert "(2 times)" in str(found)


@pytest.mark.parametrize("case", [loop_case(rows=make_rows(13), batch_size=8), EVEN], ids=["ragged", "even"])
def test_accelerate_with_sums_is_right(pools: RankPools, case: Case) -> None:
    found = judged("accelerate_right", case, pools)
    assert {name: str(verdict) for name, verdict in found.items() if verdict.outcome is not Outcome.HOLDS} == {}


MISBEHAVING = "tests.falsify.loop_subjects"
TRIAL = Trial(LAW, loop_case(epochs=1))


@pytest.fixture
def patient() -> Iterator[RankPools]:
    with RankPools(deadline_s=60.0, grace_s=1.0) as held:
        yield held


def bench(make: str, patient: RankPools) -> LoopBench:
    return LoopBench(LoopSubject(make if ":" in make else f"{MISBEHAVING}:{make}", make, patient), make)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        ("tests.falsify.absent:make", "No module named 'tests.falsify.absent'"),
        ("tests.falsify.broken_subject:make", "OSError: no licence was found"),
        ("not_a_function", "names no function"),
        ("nothing", "NoneType is no loop"),
        ("WithoutTrain", "has no method `train(told)`"),
        ("WithoutModel", "it has no attribute `model` (needed are `model`, a torch module, wrapped"),
        ("WithEmptyModel", "its `model` is None"),
        ("killed", "rank 1 was killed by SIGKILL"),
        ("exiting", "rank 1 ended with exit code 7"),
        ("leaving", "rank 1: SystemExit: enough at "),
        ("raising", "rank 1: ArithmeticError: nothing adds up at "),
        ("lying", "it says it is one of 1 ranks, but 2 were started"),
    ],
)
def test_what_a_subject_does_wrong_is_named(patient: RankPools, make: str, said: str) -> None:
    """Every claim of the trial is unknown for one reason in one line: the first cause, not what other ranks saw."""
    found = bench(make, patient).attempt(TRIAL)
    assert {verdict.outcome for verdict in found.values()} == {Outcome.UNKNOWN}
    (why,) = {verdict.why for verdict in found.values()}
    assert said in why
    assert "\n" not in why
    assert len(found) > 5


def test_what_a_subject_leaves_running_is_named_and_ended(patient: RankPools) -> None:
    found = bench("littering", patient).attempt(TRIAL)
    assert {verdict.outcome for verdict in found.values()} == {Outcome.UNKNOWN}
    assert all(f"({' '.join(COMMAND)})" in verdict.why for verdict in found.values())
    assert [process.pid for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == [*COMMAND]] == []


@pytest.mark.parametrize("make", ["Waiting", "Alone"])
def test_a_deadlock_ends_with_the_deadline(make: str) -> None:
    with RankPools(deadline_s=1.0, grace_s=0.1) as patient:
        found = bench(make, patient).attempt(TRIAL)
        assert all("no answer in time (1 s); killed" in verdict.why for verdict in found.values())
        assert patient.of(2).pids == []


def test_nonsense_on_the_standard_streams_does_nothing(patient: RankPools, capfd: pytest.CaptureFixture[str]) -> None:
    found = bench("Garbling", patient).attempt(TRIAL)
    assert {verdict.outcome for verdict in found.values()} == {Outcome.HOLDS}, found
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")
