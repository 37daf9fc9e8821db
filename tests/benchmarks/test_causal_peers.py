"""A verdict on a peer can be both: right and wrong loops are planted, as plain gradients and as real processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from andon_falsify.reference.causal import TokenSum, mean_of
from andon_falsify.verdict import Outcome
from benchmarks.causal_peers.job import ROWS, Layout, Seen, collator, features, model, rows_of
from benchmarks.causal_peers.registry import PEERS, PLANTED
from benchmarks.causal_peers.running import run
from benchmarks.causal_peers.verdict import apart, judge, row_sums

TWO = Layout(2, 2)
ONE = Layout(1, 1)


def dealt() -> list[list[list[int]]]:
    """Each row to one of two micro-batches of two ranks, in turn: rank 0 has the short rows."""
    return [[list(range(rank + 2 * part, ROWS, 4)) for part in range(2)] for rank in range(2)]


def seen_with(gradient: dict[str, torch.Tensor]) -> list[Seen]:
    """Two ranks that have this gradient."""
    return [Seen(forwards=parts, gradient=gradient, updates=3) for parts in dealt()]


def mean(places: Sequence[int], trained: str = "answers") -> dict[str, torch.Tensor]:
    """The gradient of these rows alone, one sum divided once."""
    return mean_of([row_sums(trained)[place] for place in places])[1]


def averaged(gradients: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Their plain mean."""
    return {name: torch.stack([each[name] for each in gradients]).mean(0) for name in gradients[0]}


def test_the_laws_gradient_holds() -> None:
    """And is near; another order of the micro-batches changes nothing."""
    finding = judge(TWO, seen_with(mean(range(ROWS))))
    assert (finding.outcome, finding.says) == (Outcome.HOLDS, "")
    assert finding.off < 1e-12


def test_a_mean_of_means_falls_by_name() -> None:
    """Over micro-batches, over ranks, and over accumulation steps, told from each other."""
    parts = dealt()
    micro = averaged([mean(part) for of_rank in parts for part in of_rank])
    ranks = averaged([mean([row for part in of_rank for row in part]) for of_rank in parts])
    steps = averaged([mean([*parts[0][place], *parts[1][place]]) for place in range(2)])
    for gradient, name in ((micro, "over micro-batches"), (ranks, "over ranks"), (steps, "over accumulation steps")):
        finding = judge(TWO, seen_with(gradient))
        assert finding.outcome is Outcome.FALSIFIED
        assert finding.says.startswith(f"a mean {name} of ")
        assert "trained) counts " in finding.says


def test_a_wrong_scale_falls_by_its_ratio() -> None:
    """Twice the law; and where each row's first token is counted, by the two counts."""
    law = mean(range(ROWS), "all")
    twice = judge(Layout(2, 2, trained="all"), seen_with({name: 2 * value for name, value in law.items()}))
    assert (twice.outcome, twice.says) == (Outcome.FALSIFIED, "ratio 2.0000 of the law")
    tokens = sum(one.tokens for one in row_sums("all"))
    share = tokens / (tokens + ROWS)
    first = judge(Layout(2, 2, trained="all"), seen_with({name: share * value for name, value in law.items()}))
    assert first.outcome is Outcome.FALSIFIED
    assert f"{tokens} / {tokens + ROWS}: each row's first token" in first.says


def test_a_weighting_without_a_name_is_told_by_its_extremes() -> None:
    """Row 5 counts three times; every other row as it is to."""
    sums: list[TokenSum] = list(row_sums("answers"))
    law = mean(range(ROWS))
    tokens = sum(one.tokens for one in sums)
    gradient = {name: value + 2 * sums[5].gradients[name] / tokens for name, value in law.items()}
    finding = judge(TWO, seen_with(gradient))
    assert f"one of row 5 ({sums[5].tokens} trained) 3.000" in finding.says


def test_rows_that_reach_each_other_are_no_weighting() -> None:
    """What no sum of the rows' own gradients makes is said to be that."""
    torch.manual_seed(0)
    law = mean(range(ROWS))
    gradient = {name: value + 0.1 * value.norm() * torch.randn_like(value) for name, value in law.items()}
    assert "depends on another" in judge(TWO, seen_with(gradient)).says


def test_what_cannot_be_judged_is_unknown() -> None:
    """A library that failed, and an update that is not of each row once."""
    failed = judge(ONE, [Seen(error="ValueError: no")])
    assert (failed.outcome, failed.says) == (Outcome.UNKNOWN, "ValueError: no")
    twice = judge(ONE, [Seen(forwards=[[0, 0]], gradient=mean(range(ROWS)))])
    assert twice.outcome is Outcome.UNKNOWN
    assert "not of each row once" in twice.says


def test_weights_that_part_are_seen() -> None:
    """As a share of the first layout's movement, at the layout that is furthest; failed runs are left out."""
    start: dict[str, Any] = {name: value.detach() for name, value in model().named_parameters()}
    moved = {name: value + 1.0 for name, value in start.items()}
    further = {name: value + 1.5 for name, value in start.items()}
    runs = {ONE: [Seen(weights=moved)], Layout(1, 2): [Seen(weights=moved)], TWO: [Seen(weights=further)]}
    assert apart(runs) == (pytest.approx(0.5, rel=1e-5), TWO)
    assert apart({ONE: runs[ONE], TWO: [Seen(error="no")]}) == (0.0, None)


def test_rows_are_known_by_what_the_model_is_given() -> None:
    """Padded lines, and rows end to end whose positions begin again; anything else is refused."""
    some = features("answers")[3:6]
    batch = collator()(some)
    assert rows_of(batch["input_ids"], batch["attention_mask"], None) == [3, 4, 5]
    line = torch.tensor([[token for row in some for token in row["input_ids"]]])
    positions = torch.tensor([[place for row in some for place in range(len(row["input_ids"]))]])
    assert rows_of(line, None, positions) == [3, 4, 5]
    with pytest.raises(ValueError, match="is no row"):
        rows_of(line, None, None)


@pytest.mark.parametrize(
    ("name", "outcome", "says"),
    [
        ("right", Outcome.HOLDS, ""),
        ("mean_of_means", Outcome.FALSIFIED, "a mean over micro-batches"),
        ("twice", Outcome.FALSIFIED, "ratio 2.0000 of the law"),
        ("leaking", Outcome.FALSIFIED, "depends on another"),
    ],
)
def test_planted_loops_have_their_verdicts(name: str, outcome: Outcome, says: str) -> None:
    """Real processes over gloo, 2 ranks and accumulation 2."""
    assert not PLANTED[name].missing
    finding = judge(TWO, run(name, [TWO])[TWO])
    assert finding.outcome is outcome, finding
    assert says in finding.says


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("hf_trainer", Outcome.HOLDS),
        ("trl_sft", Outcome.HOLDS),
        ("accelerate", Outcome.FALSIFIED),
        ("accelerate_by_count", Outcome.HOLDS),
        ("lightning", Outcome.FALSIFIED),
    ],
)
def test_peers_have_the_verdicts_of_the_scoreboard(name: str, outcome: Outcome) -> None:
    """On 2 ranks with accumulation 2, the loss on answers: three divide by the true count, two take means of means."""
    if missing := PEERS[name].missing:
        pytest.skip(f"{name} needs {', '.join(missing)}")
    finding = judge(TWO, run(name, [TWO])[TWO])
    assert finding.outcome is outcome, finding
    if outcome is Outcome.FALSIFIED:
        assert "a mean over micro-batches" in finding.says
