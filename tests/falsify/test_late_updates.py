"""Updates that are judged a step later, as on GPUs: what is noted of each is of that one, and faults are seen alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, library, nn

from andon_falsify.campaign.further import cut_and_resume
from andon_falsify.checkers import gradient_law, losses_close, resume_equal
from andon_falsify.claims.evidence import of_trace
from andon_falsify.claims.one_run import halted
from andon_falsify.claims.statements import NORM
from andon_falsify.claims.table import judged, judged_by
from andon_falsify.compliance.power import Laboratory
from andon_falsify.faults.registry import named
from andon_falsify.ranks.pool import RankPools
from andon_falsify.ranks.trainer import AndonTrainer
from andon_falsify.subjects.case import Case, Poison
from andon_falsify.subjects.masks import MaskRecorder
from andon_falsify.subjects.trace import Remembering
from andon_falsify.verdict import Outcome

WORLDS = (1, 2, 3)
pytestmark = pytest.mark.xdist_group("test_late_updates")
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
    assert ahead.signature() == at_once.signature()


@pytest.mark.parametrize("step", [1, 2])
def test_a_poisoned_update_stops_before_the_next(late: AndonTrainer, step: int) -> None:
    """Where the next one was taken before it was judged too: neither is applied, and neither is told."""
    trace = late.run(CASE.but(poison=Poison(step, 3, "gradient")))
    verdict = halted(of_trace(trace))
    assert verdict.outcome is Outcome.HOLDS, verdict
    assert [each.step for each in trace.first.reported] == list(range(1, step))


def test_a_run_that_is_cut_off_resumes(late: AndonTrainer) -> None:
    """The update after the cut was taken already: no checkpoint has it, and its line is not written."""
    found = cut_and_resume(late, CASE, after=5, every=2, world=2, fault=None)
    assert found.cut.first.at == 6
    assert [each.step for each in found.cut.first.reported] == [1, 2, 3, 4, 5]
    assert found.taken_up.first.resumed_from == 4
    verdict = judged_by(resume_equal.CLAIM, found.evidence)
    assert verdict.outcome is Outcome.HOLDS, verdict


@pytest.mark.parametrize("name", ["loss is a mean of shard means", "unweighted mean of uneven shards"])
def test_a_planted_fault_is_seen(late: AndonTrainer, name: str) -> None:
    fault = named(name)
    adamw = replace(fault, case=fault.case.but(optimizer="adamw", lr=1e-2))  # SGD of a CPU cannot be held back
    assert Laboratory(Remembering(late)).attempt(adamw, "inline").problems == []


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
    """Not applicable with the operation's name, for each claim that needs the masks; without dropout nothing is hid."""
    assert [recorded(Secretive(chance))[2] for chance in (0.0, 0.5)] == ["", "andon_test.attention.default"]
    trace = prompt.run(Case(world=1))
    hidden = {key: replace(leaf, hidden="aten.flash") for key, leaf in trace.first.masks.items()}
    unseen = of_trace(replace(trace, parts=(replace(trace.first, masks=hidden),)))
    found = list(judged(unseen, (gradient_law.CLAIM, losses_close.CLAIM, NORM)).values())
    assert {(verdict.outcome, verdict.why) for verdict in found} == {
        (Outcome.NOT_APPLICABLE, "the dropout inside aten.flash cannot be seen from outside")
    }
    assert judged(of_trace(trace), [gradient_law.CLAIM])[gradient_law.CLAIM.name].outcome is Outcome.HOLDS
