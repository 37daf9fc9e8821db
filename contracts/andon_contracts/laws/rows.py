"""The laws of rows: which of them an update used, in which order, and what the model was given for them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from andon_contracts.agree import minority
from andon_contracts.laws.law import Law, Rule, Seen, agreeing
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


def _explain_partition(seen: Leaves) -> Finding:
    used = [(report.rank, report.index, report.rows) for report in seen.reports]
    wanted = [(leaf.rank, leaf.index, len(leaf.ids)) for leaf in seen.plan]
    ranks = sorted({rank for rank, _, _ in wanted + used})
    odd = tuple(rank for rank in ranks if [u for u in used if u[0] == rank] != [w for w in wanted if w[0] == rank])
    what = f"micro-batches (rank, index, rows) were to be {wanted}, used were {used}"
    return Finding(what, seen.step, odd)


def _explain_content(seen: Leaves) -> Finding:
    odd = [(r, leaf) for r, leaf in zip(seen.reports, seen.plan, strict=True) if r.content != leaf.content]
    first = odd[0][1].index
    rows = [row for _, leaf in odd for row in leaf.ids]
    return Finding(
        f"the model was not given the planned rows (micro-batch {first}, among rows {rows[:8]})",
        seen.step,
        tuple(sorted({report.rank for report, _ in odd})),
        f"micro-batch {first}",
    )


def _uncounted(seen: Leaves) -> list[tuple[LeafReport, LeafPlan]]:
    pairs = zip(seen.reports, seen.plan, strict=True)
    return [(report, leaf) for report, leaf in pairs if report.terms != leaf.terms]


def _explain_terms(seen: Leaves) -> Finding:
    odd = _uncounted(seen)
    report, leaf = odd[0]
    return Finding(
        f"the loss of micro-batch {leaf.index} is a sum of {report.terms} terms, its rows have {leaf.terms}",
        seen.step,
        tuple(sorted({report.rank for report, _ in odd})),
        f"loss of micro-batch {leaf.index}",
    )


def _infinite(seen: Leaves) -> list[LeafReport]:
    return [report for report in seen.reports if report.nonfinite or not math.isfinite(report.loss_sum)]


def _explain_infinite(seen: Leaves) -> Finding:
    odd = _infinite(seen)
    first = odd[0]
    what = "loss" if not math.isfinite(first.loss_sum) else "gradient"
    ids = next(leaf.ids for leaf in seen.plan if leaf.index == first.index)
    return Finding(
        f"the {what} of micro-batch {first.index} is not finite (loss {first.loss_sum}); its rows are {list(ids)}",
        seen.step,
        tuple(sorted({report.rank for report in odd})),
        f"{what} of micro-batch {first.index}",
    )


LEAVES: tuple[Law[Leaves], ...] = (
    Law(
        "samples-once/computed",
        ("index", "rows"),
        lambda seen: (
            [(r.rank, r.index, r.rows) for r in seen.reports]
            == [(leaf.rank, leaf.index, len(leaf.ids)) for leaf in seen.plan]
        ),
        _explain_partition,
        lambda leaf: {"index": leaf.index, "rows": len(leaf.ids)},
        stops=True,
    ),
    Law(
        "content-planned/computed",
        ("content",),
        lambda seen: all(r.content == leaf.content for r, leaf in zip(seen.reports, seen.plan, strict=True)),
        _explain_content,
        lambda leaf: {"content": leaf.content},
    ),
    Law(
        "content-planned/terms",
        ("terms",),
        lambda seen: not _uncounted(seen),
        _explain_terms,
        lambda leaf: {"terms": leaf.terms},
    ),
    Law(
        "finite/computed",
        ("loss_bits", "total_bits"),
        lambda seen: not _infinite(seen),
        _explain_infinite,
        lambda _: {"loss_bits": Rule.FINITE, "total_bits": Rule.FINITE},
    ),
)
"""Before the reduction: each micro-batch of the plan computed by its owner, once, in order, from the rows as they are
in the data, with finite results. On a device the rules are of one report, from its plan."""


PLANNED: tuple[Law[Seen[object]], ...] = (
    agreeing(
        "content-planned/planned",
        ("plan",),
        "the ranks planned different rows, or the same rows have different contents",
        device=True,
    ),
)
"""All ranks planned the same rows in the same order and have the same data for them, so that they judge alike."""


# what a loop tells


@dataclass(frozen=True)
class BatchTold:
    """The rows of one update as all ranks told them, and what they were to be.

    `ids` and `contents` by rank; `planned` the ids of the plan (None: no plan); `epoch` the rows that the present
    epoch has had, of `rows` (None: unknown), not copied: its owner adds to the set after the judgement;
    `expected` the content of each id (empty: unknown).
    """

    step: int
    ids: tuple[tuple[int, ...], ...]
    contents: tuple[tuple[int, ...], ...]
    planned: tuple[int, ...] | None = None
    epoch: Set[int] = frozenset()
    rows: int | None = None
    expected: Mapping[int, int] | None = None
    resumed: bool = False
    """Whether the present epoch had begun before anything was told: it may end at any time."""
    before: frozenset[int] = frozenset()
    """The rows that the epoch before this one lacked when it ended, if this is the first update since."""

    def union(self) -> list[int]:
        """All ids, in order of rank."""
        return [row for part in self.ids for row in part]


def _rows_fault(told: BatchTold) -> tuple[str, tuple[int, ...]]:
    """What is wrong with the ids, and on which ranks; empty where nothing is."""
    union = Counter(told.union())

    def holders(rows: Sequence[int]) -> tuple[int, ...]:
        found = tuple(rank for rank, part in enumerate(told.ids) if set(part) & set(rows))
        return found if len(found) < len(told.ids) else ()

    repeated = [row for row, count in union.items() if count > 1]
    if repeated:
        return f"rows {repeated[:8]} were used more than once", holders(repeated)
    if told.planned is not None and union != Counter(told.planned):
        extra, lacking = sorted(union - Counter(told.planned)), sorted(Counter(told.planned) - union)
        return f"rows {lacking[:8]} were planned and not used, rows {extra[:8]} used and not planned", holders(extra)
    if told.rows is None:
        return "", ()
    outside = [row for row in union if row >= told.rows]
    again = [row for row in union if row in told.epoch]
    if outside:
        return f"rows {outside[:8]} are none of the {told.rows}", holders(outside)
    late = [row for row in union if row in told.before]
    if late and len(late) == len(union):
        return f"rows {late[:8]} came when the rows of the epoch had begun to come again without them", holders(late)
    if again and not begins_anew(told, union):
        return (
            f"rows {again[:8]} came again when {told.rows - len(told.epoch)} rows of the epoch had not come",
            holders(again),
        )
    return "", ()


def begins_anew(told: BatchTold, union: Iterable[int]) -> bool:
    """Whether an update with the rows `union` may begin an epoch although the one before lacks some rows.

    A loop may leave out batches on purpose: the rest of an epoch is then small, and a new one draws from all rows. Of
    an update that brings most of what was lacking, or one that comes long before the end, that cannot be.
    """
    if told.rows is None:
        return False
    if told.resumed:
        return True
    rows = set(union)
    lacking = told.rows - len(told.epoch)
    brought = len(rows - told.epoch)
    return lacking * _SKIPPED <= told.rows and brought <= 1 + 2 * len(rows) * lacking / told.rows


_SKIPPED = 4
"""An epoch that lacks more than one row of so many was not ended by leaving batches out."""


def _explain_rows(told: BatchTold) -> Finding:
    what, ranks = _rows_fault(told)
    return Finding(what, told.step, ranks, "global batch")


SAMPLES_TOLD: Law[BatchTold] = Law("samples-once/told", ("ids",), lambda told: not _rows_fault(told)[0], _explain_rows)
"""The union of the ranks' rows is the planned batch, or at least has each row once, also within its epoch."""


