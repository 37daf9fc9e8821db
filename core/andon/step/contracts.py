"""The clauses that one step is held to before its gradients are reduced: who used what, and was it finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn

from andon.step.content import bind_to_places, run_sums
from andon.step.gate import Rule
from andon.step.leaf import REPORT_FIELDS, Leaf
from andon.step.task import Task
from andon_contracts.agree import Observation, real_of
from andon_contracts.judge import in_lockstep, minority
from andon_contracts.policy import clause, ensure
from andon_contracts.violation import Finding


@dataclass(frozen=True)
class LeafReport:
    """What one rank says of one micro-batch; `content` is the digest of the rows as the model was given them.

    `nonfinite` says it of the gradient. `gradient` is the word sum of the gradient as it was computed, 0 where no audit
    is due.
    """

    rank: int
    index: int
    rows: int
    loss_sum: float
    correct: int
    nonfinite: bool
    content: int
    gradient: int = 0


@dataclass(frozen=True)
class LeafPlan:
    """What one micro-batch must be."""

    index: int
    rank: int
    ids: tuple[int, ...]
    content: int


def plan_leaves(micro_batches: Sequence[tuple[int, ...]], owners: Sequence[range], task: Task) -> tuple[LeafPlan, ...]:
    """The micro-batches of a global batch with their owners and the digests of their planned rows."""
    rank_of = {index: rank for rank, run in enumerate(owners) for index in run}
    ids = [row for part in micro_batches for row in part]
    counts = [len(part) for part in micro_batches]
    bound = bind_to_places(task.planned_content(ids), [0], [len(ids)]) if ids else torch.zeros(0, dtype=torch.int64)
    sums: list[int] = run_sums(bound, counts).tolist()
    return tuple(
        LeafPlan(index, rank_of[index], part, content)
        for index, (part, content) in enumerate(zip(micro_batches, sums, strict=True))
    )


def leaves_of(plan: Sequence[LeafPlan]) -> list[Leaf]:
    """The micro-batches of a plan with the places of their first rows in the global batch."""
    firsts = accumulate((len(leaf.ids) for leaf in plan), initial=0)
    return [Leaf(leaf.index, first, leaf.ids) for leaf, first in zip(plan, firsts, strict=False)]


def planned_reports(plan: Sequence[LeafPlan], rank: int, count: int, *, checked: bool) -> list[int]:
    """What `padded` reports of `rank` must hold, row by row.

    checked: otherwise anything may stand there.
    """
    if not checked:
        return [Rule.ANY] * (count * len(REPORT_FIELDS))
    owned = [leaf for leaf in plan if leaf.rank == rank]
    wanted = [[leaf.index, len(leaf.ids), Rule.FINITE, Rule.ANY, Rule.FINITE, leaf.content, Rule.ANY] for leaf in owned]
    missing = [[-1] * len(REPORT_FIELDS)] * (count - len(owned))
    return [value for row in [*wanted, *missing] for value in row]


def padded(reports: torch.Tensor, count: int) -> torch.Tensor:
    """Reports [n, fields] as `count` rows, the missing ones of -1: messages of all ranks have one length.

    With a `count` above what any rank is to compute, a rank that computed too many is seen to have.
    """
    return nn.functional.pad(reports[:count], (0, 0, 0, max(0, count - reports.shape[0])), value=-1)


def reports_of(observations: Sequence[Observation]) -> tuple[LeafReport, ...]:
    """Every rank's reports, in order of rank and micro-batch."""
    found: list[LeafReport] = []
    for observation in observations:
        assert observation.payload is not None
        for row in observation.payload.view(-1, len(REPORT_FIELDS)).tolist():
            index, rows, loss, correct, total, content, gradient = row
            if index >= 0:
                found.append(
                    LeafReport(
                        observation.rank,
                        index,
                        rows,
                        real_of(loss),
                        correct,
                        not math.isfinite(real_of(total)),
                        content,
                        gradient,
                    )
                )
    return tuple(found)


