"""Trials: drawn from a seed, written down so that a command repeats them, and made smaller."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from andon_falsify.campaign.budget import BUDGETS
from andon_falsify.campaign.generator import Layout, draw
from andon_falsify.campaign.script_bench import ScriptBench
from andon_falsify.campaign.shrink import candidates, shrink
from andon_falsify.campaign.trial import FUNCTIONS, HALT, KINDS, LAW, MEMORY, RESUME, Trial, read_trial
from andon_falsify.scripts.command import Command
from andon_falsify.subjects.case import Case, Poison, Rows, make_rows

LAYOUT = Layout(("inline", "gloo"), (2, 3), (1, 2))


def drawn(seed: int = 7, budget: str = "standard", layout: Layout = LAYOUT) -> list[Trial]:
    return list(draw(seed, BUDGETS[budget], layout, KINDS))


def again(trial: Trial) -> Trial:
    backend, world, accumulation = trial.place if trial.kind != FUNCTIONS else ("inline", 2, 2)
    return read_trial(trial.written(), backend=backend, world=world, accumulation=accumulation, seed=trial.seed)


@pytest.mark.parametrize("seed", [0, 1, 7, 10**6])
def test_what_is_written_is_read_as_the_same_trial(seed: int) -> None:
    for trial in drawn(seed):
        assert again(trial) == trial


@pytest.mark.parametrize("kind", [LAW, RESUME])
def test_of_a_scripts_case_only_its_layout_is_written(kind: str) -> None:
    command = Command.read("train --world {world} --batch {local_batch} --accumulate {accumulation}")
    case = ScriptBench(command, 1.0).suited(Case(world=3, micro_batches=6))
    trial = Trial(kind, case, seed=5)
    assert json.loads(trial.written()).keys() - {"kind"} == {"batch_size"}
    read = again(trial)
    assert read.kind == kind
    assert command.words(read.case, "run") == command.words(case, "run")


def test_rows_that_were_not_drawn_are_written_out() -> None:
    rows = Rows(((40, 41), (50,), (60,)), (0, 1, 1), 2)
    trial = Trial(LAW, Case(rows=rows, batch_size=4))
    assert again(trial) == trial
    assert json.loads(trial.written())["rows"]["tokens"] == [[40, 41], [50], [60]]


def test_the_default_is_written_as_nothing() -> None:
    assert Trial(LAW, Case(world=4, backend="gloo", micro_batches=4)).written() == "{}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "is not JSON"),
        ("[]", "must be a JSON object"),
        ('{"lr": "fast", "colour": 1}', "lr must be a number from 0, not 'fast'; a case has no 'colour'"),
        ('{"kind": "dance"}', "kind must be one of law"),
        ('{"batch_size": 0}', "batch_size must be a whole number from 1, not 0"),
        ('{"epochs": true}', "epochs must be"),
        ('{"rows": [0, 1]}', "rows must be"),
        ('{"rows": {"tokens": [[]], "labels": [0], "classes": 1}}', "rows must be"),
        ('{"poison": [1, 9, "nan"]}', "poison in micro-batch 9, but there are only 4"),
        ('{"poison": [1, 0, "wine"]}', "poison must be"),
        ('{"hidden": 9}', "hidden 9 cannot be divided among 2 heads"),
        ('{"class_weights": [1.0]}', "1 class_weights for 3 classes"),
        ('{"dropout": 1}', "dropout must be a number from 0 and below 1, not 1"),
        ('{"longest": 2}', "longest is 2"),
    ],
)
def test_what_is_no_case_is_said_in_words(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        read_trial(text, backend="inline", world=2, accumulation=2, seed=0)


def test_the_same_seed_draws_the_same_and_another_one_others() -> None:
    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)
    by_backend = [
        [trial.case.but(backend="") for trial in drawn() if trial.place[0] == backend and trial.kind == LAW]
        for backend in LAYOUT.backends
    ]
    assert by_backend[0] == by_backend[1]


def test_what_else_is_selected_changes_no_case() -> None:
    """A case is drawn for its place alone: with fewer worlds those that stay are the same."""
    fewer = drawn(layout=Layout(("inline",), (3,), (2,)))
    assert {trial for trial in fewer if trial.kind == LAW} <= set(drawn())


@pytest.mark.parametrize("seed", [0, 1, 7, 10**6])
def test_drawn_cases_are_what_the_claims_need(seed: int) -> None:
    """Different rows on each rank, ragged ends, SGD without clipping and AdamW with it; a cut behind a checkpoint."""
    trials = drawn(seed)
    for trial in trials:
        case = trial.case
        updates = -(-len(case.rows) // case.batch_size) * case.epochs
        if trial.kind in (LAW, HALT, RESUME):
            assert case.batch_size % (case.world * case.accumulation) == 0
            assert case.local_batch * case.accumulation * case.world == case.batch_size
        if trial.kind == HALT:
            assert case.poison is not None
            assert case.poison.step * case.batch_size <= len(case.rows)
            assert case.poison.leaf < case.micro_batches
        if trial.kind == RESUME:
            assert case.stop_after is not None
            assert case.checkpoint_every is not None
            assert case.checkpoint_every < case.stop_after < updates
            assert trial.then_world in LAYOUT.worlds
            assert case.optimizer == "adamw" or case.momentum  # else nobody notices that its state was lost
    laws = [trial.case for trial in trials if trial.kind == LAW]
    for world, accumulation in ((2, 1), (2, 2), (3, 1), (3, 2)):
        here = [case for case in laws if (case.world, case.accumulation) == (world, accumulation)]
        assert any(case.optimizer == "sgd" and case.clip_norm is None for case in here)
        assert any(case.optimizer == "adamw" and case.clip_norm is not None for case in here)
        assert any(len(case.rows) % case.batch_size % (world * accumulation) for case in here)
        assert any(len(case.rows) % case.batch_size == 0 for case in here)
    assert {trial.kind for trial in trials} == set(KINDS)


def test_a_budget_leaves_kinds_out() -> None:
    assert MEMORY not in {trial.kind for trial in drawn(budget="quick")}
    assert {trial.kind for trial in draw(7, BUDGETS["deep"], LAYOUT, [LAW])} == {LAW}


def test_a_case_is_shrunk_to_what_its_fall_needs() -> None:
    big = Trial(
        LAW,
        Case(
            rows=make_rows(29, 3),
            batch_size=24,
            micro_batches=8,
            world=4,
            epochs=3,
            optimizer="adamw",
            layers=2,
            momentum=0.9,
            architecture="encoder",
            seed=9,
        ),
    )

    def falls(trial: Trial) -> bool:
        case = trial.case
        updates = -(-len(case.rows) // case.batch_size) * case.epochs
        made = updates if case.max_steps is None else min(updates, case.max_steps)
        return case.world >= 3 and len(case.rows) >= 5 and made >= 2

    small = shrink(big, falls, limit_s=60.0).case
    assert (small.world, small.accumulation, len(small.rows), small.local_batch) == (3, 1, 5, 1)
    assert (small.layers, small.hidden, small.rank, small.epochs) == (1, 8, 1, 1)
    assert (small.optimizer, small.clip_norm, small.dropout, small.architecture, small.seed) == (
        "sgd",
        None,
        0.0,
        "decoder",
        0,
    )
    assert small.rows == make_rows(5)


def test_no_case_is_shrunk_that_nothing_smaller_follows() -> None:
    trial = drawn()[-1]
    assert shrink(trial, lambda _: False, limit_s=60.0) == trial
    assert shrink(trial, lambda _: True, limit_s=0.0) == trial


def test_shrinking_keeps_to_the_worlds_that_were_asked_for() -> None:
    trial = next(each for each in drawn() if each.place[1:] == (3, 2) and each.kind == LAW)
    found = shrink(trial, lambda _: True, limit_s=60.0, worlds=(3,), accumulations=(2,))
    assert found.place == trial.place


@pytest.mark.parametrize("kind", [LAW, HALT, RESUME])
def test_every_smaller_trial_is_one_of_its_kind(kind: str) -> None:
    for trial in (each for each in drawn() if each.kind == kind):
        for smaller in candidates(trial):
            case = smaller.case
            updates = -(-len(case.rows) // case.batch_size) * case.epochs
            assert smaller != trial
            assert smaller.kind == kind
            assert again(smaller) == smaller
            assert case.poison is None or case.poison.leaf < case.micro_batches
            assert case.stop_after is None or case.stop_after < updates


def test_a_poison_keeps_its_micro_batch() -> None:
    case = Case(rows=make_rows(8), batch_size=4, micro_batches=4, poison=Poison(1, 3, "nan"))
    assert all(smaller.case.micro_batches >= 4 for smaller in candidates(replace(Trial(HALT, case))))