def _odd_contents(told: BatchTold) -> list[tuple[int, int]]:
    expected = told.expected or {}
    return [
        (rank, row)
        for rank, (ids, contents) in enumerate(zip(told.ids, told.contents, strict=True))
        for row, content in zip(ids, contents, strict=False)
        if expected.get(row, content) != content
    ]


def _explain_told_content(told: BatchTold) -> Finding:
    odd = _odd_contents(told)
    ranks = tuple(sorted({rank for rank, _ in odd}))
    return Finding(
        f"rows {[row for _, row in odd][:8]} had other contents than the data set has for them",
        told.step,
        ranks if len(ranks) < len(told.ids) else (),
        f"row {odd[0][1]}",
    )


CONTENT_TOLD: Law[BatchTold] = Law(
    "content-planned/told", ("contents",), lambda told: not _odd_contents(told), _explain_told_content
)
"""Every row had the content that the data set has for its id."""


def _explain_data(seen: Seen[object]) -> Finding:
    what = "the ranks' data sets have different contents for the rows of this batch"
    return Finding(what, seen.step, minority(seen.column("data")), "data set")


DATA: tuple[Law[Seen[object]], ...] = (
    Law("content-planned/data", ("data",), lambda seen: "data" not in seen.differing, _explain_data),
)
"""Every rank's data set has the same contents for the rows of the batch."""
