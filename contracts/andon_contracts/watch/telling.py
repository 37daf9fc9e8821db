"""What a loop can tell its watch: rows, losses, random streams, evaluations, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from andon_contracts.act import Scene
from andon_contracts.agree import bits_of
from andon_contracts.judge import Observations
from andon_contracts.told_clauses import (
    STREAMS,
    BatchTold,
    EvaluationTold,
    judge_contents,
    judge_data,
    judge_evaluation,
    judge_restored,
    judge_rows,
)
from andon_contracts.violation import Violation
from andon_contracts.watch import restore
from andon_contracts.watch.exchange import Exchange
from andon_contracts.watch.judging import Check, Verdicts
from andon_contracts.watch.lane import Lane
from andon_contracts.watch.ledger import Recorder, Told
from andon_contracts.watch.reading import flat_digest, text_digest
from andon_contracts.watch.rows import Rows, contents_of, ids_of
from andon_contracts.watch.settings import Settings

_MUST = {"agree": 1, "differ": 2}
_WRAP = 1 << 64
_DATA = (Check("content-planned", judge_data),)


class Telling:
    """The methods of a watch with which a loop tells it what hooks cannot see. All ranks must tell alike."""

    settings: Settings
    closed: bool
    _exchange: Exchange
    _verdicts: Verdicts
    _rows: Rows
    _lanes: dict[int, Lane]
    _recorder: Recorder

    def __init__(self) -> None:
        self._told_rows = Told()
        self._epochs = 0
        self._streams: dict[str, tuple[int, int]] = {}
        self._epoch: set[int] = set()
        self._contents: dict[int, int] = {}
        self._evaluated: dict[tuple[int, int], int] = {}

    @property
    def violations(self) -> int:
        """How many findings so far are violations: neither suspicions nor silenced."""
        return self._verdicts.counts.total()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose updates are watched."""
        return [parameter for lane in self._lanes.values() for parameter in lane.parameters.values()]

    def batch(self, ids: Sequence[int] | Tensor, content: Sequence[object] | None = None) -> None:
        """The rows that this rank is about to train on; once for each micro-batch.

        ids: [rows] integers. content: [rows] what the model is given for each, tensors or values.
        Raises `ValueError` for ids or content of a wrong form, and on a closed watch.
        """
        self._demand_open()
        found = ids_of(ids)
        contents = [] if content is None else contents_of(content, len(found))
        for lane in self._lanes.values():
            lane.taps.backward_seen = False
        self._rows.add(found, contents)

    def loss(self, loss: float | Tensor, count: int, reported: float | None = None) -> None:
        """loss: the sum over `count` rows of this rank; reported: what the loop logs as the mean loss of the update."""
        self._demand_open()
        self._rows.loss_sum += float(loss)
        self._rows.loss_rows += count
        self._rows.reported = reported

    def reduced(self) -> None:
        """The gradients are reduced now, and neither unscaled nor clipped yet; for loops that clip by hand."""
        self._demand_open()
        for lane in self._lanes.values():
            lane.reduced()

    def rng(self, name: str, must: Literal["differ", "agree"], state: Tensor | None = None) -> None:
        """A random stream that must differ between ranks, or agree; `state` is torch's on the CPU if not given.

        Raises `ValueError` for a fifth stream and for another word than "differ" and "agree".
        """
        self._demand_open()
        if must not in _MUST:
            raise ValueError(f"must is 'differ' or 'agree', not {must!r}")
        if name not in self._streams and len(self._streams) == STREAMS:
            raise ValueError(f"{name!r} is one random stream more than {STREAMS}")
        digest = flat_digest([torch.get_rng_state() if state is None else state])
        self._streams[name] = (_MUST[must], digest)

    def evaluated(
        self,
        ids: Sequence[int] | Tensor,
        predictions: Sequence[int] | Tensor,
        labels: Sequence[int] | Tensor,
        metrics: Mapping[str, float] | None = None,
        rows: int | None = None,
    ) -> None:
        """What this rank evaluated, and the metrics that the loop reports (`accuracy` is recounted). Collective."""
        self._demand_open()
        table = [ids_of(ids), [int(p) for p in predictions], [int(y) for y in labels]]
        if len({len(column) for column in table}) > 1:
            raise ValueError(f"ids, predictions and labels have {[len(column) for column in table]} rows")
        step = next(iter(self._lanes.values())).updates
        parts = self._gather_rows(step, table)
        triples = [row for part in parts for row in zip(*part, strict=True)]
        right = sum(p == y for _, p, y in triples)
        weights = flat_digest(p for lane in self._lanes.values() for p in lane.parameters.values())
        key = (weights, text_digest(sorted(row[0] for row in triples)))
        answers = text_digest(sorted(triples))
        told = EvaluationTold(
            step,
            tuple(tuple(part[0]) for part in parts),
            rows,
            dict(metrics or {}),
            {"accuracy": right / max(len(triples), 1)},
            self._evaluated.setdefault(key, answers) == answers,
        )
        self._recorder.evaluated(step, len(triples), {**told.counted, **told.told})
        self._judge_told("evaluation-once", lambda: judge_evaluation(told))

    def saved(self, path: str | Path, read: Callable[[], Mapping[str, Tensor]] | None = None) -> None:
        """A checkpoint was saved at `path`: digests of all that is live go to `path`.andon.json. Collective.

        read: gives what is on the disk by parameter name, to be held to what is live.
        """
        self._demand_open()
        lanes = list(self._lanes.values())
        digests = restore.live(lanes) | {"updates": lanes[0].updates}
        digests |= {name: by_rank[0] for name, by_rank in self._random(lanes[0].updates).items()}
        if self._exchange.rank == 0:
            restore.write(Path(path), digests)
        self._recorder.saved(lanes[0].updates, Path(path).name, digests)
        if read is not None:
            on_disk = self._exchange.spread(lanes[0].updates, "on disk", restore.of_tensors(read(), lanes))
            wanted = {n: d for n, d in digests.items() if n.removeprefix("weights ") in lanes[0].subject.parameters}
            self._judge_restored(wanted, on_disk)

    def loaded(self, path: str | Path) -> None:
        """The checkpoint at `path` was loaded: all that is live is what was live at its save. Collective.

        Raises `ValueError` where the save was not told to a watch.
        """
        self._demand_open()
        lanes = list(self._lanes.values())
        wanted, updates = restore.read(Path(path))
        for lane in lanes:
            lane.updates = updates
        self._recorder.loaded(updates, Path(path).name, self._exchange.world_size, [lane.optimizer for lane in lanes])
        found = self._exchange.spread(updates, "restored", restore.live(lanes))
        if f"random state of rank {self._exchange.world_size}" in wanted:
            wanted = {name: digest for name, digest in wanted.items() if not name.startswith("random state")}
        else:
            found |= self._random(updates)
        self._judge_restored(wanted, found)

    def _random(self, updates: int) -> dict[str, tuple[int, ...]]:
        """The random state of each rank, by a name that says the rank; a state has one value wherever it is judged."""
        (states,) = self._exchange.spread(updates, "random", restore.random_state()).values()
        return {f"random state of rank {rank}": (state,) * len(states) for rank, state in enumerate(states)}

    def _judge_restored(self, wanted: Mapping[str, int], found: Mapping[str, tuple[int, ...]]) -> None:
        step = next(iter(self._lanes.values())).updates
        saved = {name: digest % _WRAP for name, digest in wanted.items()}
        live = {name: tuple(digest % _WRAP for digest in by_rank) for name, by_rank in found.items()}
        self._judge_told("checkpoint-whole", lambda: judge_restored(saved=saved, found=live, step=step))

    def _judge_told(self, clause: str, judge: Callable[[], object]) -> None:
        if clause not in self._verdicts.live:
            return
        self._verdicts.evaluations[clause] += 1
        try:
            judge()
        except Violation as found:
            self._verdicts.take(found, Scene(self._exchange.world_size, applied=True))

    def _demand_open(self) -> None:
        if self.closed:
            raise ValueError("this watch is closed")

    def _told(self) -> dict[str, int]:
        """The integers of a step that come from what was told."""
        rows = self._rows
        values = {
            "rows": len(rows.ids),
            "with content": int(len(rows.contents) == len(rows.ids)),
            "loss sum": bits_of(rows.loss_sum),
            "loss rows": rows.loss_rows,
            "reports": int(rows.reported is not None),
            "reported": bits_of(rows.reported or 0.0),
        }
        streams = [self._streams[name] for name in sorted(self._streams)]
        streams += [(0, 0)] * (STREAMS - len(streams))
        for index, (must, digest) in enumerate(streams):
            values |= {f"stream {index} must": must, f"stream {index}": digest}
        return values

    def _gather_rows(self, step: int, columns: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        """By rank, some columns of integers of one length on each rank."""
        counts = [o.values["count"] for o in self._exchange(step, "count", {"count": len(columns[0])})]
        most = max(counts)
        table = torch.zeros(len(columns), most, dtype=torch.int64)
        for index, column in enumerate(columns):
            table[index, : len(column)] = torch.tensor(list(column), dtype=torch.int64)
        seen = self._exchange(step, "rows", {}, table.flatten())
        return [
            [list(row[:count]) for row in o.payload.view(len(columns), most).tolist()]
            for o, count in zip(seen, counts, strict=True)
            if o.payload is not None
        ]

    def _judge_rows(self, observations: Observations) -> list[int]:
        """Gather the rows of this update, hold them to the plan and to the data, return them in order of rank."""
        self._told_rows = Told()
        if not any(o.values["rows"] for o in observations):
            return []
        step = observations[0].step
        contents = self._rows.contents if all(o.values["with content"] for o in observations) else []
        own = contents or [0] * len(self._rows.ids)
        parts = self._gather_rows(step, [self._rows.ids, own])
        ids = tuple(tuple(part[0]) for part in parts)
        union = [row for part in ids for row in part]
        self._told_rows = Told(
            ids, tuple(content for part in parts for content in part[1]) if contents else (), *self._place(union)
        )
        plan, rows = self.settings.plan, self.settings.rows
        told = BatchTold(
            step,
            ids,
            tuple(tuple(part[1]) for part in parts) if contents else ((),) * len(ids),
            None if plan is None else tuple(plan(step)),
            frozenset(self._epoch),
            rows,
            self._expected(step, union) if contents else None,
        )
        scene = Scene(self._exchange.world_size)
        for clause, judge in (("samples-once", judge_rows), ("content-planned", judge_contents)):
            if clause == "content-planned" and not contents:
                continue
            self._verdicts.evaluations[clause] += 1
            try:
                judge(told)
            except Violation as found:
                self._verdicts.take(found, scene)
        self._remember(told, union)
        return union

    def _expected(self, step: int, union: Sequence[int]) -> dict[int, int]:
        """The content of each row by the data set, which must be one on all ranks; else by what was told before."""
        if self.settings.contents is None:
            return {row: self._contents[row] for row in union if row in self._contents}
        found = contents_of(self.settings.contents(union), len(union))
        seen = self._exchange(step, "data", {"data": text_digest(found)})
        self._verdicts.judge(_DATA, seen, {}, Scene(self._exchange.world_size))
        return dict(zip(union, found, strict=True))

    def _place(self, union: Sequence[int]) -> tuple[int | None, int | None]:
        """The epoch of an update with these rows, and how many rows of it were used before; None without `rows`."""
        if self.settings.rows is None:
            return None, None
        return (self._epochs + 1, 0) if self._epoch & set(union) else (self._epochs, len(self._epoch))

    def _remember(self, told: BatchTold, union: Sequence[int]) -> None:
        for ids, contents in zip(told.ids, told.contents, strict=True):
            for row, content in zip(ids, contents, strict=False):
                self._contents.setdefault(row, content)
        if told.rows is not None:
            if self._epoch & set(union):
                self._turn_epoch()
            self._epoch |= set(union)
            if len(self._epoch) >= told.rows:
                self._turn_epoch()

    def _turn_epoch(self) -> None:
        self._epoch.clear()
        self._epochs += 1
