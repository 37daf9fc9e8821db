"""The reports of the loop: its rows, its losses, values to compare, evaluations, checkpoints, the number of updates."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from andon_contracts.agree import bits_of, majority, minority, real_of
from andon_contracts.digest import digests_by_name
from andon_contracts.laws.law import Law, Observations, Seen, unless_all
from andon_contracts.laws.update import COUNTED, EVALUATED, RESTORED, Count, Evaluation, Restored
from andon_contracts.observe import flat_digest, plain
from andon_contracts.untrusted import read_json
from andon_contracts.violation import Finding, first_line
from andon_contracts.watch.check import Check, Context, Cover, OptimizerProbe, Values, declared
from andon_contracts.watch.ledger import UpdateRows
from andon_contracts.watch.values import contents_of, ids_of, lenient_digest, state_digest, text_digest, value_digest

EXPECTED = 4
"""The most values that `w.expect` compares."""
_MUST = {"agree": 1, "differ": 2}
_SAMPLE = 256
"""About this many rows of the ranks' data sets are compared at the start."""


@dataclass(frozen=True)
class ReportedRows:
    """The rows of one update, as all ranks reported them.

    ids, contents: by rank. planned: the ids of the plan; None without a plan. rows: the size of the data set; None if
    unknown. expected: the content of each id, if it is known.
    """

    step: int
    ids: tuple[tuple[int, ...], ...]
    contents: tuple[tuple[int, ...], ...]
    planned: tuple[int, ...] | None = None
    rows: int | None = None
    expected: Mapping[int, int] | None = None


def _rows_once(batch: ReportedRows) -> Finding | None:
    union = Counter(row for part in batch.ids for row in part)
    repeated = [row for row, count in union.items() if count > 1]
    outside = [] if batch.rows is None else [row for row in union if row >= batch.rows]
    if repeated:
        what, rows = f"rows {repeated[:8]} were used more than once", repeated
    elif batch.planned is not None and union != Counter(batch.planned):
        rows, lacking = sorted(union - Counter(batch.planned)), sorted(Counter(batch.planned) - union)
        what = f"rows {lacking[:8]} were planned and not used, rows {rows[:8]} used and not planned"
    elif outside:
        what, rows = f"rows {outside[:8]} are none of the {batch.rows}", outside
    else:
        return None
    ranks = [rank for rank, part in enumerate(batch.ids) if set(part) & set(rows)]
    return Finding(what, batch.step, unless_all(ranks, len(batch.ids)), "global batch")


def _contents_planned(batch: ReportedRows) -> Finding | None:
    expected = batch.expected or {}
    odd = [
        (rank, row)
        for rank, (ids, contents) in enumerate(zip(batch.ids, batch.contents, strict=True))
        for row, content in zip(ids, contents, strict=False)
        if expected.get(row, content) != content
    ]
    if not odd:
        return None
    what = f"rows {[row for _, row in odd][:8]} had other contents than the data set has for them"
    ranks = sorted({rank for rank, _ in odd})
    return Finding(what, batch.step, unless_all(ranks, len(batch.ids)), f"row {odd[0][1]}")


def _same_data(seen: Seen[object]) -> Finding | None:
    if "data" not in seen.differing:
        return None
    what = "the ranks' data sets have different contents for the rows of this batch"
    return Finding(what, seen.step, minority(seen.column("data")), "data set")


def _loss_reported(seen: Seen[object]) -> Finding | None:
    mean = sum(map(real_of, seen.column("loss sum"))) / max(sum(seen.column("loss rows")), 1)
    reported = {o.rank: real_of(o.values["reported"]) for o in seen.observations if o.values["reports"]}
    odd = [rank for rank, each in reported.items() if not math.isclose(each, mean, rel_tol=1e-4, abs_tol=1e-7)]
    if not odd:
        return None
    what = f"the loss reported is {reported[odd[0]]!r}, the mean over the rows of all ranks is {mean!r}"
    return Finding(what, seen.step, seen.unless_all(odd), "loss")


