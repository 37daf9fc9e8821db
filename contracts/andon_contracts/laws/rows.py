"""The laws of rows: which of them an update used, in which order, and what the model was given for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from andon_contracts.laws.law import Law, Rule, agreeing
from andon_contracts.violation import Finding


@dataclass(frozen=True)
class LeafReport:
    """What one rank says of one micro-batch; `content` is the digest of the rows as the model was given them.

    `terms` is how many its loss sums up; `nonfinite` is said of the gradient. `gradient` is the word sum of the
    gradient as it was computed, 0 where no audit is due.
    """

    rank: int
    index: int
    rows: int
    loss_sum: float
    correct: int
    terms: int
    nonfinite: bool
    content: int
    gradient: int = 0


@dataclass(frozen=True)
class LeafPlan:
    """What one micro-batch must be; `terms` of its loss sum are what the gradient is divided by."""

    index: int
    rank: int
    ids: tuple[int, ...]
    content: int
    terms: int


@dataclass(frozen=True)
class Leaves:
    """What all ranks report of the micro-batches of an update, in order of rank and micro-batch, and their plan."""

    reports: Sequence[LeafReport]
    plan: Sequence[LeafPlan]
    step: int


def _partition(seen: Leaves) -> Finding | None:
    used = [(report.rank, report.index, report.rows) for report in seen.reports]
    wanted = [(leaf.rank, leaf.index, len(leaf.ids)) for leaf in seen.plan]
    if used == wanted:
        return None
    ranks = sorted({rank for rank, _, _ in wanted + used})
    odd = tuple(rank for rank in ranks if [u for u in used if u[0] == rank] != [w for w in wanted if w[0] == rank])
    what = f"micro-batches (rank, index, rows) were to be {wanted}, used were {used}"
    return Finding(what, seen.step, odd)


def _content(seen: Leaves) -> Finding | None:
    odd = [(r, leaf) for r, leaf in zip(seen.reports, seen.plan, strict=True) if r.content != leaf.content]
    if not odd:
        return None
    first = odd[0][1].index
    rows = [row for _, leaf in odd for row in leaf.ids]
    what = f"the model was not given the planned rows (micro-batch {first}, among rows {rows[:8]})"
    return Finding(what, seen.step, tuple(sorted({report.rank for report, _ in odd})), f"micro-batch {first}")


def _terms(seen: Leaves) -> Finding | None:
    odd = [(r, leaf) for r, leaf in zip(seen.reports, seen.plan, strict=True) if r.terms != leaf.terms]
    if not odd:
        return None
    report, leaf = odd[0]
    name = f"loss of micro-batch {leaf.index}"
    what = f"the {name} is a sum of {report.terms} terms, its rows have {leaf.terms}"
    return Finding(what, seen.step, tuple(sorted({each.rank for each, _ in odd})), name)


def _finite(seen: Leaves) -> Finding | None:
    odd = [report for report in seen.reports if report.nonfinite or not math.isfinite(report.loss_sum)]
    if not odd:
        return None
    first = odd[0]
    name = f"{'gradient' if math.isfinite(first.loss_sum) else 'loss'} of micro-batch {first.index}"
    ids = next(leaf.ids for leaf in seen.plan if leaf.index == first.index)
    what = f"the {name} is not finite (loss {first.loss_sum}); its rows are {list(ids)}"
    return Finding(what, seen.step, tuple(sorted({report.rank for report in odd})), name)


_SUMS = ("loss_bits", "total_bits")
LEAVES: tuple[Law[Leaves], ...] = (
    Law(
        "samples-once/computed",
        ("index", "rows"),
        _partition,
        lambda leaf: {"index": leaf.index, "rows": len(leaf.ids)},
        stops=True,
    ),
    Law("content-planned/computed", ("content",), _content, lambda leaf: {"content": leaf.content}),
    Law("content-planned/terms", ("terms",), _terms, lambda leaf: {"terms": leaf.terms}),
    Law("finite/computed", _SUMS, _finite, lambda _: dict.fromkeys(_SUMS, Rule.FINITE)),
)
"""Before the reduction: each micro-batch of the plan computed by its owner, once, in order, from the rows as they are
in the data, with finite results. On a device the rules are of one report, from its plan."""


_OTHER_ROWS = "the ranks planned different rows, or the same rows have different contents"
PLANNED = (agreeing("content-planned/planned", ("plan",), _OTHER_ROWS, device=True),)
"""All ranks planned the same rows in the same order and have the same data for them, so that they judge alike."""
