"""The power gate counts a kill only if the fault's own claim falls for its own reason, and holds without the fault."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from andon_contracts.policy import enforced
from andon_falsify.claims.evidence import Evidence
from andon_falsify.claims.functions import TABLES, Tabulated
from andon_falsify.claims.of_trainer import CLAIMS
from andon_falsify.claims.table import CHECKERS
from andon_falsify.compliance.power import Laboratory
from andon_falsify.faults import causal, looped, registry
from andon_falsify.faults.own_promises import MEMORY
from andon_falsify.faults.planting import Fault
from andon_falsify.faults.seed_mutants import ADDED, CAUGHT, MISSED
from andon_falsify.ranks.pool import RankPools
from andon_falsify.ranks.trainer import AndonTrainer
from andon_falsify.subjects.case import make_rows
from andon_falsify.verdict import Counterexample, Verdict, conclude

ROOT = Path(__file__).parents[2]
LABORATORY = Laboratory(AndonTrainer(RankPools()))
UNDIVIDED = registry.named("average without division")


def test_every_claim_has_a_fault_that_it_must_see() -> None:
    """Seed 5.1 lists 12 mutants that survived, 12 that were killed and 11 to add; 5 faults are of memory."""
    assert [len(faults) for faults in (MISSED, CAUGHT, ADDED, MEMORY)] == [12, 12, 11, 5]
    assert {fault.claim for fault in registry.FAULTS} == {claim.name for claim in CLAIMS}


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (UNDIVIDED, None),
        (Fault("idle", "average-law", "", lambda *_: None, kind="functions"), "the fault changed nothing"),
        (replace(UNDIVIDED, claim="shards-law"), "not seen by shards-law; fallen: none"),
        (replace(UNDIVIDED, reason="of another"), "seen for another reason than 'of another'"),
    ],
)
def test_a_kill_needs_the_claim_the_reason_and_a_change(fault: Fault, problem: str | None) -> None:
    """Being noticed by another claim, or by chance, is not enough."""
    found = LABORATORY.attempt(fault, "inline").problems
    assert found == [] if problem is None else any(each.startswith(problem) for each in found)


def test_a_check_that_falls_whenever_contracts_are_off_kills_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It falls without the fault too, even in the words of the fault's reason."""
    claim = next(claim for claim in CLAIMS if claim.name == UNDIVIDED.claim)

    def falls() -> Tabulated:
        wrong = [] if enforced() else [Counterexample("[[1.0, 2.0], [3.0, 6.0]]: seen [4.0, 8.0]")]
        return Tabulated(conclude(claim, 1, wrong), "")

    monkeypatch.setitem(TABLES, claim.name, falls)
    problems = Laboratory(AndonTrainer(RankPools())).attempt(UNDIVIDED, "inline").problems
    assert any(each.startswith("without the fault and contracts: average-law: falsified") for each in problems)


@pytest.mark.deep  # it trains; the test above plants such a check where nothing is trained
def test_a_claim_of_a_run_that_falls_whenever_contracts_are_off_kills_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for our trainer."""
    summed = registry.named("sum instead of mean")
    short, checker = replace(summed, case=summed.case.but(rows=make_rows(5))), CHECKERS[summed.claim]
    assert LABORATORY.attempt(short, "inline").problems == []

    def falls(evidence: Evidence) -> Verdict:
        wrong = Counterexample("", "step 1", ratio=5.0, equals="5.000 = batch 5")
        return conclude(checker.claim, 1, [] if evidence.sightings.case.contracts else [wrong])

    monkeypatch.setitem(CHECKERS, summed.claim, replace(checker, check=falls))  # type: ignore[arg-type]
    problems = Laboratory(AndonTrainer(RankPools())).attempt(short, "inline").problems
    assert any(each.startswith("without the fault and contracts: gradient-law: falsified") for each in problems)


said = cache(causal.attempt)


@pytest.mark.parametrize(
    "fault",
    [
        # Deep: each check has a fault that the default run plants.
        pytest.param(fault, id=fault.name, marks=() if place in (0, 4, 6) else pytest.mark.deep)
        for place, fault in enumerate(causal.FAULTS)
    ],
)
def test_a_fault_of_instruction_tuning_is_seen_by_its_check_for_its_reason(fault: causal.CausalFault) -> None:
    """No check says anything of the case without it."""
    control, planted = said(fault.case), said(fault.case, fault.plant)
    assert causal.problems(fault, control, planted) == []
    (silent,) = causal.problems(fault, control, {})
    (otherwise,) = causal.problems(replace(fault, reason="of another"), control, planted)
    assert (silent, otherwise[:40]) == (f"not seen by {fault.killer}", "seen for another reason than 'of another")
    assert causal.problems(fault, planted, planted)[0].startswith("without the fault, ")


def test_no_check_sees_anything_in_rows_that_are_not_packed() -> None:
    """The other controls go with the faults."""
    assert not any(said(causal.CausalCase(packed=False)).values())


FAULTS = {
    "trainer": ("mutants.md", {fault.name: fault.claim for fault in registry.FAULTS}),
    "loops": ("loop-faults.md", {fault.name: getattr(fault.outside, "claim", None) for fault in looped.FAULTS}),
    "causal": ("causal-mutants.md", {fault.name: fault.killer for fault in causal.FAULTS}),
}


@pytest.mark.parametrize("part", FAULTS)
def test_the_frozen_rows_and_the_docs_name_every_fault_with_its_claim(part: str) -> None:
    """`benchmarks.freeze --write` writes both; here nothing is run."""
    page, claims = FAULTS[part]
    rows = json.loads((ROOT / "tests" / "golden" / f"{part}.json").read_text(encoding="utf-8"))
    frozen = {row["fault"]: row.get("claim", row.get("check")) for row in rows if not row["fault"].startswith("none: ")}
    assert frozen == claims
    assert [row for row in rows if row.get("problems")] == []
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    for name, claim in claims.items():
        begins = f"| {name.replace(' ', ' | ', 1) if part == 'loops' else name} | " if claim else f"- {name}: "
        mark = "**KILLED**" if part == "causal" else f"| {claim} | " if claim else ""
        assert any(line.startswith(begins) and mark in line for line in lines), name
