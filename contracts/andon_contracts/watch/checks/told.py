"""What the loop tells by `w.batch`, `w.loss` and `w.expect`: its rows, its losses, and values to compare."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from andon_contracts.agree import bits_of, majority, minority, real_of
from andon_contracts.laws.law import Law, Observations, Seen, unless_all
from andon_contracts.observe import flat_digest
from andon_contracts.violation import Finding
from andon_contracts.watch.check import Check, Context, Cover, OptimizerProbe, Values
from andon_contracts.watch.ledger import UpdateRows
from andon_contracts.watch.rows import contents_of, ids_of
from andon_contracts.watch.values import text_digest, value_digest

EXPECTED = 4
"""How many values can be compared by `w.expect`."""
_SAMPLE = 256
"""About so many rows of the ranks' data sets are compared at the start."""


class _Must(IntEnum):
    AGREE = 1
    DIFFER = 2


@dataclass(frozen=True)
class BatchTold:
    """The rows of one update as all ranks told them.

    ids, contents: by rank. planned: the ids of the plan; None: there is none. rows: how many the data set has; None:
    unknown. expected: the content of each id as far as it is known.
    """

    step: int
    ids: tuple[tuple[int, ...], ...]
    contents: tuple[tuple[int, ...], ...]
    planned: tuple[int, ...] | None = None
    rows: int | None = None
    expected: Mapping[int, int] | None = None


def _rows_once(told: BatchTold) -> Finding | None:
    union = Counter(row for part in told.ids for row in part)

    def finding(what: str, rows: Sequence[int]) -> Finding:
        holders = [rank for rank, part in enumerate(told.ids) if set(part) & set(rows)]
        return Finding(what, told.step, unless_all(holders, len(told.ids)), "global batch")

    repeated = [row for row, count in union.items() if count > 1]
    if repeated:
        return finding(f"rows {repeated[:8]} were used more than once", repeated)
    if told.planned is not None and union != Counter(told.planned):
        extra, lacking = sorted(union - Counter(told.planned)), sorted(Counter(told.planned) - union)
        what = f"rows {lacking[:8]} were planned and not used, rows {extra[:8]} used and not planned"
        return finding(what, extra)
    outside = [] if told.rows is None else [row for row in union if row >= told.rows]
    return finding(f"rows {outside[:8]} are none of the {told.rows}", outside) if outside else None


def _contents_planned(told: BatchTold) -> Finding | None:
    expected = told.expected or {}
    odd = [
        (rank, row)
        for rank, (ids, contents) in enumerate(zip(told.ids, told.contents, strict=True))
        for row, content in zip(ids, contents, strict=False)
        if expected.get(row, content) != content
    ]
    if not odd:
        return None
    what = f"rows {[row for _, row in odd][:8]} had other contents than the data set has for them"
    ranks = sorted({rank for rank, _ in odd})
    return Finding(what, told.step, unless_all(ranks, len(told.ids)), f"row {odd[0][1]}")


def _same_data(seen: Seen[object]) -> Finding | None:
    if "data" not in seen.differing:
        return None
    what = "the ranks' data sets have different contents for the rows of this batch"
    return Finding(what, seen.step, minority(seen.column("data")), "data set")


def _loss_reported(seen: Seen[object]) -> Finding | None:
    mean = sum(map(real_of, seen.column("loss sum"))) / max(sum(seen.column("loss rows")), 1)
    reported = {o.rank: real_of(o.values["reported"]) for o in seen.said if o.values["reports"]}
    odd = [rank for rank, each in reported.items() if not math.isclose(each, mean, rel_tol=1e-4, abs_tol=1e-7)]
    if not odd:
        return None
    what = f"the loss reported is {reported[odd[0]]!r}, the mean over the rows of all ranks is {mean!r}"
    return Finding(what, seen.step, seen.some(odd), "loss")