def _as_expected(seen: Seen[object]) -> Finding | None:
    for index in range(EXPECTED):
        name = f"stream {index}"
        must, values = majority(seen.column(f"{name} must")), seen.column(name)
        if must == _MUST["agree"] and len(set(values)) > 1:
            return Finding("the ranks have different states of it, and must agree", seen.step, minority(values), name)
        if must == _MUST["differ"] and len(set(values)) < len(values):
            equal = [rank for rank, value in enumerate(values) if values.count(value) > 1]
            return Finding(f"ranks {equal} have the same state of it, and must differ", seen.step, (), name)
    return None


_ROWS = (Law("samples-once/told", ("ids",), _rows_once),)
_CONTENTS = (Law("content-planned/told", ("contents",), _contents_planned),)
_DATA = (Law("content-planned/data", ("data",), _same_data),)
_STREAMS = tuple(f"stream {index}{must}" for index in range(EXPECTED) for must in (" must", ""))


class LoopReports(Check):
    """Holds the arguments of `Watch.batch`, `Watch.loss` and `Watch.expect` until the update that they belong to."""

    before_laws = (
        Law("loss-reported/before", ("reports", "reported", "loss sum", "loss rows"), _loss_reported),
        Law("randomness-declared/before", _STREAMS, _as_expected),
    )

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._rows = context.rows
        self.of_update = UpdateRows()
        """The rows of this update, for the ledger."""
        self.unreported = {"loss-reported", "randomness-declared"}
        """Clauses for which the loop has reported nothing yet."""
        self._expected: dict[str, tuple[int, int]] = {}
        self._contents: dict[int, int] = {}
        """By row, as first reported."""
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
        rows = ids_of(ids)
        self._rows.add(rows, [] if content is None else contents_of(content, len(rows)))

    def loss(self, loss: float | Tensor, count: int) -> None:
        self._rows.loss_sum += float(loss)
        self._rows.loss_rows += count

    def expect(self, name: str, value: object, must: str) -> None:
        if must not in ("agree", "differ", "mean"):
            raise ValueError(f"must is 'agree', 'differ' or 'mean', not {must!r}")
        if must == "mean":
            self.unreported.discard("loss-reported")
            self._rows.reported = float(value)  # type: ignore[arg-type]
            return
        if name not in self._expected and len(self._expected) == EXPECTED:
            raise ValueError(f"{name!r} is one value more than {EXPECTED} that can be compared")
        self.unreported.discard("randomness-declared")
        state = value.get_state() if isinstance(value, torch.Generator) else value
        digest = flat_digest([state]) if isinstance(state, Tensor) else value_digest(state, f"the value of {name!r}")
        self._expected[name] = (_MUST[must], digest)

    def compare_data(self) -> None:
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
            "windows passed": len(rows.skipped_windows),
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
        context, settings, step = self.context, self.context.settings, said[0].step
        self.of_update = UpdateRows()
        if any(o.values["windows passed"] for o in said):
            self._use_skipped_windows(step)
        if not any(o.values["rows"] for o in said):
            return
        with_contents = all(o.values["with content"] for o in said)
        own = self._rows.contents if with_contents else [0] * len(self._rows.ids)
        parts = context.exchange.gather_columns(step, [self._rows.ids, own])
        ids, contents = (tuple(tuple(part[column]) for part in parts) for column in (0, 1))
        union = [row for part in ids for row in part]
        known = tuple(content for part in contents for content in part) if with_contents else ()
        # The epoch of these rows, and how many of its rows were used before. Unknown without `rows=`.
        position = (self._epochs + 1, 0) if self._epoch & set(union) else (self._epochs, len(self._epoch))
        self.of_update = UpdateRows(ids, known, *((None, None) if settings.rows is None else position))
        expected: dict[int, int] | None = None
        if with_contents and settings.contents is not None:
            of_data = contents_of(settings.contents(union), len(union))
            self._judge_data(step, of_data)
            expected = dict(zip(union, of_data, strict=True))
        elif with_contents:
            expected = self._contents
        reported = contents if with_contents else ((),) * len(ids)
        # The plan goes on past updates that a loss scaler skipped.
        planned = None if settings.plan is None else tuple(settings.plan(step + probe.skipped))
        batch = ReportedRows(step, ids, reported, planned, settings.rows, expected)
        context.verdicts.judge((*_ROWS, *_CONTENTS) if with_contents else _ROWS, batch, context.scene())
        for row, content in zip(union, known, strict=False):
            self._contents.setdefault(row, content)
        self._use(union)

    def _use_skipped_windows(self, step: int) -> None:
        """Count the rows of updates that a loss scaler skipped as used, update by update."""
        passed = self._rows.skipped_windows
        windows = [window for window, ids in enumerate(passed) for _ in ids]
        parts = self.context.exchange.gather_columns(step, [[row for ids in passed for row in ids], windows])
        for window in sorted({window for part in parts for window in part[1]}):
            self._use([row for part in parts for row, of_window in zip(*part, strict=True) if of_window == window])
        self._rows.skipped_windows = []

    def _use(self, union: Sequence[int]) -> None:
        """Count rows as used in this epoch. The next one begins if a row comes again, or if all were used."""
        rows = self.context.settings.rows
        if rows is None:
            return
        if self._epoch & set(union):
            self._epoch, self._epochs = set(), self._epochs + 1
        self._epoch |= set(union)
        if len(self._epoch) >= rows:
            self._epoch, self._epochs = set(), self._epochs + 1


