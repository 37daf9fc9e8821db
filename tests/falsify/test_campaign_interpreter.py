"""What a campaign does with what its trials say: goes on, gives up, shrinks, and writes down how to repeat it."""

from __future__ import annotations

import shlex
from dataclasses import replace
from itertools import pairwise

import pytest

from andon_falsify.campaign.budget import BUDGETS
from andon_falsify.campaign.findings import Report
from andon_falsify.campaign.generator import Layout, draw
from andon_falsify.campaign.interpreter import Bench, Campaign, Interpreter
from andon_falsify.campaign.loop_bench import LoopBench
from andon_falsify.campaign.reporting import Origin, report
from andon_falsify.campaign.request import Options, understood
from andon_falsify.campaign.runner import Listeners, carried_out, planned
from andon_falsify.campaign.trainer_bench import AndonBench
from andon_falsify.campaign.trial import FUNCTIONS, HALT, LAW, RESUME, Trial
from andon_falsify.loops.subject import LoopSubject
from andon_falsify.loops.task import loop_case
from andon_falsify.ranks.pool import RankPools
from andon_falsify.ranks.trainer import AndonTrainer
from andon_falsify.subjects.case import Case, make_rows
from andon_falsify.verdict import Counterexample, Outcome, Verdict, conclude, not_applicable, unknown
from tests.falsify.oracle import SUM, Oracle, falls_with, holds

QUICK = BUDGETS["quick"]


def campaign(bench: Bench, *kinds: str, worlds: tuple[int, ...] = (2, 3), **changes: object) -> Campaign:
    trials = tuple(draw(7, QUICK, Layout(("gloo",), worlds, (1, 2)), kinds or (LAW,)))
    judged = frozenset().union(*(bench.kinds[kind] for kind in kinds or (LAW,)))
    return replace(Campaign(bench, trials, judged, QUICK), **changes)  # type: ignore[arg-type]


def found(one: Campaign) -> Report:
    said = Interpreter(one).run()
    return report(one.bench, said, one.claims, Origin("now", {}, {}, {}))


def test_every_place_has_a_finding_of_its_own() -> None:
    bench = Oracle(holds)
    whole = found(campaign(bench))
    places = [(finding.world, finding.accumulation) for finding in whole.findings]
    assert places == [(2, 1), (2, 2), (3, 1), (3, 2)]
    assert {finding.checked for finding in whole.findings} == {3}
    assert (whole.runs, whole.exit_code, whole.not_selected) == (12, 0, ("halts", "table"))


def test_a_fall_is_shrunk_explained_and_repeatable() -> None:
    """Minimal first: still 4 = accumulation x world, three rows, one for each class; one exact command."""
    whole = found(campaign(Oracle(falls_with(lambda case: float(case.world * case.accumulation)))))
    first = whole.verdicts[0].counterexamples[0]
    assert first.equals == "4.000 = accumulation 2 x world 2: the loss was not divided"
    words = shlex.split(first.repro)
    assert words[:4] == ["andon", "falsify", "--subject", "a b:make"]
    given = dict(zip(words[2::2], words[3::2], strict=True))
    assert (given["--world"], given["--accumulation"], given["--seed"], given["--claim"]) == ("2", "2", "7", "sum")
    assert '"rows":[3,0]' in given["--case"]
    assert all(each.repro for verdict in whole.verdicts for each in verdict.counterexamples)
    assert all(each.seed == 7 for verdict in whole.verdicts for each in verdict.counterexamples)


def test_ratios_of_all_places_are_explained_together() -> None:
    whole = found(campaign(Oracle(falls_with(lambda case: float(case.world)))))
    told = {each.equals for verdict in whole.verdicts for each in verdict.counterexamples}
    assert told == {f"{world}.000 = world {world}: summed over the ranks instead of averaged" for world in (2, 3)}


def test_an_exact_case_is_not_shrunk() -> None:
    bench = Oracle(falls_with(lambda case: 2.0))
    found(campaign(bench, exact=True))
    assert len(bench.asked) == 12


@pytest.mark.parametrize("worlds", [(1, 2), (2, 1)])
@pytest.mark.parametrize("backwards", [False, True])
def test_no_trial_is_left_out_since_others_did_not_apply(worlds: tuple[int, ...], backwards: bool) -> None:
    """Whether a claim applies may depend on the layout: a mistake on two ranks is found in any order of trials."""

    def says(trial: Trial) -> Verdict:
        if trial.case.world == 1:
            return not_applicable(SUM, "one rank has nobody to agree with")
        return conclude(SUM, 1, [Counterexample("the weights differ")])

    bench = Oracle(says)
    one = campaign(bench, worlds=worlds, exact=True)
    whole = found(replace(one, trials=one.trials[::-1] if backwards else one.trials))
    assert len(bench.asked) == 12
    assert {(each.world, each.outcome) for each in whole.findings} == {
        (1, Outcome.NOT_APPLICABLE),
        (2, Outcome.FALSIFIED),
    }


