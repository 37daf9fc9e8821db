"""Foreign loops in real processes: a right one holds on every claim, a wrong one falls by the claim that names it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from andon_falsify.campaign.loop_bench import LoopBench, judge_evaluation, judge_further, judge_loop
from andon_falsify.campaign.trial import LAW, Trial
from andon_falsify.checkers import halts, resume_equal
from andon_falsify.claims.alike import across
from andon_falsify.claims.diagnosis import comparisons
from andon_falsify.claims.of_loop import CLAIMS, verdicts
from andon_falsify.claims.statements import RANDOMNESS
from andon_falsify.loops.subject import LoopSubject
from andon_falsify.loops.task import loop_case, shaped
from andon_falsify.ranks.pool import RankPools
from andon_falsify.subjects.case import Case, make_rows
from andon_falsify.verdict import Outcome, Verdict

WORLDS = (1, 2, 3)
pytestmark = pytest.mark.xdist_group("test_loops")
HERE = "tests.falsify.loop_subjects"
PEERS = "andon_falsify.peers"
CLIPPED = loop_case()
EVERY_WEIGHT = loop_case(rank=0, lr=1e-3)
SGD = loop_case(optimizer="sgd", lr=0.05, clip_norm=None, weight_decay=0.0)
FEW = SGD.but(rows=make_rows(13))


def falsified(found: Mapping[str, Verdict]) -> set[str]:
    return {name for name, verdict in found.items() if verdict.outcome is Outcome.FALSIFIED}


@pytest.mark.parametrize(
    ("case", "others"),
    [
        (CLIPPED.but(rows=make_rows(13)), [shaped(CLIPPED.but(rows=make_rows(13)), 1, 1)]),
        (shaped(FEW, 1, 4), [shaped(FEW, 2, 1)]),
        (shaped(FEW, 3, 2), []),
    ],
    ids=["AdamW clipped on 2", "SGD on 1", "SGD on 3"],
)
def test_a_right_loop_holds_on_every_claim(pools: RankPools, case: Case, others: list[Case]) -> None:
    found = judge_loop(LoopSubject(f"{PEERS}.plain:make", pools=pools), case, others)
    open_ = {"same-everywhere"} if not others else set()
    alone = {"replicas-agree", "layout-equal", "randomness-apart"} if case.world == 1 else set()
    other = {name: str(verdict) for name, verdict in found.items() if verdict.outcome is not Outcome.HOLDS}
    assert other.keys() == open_ | alone
    assert found.keys() == {claim.name for claim in CLAIMS}
    assert all(found[name].why for name in open_ | alone)


@pytest.mark.parametrize(("loop", "fallen"), [("Relabelled", "samples-once"), ("OddRate", "schedule")])
def test_a_wrong_loop_falls_by_the_claim_that_names_its_fault(pools: RankPools, loop: str, fallen: str) -> None:
    found = verdicts(LoopSubject(f"{HERE}:{loop}", pools=pools).run(SGD))
    assert falsified(found) == {fallen}, "\n".join(map(str, found.values()))


@pytest.mark.parametrize(
    ("loop", "case"),
    [
        ("TensorRate", SGD),
        ("DecoupledAdam", CLIPPED),
        ("SeldomTold", SGD),
        ("InStep", SGD),
        ("Measuring", SGD),
        ("Measuring", CLIPPED),
        ("Declared", EVERY_WEIGHT),
        ("Exempting", EVERY_WEIGHT),
    ],
)
def test_a_right_loop_that_is_written_otherwise_holds(pools: RankPools, loop: str, case: Case) -> None:
    found = verdicts(LoopSubject(f"{HERE}:{loop}", pools=pools).run(case))
    assert {verdict.outcome for verdict in found.values()} == {Outcome.HOLDS}, "\n".join(map(str, found.values()))


@pytest.mark.parametrize(
    ("loop", "said"), [("InTurn", "several optimizers"), ("DealtOut", "the ranks' optimizers share out")]
)
def test_a_design_that_cannot_be_judged_is_not_falsified(pools: RankPools, loop: str, said: str) -> None:
    bench = LoopBench(LoopSubject(f"{HERE}:{loop}", pools=pools), loop)
    found = bench.attempt(Trial(LAW, SGD))
    assert {verdict.outcome for verdict in found.values()} == {Outcome.UNKNOWN}
    assert all(said in verdict.why for verdict in found.values())


def test_an_evaluation_in_training_mode_is_seen(pools: RankPools) -> None:
    """Without dropout it is right; the case that draws whether ranks draw apart shows it."""
    wrong, right = (LoopSubject(name, pools=pools) for name in (f"{HERE}:Dropping", f"{PEERS}.plain:make"))
    trace = wrong.run(SGD)
    assert verdicts(trace)["evaluation-law"].outcome is Outcome.HOLDS
    fallen = judge_evaluation(wrong, trace)
    assert fallen.outcome is Outcome.FALSIFIED
    assert "with dropout in the model" in str(fallen)
    assert judge_evaluation(right, right.run(SGD)).outcome is Outcome.HOLDS


def test_a_row_that_counts_for_nothing_was_not_visited(pools: RankPools) -> None:
    found = verdicts(LoopSubject(f"{HERE}:Muted", pools=pools).run(SGD))["samples-once"]
    told = [(each.what, each.expected) for each in found.counterexamples]
    assert told == [("rows that were never visited", "rows 5")] * SGD.epochs
    assert found.why == "forward passes of rows 5 counted for nothing, by their gradient, and are no visits"


def test_an_update_without_rows_is_compared_with_another_run(pools: RankPools) -> None:
    subject = LoopSubject(f"{HERE}:OnceMore", pools=pools)
    trace = subject.run(SGD)
    assert falsified(verdicts(trace)) == {"samples-once"}
    assert across([trace, subject.run(shaped(SGD, 1, 1))]).outcome is Outcome.HOLDS


def test_training_without_its_dropout_is_seen_on_one_rank(pools: RankPools) -> None:
    case = SGD.but(world=1, micro_batches=1)
    wrong = LoopSubject("andon_falsify.faults.looped.rows:NeverTraining", pools=pools)
    right = LoopSubject(f"{PEERS}.plain:make", pools=pools)
    fallen, none = (judge_further(RANDOMNESS, subject, subject.run(case)) for subject in (wrong, right))
    assert str(fallen.counterexamples[0]).startswith("step 2, rank 0: training goes on without dropout")
    assert (none.outcome, none.why) == (Outcome.NOT_APPLICABLE, "one rank has nobody to draw the same as")


def test_what_an_evaluation_changes_is_seen_of_any_model(pools: RankPools) -> None:
    """Of one that the reference does not know too; statistics that a rank takes over from rank 0 are no change."""
    steps = "andon_falsify.faults.looped.reporting:SteppingEvaluation"
    loops = (f"{HERE}:OwnModelEvaluating", f"{HERE}:TakingOver", steps)
    changing, right, stepping = (verdicts(LoopSubject(name, pools=pools).run(SGD)) for name in loops)
    assert falsified(stepping) == {"evaluation-law"}
    (said,) = changing["evaluation-law"].counterexamples
    assert str(said).startswith("after the last update: the evaluation changed 1 tensors of the model")
    assert right["evaluation-law"].outcome is Outcome.HOLDS
    assert falsified(right) == {"replicas-agree"}


def test_a_wrong_gradient_is_named_by_what_was_not_divided_or_counts_more(pools: RankPools) -> None:
    undivided, twice = (LoopSubject(f"{HERE}:{name}", pools=pools).run(SGD) for name in ("Undivided", "Twice"))
    for trace in (undivided, twice):
        assert falsified(verdicts(trace)) == {"gradient-law", "losses-close"}
    (first, *_) = verdicts(undivided)["gradient-law"].counterexamples
    assert first.equals.startswith("4.000 = accumulation 2 x world 2")
    assert [round(each.ratio or 0, 3) for each in comparisons(undivided)] == [4.0] * 6
    shares = next(each.shares for each in comparisons(twice) if 5 in each.shares)
    assert {row: round(times, 2) for row, times in shares.items() if round(times, 2) != 1} == {5: 2.0}
    assert "row 5 counts 2 times" in str(verdicts(twice)["gradient-law"])


def test_the_tutorial_of_ddp_takes_a_mean_of_means(pools: RankPools) -> None:
    """31 rows, 2 ranks, 2 micro-batches: the last update is 3, 1, 3, 1 rows, the first two are right; a row repeats."""
    subject = LoopSubject(f"{PEERS}.ddp:make", pools=pools)
    trace = subject.run(SGD)
    found = verdicts(trace)
    assert falsified(found) == {"gradient-law", "samples-once"}
    assert "the mean of the means of 4 micro-batches (of 3, 1, 3, 1 rows)" in str(found["gradient-law"])
    assert [each.step for each in comparisons(trace) if each.relative > 0.1] == [3, 6]
    assert "32 visits of 31 rows" in str(found["samples-once"])
    assert across([trace, subject.run(shaped(SGD, 1, 2))]).outcome is Outcome.FALSIFIED


def test_a_short_window_that_is_divided_as_a_full_one_is_named_so(pools: RankPools) -> None:
    """10 rows as 8 and 2: 1 of 2 micro-batches on each rank. What is 1/2 of full windows too, is no matter of them."""
    case = SGD.but(rows=make_rows(10), batch_size=8)
    short = verdicts(LoopSubject(f"{PEERS}.ddp:make", pools=pools).run(case))["gradient-law"]
    said = "0.500 = 1 of 2 micro-batches: a short window is divided as a full one"
    assert [(each.where, each.equals) for each in short.counterexamples] == [("step 2", said), ("step 4", said)]
    halved = verdicts(LoopSubject(f"{HERE}:Halved", pools=pools).run(case))["gradient-law"]
    everywhere = "0.500 = 1 / accumulation 2 or 1 / rows 2 or 1 / world 2"
    assert [each.equals for each in halved.counterexamples] == [everywhere] * 4


def test_a_resume_without_moments_and_a_step_on_nan_are_seen(pools: RankPools) -> None:
    forgetful, careless = (LoopSubject(f"{HERE}:{name}", pools=pools) for name in ("Forgetful", "Careless"))
    assert judge_further(resume_equal.CLAIM, forgetful, forgetful.run(CLIPPED)).outcome is Outcome.FALSIFIED
    assert judge_further(halts.CLAIM, careless, careless.run(SGD)).outcome is Outcome.FALSIFIED


def test_a_model_of_the_loops_own_is_judged_by_its_own_forward_pass(pools: RankPools) -> None:
    case = SGD.but(optimizer="sgd", momentum=0.0)
    right, wrong = (
        verdicts(LoopSubject(f"{HERE}:{name}", pools=pools).run(case)) for name in ("OwnModel", "OwnModelWrong")
    )
    assert not falsified(right), "\n".join(map(str, right.values()))
    assert right["gradient-law"].outcome is Outcome.HOLDS
    assert "not independent" in right["gradient-law"].why
    assert right["evaluation-law"].outcome is Outcome.NOT_APPLICABLE
    assert falsified(wrong) == {"gradient-law"}
