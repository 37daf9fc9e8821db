"""What a loop can tell its watch of what came out: evaluations, checkpoints, the number of updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from andon_contracts.act import Scene
from andon_contracts.agree import bits_of, real_of
from andon_contracts.causes import first_line
from andon_contracts.outcome_clauses import EvaluationTold, judge_count, judge_evaluation, judge_restored
from andon_contracts.violation import Violation
from andon_contracts.watch import restore
from andon_contracts.watch.exchange import Exchange
from andon_contracts.watch.judging import Verdicts
from andon_contracts.watch.lane import Lane
from andon_contracts.watch.ledger import Recorder
from andon_contracts.watch.reading import flat_digest, text_digest
from andon_contracts.watch.rows import ids_of
from andon_contracts.watch.settings import Settings
from andon_contracts.watch.subject import Subject

_WRAP = 1 << 64


class Outcomes:
    """The methods of a watch that are told seldom. All of them are collective, and refuse on all ranks or on none."""

    settings: Settings
    closed: bool
    _exchange: Exchange
    _verdicts: Verdicts
    _lanes: dict[int, Lane]
    _recorder: Recorder
    _subject: Subject

    def __init__(self) -> None:
        self._evaluated: dict[tuple[int, int], int] = {}
        self._norm_in_training = 0
        """Of the last forward pass without gradients since the last update, the batch norm in training mode."""

    def evaluated(
        self,
        ids: Sequence[int] | Tensor,
        predictions: Sequence[int] | Tensor,
        labels: Sequence[int] | Tensor,
        metrics: Mapping[str, float] | None = None,
        rows: int | None = None,
    ) -> None:
        """What this rank evaluated, and the metrics that the loop reports (`accuracy` is recounted). Collective.

        Raises `ValueError` on every rank where any rank's ids, predictions and labels do not go together.
        """
        self._demand_open()
        table, problem = _table(ids, predictions, labels)
        self._refuse(problem)
        step = next(iter(self._lanes.values())).updates
        seen = self._exchange(step, "evaluated", self._reported(metrics or {}, rows))
        parts = self._gather_rows(step, table)
        triples = [row for part in parts for row in zip(*part, strict=True)]
        right = sum(p == y for _, p, y in triples)
        weights = text_digest([o.values["weights"] for o in seen])
        key = (weights, text_digest(sorted(row[0] for row in triples)))
        answers = text_digest(sorted(triples))
        told = EvaluationTold(
            step,
            tuple(tuple(part[0]) for part in parts),
            max(o.values["rows"] for o in seen) if all(o.values["rows known"] for o in seen) else None,
            {"accuracy": [real_of(o.values["accuracy"]) if o.values["tells accuracy"] else None for o in seen]},
            {"accuracy": right / max(len(triples), 1)},
            self._evaluated.setdefault(key, answers) == answers,
            tuple(self._subject.norm_name(o.values["norm in training"]) for o in seen),
        )
        self._recorder.evaluated(step, len(triples), {**told.counted, **(metrics or {})})
        self._judge_told("evaluation-once", lambda: judge_evaluation(told))

    def _reported(self, metrics: Mapping[str, float], rows: int | None) -> dict[str, int]:
        weights = flat_digest(p for lane in self._lanes.values() for p in lane.parameters.values())
        return {
            "weights": weights,
            "rows known": int(rows is not None),
            "rows": rows or 0,
            "tells accuracy": int("accuracy" in metrics),
            "accuracy": bits_of(metrics.get("accuracy", 0.0)),
            "norm in training": self._norm_in_training,
        }

    def saved(self, path: str | Path, read: Callable[[], Mapping[str, Tensor]] | None = None) -> None:
        """A checkpoint was saved at `path`: digests of all that is live go to `path`.andon.json. Collective.

        read: gives what is on the disk by parameter name, to be held to what is live.
        Raises `OSError` on every rank where the disk refuses; where `read` raises on any rank, that on this one, and
        `ValueError` on the others.
        """
        self._demand_open()
        lanes = list(self._lanes.values())
        digests = restore.live(lanes) | restore.updates_of(lanes)
        digests |= {name: by_rank[0] for name, by_rank in self._random(lanes[0].updates).items()}
        self._write(Path(path), digests)
        self._recorder.saved(lanes[0].updates, Path(path).name, digests)
        if read is not None:
            on_disk = self._exchange.spread(lanes[0].updates, "on disk", self._read(read, lanes))
            wanted = {n: d for n, d in digests.items() if n.removeprefix("weights ") in lanes[0].subject.parameters}
            self._judge_restored(wanted, on_disk)

    def _write(self, path: Path, digests: Mapping[str, int]) -> None:
        """Let rank 0 write; when this returns, every rank can read it."""
        problem: OSError | None = None
        if self._exchange.rank == 0:
            try:
                restore.write(path, digests)
            except OSError as error:
                problem = error
        step = next(iter(self._lanes.values())).updates
        seen = self._exchange(step, "saved", {"refused": int(problem is not None)})
        if problem is not None:
            raise problem
        if seen[0].values["refused"]:
            msg = f"rank 0 could not write the digests beside {path}"
            raise OSError(msg)

    def _read(self, read: Callable[[], Mapping[str, Tensor]], lanes: Sequence[Lane]) -> dict[str, int]:
        """The digests of what `read` gives; refused on every rank where it raises on any."""
        problem: Exception | None = None
        found: dict[str, int] = {}
        try:
            found = restore.of_tensors(read(), lanes)
        except Exception as error:  # noqa: BLE001 - it is raised again, once the others know
            problem = error
        try:
            self._refuse("" if problem is None else first_line(problem))
        except ValueError:
            if problem is not None:
                raise problem from None
            raise
        return found

    def loaded(self, path: str | Path) -> None:
        """The checkpoint at `path` was loaded: all that is live is what was live at its save. Collective.

        Raises `ValueError` on every rank where the save was not told to a watch, or a rank cannot read what was.
        """
        self._demand_open()
        lanes = list(self._lanes.values())
        wanted, counts, problem = restore.read(Path(path), len(lanes))
        self._refuse(problem)
        for lane, count in zip(lanes, counts, strict=True):
            lane.updates = count
        updates = counts[0]
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

    def _refuse(self, problem: str) -> None:
        """Raise `ValueError` on every rank where any rank has a `problem` with what it was told. Collective."""
        step = next(iter(self._lanes.values())).updates
        seen = self._exchange(step, "told", {"problem": int(bool(problem))})
        others = [str(o.rank) for o in seen if o.values["problem"]]
        if others:
            raise ValueError(problem or f"rank {', '.join(others)} was told something wrong; its own message says what")

    def _judge_count(self, made: int, *, over: bool) -> None:
        """Hold the number of updates to the planned one, if one was declared."""
        planned = self.settings.updates
        if planned is not None:
            self._judge_told("updates-planned", lambda: judge_count(made=made, planned=planned, over=over))

    def _demand_open(self) -> None:
        if self.closed:
            raise ValueError("this watch is closed")

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


def _table(
    ids: Sequence[int] | Tensor, predictions: Sequence[int] | Tensor, labels: Sequence[int] | Tensor
) -> tuple[list[list[int]], str]:
    """The three columns, and what is wrong with them; "" where nothing is."""
    try:
        table = [ids_of(ids), [int(p) for p in predictions], [int(y) for y in labels]]
    except (TypeError, ValueError) as error:
        return [], str(error)
    lengths = [len(column) for column in table]
    return table, f"ids, predictions and labels have {lengths} rows" if len(set(lengths)) > 1 else ""
