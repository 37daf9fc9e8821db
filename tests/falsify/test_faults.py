"""The power gate: a fault counts as seen only if its own claim falls for its own reason, and holds without it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from andon_falsify.claims import CLAIMS, claims_of, replicas_agree
from andon_falsify.claims.evidence import of_trace
from andon_falsify.loops.subject import LoopSubject
from andon_falsify.peers.plain import PlainLoop
from andon_falsify.ranks.pool import RankPools
from andon_falsify.verdict import Counterexample, Outcome, conclude
from falsify.power import looped, registry
from falsify.power.laboratory import Attempt, LoopLaboratory, TrialResult
from falsify.power.looped import make, named
from falsify.power.looped.fault import SGD, LoopFault, Outside

ROOT = Path(__file__).parents[2]
CLAIM = {claim.name: claim for claim in CLAIMS}


def test_every_claim_has_a_fault_that_it_must_see() -> None:
    assert {fault.claim for fault in registry.FAULTS} == {claim.name for claim in claims_of("trainer")}


def observed(claim: str, signature: str, *found: Counterexample) -> TrialResult:
    return TrialResult({claim: conclude(CLAIM[claim], 1, found)}, signature)


FALLEN = observed("norm-law", "wrong", Counterexample("the reported norm is not that of the reference", "step 1"))
KILL = Attempt("norm-law", "step 1: the reported norm", {"without it": observed("norm-law", "right")}, FALLEN)


@pytest.mark.parametrize(
    ("attempt", "problem"),
    [
        (KILL, None),
        (replace(KILL, planted=replace(FALLEN, signature="right")), "the fault changed nothing"),
        (replace(KILL, claim="schedule"), "not seen by schedule; fallen: ('norm-law',)"),
        (replace(KILL, reason="of another"), "seen for another reason than 'of another'"),
        (replace(KILL, controls={"without it": FALLEN}), "without it: norm-law: falsified"),
    ],
)
def test_a_kill_needs_the_claim_the_reason_a_change_and_a_control(attempt: Attempt, problem: str | None) -> None:
    assert attempt.problems == [] if problem is None else any(each.startswith(problem) for each in attempt.problems)


CLAIMED = {
    "trainer": {fault.name: fault.claim for fault in registry.FAULTS},
    "loops": {fault.name: getattr(fault.outside, "claim", None) for fault in looped.FAULTS},
}


@pytest.mark.parametrize("part", CLAIMED)
def test_the_frozen_rows_name_every_fault_with_its_claim(part: str) -> None:
    """`benchmarks.freeze --write` writes them; here nothing is run."""
    rows = json.loads((ROOT / "tests" / "golden" / f"{part}.json").read_text(encoding="utf-8"))
    assert {row["fault"]: row.get("claim") for row in rows} == CLAIMED[part]
    assert [row for row in rows if row.get("problems")] == []
    assert [row for row in rows if "claim" not in row and not row["not shown"]] == []


SHOWN = {fault.name: fault.outside for fault in looped.FAULTS if isinstance(fault.outside, Outside)}
DEFAULT = [name for name in SHOWN if name[:3] in "F01 F17 F37 F41 F46 F58 F61 F68 F76 F85 F88"]
PLACES = ((2,),)


class Idle(LoopFault):
    name, right = PlainLoop.__name__, PlainLoop


@pytest.fixture(scope="module")
def laboratory(pools: RankPools) -> LoopLaboratory:
    return LoopLaboratory(pools)


@pytest.mark.parametrize(
    "name",
    # Deep: the default run plants one fault for each claim.
    [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.deep) for name in SHOWN],
)
def test_a_planted_fault_falls_by_its_claim_for_its_reason(laboratory: LoopLaboratory, name: str) -> None:
    assert laboratory.attempt(named(name)).problems == []


def test_the_default_run_plants_a_fault_for_every_claim_that_one_names() -> None:
    claims = {outside.claim for outside in SHOWN.values()}
    assert {SHOWN[name].claim for name in DEFAULT} == claims <= {claim.name for claim in claims_of("loop")}
    assert len({fault.name for fault in looped.FAULTS}) == len(looped.FAULTS)


def test_a_fault_that_changes_nothing_is_no_kill(laboratory: LoopLaboratory) -> None:
    changed, seen = laboratory.attempt(Idle("F00", "idle", PlainLoop, "", Outside("gradient-law", ""))).problems
    assert (changed, seen[:46]) == ("the fault changed nothing", "not seen by gradient-law; fallen: none; gradie")
    with pytest.raises(ValueError, match="no claim sees F71 tied weights untied: the loop brings"):
        laboratory.attempt(named("F71 tied weights untied"))
    with pytest.raises(KeyError, match="F16 sum"):
        make(SGD.but(fault="F16 sum"))


def test_weights_that_are_broadcast_behind_the_step_are_no_difference(pools: RankPools) -> None:
    """The seed's workers differ in gradients and optimizer moments, and continue with equal weights."""
    trace = LoopSubject("andon_falsify.peers.seed:SeedLoop", pools=pools).run(SGD.but(momentum=0.9))
    verdict = replicas_agree.check(of_trace(trace))
    assert verdict.outcome is Outcome.FALSIFIED
    digests = {step.number: {entry.weights for entry in step.ranks} for step in trace.seen.steps}
    assert {number: len(held) for number, held in digests.items()} == dict.fromkeys(digests, 1)
    assert all(len({entry.optimizer for entry in step.ranks}) == 2 for step in trace.seen.steps)
