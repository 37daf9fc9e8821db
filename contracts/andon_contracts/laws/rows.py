"""The laws of rows: which of them an update used, in which order, and what the model was given for them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from andon_contracts.agree import minority
from andon_contracts.laws.law import Law, Rule, Seen, agreeing, unless_all
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


@dataclass(frozen=True)
class BatchTold:
    """The rows of one update as all ranks told them, and what they were to be.

    `ids` and `contents` by rank; `planned` the ids of the plan (None: no plan); `epoch` the rows that the present
    epoch has had, of `rows` (None: unknown), not copied: its owner adds to the set after the judgement;
    `expected` the content of each id (empty: unknown). resumed: the present epoch had begun before anything was told,
    so it may end at any time. before: the rows that the epoch before lacked when it ended, in the first update since.
    """

    step: int
    ids: tuple[tuple[int, ...], ...]
    contents: tuple[tuple[int, ...], ...]
    planned: tuple[int, ...] | None = None
    epoch: Set[int] = frozenset()
    rows: int | None = None
    expected: Mapping[int, int] | None = None
    resumed: bool = False
    before: frozenset[int] = frozenset()


def _samples_told(told: BatchTold) -> Finding | None:
    union = Counter(row for part in told.ids for row in part)

    def found(what: str, rows: Sequence[int]) -> Finding:
        holders = unless_all((rank for rank, part in enumerate(told.ids) if set(part) & set(rows)), len(told.ids))
        return Finding(what, told.step, holders, "global batch")

    repeated = [row for row, count in union.items() if count > 1]
    if repeated:
        return found(f"rows {repeated[:8]} were used more than once", repeated)
    if told.planned is not None and union != Counter(told.planned):
        extra, lacking = sorted(union - Counter(told.planned)), sorted(Counter(told.planned) - union)
        return found(f"rows {lacking[:8]} were planned and not used, rows {extra[:8]} used and not planned", extra)
    if told.rows is None:
        return None
    outside = [row for row in union if row >= told.rows]
    if outside:
        return found(f"rows {outside[:8]} are none of the {told.rows}", outside)
    late = [row for row in union if row in told.before]
    if late and len(late) == len(union):
        return found(f"rows {late[:8]} came when the rows of the epoch had begun to come again without them", late)
    again = [row for row in union if row in told.epoch]
    if again and not begins_anew(told, union):
        lacking_rows = told.rows - len(told.epoch)
        return found(f"rows {again[:8]} came again when {lacking_rows} rows of the epoch had not come", again)
    return None


def begins_anew(told: BatchTold, union: Iterable[int]) -> bool:
    """Whether an update with the rows `union` may begin an epoch although the one before lacks some rows.

    A loop may leave out batches on purpose: the rest of an epoch is then small, and a new epoch draws from all rows.
    An update that brings most of what was lacking, or comes long before the end, does not begin one.
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

SAMPLES_TOLD = Law("samples-once/told", ("ids",), _samples_told)
"""The union of the ranks' rows is the planned batch, or at least has each row once, also within its epoch."""


def _content_told(told: BatchTold) -> Finding | None:
    expected, odd = told.expected or {}, []
    for rank, (ids, contents) in enumerate(zip(told.ids, told.contents, strict=True)):
        pairs = zip(ids, contents, strict=False)
        odd += [(rank, row) for row, content in pairs if expected.get(row, content) != content]
    if not odd:
        return None
    what = f"rows {[row for _, row in odd][:8]} had other contents than the data set has for them"
    return Finding(what, told.step, unless_all((rank for rank, _ in odd), len(told.ids)), f"row {odd[0][1]}")


CONTENT_TOLD = Law("content-planned/told", ("contents",), _content_told)
"""Every row had the content that the data set has for its id."""


def _data(seen: Seen[object]) -> Finding | None:
    what = "the ranks' data sets have different contents for the rows of this batch"
    differ = "data" in seen.differing
    return Finding(what, seen.step, minority(seen.column("data")), "data set") if differ else None


DATA: tuple[Law[Seen[object]], ...] = (Law("content-planned/data", ("data",), _data),)
"""Every rank's data set has the same contents for the rows of the batch."""