def _explain_partition(reports: Sequence[LeafReport], plan: Sequence[LeafPlan], step: int) -> Finding:
    used = [(report.rank, report.index, report.rows) for report in reports]
    wanted = [(leaf.rank, leaf.index, len(leaf.ids)) for leaf in plan]
    ranks = sorted({rank for rank, _, _ in wanted + used})
    odd = tuple(rank for rank in ranks if [u for u in used if u[0] == rank] != [w for w in wanted if w[0] == rank])
    return Finding(
        seen=f"micro-batches (rank, index, rows) were to be {wanted}, used were {used}", step=step, ranks=odd
    )


@clause("samples-once", _explain_partition)
def leaves_partition(reports: Sequence[LeafReport], plan: Sequence[LeafPlan], step: int) -> bool:
    """Every micro-batch of the plan was computed by its owner, once, in order, with its number of rows."""
    return [(r.rank, r.index, r.rows) for r in reports] == [(p.rank, p.index, len(p.ids)) for p in plan]


def _explain_content(reports: Sequence[LeafReport], plan: Sequence[LeafPlan], step: int) -> Finding:
    odd = [(r, p) for r, p in zip(reports, plan, strict=True) if r.content != p.content]
    ranks = tuple(sorted({report.rank for report, _ in odd}))
    rows = [row for _, leaf in odd for row in leaf.ids]
    return Finding(
        seen=f"the model was not given the planned rows (micro-batch {odd[0][0].index}, among rows {rows[:8]})",
        step=step,
        ranks=ranks,
        tensor=f"micro-batch {odd[0][0].index}",
    )


@clause("content-planned", _explain_content)
def content_planned(reports: Sequence[LeafReport], plan: Sequence[LeafPlan], step: int) -> bool:
    """What the model was given has the digest of the planned rows, micro-batch by micro-batch."""
    return all(report.content == leaf.content for report, leaf in zip(reports, plan, strict=True))


def _explain_leaves_finite(reports: Sequence[LeafReport], plan: Sequence[LeafPlan], step: int) -> Finding:
    odd = [r for r in reports if r.nonfinite or not math.isfinite(r.loss_sum)]
    what = "loss" if not math.isfinite(odd[0].loss_sum) else "gradient"
    return Finding(
        seen=f"the {what} of micro-batch {odd[0].index} is not finite (loss {odd[0].loss_sum}); "
        f"its rows are {list(plan[odd[0].index].ids)}",
        step=step,
        ranks=tuple(sorted({r.rank for r in odd})),
        tensor=f"{what} of micro-batch {odd[0].index}",
    )


@clause("finite", _explain_leaves_finite)
def leaves_finite(reports: Sequence[LeafReport], plan: Sequence[LeafPlan], step: int) -> bool:
    """Every micro-batch's loss and raw gradient are finite, before anything could hide that they are not."""
    return all(not r.nonfinite and math.isfinite(r.loss_sum) for r in reports)


def _explain_plans(result: Sequence[Observation]) -> Finding:
    plans = [observation.values["plan"] for observation in result]
    shown = ", ".join(f"rank {rank}: {plan % (1 << 64):016x}" for rank, plan in enumerate(plans))
    return Finding(
        seen=f"the ranks planned different rows, or the same rows have different contents ({shown})",
        step=result[0].step,
        ranks=minority(plans),
        tensor="plan",
    )


@clause("content-planned", _explain_plans)
def plans_agree(result: Sequence[Observation]) -> bool:
    """Every rank planned the same rows in the same order and has the same data for them."""
    return all(o.values["plan"] == result[0].values["plan"] for o in result)


@ensure(in_lockstep)
def judge_presence(observations: Sequence[Observation]) -> Sequence[Observation]:
    """All ranks speak of the same step. Raises `Violation`."""
    return observations


@ensure(plans_agree)
def judge_plans(observations: Sequence[Observation]) -> Sequence[Observation]:
    """All ranks have the same plan for this step, so that they judge alike. Raises `Violation`."""
    return observations


@ensure(leaves_finite)
@ensure(content_planned)
@ensure(leaves_partition)
def judge_leaves(reports: Sequence[LeafReport], plan: Sequence[LeafPlan], step: int) -> Sequence[LeafReport]:
    """Before the reduction: each planned row used once, as it is in the data, finite results. Raises `Violation`."""
    return reports
