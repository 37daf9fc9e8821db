"""The loops of other libraries: what is known of these versions is found, with its figure; others are skipped."""

from __future__ import annotations

import pytest

from andon_falsify.claims.of_loop import verdicts
from andon_falsify.loops.subject import LoopSubject
from andon_falsify.loops.task import loop_case
from andon_falsify.peers.registry import PEERS, Peer
from andon_falsify.ranks.pool import RankPools
from andon_falsify.subjects.case import Case, make_rows
from andon_falsify.verdict import Outcome, Verdict

WORLDS = (1, 2)
pytestmark = pytest.mark.xdist_group("test_peers")
SGD = {"optimizer": "sgd", "lr": 0.05, "clip_norm": None, "weight_decay": 0.0, "epochs": 1}
EVEN = loop_case(rows=make_rows(24), **SGD)
"""24 rows in two batches of 12: 2 ranks x 2 micro-batches of 3 rows, nothing ragged."""


def judged(name: str, case: Case, pools: RankPools) -> dict[str, Verdict]:
    peer = PEERS[name]
    if not peer.as_measured:
        pytest.skip(_why(peer))
    trace = LoopSubject(peer.make, name, pools).run(case)
    assert not trace.errors, trace.errors
    return verdicts(trace)


def _why(peer: Peer) -> str:
    wanted = ", ".join(f"{name} {version}" for name, version in peer.measured.items())
    return peer.missing or f"the figures are those of {wanted}; installed is {peer.version}"


def test_hf_trainer_multiplies_by_accumulation_and_world(pools: RankPools) -> None:
    """With default arguments the gradient of a classifier is 2 x 2 times the law, and so is the loss that is logged."""
    found = judged("hf_trainer", EVEN, pools)
    for claim in ("gradient-law", "losses-close"):
        assert found[claim].outcome is Outcome.FALSIFIED
        assert "ratio 4.000 = accumulation 2 x world 2" in str(found[claim])
    assert found["evaluation-law"].counterexamples[0].ratio == pytest.approx(2.0, rel=1e-3)


# By default the accelerate loop with sums, and test_loops.py, show these verdicts.
@pytest.mark.deep
def test_hf_trainer_mended_is_right_on_even_batches(pools: RankPools) -> None:
    """With its two switches set, gradient and logged loss are the law's, and every row is visited once."""
    found = judged("hf_trainer_mended", EVEN, pools)
    held = [found[claim].outcome for claim in ("gradient-law", "losses-close", "samples-once", "update-law")]
    assert held == [Outcome.HOLDS] * 4, found


@pytest.mark.deep
def test_hf_trainer_mended_still_averages_means_in_a_ragged_window(pools: RankPools) -> None:
    """One rank, 11 rows as 2 x 4 and the rest: the rest's window is 2 rows and 1, and their means are averaged."""
    case = loop_case(rows=make_rows(11), batch_size=8, micro_batches=4, world=1, **SGD)
    found = judged("hf_trainer_mended", case, pools)["gradient-law"]
    assert found.outcome is Outcome.FALSIFIED
    assert [each.where for each in found.counterexamples] == ["step 2"]
    assert "mean of the means of 2 micro-batches (of 2, 1 rows)" in str(found)


def test_accelerate_visits_sixteen_rows_of_ten(pools: RankPools) -> None:
    """10 rows in batches of 4 on 2 ranks: `even_batches` makes 16 visits of them."""
    case = loop_case(rows=make_rows(10), batch_size=8, micro_batches=2, **SGD)
    found = judged("accelerate", case, pools)["samples-once"]
    assert found.outcome is Outcome.FALSIFIED
    assert "16 visits of 10 rows" in str(found)
    assert "(2 times)" in str(found)


@pytest.mark.parametrize("case", [loop_case(rows=make_rows(13), batch_size=8), EVEN], ids=["ragged", "even"])
def test_accelerate_with_sums_is_right(pools: RankPools, case: Case) -> None:
    """No claim falls, and those on rows, gradient, update, loss and evaluation hold: such a loop can be written."""
    found = judged("accelerate_right", case, pools)
    assert {name: str(verdict) for name, verdict in found.items() if verdict.outcome is not Outcome.HOLDS} == {}
