"""The list of faults is whole, a fault that changes nothing is an error, and what is planted is taken back."""

from __future__ import annotations

import ast
from contextlib import ExitStack
from pathlib import Path

import pytest

from andon.gradients import average_gradients
from andon_contracts.policy import suspended
from andon_contracts.violation import Violation
from andon_falsify import compliance
from andon_falsify.claims.of_trainer import CLAIMS
from andon_falsify.compliance.power import Laboratory, matrix
from andon_falsify.faults import registry
from andon_falsify.faults.own_promises import MEMORY
from andon_falsify.faults.planting import SGD, Fault, body_replaced
from andon_falsify.faults.seed_mutants import ADDED, CAUGHT, MISSED
from andon_falsify.ranks.pool import RankPools
from andon_falsify.ranks.trainer import AndonTrainer
from andon_falsify.subjects.case import Case, make_rows

NAMES = {claim.name for claim in CLAIMS}
LABORATORY = Laboratory(AndonTrainer(RankPools()))


def test_every_mutant_of_the_seed_is_there() -> None:
    """Seed 5.1 lists 12 that survived, 12 that were killed and 11 to add; issue 2 adds 5 of memory."""
    sizes = [len(faults) for faults in (MISSED, CAUGHT, ADDED, MEMORY)]
    assert sizes == [12, 12, 11, 5]
    assert len({fault.name for fault in registry.FAULTS}) == len(registry.FAULTS)


def test_every_claim_can_fall() -> None:
    """For each claim there is a fault that it must see, and for each fault a claim that exists."""
    assert {fault.claim for fault in registry.FAULTS} == NAMES


def test_every_claim_has_a_compliance_test() -> None:
    """A claim without a test would never be checked."""
    folder = Path(compliance.__path__[0])
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in folder.glob("test_*.py")]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    marked = [call for call in calls if ast.unparse(call.func) == "pytest.mark.claim"]
    assert {ast.literal_eval(argument) for call in marked for argument in call.args} == NAMES


def _nothing(*_: object) -> None:
    """Plants nothing."""


def test_a_fault_that_changes_nothing_is_an_error_of_the_suite() -> None:
    """It would be counted as survived or killed for a reason that is not its own."""
    idle = Fault("idle", "", "replicas-agree", _nothing, SGD)
    registry._BY_NAME["idle"] = idle
    try:
        trial = LABORATORY.attempt(idle, "inline")
    finally:
        del registry._BY_NAME["idle"]
    assert "the fault changed nothing" in trial.problems
    assert not trial.killed


def test_a_fault_named_for_the_wrong_claim_is_not_killed() -> None:
    """Being noticed by another claim is not enough."""
    right = registry.named("average without division")
    wrong = Fault(right.name, right.source, "shards-law", right.plant, right.case, right.kind)
    assert any("not seen by shards-law" in problem for problem in LABORATORY.attempt(wrong, "inline").problems)


def test_a_replaced_body_stays_under_its_contract_and_is_taken_back() -> None:
    """With the contract on the mutant raises, without it lies, and afterwards the function is what it was."""

    def zeros(grads: list[list[float]]) -> list[float]:
        return [0.0 for _ in grads[0]]

    with ExitStack() as stack:
        body_replaced(stack, average_gradients, zeros)
        with pytest.raises(Violation):
            average_gradients([[1.0], [3.0]])
        with suspended():
            assert average_gradients([[1.0], [3.0]]) == [0.0]
    assert average_gradients([[1.0], [3.0]]) == [2.0]


def test_the_matrix_names_fault_claim_and_contract() -> None:
    """One row a fault, its own claim marked, the others that fell beside it."""
    trial = LABORATORY.attempt(registry.named("average without division"), "inline")
    header, _, row = matrix([trial]).splitlines()
    assert header == "| fault | source | backend | contract | average-law |"
    assert row == "| average without division | seed 5.1, killed | inline | gradient-average | **KILLED** |"


def test_rows_are_sorted_by_label_and_are_texts() -> None:
    """Contiguous shards see different classes, and the coordinator can take the same rows as texts."""
    rows = make_rows(20, 3)
    assert list(rows.labels) == sorted(rows.labels)
    assert set(rows.labels) == {0, 1, 2}
    assert all(33 <= token < 127 for row in rows.tokens for token in row)
    assert make_rows(20, 3) == rows != make_rows(20, 4)


def test_a_case_says_what_is_special_about_it() -> None:
    """Counterexamples name their case."""
    assert "optimizer=sgd" in str(Case(optimizer="sgd"))
    assert "world" not in str(Case(optimizer="sgd"))
