"""The suite sees what is wrong with a foreign loop: a sample of the planted faults, and what a trial may not accept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from andon_falsify.claims.of_loop import CLAIMS, verdicts
from andon_falsify.compliance.loop_power import LoopLaboratory, matrix
from andon_falsify.faults.looped import FAULTS, RIGHT, make, named
from andon_falsify.faults.looped.fault import SGD, Inside, LoopFault, Outside
from andon_falsify.loops.subject import LoopSubject
from andon_falsify.peers.plain import PlainLoop
from andon_falsify.ranks.pool import RankPools
from andon_falsify.verdict import Outcome

ROOT = Path(__file__).parents[2]
SAMPLE = (
    "F01 initial weights differ",
    "F02 DDP bypassed through its module",
    "F11 buffers not synchronised",
    "F14 rank-local learning rate",
    "F17 mean of ranks' means",
    "F20 loss times world size, AdamW clipped",
    "F26 stale gradient on one rank",
    "F37 clip norm summed over replicas",
    "F38 clipped before the reduction",
    "F41 NaN hidden by nan_to_num",
    "F46 sampler pads with repeats",
    "F53 labels shifted, unseen by the model",
    "F55 same dropout masks",
    "F58 training in evaluation mode",
    "F62 optimizer holds stale parameters",
    "F65 one matrix does not decay",
    "F65 other betas",
    "F76 moments permuted",
    "F85 evaluation pads with repeats",
    "F88 evaluation of one rank reported",
    "F89 weights changed by the evaluation",
)
"""One for each kind of wrong that is seen in its own way."""
CATALOGUE = frozenset(
    f"F{number:02}"
    for number in (
        *(1, 2, 4, 5, 7, 8, 10, 11, 13, 14),
        *(16, 17, 19, 20, 22, 23, 25, 26),
        *(28, 29, 31, 32, 34, 35),
        *(37, 38, 40, 41, 43, 44),
        *(46, 47, 49, 50, 52, 53),
        *(55, 56, 58, 59),
        *(61, 62, 64, 65),
        *(67, 68, 70, 71),
        *(73, 74, 76, 77, 79, 80, 82, 83),
        *(85, 86, 88),
        *(89, 91, 92),
    )
)
"""The faults that real training runs had, by the code of the catalogue; a line for each of its classes A to K."""
SHOWN = [fault for fault in FAULTS if isinstance(fault.outside, Outside)]


class Idle(LoopFault):
    """A fault that is none: what is planted is the right loop."""

    @property
    def name(self) -> str:
        """The right loop."""
        return PlainLoop.__name__

    @property
    def right(self) -> type[PlainLoop]:
        """The same."""
        return PlainLoop


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


@pytest.mark.parametrize("name", SAMPLE)
def test_a_planted_fault_falls_by_its_claim_for_its_reason(laboratory: LoopLaboratory, name: str) -> None:
    """It changes what is seen, the right loop holds on every claim, and a counterexample says what is wrong."""
    assert laboratory.attempt(named(name)).problems == []


def test_a_fault_that_changes_nothing_or_falls_otherwise_is_no_kill(laboratory: LoopLaboratory) -> None:
    """An idle fault, another claim and another reason are each named as a problem."""
    changed, seen = laboratory.attempt(Idle("F00", "idle", PlainLoop, "", Outside("gradient-law", ""))).problems
    assert changed == "the fault changed nothing"
    assert seen.startswith("not seen by gradient-law; fallen: none")
    right = named("F20 loss times world size")
    assert laboratory.attempt(right).problems == []
    (unseen,) = laboratory.attempt(replace(right, outside=Outside("replicas-agree", ""))).problems
    assert unseen.startswith("not seen by replicas-agree; fallen: ('gradient-law'")
    (otherwise,) = laboratory.attempt(replace(right, outside=Outside("gradient-law", "ratio 3"))).problems
    assert otherwise.startswith("seen for another reason than 'ratio 3'")


def test_every_entry_of_the_catalogue_is_planted() -> None:
    """Each for a watch, and for a claim unless it says why not; names are distinct, and claims exist."""
    assert {fault.code for fault in FAULTS if isinstance(fault.inside, Inside)} == CATALOGUE
    assert {fault.code for fault in SHOWN} | {"F71"} == CATALOGUE
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    outsides = [fault.outside for fault in FAULTS if isinstance(fault.outside, Outside)]
    assert {outside.claim for outside in outsides} <= {claim.name for claim in CLAIMS}
    assert all(fault.right.__name__ in RIGHT for fault in FAULTS)
    assert all(fault.inside and fault.outside for fault in FAULTS)


def test_a_fault_that_no_claim_sees_is_not_tried(laboratory: LoopLaboratory) -> None:
    """It is no kill and no miss."""
    with pytest.raises(ValueError, match="no claim sees F71 tied weights untied: whether"):
        laboratory.attempt(named("F71 tied weights untied"))


def test_the_published_matrix_is_of_these_faults() -> None:
    """Every fault has its row, and none of them is without its mark; the others have their reason."""
    text = (ROOT / "docs" / "loop-faults.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if re.match(r"\| F\d\d \|", line)]
    half = len(rows) // 2
    assert [row.split(" | ")[:2] for row in rows[:half]] == [[f"| {f.code}", f.what] for f in SHOWN]
    assert all("**KILLED**" in row for row in rows[:half])
    assert all(f"- {f.name}: {f.outside}." in text for f in FAULTS if f not in SHOWN)


def test_the_matrix_marks_the_claim_of_the_fault_and_quotes_it(laboratory: LoopLaboratory) -> None:
    """KILLED only where the reason is the right one."""
    trial = laboratory.attempt(named("F17 mean of ranks' means"))
    header, _, row, *_, said = matrix([trial]).splitlines()
    assert header == "| fault | what | gradient-law | losses-close |"
    assert row == "| F17 | mean of ranks' means | **KILLED** | fell |"
    assert "it is the mean of the means of 2 ranks (with 3, 2 rows)" in said
    unlike = replace(trial, outside=replace(trial.outside, says="another"))
    assert matrix([unlike]).splitlines()[2] == "| F17 | mean of ranks' means | fell | fell |"


def test_a_name_that_is_no_fault_is_refused() -> None:
    """Else a misspelt fault would be a right loop that is not seen."""
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
