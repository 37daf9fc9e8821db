"""What is noted of the trainer's runs: updates that are judged a step later, as on GPUs, and the witness's record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, library, nn

from andon_contracts.record import End, Record, Resume, Start, Step, decode_line
from andon_contracts.record import chain as chained
from andon_falsify.campaign.warm_bench import cut_and_resume
from andon_falsify.claims import (
    gradient_law,
    halt_together,
    judged,
    loss_finite,
    losses_close,
    norm_law,
    resume_equal,
    same_everywhere,
)
from andon_falsify.claims.evidence import Evidence, of_trace
from andon_falsify.history import read_lines
from andon_falsify.loops import subject as of_loops
from andon_falsify.loops.sightings import Group, LoopSightings, Made
from andon_falsify.ranks.pool import RankPools
from andon_falsify.ranks.trainer import AndonTrainer
from andon_falsify.subjects import trace as of_trainers
from andon_falsify.subjects.case import Case, Poison, make_rows
from andon_falsify.subjects.masks import MaskRecorder
from andon_falsify.subjects.trace import Observations, Reported, Trace, assemble_trace
from andon_falsify.verdict import ExtraRun, Outcome
from falsify.power.laboratory import signature

PLACES = ((1,), (2,), (3,))
pytestmark = pytest.mark.xdist_group("test_witness")
CASE = Case(epochs=2, world=3)
"""Updates 1, 2 and 3 of an epoch: nothing is due after the first, so the second is taken before the first is judged."""


@pytest.fixture
def late(pools: RankPools) -> AndonTrainer:
    return AndonTrainer(pools, late=True)


@pytest.fixture
def prompt(pools: RankPools) -> AndonTrainer:
    return AndonTrainer(pools)


@pytest.mark.parametrize("case", [CASE, CASE.but(contracts=False, clip_norm=None)], ids=["contracts", "none"])
def test_every_update_is_noted_as_it_was(late: AndonTrainer, prompt: AndonTrainer, case: Case) -> None:
    ahead, at_once = late.run(case), prompt.run(case)
    assert [each.step for each in ahead.first.reported] == [1, 2, 3, 4, 5, 6]
    assert len({ahead.first.steps[0, step].weights for step in range(1, 7)}) == 6
    assert ahead.first.steps == at_once.first.steps
    assert signature(ahead) == signature(at_once)


@pytest.mark.parametrize("step", [1, 2])
def test_a_poisoned_update_stops_before_the_next(late: AndonTrainer, step: int) -> None:
    trace = late.run(CASE.but(poison=Poison(step, 3, "gradient")))
    verdict = halt_together.check(of_trace(trace))
    assert verdict.outcome is Outcome.HOLDS, verdict
    assert [each.step for each in trace.first.reported] == list(range(1, step))


def test_a_run_that_is_cut_off_resumes(late: AndonTrainer) -> None:
    cut, resumed = cut_and_resume(late, CASE, after=5, every=2)
    assert cut.first.at == 6
    assert [each.step for each in cut.first.reported] == [1, 2, 3, 4, 5]
    assert resumed.first.resumed_from == 4
    others: dict[ExtraRun, Evidence] = {"cut": of_trace(cut), "resumed": of_trace(resumed)}
    verdict = resume_equal.check(replace(of_trace(late.run(CASE)), others=others))
    assert verdict.outcome is Outcome.HOLDS, verdict


class Fused(nn.Dropout):
    def forward(self, given: Tensor) -> Tensor:
        return torch.native_dropout(given, self.p, self.training)[0]


def recorded(dropout: nn.Module) -> tuple[Mapping[str, Tensor], Tensor, str]:
    model = nn.Sequential(dropout)
    recorder = MaskRecorder(model)
    with recorder.recording() as masks:
        output = model(torch.ones(5, 40))
    return masks, output, recorder.hidden


@pytest.mark.parametrize("kind", [nn.Dropout, Fused])
def test_masks_are_the_factors_of_either_operation(kind: type[nn.Dropout]) -> None:
    masks, output, hidden = recorded(kind(0.25))
    (factors,) = masks.values()
    assert torch.equal(factors, output)
    assert sorted(set(factors.flatten().tolist())) == pytest.approx([0.0, 1 / 0.75])
    assert hidden == ""
    assert recorded(kind(0.0))[0] == {}


@library.custom_op("andon_test::attention", mutates_args=())
def secretive(given: Tensor, dropout_p: float) -> Tensor:
    return given * (1 - dropout_p)


class Secretive(nn.Dropout):
    def forward(self, given: Tensor) -> Tensor:
        found: Tensor = secretive(given, self.p)
        return found


def test_what_drops_in_secret_leaves_no_law(prompt: AndonTrainer) -> None:
    assert [recorded(Secretive(chance))[2] for chance in (0.0, 0.5)] == ["", "andon_test.attention.default"]
    trace = prompt.run(Case(world=1))
    hidden = {key: replace(leaf, hidden="aten.flash") for key, leaf in trace.first.masks.items()}
    unseen = of_trace(replace(trace, parts=(replace(trace.first, masks=hidden),)))
    found = list(judged(unseen, (gradient_law.CLAIM, losses_close.CLAIM, norm_law.CLAIM)).values())
    assert {(verdict.outcome, verdict.why) for verdict in found} == {
        (Outcome.NOT_APPLICABLE, "the dropout inside aten.flash cannot be seen from outside")
    }
    assert judged(of_trace(trace), [gradient_law.CLAIM])[gradient_law.CLAIM.name].outcome is Outcome.HOLDS


DIGESTS = st.sampled_from(["", "0" * 16, "00000000000000a1", "f" * 16])
REALS = st.floats(allow_nan=True, allow_infinity=True)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Case, list[LoopSightings]]:
    world, rows = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    case = Case(rows=make_rows(rows), batch_size=world, micro_batches=world, world=world)
    if draw(st.booleans()):
        case = case.but(stop_after=draw(st.integers(0, 3)))
    parts = [LoopSightings((rank,)) for rank in range(world)]
    parts[0].resumed_from = draw(st.integers(0, 2))
    parts[0].start[0] = draw(DIGESTS)
    for step in range(1, draw(st.integers(0, 3)) + 1):
        group = Group(("w",), {"lr": draw(REALS)})
        parts[0].made[step] = Made("SGD", (group,), draw(st.none() | REALS), clipped=False)
        if draw(st.booleans()):
            parts[0].told_losses[step] = draw(REALS)
        ids = tuple(draw(st.permutations(range(rows))))
        parts[0].reported.append(
            Reported(step, draw(st.integers(0, 2)), ids, rows, draw(REALS), draw(REALS), draw(REALS))
        )
        for part in parts:
            sight = part.of(part.ranks[0], step)
            sight.leaves = draw(st.lists(st.lists(st.integers(0, rows - 1), max_size=3).map(tuple), max_size=2))
            sight.weights, sight.optimizer, sight.gradient = draw(DIGESTS), draw(DIGESTS), draw(DIGESTS)
    if draw(st.booleans()):
        parts[-1].violation = ("finite", draw(st.integers(0, 4)), draw(st.text(max_size=5)))
    return case, parts


def decoded(lines: list[bytes]) -> list[Record]:
    found, head = [], "0" * 16
    for count, raw in enumerate(lines):
        found.append(decode_line(raw, count, head))
        head = chained(raw)
    return found


@given(runs(), st.sampled_from([of_trainers, of_loops]))
@settings(deadline=None)
def test_every_line_is_one_of_the_ledger(run: tuple[Case, list[LoopSightings]], writer: Any) -> None:
    case, parts = run
    lines = writer.witnessed(case, parts)
    records, history = decoded(lines), read_lines(lines, "seen")
    assert not history.unread
    assert [record.kind for record in records] == [event.kind for event in history.events]
    starts = [record for record in records if isinstance(record, Start | Resume)]
    assert {record.writer for record in starts} == {of_trainers.WRITER}
    assert {value for record in starts for value in (record.algorithms or {}).values()} == {"sha256"}
    assert {record.reason for record in records if isinstance(record, End)} <= {"finished"}
    steps = [record for record in records if isinstance(record, Step)]
    assert [(s.step, s.ids, s.lr.hex) for s in steps] == [(e.number, e.ids, e.lr and e.lr.hex) for e in history.steps]
    for record, event in zip(steps, history.steps, strict=True):
        assert [(r.rank, r.ids, r.weights, r.gradient, r.optimizer) for r in record.ranks] == [
            (r.rank, r.ids, r.weights, r.gradient, r.optimizer) for r in event.ranks
        ]


def test_a_run_of_which_nothing_was_seen_is_not_one_of_another_machine() -> None:
    """Its rank died, so whether it gave the same bits is unknown: a claim that does not apply would pass in silence."""
    case = Case(rows=make_rows(4), batch_size=4, world=1)
    part = Observations((0,))
    part.reported.append(Reported(1, 0, (0, 1, 2, 3), 4, 0.1, 0.5, 1.0))
    whole = assemble_trace(case, [part], {}, "whole")
    dead = assemble_trace(case, [], {0: "died"}, "dead")
    assert [same_everywhere.check_traces(*pair).outcome for pair in ((dead, whole), (whole, dead))] == [
        Outcome.UNKNOWN
    ] * 2


def test_only_updates_with_a_told_loss_are_judged_of_a_loop() -> None:
    """What is told of an update that was never made is no reason to judge the norms of those that told nothing."""
    case = Case(rows=make_rows(2), batch_size=2, world=1)
    part = LoopSightings((0,))
    part.made[1] = Made("SGD", (Group(("w",), {"lr": 0.1}),), math.nan, clipped=True)
    part.told_losses[2] = 0.5
    trace = Trace(case, (part,), read_lines(of_loops.witnessed(case, [part]), "loop"), None)
    assert loss_finite.check(of_trace(trace)).outcome is Outcome.UNKNOWN
