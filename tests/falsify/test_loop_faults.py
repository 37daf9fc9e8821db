"""The suite sees what is wrong with a foreign loop: a planted fault for each claim, and what is no fault."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from andon_falsify.claims.of_loop import CLAIMS, verdicts
from andon_falsify.compliance.loop_power import LoopLaboratory
from andon_falsify.faults.looped import FAULTS, make, named
from andon_falsify.faults.looped.fault import SGD, LoopFault, Outside
from andon_falsify.loops.subject import LoopSubject
from andon_falsify.peers.plain import PlainLoop
from andon_falsify.ranks.pool import RankPools
from andon_falsify.verdict import Outcome

SHOWN = {fault.name: fault.outside for fault in FAULTS if isinstance(fault.outside, Outside)}
FIRST = {
    "base-frozen": "F68 base touched",
    "evaluation-law": "F85 evaluation pads with repeats",
    "gradient-law": "F17 mean of ranks' means",
    "halt-together": "F41 NaN hidden by nan_to_num",
    "losses-close": "F88 loss of one rank reported",
    "randomness-apart": "F58 training in evaluation mode",
    "replicas-agree": "F01 initial weights differ",
    "resume-equal": "F76 moments permuted",
    "samples-once": "F46 sampler pads with repeats",
    "schedule": "F61 scheduler for each micro-batch",
    "update-law": "F37 clip norm summed over replicas",
}
"""By claim, the fault that the default run plants."""
pytestmark = pytest.mark.xdist_group("test_loop_faults")


class Idle(LoopFault):
    """A fault that is none: what is planted is the right loop."""

    name, right = PlainLoop.__name__, PlainLoop


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    """Ranks for all tests of this file, there before a test looks which processes there are."""
    with RankPools() as held:
        held.of(2).run("builtins:repr", "")
        yield held


@pytest.fixture(scope="module")
def laboratory(pools: RankPools) -> LoopLaboratory:
    """What it has seen of right loops serves all tests."""
    return LoopLaboratory(pools)


@pytest.mark.parametrize(
    "name",
    # Deep: the default run plants one fault for each claim.
    [pytest.param(name, marks=() if name in FIRST.values() else pytest.mark.deep) for name in SHOWN],
)
def test_a_planted_fault_falls_by_its_claim_for_its_reason(laboratory: LoopLaboratory, name: str) -> None:
    """It changes what is seen, the right loop holds on every claim, and a counterexample says what is wrong."""
    assert laboratory.attempt(named(name)).problems == []


def test_every_claim_that_a_fault_names_has_one_in_the_default_run() -> None:
    """Names are distinct, and claims exist."""
    assert {claim: SHOWN[name].claim for claim, name in FIRST.items()} == {claim: claim for claim in FIRST}
    assert FIRST.keys() == {outside.claim for outside in SHOWN.values()} <= {claim.name for claim in CLAIMS}
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_a_fault_that_changes_nothing_is_no_kill(laboratory: LoopLaboratory) -> None:
    """Two runs of one loop leave the same; a loop without a claim, or of another name, is refused."""
    changed, seen = laboratory.attempt(Idle("F00", "idle", PlainLoop, "", Outside("gradient-law", ""))).problems
    assert (changed, seen[:46]) == ("the fault changed nothing", "not seen by gradient-law; fallen: none; gradie")
    with pytest.raises(ValueError, match="no claim sees F71 tied weights untied: whether"):
        laboratory.attempt(named("F71 tied weights untied"))
    with pytest.raises(KeyError, match="F16 sum"):
        make(SGD.but(fault="F16 sum"))


def test_weights_that_are_broadcast_behind_the_step_are_no_difference(pools: RankPools) -> None:
    """The seed's workers differ in the gradient and in what the optimizer remembers, not in what they go on with."""
    trace = LoopSubject("andon_falsify.peers.seed:make", pools=pools).run(SGD.but(momentum=0.9))
    verdict = verdicts(trace)["replicas-agree"]
    assert verdict.outcome is Outcome.FALSIFIED
    digests = {step.number: {entry.weights for entry in step.ranks} for step in trace.seen.steps}
    assert {number: len(held) for number, held in digests.items()} == dict.fromkeys(digests, 1)
    assert all(len({entry.optimizer for entry in step.ranks}) == 2 for step in trace.seen.steps)