_WRAP = 1 << 64
S = TypeVar("S")


class Outcomes(Check):
    """`Watch.evaluated`, `saved` and `loaded`. They are collective, and refuse on all ranks or on none."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._evaluated: dict[tuple[int, int], int] = {}
        modules = context.subject.inner.named_modules()
        self._batch_norms = [(n, m) for n, m in modules if isinstance(m, _BatchNorm) and m.track_running_stats]
        self._batch_norm_in_training = 0
        """The number, from 1, of a batch norm in training mode in the last forward pass without gradients since an
        update; 0 for none.
        """

    def cover(self) -> Mapping[str, Cover]:
        return {
            "updates-planned": declared(self.context.settings.updates, "updates="),
            "evaluation-once": Cover("live", "where w.evaluated tells one"),
            "checkpoint-whole": Cover("live", "where w.saved and w.loaded tell one"),
        }

    def forward(self, module: object, args: object, kwargs: object) -> None:
        if not torch.is_grad_enabled():
            training = (number for number, (_, norm) in enumerate(self._batch_norms, 1) if norm.training)
            self._batch_norm_in_training = next(training, 0)

    def updated(self, probe: OptimizerProbe) -> None:
        self._batch_norm_in_training = 0

    def judge(self, probe: OptimizerProbe, said: Observations, aligned: Observations) -> None:
        if (planned := self.context.settings.updates) is not None:
            self._judge(COUNTED, Count(probe.updates, planned, over=False))

    def judge_close(self) -> None:
        if (planned := self.context.settings.updates) is not None:
            self._judge(COUNTED, Count(self.context.updates, planned, over=True))

    def _judge(self, laws: Sequence[Law[S]], seen: S) -> None:
        self.context.verdicts.judge(laws, seen, self.context.scene(applied=True))

    @property
    def _step(self) -> int:
        return self.context.probes[0].updates

    def evaluated(
        self,
        ids: Sequence[int] | Tensor,
        predictions: Sequence[int] | Tensor,
        labels: Sequence[int] | Tensor,
        metrics: Mapping[str, float] | None = None,
        rows: int | None = None,
    ) -> None:
        table, problem = _table(ids, predictions, labels)
        self._raise_on_all_ranks(problem)
        step, exchange, metrics = self._step, self.context.exchange, metrics or {}
        reported = {
            "weights": flat_digest(p for probe in self.context.probes for p in probe.members),
            "rows known": int(rows is not None),
            "rows": rows or 0,
            "tells accuracy": int("accuracy" in metrics),
            "accuracy": bits_of(metrics.get("accuracy", 0.0)),
            "norm in training": self._batch_norm_in_training,
        }
        seen = exchange(step, "evaluated", reported)
        parts = exchange.gather_columns(step, table)
        triples = [row for part in parts for row in zip(*part, strict=True)]
        counted = {"accuracy": sum(p == y for _, p, y in triples) / max(len(triples), 1)}
        weights = text_digest([o.values["weights"] for o in seen])
        evaluated_rows = text_digest(sorted(row for row, _, _ in triples))
        answers = text_digest(sorted(triples))
        norm_names = ["", *(name for name, _ in self._batch_norms)]
        evaluation = Evaluation(
            step,
            tuple(tuple(part[0]) for part in parts),
            max(o.values["rows"] for o in seen) if all(o.values["rows known"] for o in seen) else None,
            {"accuracy": [real_of(o.values["accuracy"]) if o.values["tells accuracy"] else None for o in seen]},
            counted,
            self._evaluated.setdefault((weights, evaluated_rows), answers) == answers,
            tuple(norm_names[o.values["norm in training"]] for o in seen),
        )
        self.context.recorder.evaluated(step, len(triples), {**counted, **metrics})
        self._judge(EVALUATED, evaluation)

    def saved(self, path: str | Path, read: Callable[[], Mapping[str, Tensor]] | None = None) -> None:
        step, probes = self._step, self.context.probes
        digests = _live_digests(probes)
        digests |= {_updates_key(index): probe.updates for index, probe in enumerate(probes)}
        digests |= {name: by_rank[0] for name, by_rank in self._random(step).items()}
        # Rank 0 writes. After this gather, every rank can read the file.
        problem: OSError | None = None
        if self.context.exchange.rank == 0:
            text = json.dumps({name: f"{digest:x}" for name, digest in digests.items()}, indent=1, sort_keys=True)
            try:
                _digest_file(Path(path)).write_text(text + "\n", encoding="utf-8")
            except OSError as error:
                problem = error
        seen = self.context.exchange(step, "saved", {"refused": int(problem is not None)})
        if problem is not None:
            raise problem
        if seen[0].values["refused"]:
            raise OSError(f"rank 0 could not write the digests beside {path}")
        self.context.recorder.saved(step, Path(path).name, digests)
        if read is not None:
            parameters = self.context.subject.parameters
            try:
                own = {f"weights {n}": d for n, d in digests_by_name(_dense(read())).items() if n in parameters}
            except Exception as error:
                with suppress(ValueError):  # the other ranks raise it
                    self._raise_on_all_ranks(first_line(error))
                raise
            self._raise_on_all_ranks("")
            on_disk = self.context.exchange.gather_named(step, "on disk", own)
            weights = {n: d for n, d in digests.items() if n.removeprefix("weights ") in parameters}
            self._judge_restored(weights, on_disk)

    def loaded(self, path: str | Path) -> None:
        probes, exchange = self.context.probes, self.context.exchange
        saved, counts, problem = _read_digests(Path(path), len(probes))
        self._raise_on_all_ranks(problem)
        for probe, count in zip(probes, counts, strict=True):
            probe.updates = count
        optimizers = [probe.optimizer for probe in probes]
        self.context.recorder.loaded(self._step, Path(path).name, exchange.world_size, optimizers)
        live = exchange.gather_named(self._step, "restored", _live_digests(probes))
        if f"random state of rank {exchange.world_size}" in saved:  # the run that saved had more ranks
            saved = {name: digest for name, digest in saved.items() if not name.startswith("random state")}
        else:
            live |= self._random(self._step)
        self._judge_restored(saved, live)

    def _random(self, updates: int) -> dict[str, tuple[int, ...]]:
        own = {"random state": flat_digest([torch.get_rng_state()])}
        (states,) = self.context.exchange.gather_named(updates, "random", own).values()
        return {f"random state of rank {rank}": (state,) * len(states) for rank, state in enumerate(states)}

    def _judge_restored(self, saved: Mapping[str, int], live: Mapping[str, tuple[int, ...]]) -> None:
        wanted = {name: digest % _WRAP for name, digest in saved.items()}
        # A checkpoint does not restore state that the optimizer created after the save.
        found = {name: tuple(digest % _WRAP for digest in live[name]) for name in wanted if name in live}
        self._judge(RESTORED, Restored(wanted, found, self._step))

    def _raise_on_all_ranks(self, problem: str) -> None:
        """Raise `ValueError` on every rank if any rank has a `problem` with its arguments. Collective."""
        seen = self.context.exchange(self._step, "told", {"problem": int(bool(problem))})
        others = [str(o.rank) for o in seen if o.values["problem"]]
        if others:
            raise ValueError(problem or f"rank {', '.join(others)} was told something wrong; its own message says what")


def _table(
    ids: Sequence[int] | Tensor, predictions: Sequence[int] | Tensor, labels: Sequence[int] | Tensor
) -> tuple[list[list[int]], str]:
    try:
        # One copy from a GPU, instead of one for each element.
        columns = [each.tolist() if isinstance(each, Tensor) else each for each in (predictions, labels)]
        table = [ids_of(ids), *([int(value) for value in column] for column in columns)]
    except (TypeError, ValueError) as error:
        return [], str(error)
    lengths = [len(column) for column in table]
    return table, f"ids, predictions and labels have {lengths} rows" if len(set(lengths)) > 1 else ""


def _live_digests(probes: Sequence[OptimizerProbe]) -> dict[str, int]:
    """The digests of weights, buffers, optimizer states and hyperparameters, by name. Collective if sharded."""
    subject = probes[0].context.subject
    digests = {f"weights {n}": d for n, d in digests_by_name(_dense(subject.parameters)).items()}
    digests |= {f"buffer {n}": d for n, d in digests_by_name(_dense(subject.buffers_by_name())).items()}
    for probe in probes:
        for name, parameter in probe.parameters.items():
            state = probe.optimizer.state.get(parameter, {})
            digests[f"optimizer state {name}"] = state_digest({key: _gathered(each) for key, each in state.items()})
        for index, group in enumerate(probe.optimizer.param_groups):
            digests |= {f"group {index} {k}": lenient_digest(v) for k, v in group.items() if not k.startswith("param")}
    return digests


def _dense(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: plain(_gathered(tensor)) for name, tensor in tensors.items()}


def _gathered(value: Any) -> Any:
    """A sharded tensor gathered from all ranks, so that its digest does not depend on the sharding, or the value."""
    gathered = getattr(value, "full_tensor", None)
    return value if gathered is None else gathered()


def _digest_file(path: Path) -> Path:
    return path.with_name(path.name + ".andon.json")


def _updates_key(index: int) -> str:
    return f"updates of optimizer {index + 1}" if index else "updates"


def _read_digests(path: Path, optimizers: int) -> tuple[dict[str, int], list[int], str]:
    """The digests of the checkpoint at `path`, the updates of each optimizer, and the problem or "".

    An optimizer that is not in the file has the updates of the first one.
    """
    try:
        digests = {name: int(text, 16) for name, text in read_json(_digest_file(path)).items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return {}, [0] * optimizers, f"{_digest_file(path)} does not say what was saved: {error}"
    first = digests.get("updates", 0)
    return digests, [digests.pop(_updates_key(index), first) for index in range(optimizers)], ""