def _as_expected(seen: Seen[object]) -> Finding | None:
    for index in range(EXPECTED):
        name = f"stream {index}"
        must, values = majority(seen.column(f"{name} must")), seen.column(name)
        if must == _Must.AGREE and len(set(values)) > 1:
            return Finding("the ranks have different states of it, and must agree", seen.step, minority(values), name)
        if must == _Must.DIFFER and len(set(values)) < len(values):
            alike = [rank for rank, value in enumerate(values) if values.count(value) > 1]
            return Finding(f"ranks {alike} have the same state of it, and must differ", seen.step, (), name)
    return None


_BATCH = (Law("samples-once/told", ("ids",), _rows_once),)
_CONTENTS = (Law("content-planned/told", ("contents",), _contents_planned),)
_DATA = (Law("content-planned/data", ("data",), _same_data),)


class ToldByLoop(Check):
    """What hooks cannot see and the loop tells, kept until the update that it belongs to."""

    before_laws = (
        Law("loss-reported/before", ("reports", "reported", "loss sum", "loss rows"), _loss_reported),
        Law(
            "randomness-declared/before",
            tuple(f"stream {index}{must}" for index in range(EXPECTED) for must in (" must", "")),
            _as_expected,
        ),
    )

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._rows = context.rows
        self.of_update = UpdateRows()
        """What the ledger says of the rows of this update."""
        self.untold = {"loss-reported", "randomness-declared"}
        """Clauses of which the loop has told nothing yet."""
        self._expected: dict[str, tuple[int, int]] = {}
        self._contents: dict[int, int] = {}
        self._epochs = 0
        self._epoch: set[int] = set()

    def cover(self) -> Mapping[str, Cover]:
        planned, contents = self.context.settings.plan is not None, self.context.settings.contents
        of_rows = "of torch's data loaders and w.batch; no plan=: no row twice" * (not planned)
        no_contents = "needs w.batch(content=); no contents=: held to what the same row was before"
        return {
            "samples-once": Cover("live" if planned else "degraded", of_rows),
            "content-planned": Cover("live" if contents else "degraded", "" if contents else no_contents),
            "loss-reported": Cover("live", "where w.expect tells one"),
            "randomness-declared": Cover("live", "where w.expect tells values"),
        }

    def batch(self, ids: Sequence[int] | Tensor, content: Sequence[object] | None = None) -> None:
        """As `Watch.batch`."""
        found = ids_of(ids)
        self._rows.add(found, [] if content is None else contents_of(content, len(found)))

    def loss(self, loss: float | Tensor, count: int) -> None:
        """As `Watch.loss`."""
        self._rows.loss_sum += float(loss)
        self._rows.loss_rows += count

    def expect(self, name: str, value: object, must: str) -> None:
        """As `Watch.expect`."""
        if must not in ("agree", "differ", "mean"):
            raise ValueError(f"must is 'agree', 'differ' or 'mean', not {must!r}")
        if must == "mean":
            self.untold.discard("loss-reported")
            self._rows.reported = float(value)  # type: ignore[arg-type]
            return
        if name not in self._expected and len(self._expected) == EXPECTED:
            raise ValueError(f"{name!r} is one value more than {EXPECTED} that can be compared")
        self.untold.discard("randomness-declared")
        found = value.get_state() if isinstance(value, torch.Generator) else value
        digest = flat_digest([found]) if isinstance(found, Tensor) else value_digest(found, f"the value of {name!r}")
        self._expected[name] = (_Must[must.upper()], digest)

    def compare_data(self) -> None:
        """Compare a sample of the ranks' data sets at the start. Collective."""
        contents, rows = self.context.settings.contents, self.context.settings.rows
        if contents is not None and rows is not None:
            ids = range(0, rows, max(rows // _SAMPLE, 1))
            self._judge_data(0, contents_of(contents(ids), len(ids)))

    def _judge_data(self, step: int, contents: Sequence[int]) -> None:
        seen = self.context.exchange(step, "data", {"data": text_digest(contents)})
        self.context.verdicts.judge(_DATA, Seen[object](seen, None), self.context.scene())

    def meanwhile(self, probe: OptimizerProbe) -> Values:
        rows = self._rows
        values = {
            "rows": len(rows.ids),
            "windows passed": len(rows.passed),
            "with content": int(len(rows.contents) == len(rows.ids)),
            "loss sum": bits_of(rows.loss_sum),
            "loss rows": rows.loss_rows,
            "reports": int(rows.reported is not None),
            "reported": bits_of(rows.reported or 0.0),
        }
        expected = [self._expected[name] for name in sorted(self._expected)]
        for index, (must, digest) in enumerate([*expected, *[(0, 0)] * EXPECTED][:EXPECTED]):
            values |= {f"stream {index} must": must, f"stream {index}": digest}
        return values

    def judge(self, probe: OptimizerProbe, said: Observations, aligned: Observations) -> None:
        """Gather the rows of this update and judge them by the plan and the data."""
        context, step = self.context, said[0].step
        self.of_update = UpdateRows()
        if any(o.values["windows passed"] for o in said):
            self._mark_passed(step)
        if not any(o.values["rows"] for o in said):
            return
        with_contents = all(o.values["with content"] for o in said)
        own = self._rows.contents if with_contents else [0] * len(self._rows.ids)
        parts = context.exchange.columns(step, [self._rows.ids, own])
        ids, contents = (tuple(tuple(part[column]) for part in parts) for column in (0, 1))
        union = [row for part in ids for row in part]
        known = tuple(content for part in contents for content in part) if with_contents else ()
        self.of_update = UpdateRows(ids, known, *self._place(union))
        plan = context.settings.plan
        told = BatchTold(
            step,
            ids,
            contents if with_contents else ((),) * len(ids),
            # The plan goes on past updates that a loss scaler skipped.
            None if plan is None else tuple(plan(step + probe.skipped)),
            context.settings.rows,
            self._contents_of(step, union) if with_contents else None,
        )
        context.verdicts.judge((*_BATCH, *_CONTENTS) if with_contents else _BATCH, told, context.scene())
        for part, its in zip(told.ids, told.contents, strict=True):
            for row, content in zip(part, its, strict=False):
                self._contents.setdefault(row, content)
        self._mark(union)

    def _contents_of(self, step: int, union: Sequence[int]) -> dict[int, int]:
        """The content of each row by the data set, which must be the same on all ranks; else as it was told before."""
        contents = self.context.settings.contents
        if contents is None:
            return {row: self._contents[row] for row in union if row in self._contents}
        found = contents_of(contents(union), len(union))
        self._judge_data(step, found)
        return dict(zip(union, found, strict=True))

    def _place(self, union: Sequence[int]) -> tuple[int | None, int | None]:
        """The epoch of these rows and how many of its rows were used before, for the ledger; None without `rows=`."""
        if self.context.settings.rows is None:
            return None, None
        return (self._epochs + 1, 0) if self._epoch & set(union) else (self._epochs, len(self._epoch))

    def _mark_passed(self, step: int) -> None:
        """The rows of updates that a loss scaler skipped were used too, one update after the other."""
        passed = self._rows.passed
        windows = [window for window, ids in enumerate(passed) for _ in ids]
        parts = self.context.exchange.columns(step, [[row for ids in passed for row in ids], windows])
        for window in sorted({window for part in parts for window in part[1]}):
            self._mark([row for part in parts for row, its in zip(*part, strict=True) if its == window])
        self._rows.passed = []

    def _mark(self, union: Sequence[int]) -> None:
        rows = self.context.settings.rows
        if rows is None:
            return
        if self._epoch & set(union):
            self._begin_epoch()
        self._epoch |= set(union)
        if len(self._epoch) >= rows:
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._epoch.clear()
        self._epochs += 1
