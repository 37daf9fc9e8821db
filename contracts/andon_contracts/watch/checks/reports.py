"""What the loop reports by `w.batch`, `w.loss` and `w.expect`: its rows, its losses, and values to compare."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Number
from typing import NamedTuple

import torch
from torch import Tensor

from andon_contracts.agree import bits_of, majority, minority, real_of
from andon_contracts.laws.law import Law, Observations, Seen, agreeing, unless_all
from andon_contracts.observe import flat_digest
from andon_contracts.violation import Finding, named_ranks
from andon_contracts.watch.check import Check, Context, Cover, OptimizerProbe, Values
from andon_contracts.watch.ledger import UpdateRows
from andon_contracts.watch.values import contents_of, ids_of, text_digest, value_digest

EXPECTED = 4
"""The most values that `w.expect` compares."""
_MUST = {"agree": 1, "differ": 2}
_SAMPLE = 256
"""About this many rows of the ranks' data sets are compared at the start."""


class ReportedRows(NamedTuple):
    """The rows of one update, as all ranks reported them.

    ids, contents: by rank. planned: the ids of the plan; None without a plan. rows: the size of the data set; None if
    unknown. expected: the content of each id, if it is known, from `source`.
    """

    step: int
    ids: tuple[tuple[int, ...], ...]
    contents: tuple[tuple[int, ...], ...]
    planned: tuple[int, ...] | None
    rows: int | None
    expected: Mapping[int, int]
    source: str


def _rows_once(batch: ReportedRows) -> Finding | None:
    union = Counter(row for part in batch.ids for row in part)
    repeated = [row for row, count in union.items() if count > 1]
    outside = [] if batch.rows is None else [row for row in union if row >= batch.rows]
    if repeated:
        what, rows = f"rows {repeated[:8]} were used more than once", repeated
    elif batch.planned is not None and union != Counter(batch.planned):
        rows, lacking = sorted(union - Counter(batch.planned)), sorted(Counter(batch.planned) - union)
        what = f"rows {lacking[:8]} were planned but not used, rows {rows[:8]} used but not planned"
    elif outside:
        what, rows = f"rows {outside[:8]} are beyond the {batch.rows} rows of the data set", outside
    else:
        return None
    ranks = [rank for rank, part in enumerate(batch.ids) if set(part) & set(rows)]
    return Finding(what, batch.step, unless_all(ranks, len(batch.ids)), "global batch")


def _contents_planned(batch: ReportedRows) -> Finding | None:
    odd = [
        (rank, row)
        for rank, (ids, contents) in enumerate(zip(batch.ids, batch.contents, strict=True))
        for row, content in zip(ids, contents, strict=False)
        if batch.expected.get(row, content) != content
    ]
    if not odd:
        return None
    what = f"the content of rows {[row for _, row in odd][:8]} differs from {batch.source}"
    return Finding(what, batch.step, unless_all((rank for rank, _ in odd), len(batch.ids)), f"row {odd[0][1]}")


def _loss_reported(seen: Seen[object]) -> Finding | None:
    rows = sum(seen.column("loss rows"))
    if not rows:  # no rank called `w.loss`: nothing to compare with
        return None
    mean = sum(map(real_of, seen.column("loss sum"))) / rows
    reported = {o.rank: real_of(o.values["reported"]) for o in seen.observations if o.values["reports"]}
    odd = [rank for rank, each in reported.items() if not math.isclose(each, mean, rel_tol=1e-4, abs_tol=1e-7)]
    if not odd:
        return None
    what = f"the reported loss is {reported[odd[0]]!r}, but the mean over the rows of all ranks is {mean!r}"
    return Finding(what, seen.step, seen.unless_all(odd), "loss")


def _as_expected(seen: Seen[Sequence[Mapping[str, str]]]) -> Finding | None:
    """want: by rank, the text of each value by name; empty until a difference was found."""
    for index in range(EXPECTED):
        musts, values = seen.column(f"stream {index} must"), seen.column(f"stream {index}")
        told = [rank for rank, must in enumerate(musts) if must]
        if not told:
            continue
        must = majority([musts[rank] for rank in told])
        equal = [rank for rank in told if [values[each] for each in told].count(values[rank]) > 1]
        if must == _MUST["agree"] and len(set(values)) > 1:
            what, ranks = "the values differ between ranks, but must agree", minority(values)
            likely = "each rank computes the value from its own rows, settings or random numbers"
        elif must == _MUST["differ"] and equal:
            what, ranks = f"the values of {named_ranks(equal)} are equal, but must differ", ()
            likely = "the value does not depend on the rank"
        else:
            continue
        name = min((sorted(texts)[index] for texts in seen.want if index < len(texts)), default=f"value {index + 1}")
        texts = [each.get(name, "no value was reported") for each in seen.want]
        shown = ", ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
        what += f" ({shown})" * bool(shown)
        named = any(each.get(name) for each in seen.want)
        return Finding(what, seen.step, ranks, name, likely=likely if named else None)
    return None