def test_options_in_another_order_ask_for_the_same_trials() -> None:
    orders = (("inline,gloo", "1,2,3", "1,2"), ("gloo,inline", "3,1,2", "2,1"))
    with RankPools() as pools:
        bench = AndonBench(AndonTrainer(pools))
        plans = [
            planned(understood(Options(backend=backend, world=world, accumulation=accumulation)), bench).trials
            for backend, world, accumulation in orders
        ]
    assert {trial.kind for trial in plans[0]} == {LAW, HALT, RESUME, FUNCTIONS}
    assert plans[0] == plans[1]


def test_a_loop_that_declares_no_brakes_is_run_once_to_see_that() -> None:
    case = loop_case(epochs=1)
    with RankPools() as pools:
        bench = LoopBench(LoopSubject("andon_falsify.peers.ddp:make", "ddp", pools), "ddp")
        verdicts = [bench.attempt(Trial(kind, case.but(world=world))) for kind in (HALT, RESUME) for world in (2, 3)]
    assert {each.outcome for found in verdicts for each in found.values()} == {Outcome.NOT_APPLICABLE}
    assert bench.runs == 1


def test_a_subject_that_never_works_is_given_up() -> None:
    """After four trials that ended in the same way; the tables of calls are still looked at."""
    bench = Oracle(lambda trial: holds(trial) if trial.kind == FUNCTIONS else unknown(SUM, "no module"))
    whole = found(campaign(bench, FUNCTIONS, LAW))
    assert len(bench.asked) == 5
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
    monkeypatch.setattr("andon_falsify.campaign.interpreter.time.monotonic", lambda: clock[0])

    def says(trial: Trial) -> Verdict:
        if trial.case.world == 2:
            return holds(trial)
        clock[0] += QUICK.deadline_s
        return unknown(SUM, "no answer in time")

    bench = Oracle(says)
    whole = found(campaign(bench))
    asked = [trial.case.world for trial in bench.asked]
    assert (asked.count(2), asked.count(3)) == (6, 2)
    said = {finding.why for finding in whole.findings if finding.world == 3}
    assert any("not tried: 2 runs on 3 ranks did not end within 60 s" in why for why in said)


def test_a_smaller_counterexample_is_one_of_the_same_mistake() -> None:
    """On few rows it is the optimizer that differs, and not the weights: the smallest that counts has five rows."""

    def says(trial: Trial) -> Verdict:
        what = "the weights differ" if len(trial.case.rows) > 4 else "the optimizer differs"
        return conclude(SUM, 1, [Counterexample(f"{what} in {len(trial.case.rows)} rows")])

    first = found(campaign(Oracle(says), worlds=(2,))).verdicts[0].counterexamples[0]
    assert first.what == "the weights differ in 5 rows"


def test_reports_of_a_campaign_that_goes_on_are_not_made_after_every_trial() -> None:
    bench = Oracle(lambda trial: falls_with(lambda _: 2.0)(trial) if trial.seed == 0 else holds(trial))
    trials = [each for seed in range(40) for each in draw(seed, QUICK, Layout(("gloo",), (2, 3), (1, 2)), (LAW,))]
    known = list[Report]()
    one = replace(campaign(bench, exact=True), trials=tuple(trials))
    whole = carried_out(one, Origin("now", {}, {}, {}), Listeners(known=known.append))
    reported = [sum(finding.checked for finding in each.findings) for each in known]
    assert len(trials) == 480
    assert reported[:31] == list(range(31))
    assert all(after - before <= max(1, after / 20) for before, after in pairwise([*reported, 480]))
    assert len(reported) < 100
    found = [found for each in known for verdict in each.verdicts for found in verdict.counterexamples]
    assert {each.equals for each in found} == {""}
    assert whole.verdicts[0].counterexamples[0].equals.startswith("2.000 = ")


def test_a_claim_of_which_nothing_is_said_is_unknown() -> None:
    whole = found(replace(campaign(Oracle(holds)), claims=frozenset({"sum", "halts"})))
    (missing,) = [finding for finding in whole.findings if finding.claim == "halts"]
    assert (missing.outcome, missing.why) == (Outcome.UNKNOWN, "no case that was run says anything of it")
    assert whole.closing_line == "checked 1 of 3 claims, 12 runs, 0 not applicable, 1 unknown"


def test_a_planted_fault_is_found_shrunk_and_found_again() -> None:
    case = Case(
        rows=make_rows(7),
        batch_size=3,
        micro_batches=3,
        world=3,
        optimizer="sgd",
        clip_norm=None,
        dropout=0.0,
        hidden=8,
        heads=1,
        inner=8,
        rank=1,
        fault="last shard not trained",
        contracts=False,
    )
    with RankPools() as pools:
        bench = AndonBench(AndonTrainer(pools))
        one = Campaign(bench, (Trial(LAW, case),), frozenset({"gradient-law"}), replace(QUICK, shrink_s=60.0))
        said = Interpreter(one).run()
        (small,) = [each for each in said if each.shrunk]
        assert small.trial.case.world == 2
        assert len(small.trial.case.rows) < 5
        assert small.trial.case.max_steps == 1 or len(small.trial.case.rows) <= small.trial.case.batch_size
        again = AndonBench(AndonTrainer(pools)).attempt(small.trial)
    assert again["gradient-law"] == small.verdict
    assert small.verdict.outcome is Outcome.FALSIFIED
    # The run on one rank that it is compared with has no fault.
    assert again["same-everywhere"].outcome is Outcome.FALSIFIED
