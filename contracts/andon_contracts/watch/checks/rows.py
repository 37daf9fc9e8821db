"""Which rows the ranks train on, and in which order, observed from data loaders and forward passes.

A loop may train on a batch later: Accelerate reads one batch ahead, the Trainer of transformers a whole accumulation
window. A batch counts as trained on when a forward pass receives its memory. If no forward pass does, because the batch
was copied to a device, the oldest batch of the loader that yielded last counts. Batches left at the close do not.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from andon_contracts.digest import mix64
from andon_contracts.laws.law import Law, Observations, Seen, unless_all
from andon_contracts.observe import Look, Observer
from andon_contracts.violation import Finding, named_ranks
from andon_contracts.watch.check import LIVE, Check, Context, Cover, OptimizerProbe, Values
from andon_contracts.watch.intercept import LoaderPass, Yielded, is_running, report_unreadable, storage_ids, tensors_in

_AHEAD = 64
"""The most batches that may be yielded before they are used."""
_SAMPLED = 1024
"""About this many elements stand for a tensor that a forward pass receives."""
_LEAST = 6
"""Passes with fewer rows than this may have the same order by chance."""
_MOST = 1 << 16
"""The most different rows of a pass that are counted."""
_SURE, _LIKELY = 2, 3
"""After this many updates in a row with the same rows on all ranks: a fault if rows are known, else a suspicion."""


_SameRows = tuple[int, int, Sequence[int]]
"""For how many updates in a row all ranks drew the same rows and gave them to the model; for how many, with unknown
rows, inputs or raw gradients were equal; and this rank's rows of the update.
"""
_MISSING, _READS_ALL = "is DistributedSampler missing?", "no DistributedSampler, so that each rank reads all rows"


def _distributed(seen: Seen[_SameRows]) -> Finding | None:
    same, _, ids = seen.want
    rows = f" (rows {ids[:8]})" if ids else ""
    what = f"all ranks were given the same rows{rows} in {same} consecutive updates: {_MISSING}"
    return Finding(what, seen.step, (), "global batch", likely=_READS_ALL) if same >= _SURE else None


def _inputs_differ(seen: Seen[_SameRows]) -> Finding | None:
    _, same, _ = seen.want
    what = f"in {same} consecutive updates, the model's inputs or the raw gradients were equal on all ranks"
    what += ", bit for bit, as if all trained on the same rows"
    return Finding(what, seen.step, (), "global batch") if same >= _LIKELY else None


def _order_renewed(seen: Seen[object]) -> Finding | None:
    passes = seen.column("order again")
    what = f"pass {max(passes)} over the data has the same order as the pass before, although its sampler shuffles"
    ranks = [rank for rank, number in enumerate(passes) if number]
    return Finding(what, seen.step, seen.unless_all(ranks), "order of rows") if ranks else None


_ROWS = (
    Law("samples-once/drawn", ("drawn", "drawn keys", "given"), _distributed),
    Law("samples-once/given", ("given", "raw"), _inputs_differ, suspicion=True),
)
_PASS = (Law[Finding | None]("samples-once/pass", ("held",), lambda found: found),)
_ORDER = (Law("order-renewed/pass", ("order again",), _order_renewed),)


class LoadedRows(Check):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._waiting: deque[Yielded] = deque(maxlen=_AHEAD)
        self._latest: LoaderPass | None = None
        self._used: Yielded | None = None
        self.window: list[Yielded] = []  # the batches of this update
        self._not_gathered: list[Yielded] = []  # the batches since their rows were last gathered
        self._inputs: list[Tensor] = []
        self._observer = Observer()
        self._look: Look | None = None
        self._same = self._same_input = 0
        self._order_again = 0  # the number of a pass that has the order of the pass before
        self._counts: defaultdict[int, _PassCount] = defaultdict(_PassCount)
        self._numbers: weakref.WeakKeyDictionary[LoaderPass, int] = weakref.WeakKeyDictionary()
        """A number for each pass that was trained on; the same on all ranks."""
        self._next_number = 0
        self._unended: list[LoaderPass] = []
        self._uneven: dict[str, None] = {}  # closing lines about passes that left out rows or had some twice

    def cover(self) -> Mapping[str, Cover]:
        return {"order-renewed": LIVE}

    @property
    def ids(self) -> list[int]:
        """This rank's rows of the present update, as far as its data loaders show them."""
        return [row for each in self.window for row in each.ids or ()]

    def yielded(self, batch: Yielded) -> None:
        self._waiting.append(batch)
        self._latest = batch.source

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        try:
            tensors = list(tensors_in((args, kwargs)))
            batch = self._take_batch(storage_ids(tensors))
            if not torch.is_grad_enabled():
                return
            if self.context.full:
                flat = [each.reshape(-1) for each in tensors if each.numel()]
                self._inputs += [each[:: max(each.numel() // _SAMPLED, 1)].clone() for each in flat]
            if batch is not None:
                if not any(each.dim() and each.shape[0] == len(batch.ids or ()) for each in tensors):
                    # For example, each rank takes a part of a batch that all ranks read: its rows are not known.
                    batch.ids = batch.keys = None
                self._train_on(batch)
        except Exception as error:  # noqa: BLE001 - the inputs of a model may raise anything
            report_unreadable("the model's inputs", error)

    def _take_batch(self, places: frozenset[int]) -> Yielded | None:
        known = next((each for each in reversed(self._waiting) if each.storage_ids & places), None)
        if known is None and self._used is not None and self._used.storage_ids & places:
            return None
        waiting = [each for each in self._waiting if each.source is self._latest]
        found = known or (waiting[0] if waiting else None)
        if found is not None:
            # The loop may leave out batches, for example when it resumes. Copies on a GPU do not show which ones.
            source, resumes = found.source, self.context.recorder.earlier and not self._next_number
            if known is None:
                source.ahead = source.ahead or (1 if resumes else len(waiting))
                source.unclear |= len(waiting) > source.ahead
            if source.unclear:
                found.ids = found.keys = None
            for each in list(self._waiting)[: self._waiting.index(found) + 1]:
                if each.source is found.source:
                    self._waiting.remove(each)
        self._used = found or self._used
        return found

    def _train_on(self, batch: Yielded) -> None:
        source = batch.source
        source.batches += 1
        if source not in self._numbers:
            self._numbers[source], self._next_number = self._next_number, self._next_number + 1
            self._note_ended_passes()
            self._unended.append(source)
        self.window.append(batch)
        if batch.keys is not None and self.context.ranks_have_own_rows:
            self._not_gathered.append(batch)
        before = source.before
        if before is not None and source.shuffles and before.batches > 1 and source.batches > 1:
            first = source.order[: len(before.order)]
            if len(first) >= _LEAST and first == before.order[: len(first)] and first != sorted(first):
                self._order_again = source.number
        elif source.batches > 1:
            source.before = None

    def look(self, probe: OptimizerProbe) -> list[list[Tensor]]:
        self._look = self._observer.look(self._inputs) if self._inputs else None
        return [] if self._look is None else [self._look.device_sums]

    def meanwhile(self, probe: OptimizerProbe) -> Values:
        ids = [each.ids for each in self.window if each.ids is not None]
        keys = [each.keys for each in self.window if each.keys is not None]
        known = bool(ids) and len(keys) == len(ids) == len(self.window)
        return {
            "drawn": sum(map(len, ids)) if known else 0,
            "drawn keys": int(mix64(torch.cat(keys)).sum()) if known else 0,
            "held": sum(len(each.ids or ()) for each in self._not_gathered),
            "order again": self._order_again,
        }

    def before(self, probe: OptimizerProbe) -> Values:
        # in [0, 2^63); 0: the inputs are unknown
        return {"given": 0 if self._look is None else self._look.digest >> 1}

    def judge(self, probe: OptimizerProbe, said: Observations, aligned: Observations) -> None:
        verdicts, scene, seen = self.context.verdicts, self.context.scene(), Seen[object](said, None)
        verdicts.judge(_ORDER, seen, scene)
        if not self.context.ranks_have_own_rows:
            return
        if seen.any("drawn") or seen.any("given"):
            one = {name: len(set(seen.column(name))) == 1 and seen.any(name) for name in ("drawn keys", "given", "raw")}
            known = all(seen.column("drawn"))
            self._same = self._same + 1 if known and one["drawn keys"] and one["given"] else 0
            self._same_input = self._same_input + 1 if (one["given"] or one["raw"]) and not known else 0
        verdicts.judge(_ROWS, Seen(said, (self._same, self._same_input, self.ids)), scene)
        if self.context.settings.is_sampled(seen.step) and seen.any("held"):
            self._judge_passes(seen.step)

    def _judge_passes(self, step: int) -> None:
        """Gather the rows since the last call, and judge whether a pass has rows more often than it may."""
        table: list[tuple[int, ...]] = []
        for each in self._not_gathered:
            of_pass = (self._numbers[each.source], each.source.size, each.source.most_repeats, each.so_far)
            keys = [] if each.keys is None else each.keys.tolist()
            table += [(*of_pass, row, key) for row, key in zip(each.ids or (), keys, strict=True)]
        self._not_gathered = []
        parts = self.context.exchange.gather_columns(step, [[line[column] for line in table] for column in range(6)])
        numbers = sorted({number for part in parts for number in part[0]})
        for rank, part in enumerate(parts):
            for number, *values in zip(*part, strict=True):
                self._counts[number].add(rank, *values)
        for number in numbers:
            count = self._counts[number]
            found = None
            if again := count.repeated():
                ranks = sorted({rank for key in again for rank in count.ranks[key]})
                rows = f"rows {sorted(count.row[key] for key in again)[:8]}"
                what, likely = f"{rows} came more than once in one pass over the data", None
                if all(len(set(count.ranks[key])) > 1 for key in again):
                    what = f"{named_ranks(ranks)} were given the same {rows}: {_MISSING}"
                    likely = f"{_READS_ALL}; or its seed or epoch differs between the ranks"
                culprits = unless_all(ranks, self.context.world)
                found = Finding(what, step, culprits, "global batch", likely=likely)
            self.context.verdicts.judge(_PASS, found, self.context.scene())
        for number in [each for each in self._counts if each < max(numbers, default=0) - 1]:
            del self._counts[number]

    def updated(self, probe: OptimizerProbe) -> None:
        self.window, self._inputs = [], []
        self._order_again *= not probe.full

    def closing_lines(self) -> list[str]:
        self._note_ended_passes()
        return list(self._uneven)

    def _note_ended_passes(self) -> None:
        """Note how many rows the ended passes left out or repeated. Forget these passes and those broken off."""
        for each in self._unended:
            extra = self.context.world * each.rows - each.size
            # Without padding rank 0 may have more rows than the others.
            known = each.most_repeats == 1 and (extra < 0 or each.even or self.context.world == 1)
            if each.finished and known and 0 < abs(extra) < each.size:
                most = "" if each.even else "at least "
                what = f"repeated {extra}" if extra > 0 else f"left out {most}{-extra}"
                self._uneven[f"  rows: one pass over the data {what} of its {each.size} rows ({each.sampler})"] = None
        self._unended = [each for each in self._unended if is_running(each)]


@dataclass
class _PassCount:
    """How often each row came in one pass, on all ranks. Rows are counted by key, which also covers their content."""

    row: dict[int, int] = field(default_factory=dict)  # by key, the row's index
    ranks: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # by key, of each occurrence
    _size: int = 0
    _most: int = 1
    _yielded: dict[int, int] = field(default_factory=dict)

    def add(self, rank: int, size: int, most: int, so_far: int, row: int, key: int) -> None:
        self._size, self._most = max(size, self._size), 0 if 0 in (most, self._most) else max(most, self._most)
        self._yielded[rank] = max(so_far, self._yielded.get(rank, 0))
        if len(self.ranks) < _MOST:
            self.row[key] = row
            self.ranks[key].append(rank)

    def repeated(self) -> list[int]:
        """The keys of rows that came too often; none if they only fill up the end of the pass."""
        if not self._most:
            return []
        again = [key for key, ranks in self.ranks.items() if len(ranks) > self._most]
        extra = sum(len(self.ranks[key]) - self._most for key in again)
        return again if extra > max(0, sum(self._yielded.values()) - self._most * self._size) else []