def text_of(value: object) -> str:
    """A number, a short text or a tensor of few elements as text; "" for any other value, as a random state."""
    if isinstance(value, Tensor) and value.numel() <= EXPECTED:
        return str(value.tolist())
    return repr(value) if isinstance(value, Number) or (isinstance(value, str) and len(value) < 80) else ""


_ROWS = (Law("samples-once/told", ("ids",), _rows_once),)
_CONTENTS = (Law("content-planned/told", ("contents",), _contents_planned),)
_OTHER = "the ranks' data sets have different content for the same rows"
_DATA = (agreeing("content-planned/data", ("data set",), _OTHER),)
_STREAMS = tuple(f"stream {index}{must}" for index in range(EXPECTED) for must in (" must", ""))
_EXPECTED = (Law("randomness-declared/before", _STREAMS, _as_expected),)


class LoopReports(Check):
    """Stores and judges what `Watch.batch` and `loss` report of an update, and the last values of `Watch.expect`."""

    before_laws = (Law("loss-reported/before", ("reports", "reported", "loss sum", "loss rows"), _loss_reported),)

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._rows = context.rows
        self.of_update = UpdateRows()  # the rows of this update, for the ledger
        self.unreported = {"loss-reported", "randomness-declared"}  # clauses for which nothing is reported yet
        self._expected: dict[str, tuple[int, int, str]] = {}
        self._contents: dict[int, int] = {}  # by row id, the digest of its content as first reported
        self._epochs_known = context.settings.rows is not None and context.settings.plan is not None
        self._epochs, self._mean_told = 0, False
        self._epoch: set[int] = set()

    def cover(self) -> Mapping[str, Cover]:
        planned, contents = self.context.settings.plan is not None, self.context.settings.contents
        of_rows = "without plan=: only that no row of a data loader or of w.batch comes twice" * (not planned)
        no_contents = "needs w.batch(content=); without contents=: each row is compared with its earlier content"
        return {
            "samples-once": Cover("live" if planned else "degraded", of_rows),
            "content-planned": Cover("live" if contents else "degraded", "" if contents else no_contents),
            "loss-reported": Cover("live", "if the loop calls w.expect with must='mean'"),
            "randomness-declared": Cover("live", "if the loop calls w.expect"),
        }

    def batch(self, ids: Sequence[int] | Tensor, content: Sequence[object] | None = None) -> None:
        rows = ids_of(ids)
        self._rows.add(rows, [] if content is None else contents_of(content, len(rows)))

    def loss(self, loss: float | Tensor, count: int) -> None:
        self._rows.loss_sum += float(loss)
        self._rows.loss_rows += count

    def expect(self, name: str, value: object, must: str) -> None:
        if must not in ("agree", "differ", "mean"):
            raise ValueError(f"must= takes 'agree', 'differ' or 'mean', not {must!r}")
        if must == "mean":
            self._mean_told, self._rows.reported = True, float(value)  # type: ignore[arg-type]
            return
        if name not in self._expected and len(self._expected) == EXPECTED:
            raise ValueError(f"at most {EXPECTED} values can be compared; {name!r} is one more")
        self.unreported.discard("randomness-declared")
        state = value.get_state() if isinstance(value, torch.Generator) else value
        digest = flat_digest([state]) if isinstance(state, Tensor) else value_digest(state, f"the value of {name!r}")
        self._expected[name] = (_MUST[must], digest, text_of(value))

    def compare_data(self) -> None:
        contents, rows = self.context.settings.contents, self.context.settings.rows
        if contents is not None and rows is not None:
            ids = range(0, rows, max(rows // _SAMPLE, 1))
            self._judge_data(0, contents_of(contents(ids), len(ids)))

    def _judge_data(self, step: int, contents: Sequence[int]) -> None:
        seen = self.context.exchange(step, "data", {"data set": text_digest(contents)})
        self.context.verdicts.judge(_DATA, Seen[object](seen, None), self.context.scene())

    def meanwhile(self, probe: OptimizerProbe) -> Values:
        rows = self._rows
        values = {
            "rows": len(rows.ids),
            "windows passed": len(rows.skipped_windows),
            "with content": int(len(rows.contents) == len(rows.ids)),
            "loss sum": bits_of(rows.loss_sum),
            "loss rows": rows.loss_rows,
            "reports": int(rows.reported is not None),
            "reported": bits_of(rows.reported or 0.0),
        }
        expected = [self._expected[name] for name in sorted(self._expected)]
        for index, (must, digest, _) in enumerate([*expected, *[(0, 0, "")] * EXPECTED][:EXPECTED]):
            values |= {f"stream {index} must": must, f"stream {index}": digest}
        return values

    def judge(self, probe: OptimizerProbe, said: Observations, aligned: Observations) -> None:
        """Judge the values of this update, then gather its rows and judge them by `plan=`, `rows=` and `contents=`."""
        context, settings, step = self.context, self.context.settings, said[0].step
        judged = context.verdicts.judgement(_EXPECTED, Seen[Sequence[Mapping[str, str]]](said, ()))
        if judged.first is not None and not context.verdicts.is_reported("randomness-declared"):
            own_texts = json.dumps({name: text for name, (*_, text) in self._expected.items()})
            texts = context.exchange.gather_texts(step, own_texts)
            judged.seen = replace(judged.seen, want=[json.loads(text) for text in texts])
        if judged.first is not None:
            context.verdicts.report_all(judged, context.scene_of(probe, aligned, applied=False))
        self.of_update = UpdateRows()
        if any(o.values["reports"] for o in said) and any(o.values["loss rows"] for o in said):
            self.unreported.discard("loss-reported")
        if any(o.values["windows passed"] for o in said):
            passed, self._rows.skipped_windows = self._rows.skipped_windows, []
            numbers = [window for window, skipped in enumerate(passed) for _ in skipped]
            parts = context.exchange.gather_columns(step, [[row for skipped in passed for row in skipped], numbers])
            for number in sorted({window for part in parts for window in part[1]}):
                self._use([row for part in parts for row, window in zip(*part, strict=True) if window == number])
        if not any(o.values["rows"] for o in said):
            return
        with_contents = all(o.values["with content"] for o in said)
        own = self._rows.contents if with_contents else [0] * len(self._rows.ids)
        parts = context.exchange.gather_columns(step, [self._rows.ids, own])
        ids, contents = (tuple(tuple(part[column]) for part in parts) for column in (0, 1))
        union = [row for part in ids for row in part]
        known = tuple(content for part in contents for content in part) if with_contents else ()
        # The epoch of these rows, and how many of its rows were used before.
        position = (self._epochs + 1, 0) if self._epoch & set(union) else (self._epochs, len(self._epoch))
        self.of_update = UpdateRows(ids, known, *(position if self._epochs_known else (None, None)))
        expected, source = dict[int, int](), "their content when first reported (no contents=)"
        if with_contents and settings.contents is not None:
            of_data = contents_of(settings.contents(union), len(union))
            self._judge_data(step, of_data)
            expected, source = dict(zip(union, of_data, strict=True)), "what contents= returns for them"
        elif with_contents:
            expected = self._contents
        reported = contents if with_contents else ((),) * len(ids)
        # The plan goes on past updates that a loss scaler skipped.
        planned = None if settings.plan is None else tuple(settings.plan(step + probe.skipped))
        batch = ReportedRows(step, ids, reported, planned, settings.rows, expected, source)
        context.verdicts.judge((*_ROWS, *_CONTENTS) if with_contents else _ROWS, batch, context.scene())
        for row, content in zip(union, known, strict=False):
            self._contents.setdefault(row, content)
        self._use(union)

    def closing_lines(self) -> list[str]:
        without_losses = self._mean_told and "loss-reported" in self.unreported
        return ["  loss-reported: not judged, no w.loss(...) for the mean of w.expect"] * without_losses

    def _use(self, union: Sequence[int]) -> None:
        """Count rows as used in this epoch. A new epoch begins if a row comes again, or if all were used."""
        rows = self.context.settings.rows
        if rows is None or not self._epochs_known:
            return
        if self._epoch & set(union):
            self._epoch, self._epochs = set(), self._epochs + 1
        self._epoch |= set(union)
        if len(self._epoch) >= rows:
            self._epoch, self._epochs = set(), self._epochs + 1
