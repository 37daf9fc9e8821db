"""Trials: drawn from a seed, written down and made smaller; and what a campaign does with what they say."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from andon_falsify.campaign.bench import Bench
from andon_falsify.campaign.request import read_request
from andon_falsify.campaign.run import Campaign, plan
from andon_falsify.campaign.script_bench import Command, ScriptBench
from andon_falsify.campaign.shrink import candidates, shrink
from andon_falsify.campaign.trial import BUDGETS, HALT, KINDS, LAW, MEMORY, RESUME, Layouts, Trial, draw, read_trial
from andon_falsify.campaign.warm_bench import AndonBench, LoopBench
from andon_falsify.cli.campaign import ReportFiles, run
from andon_falsify.loops.subject import LoopSubject
from andon_falsify.loops.task import loop_case
from andon_falsify.ranks.pool import RankPools
from andon_falsify.ranks.trainer import AndonTrainer
from andon_falsify.report.findings import Report
from andon_falsify.subjects.case import Case, Poison, Rows, make_rows
from andon_falsify.verdict import Counterexample, Outcome, Quantity, Verdict, conclude, not_applicable, unknown
from tests.falsify.oracle import HALTS, SUM, TABLE, Oracle, falls_with, holds

LAYOUT = Layouts(("inline", "gloo"), (2, 3), (1, 2))


def drawn(seed: int = 7, budget: str = "standard", layout: Layouts = LAYOUT) -> list[Trial]:
    return list(draw(seed, BUDGETS[budget], layout, KINDS))


def again(trial: Trial) -> Trial:
    backend, world, accumulation = trial.place
    return read_trial(trial.written, backend=backend, world=world, accumulation=accumulation, seed=trial.seed)


@pytest.mark.parametrize("seed", [0, 1, 7, 10**6])
def test_what_is_written_is_read_as_the_same_trial(seed: int) -> None:
    for trial in drawn(seed):
        assert again(trial) == trial


@pytest.mark.parametrize("kind", [LAW, RESUME])
def test_of_a_scripts_case_only_its_layout_is_written(kind: str) -> None:
    text = "train --world {world} --batch {local_batch} --accumulate {accumulation}"
    command = Command.read(text)
    trial = ScriptBench(text, 1.0).suited(Trial(kind, Case(world=3, micro_batches=6), seed=5))
    assert json.loads(trial.written).keys() - {"kind"} == {"batch_size"}
    read = again(trial)
    assert read.kind == kind
    assert command.words(read.case, "run") == command.words(trial.case, "run")


def test_rows_that_were_not_drawn_are_written_out() -> None:
    rows = Rows(((40, 41), (50,), (60,)), (0, 1, 1), 2)
    trial = Trial(LAW, Case(rows=rows, batch_size=4))
    assert again(trial) == trial
    assert json.loads(trial.written)["rows"]["tokens"] == [[40, 41], [50], [60]]
    assert Trial(LAW, Case(world=4, backend="gloo", micro_batches=4)).written == "{}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "is not JSON"),
        ("[]", "must be a JSON object"),
        ('{"lr": "fast", "colour": 1}', "a case has no 'colour'; it has "),
        ('{"kind": "dance"}', "kind must match '^(law|halt"),
        ('{"batch_size": 0}', "batch_size must be greater than 0, not 0"),
        ('{"epochs": true}', "epochs must be"),
        ('{"rows": [0, 1]}', "rows[0] must be greater than 0"),
        ('{"rows": {"tokens": [[]], "labels": [0], "classes": 1}}', "rows need a label and"),
        ('{"poison": {"step": 1, "leaf": 9, "kind": "nan"}}', "poison in micro-batch 9, but there are only 4"),
        ('{"poison": {"step": 1, "leaf": 0, "kind": "wine"}}', "poison.kind must match"),
        ('{"hidden": 9}', "hidden 9 cannot be divided among 2 heads"),
        ('{"class_weights": [1.0]}', "1 class_weights for 3 classes"),
        ('{"dropout": 1}', "dropout must be less than 1, not 1"),
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
    fewer = drawn(layout=Layouts(("inline",), (3,), (2,)))
    assert {trial for trial in fewer if trial.kind == LAW} <= set(drawn())
    assert MEMORY not in {trial.kind for trial in drawn(budget="quick")}
    assert {trial.kind for trial in draw(7, BUDGETS["deep"], LAYOUT, [LAW])} == {LAW}


@pytest.mark.parametrize("seed", [0, 1, 7, 10**6])
def test_drawn_cases_are_what_the_claims_need(seed: int) -> None:
    trials = drawn(seed)
    for trial in trials:
        case = trial.case
        updates = -(-len(case.rows) // case.batch_size) * case.epochs
        if trial.kind in (LAW, HALT, RESUME):
            assert case.local_batch * case.accumulation * case.world == case.batch_size
        if trial.kind == HALT:
            assert case.poison.step * case.batch_size <= len(case.rows)
            assert case.poison.leaf < case.micro_batches
        if trial.kind == RESUME:
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


def test_a_case_is_shrunk_to_what_its_fall_needs() -> None:
    layout = {"rows": make_rows(29, 3), "batch_size": 24, "micro_batches": 8, "world": 4, "epochs": 3}
    big = Trial(LAW, Case(**layout, layers=2, momentum=0.9, architecture="encoder", seed=9))

    def falls(trial: Trial) -> bool:
        case = trial.case
        updates = -(-len(case.rows) // case.batch_size) * case.epochs
        made = updates if case.max_steps is None else min(updates, case.max_steps)
        return case.world >= 3 and len(case.rows) >= 5 and made >= 2

    small = shrink(big, falls, limit_s=60.0).case
    assert (small.world, small.accumulation, len(small.rows), small.local_batch) == (3, 1, 5, 1)
    assert (small.layers, small.hidden, small.rank, small.epochs) == (1, 8, 1, 1)
    assert (small.optimizer, small.clip_norm, small.dropout) == ("sgd", None, 0.0)
    assert (small.architecture, small.seed, small.rows) == ("decoder", 0, make_rows(5))
    trial = next(each for each in drawn() if each.place[1:] == (3, 2) and each.kind == LAW)
    assert shrink(trial, lambda _: False, limit_s=60.0) == shrink(trial, lambda _: True, limit_s=0.0) == trial
    kept = shrink(trial, lambda _: True, limit_s=60.0, worlds=(3,), accumulations=(2,))
    assert kept.place == trial.place


def test_every_smaller_trial_is_one_of_its_kind() -> None:
    for trial in (each for each in drawn() if each.kind in (LAW, HALT, RESUME)):
        for smaller in candidates(trial):
            case = smaller.case
            updates = -(-len(case.rows) // case.batch_size) * case.epochs
            assert smaller != trial
            assert smaller.kind == trial.kind
            assert again(smaller) == smaller
            assert case.poison is None or case.poison.leaf < case.micro_batches
            assert case.stop_after is None or case.stop_after < updates
    poisoned = Case(rows=make_rows(8), batch_size=4, micro_batches=4, poison=Poison(1, 3, "nan"))
    assert all(smaller.case.micro_batches >= 4 for smaller in candidates(Trial(HALT, poisoned)))


QUICK = BUDGETS["quick"]


def campaign(bench: Bench, *kinds: str, worlds: tuple[int, ...] = (2, 3), **changes: object) -> Campaign:
    trials = tuple(draw(7, QUICK, Layouts(("gloo",), worlds, (1, 2)), kinds or (LAW,)))
    judged = frozenset().union(*(bench.kinds[kind] for kind in kinds or (LAW,)))
    return replace(Campaign(bench, trials, judged, QUICK), **changes)  # type: ignore[arg-type]


def found(one: Campaign) -> Report:
    list(one.run())
    return one.report()


def test_every_place_and_every_claim_has_a_finding_of_its_own() -> None:
    whole = found(campaign(Oracle(holds)))
    places = [(finding.world, finding.accumulation) for finding in whole.findings]
    assert places == [(2, 1), (2, 2), (3, 1), (3, 2)]
    assert {finding.checked for finding in whole.findings} == {3}
    assert (whole.runs, whole.exit_code, whole.not_selected) == (12, 0, ("halts", "table"))
    whole = found(replace(campaign(Oracle(holds)), claims=frozenset({"sum", "halts"})))
    (missing,) = [finding for finding in whole.findings if finding.claim == "halts"]
    assert (missing.outcome, missing.why) == (Outcome.UNKNOWN, "no trial tested it")
    assert whole.closing_line == "checked 1 of 3 claims, 12 runs, 0 not applicable, 1 unknown"


def test_a_fall_is_shrunk_unless_exact_explained_and_repeatable() -> None:
    whole = found(campaign(Oracle(falls_with(lambda case: float(case.world * case.accumulation)))))
    first = whole.cells[0].verdict.counterexamples[0]
    assert first.equals == "4.000 = accumulation 2 x world 2: the loss was not divided"
    words = shlex.split(first.repro)
    assert words[:4] == ["andon", "falsify", "--subject", "a b:make"]
    given = dict(zip(words[2::2], words[3::2], strict=True))
    assert (given["--world"], given["--accumulation"], given["--seed"], given["--claim"]) == ("2", "2", "7", "sum")
    assert '"rows":[3,0]' in given["--case"]
    assert all(each.repro for cell in whole.cells for each in cell.verdict.counterexamples)
    assert all(each.seed == 7 for cell in whole.cells for each in cell.verdict.counterexamples)
    whole = found(campaign(Oracle(falls_with(lambda case: float(case.world)))))
    explained = {each.equals for cell in whole.cells for each in cell.verdict.counterexamples}
    assert explained == {f"{world}.000 = world {world}: summed over the ranks instead of averaged" for world in (2, 3)}
    bench = Oracle(falls_with(lambda case: 2.0))
    found(campaign(bench, exact=True))
    assert len(bench.asked) == 12


@pytest.mark.parametrize("worlds", [(1, 2), (2, 1)])
@pytest.mark.parametrize("backwards", [False, True])
def test_no_trial_is_left_out_since_others_did_not_apply(worlds: tuple[int, ...], backwards: bool) -> None:
    def says(trial: Trial) -> Verdict:
        if trial.case.world == 1:
            return not_applicable(SUM, "one rank has nobody to agree with")
        return conclude(SUM, 1, [Counterexample("the weights differ")])

    bench = Oracle(says)
    one = campaign(bench, worlds=worlds, exact=True)
    whole = found(replace(one, trials=one.trials[::-1] if backwards else one.trials))
    assert len(bench.asked) == 12
    outcomes = {(each.world, each.outcome) for each in whole.findings}
    assert outcomes == {(1, Outcome.NOT_APPLICABLE), (2, Outcome.FALSIFIED)}


def test_options_in_another_order_ask_for_the_same_trials() -> None:
    orders = (("inline,gloo", "1,2,3", "1,2"), ("gloo,inline", "3,1,2", "2,1"))
    with RankPools() as pools:
        bench = AndonBench(AndonTrainer(pools))
        plans = [
            plan(read_request(backend=backend, world=world, accumulation=accumulation), bench).trials
            for backend, world, accumulation in orders
        ]
    assert {trial.kind for trial in plans[0]} == {LAW, HALT, RESUME}
    assert plans[0] == plans[1]


def test_a_loop_that_declares_no_brakes_is_run_once_to_see_that() -> None:
    case = loop_case(epochs=1)
    with RankPools() as pools:
        bench = LoopBench(LoopSubject("andon_falsify.peers.ddp:DdpLoop", "ddp", pools), "ddp")
        trials = [Trial(kind, case.but(world=world)) for kind in (HALT, RESUME) for world in (2, 3)]
        verdicts = [bench.attempt(trial) for trial in trials]
    assert {each.outcome for found in verdicts for each in found.values()} == {Outcome.NOT_APPLICABLE}
    assert bench.runs == 1


def test_a_subject_that_never_works_is_given_up() -> None:
    bench = Oracle(lambda _: unknown(SUM, "no module"))
    whole = found(campaign(bench, LAW))
    assert len(bench.asked) == 4
    assert [finding.why for finding in whole.findings if finding.claim == "sum"] == ["no module"] * 4
    assert whole.exit_code == 2


@pytest.mark.parametrize("backwards", [False, True])
def test_a_place_that_fails_does_not_give_up_another(backwards: bool) -> None:
    bench = Oracle(lambda trial: unknown(SUM, "crash") if trial.case.world == 3 else holds(trial))
    one = campaign(bench)
    in_order = sorted(one.trials, key=lambda trial: trial.case.world, reverse=backwards)
    outcomes = {(each.world, each.outcome) for each in found(replace(one, trials=tuple(in_order))).findings}
    assert outcomes == {(2, Outcome.HOLDS), (3, Outcome.UNKNOWN)}


def test_a_place_that_is_always_late_costs_two_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("andon_falsify.campaign.run.time.monotonic", lambda: clock[0])

    def says(trial: Trial) -> Verdict:
        """Ranks of 2 fail slowly, but within the 2 deadlines of this bench."""
        clock[0] += (2 if trial.case.world == 3 else 1.9 if bench.asked[1:] else 0) * QUICK.deadline_s
        return unknown(SUM, "failed") if clock[0] else holds(trial)

    bench = Oracle(says)
    whole = found(campaign(bench))
    asked = [trial.case.world for trial in bench.asked]
    assert (asked.count(2), asked.count(3)) == (6, 2)
    said = {finding.why for finding in whole.findings if finding.world == 3}
    assert any("not tried: 2 runs on 3 ranks did not end within 120 s" in why for why in said)


def test_a_smaller_counterexample_is_one_of_the_same_mistake() -> None:
    def says(trial: Trial) -> Verdict:
        quantity: Quantity = "weights" if len(trial.case.rows) > 4 else "optimizer"
        return conclude(SUM, 1, [Counterexample(f"{quantity} in {len(trial.case.rows)} rows", quantity=quantity)])

    first = found(campaign(Oracle(says), worlds=(2,))).cells[0].verdict.counterexamples[0]
    assert first.what == "weights in 5 rows"
    for runs, dropout in (((), 0.0), (("random",), 0.1)):  # a claim about random numbers needs its dropout
        (oracle := Oracle(says)).claims = (replace(SUM, runs=runs), HALTS, TABLE)
        found(one := campaign(oracle, trials=(Trial(LAW, Case(dropout=0.1)),)))
        assert {each.trial.case.dropout for each in one.said if each.shrunk} == {dropout}


def test_the_search_for_a_smaller_counterexample_judges_one_claim_and_keeps_its_time() -> None:
    judged, limits = list[int](), list[float]()

    class Several(Oracle):
        claims, kinds = (SUM, HALTS), {LAW: frozenset({"sum", "halts"})}

        def attempt(self, trial: Trial, claims: Collection[str] = ()) -> Mapping[str, Verdict]:
            judged.append(len(claims))
            return {name: replace(falls_with(lambda _: 2.0)(trial), claim=name) for name in claims}

    found(campaign(Several(holds), limit=limits.append))
    assert (set(judged[:12]), set(limits[:12])) == ({2}, {QUICK.deadline_s})
    assert set(judged[12:]) == {1}
    assert all(0 < limit <= QUICK.shrink_s for limit in limits[12:])


def test_reports_of_a_running_campaign_are_not_made_every_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = list[Report]()
    bench = Oracle(lambda trial: falls_with(lambda _: 2.0)(trial) if trial.seed == 0 else holds(trial))
    trials = [each for seed in range(40) for each in draw(seed, QUICK, Layouts(("gloo",), (2, 3), (1, 2)), (LAW,))]
    one = replace(campaign(bench, exact=True), trials=tuple(trials))
    monkeypatch.setattr("andon_falsify.cli.campaign.opened", lambda _: nullcontext(one))
    monkeypatch.setattr(ReportFiles, "write", lambda _, report, **html: known.append(report))
    run(read_request(), ReportFiles({"--json": tmp_path / "r"}), None)
    *known, whole = known
    reported = [sum(finding.checked for finding in each.findings) for each in known]
    assert len(trials) == 480
    assert reported[:31] == list(range(31))
    assert all(after - before <= max(1, after / 20) for before, after in pairwise([*reported, 480]))
    assert len(reported) < 100
    assert {example.equals for each in known for cell in each.cells for example in cell.verdict.counterexamples} == {""}
    assert whole.cells[0].verdict.counterexamples[0].equals.startswith("2.000 = ")
