"""The suite sees the faults planted in a foreign loop, and refuses a fault that changes nothing."""

from __future__ import annotations

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
DEFAULT = (
    "F01 initial weights differ",
    "F17 mean of ranks' means",
    "F37 clip norm summed over replicas",
    "F41 NaN hidden by nan_to_num",
    "F46 sampler pads with repeats",
    "F58 training in evaluation mode",
    "F61 scheduler for each micro-batch",
    "F68 base touched",
    "F76 moments permuted",
    "F85 evaluation pads with repeats",
    "F88 loss of one rank reported",
)
WORLDS = (2,)
pytestmark = pytest.mark.xdist_group("test_loop_faults")


class Idle(LoopFault):
    """A fault that is none: what is planted is the right loop."""

    name, right = PlainLoop.__name__, PlainLoop


@pytest.fixture(scope="module")
def laboratory(pools: RankPools) -> LoopLaboratory:
    """What it has seen of right loops serves all tests."""
    return LoopLaboratory(pools)


@pytest.mark.parametrize(
    "name",
    # Deep: the default run plants one fault for each claim.
    [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.deep) for name in SHOWN],
)
def test_a_planted_fault_falls_by_its_claim_for_its_reason(laboratory: LoopLaboratory, name: str) -> None:
    """It changes what is seen, the right loop holds on every claim, and a counterexample says what is wrong."""
    assert laboratory.attempt(named(name)).problems == []


def test_the_default_run_plants_a_fault_for_every_claim_that_one_names() -> None:
    """Claims exist, and names are distinct."""
    claims = {outside.claim for outside in SHOWN.values()}
    assert {SHOWN[name].claim for name in DEFAULT} == claims <= {claim.name for claim in CLAIMS}
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
