"""What ranks report of their micro-batches, and what is planned of them, as `laws.rows` holds them to each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn

from andon.step.gate import expected_row
from andon.step.micro_batch import REPORT_FIELDS, Leaf, bind_to_places, run_sums
from andon.step.task import Task
from andon_contracts.agree import Observation, real_of
from andon_contracts.laws.law import Rule, rules_of
from andon_contracts.laws.rows import LEAVES, LeafPlan, LeafReport


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
    owned = [rules_of(LEAVES, leaf) for leaf in plan if leaf.rank == rank]
    wanted = [value for rules in owned for value in expected_row(rules, REPORT_FIELDS)]
    return wanted + [-1] * ((count - len(owned)) * len(REPORT_FIELDS))


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
