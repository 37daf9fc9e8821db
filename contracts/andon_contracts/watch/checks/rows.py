"""Which rows the ranks train on, and in which order, as their data loaders and forward passes show without being told.

A loader's batch is not always trained on at once: Accelerate reads one batch ahead, the Trainer of transformers a
whole accumulation window. A batch counts as trained on when a forward pass gets its memory. If no forward pass does
(the batch was copied to a device), the oldest batch of the loader that yielded last counts. Batches that are left at
the close were not used.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from andon_contracts.laws.law import Law, Observations, Seen, unless_all
from andon_contracts.observe import Look, Observer
from andon_contracts.violation import Finding
from andon_contracts.watch.check import LIVE, Check, Context, Cover, OptimizerProbe, Values, is_sampled
from andon_contracts.watch.loaders import Pass, Yielded, cannot_look, is_under_way, places_of, tensors_in, total

_AHEAD = 64
"""So many batches may be yielded before they are used."""
_SAMPLED = 1024
"""About so many elements of a tensor stand for what a forward pass was given."""
_ALWAYS, _IN_A_ROW = 16, 4
"""Inputs of forward passes are read in the first 16 updates, and then in 4 of each 16: a loop that does not deal out
rows does so all the time.
"""
_LEAST = 6
"""Fewer rows may come in the same order by chance."""
_MOST = 1 << 16
"""A pass of more rows is not followed to its end."""
_SURE = 2
"""All ranks trained on the same known rows in so many updates in a row: a fault."""
_LIKELY = 3
"""The same if the rows are not known: suspicious."""


@dataclass(frozen=True)
class _RowsSeen:
    """What all ranks saw of their rows; equal on every rank but for `rows`.

    alike: for how many updates in a row all ranks drew the same rows and gave them to the model. unseen: the same if
    rows are not known on all ranks, by what the model was given or by raw gradients. rows: some of this rank's rows.
    repeated, ranks: rows that came again in one pass over their data, and the ranks that had them.
    """

    step: int
    alike: int = 0
    unseen: int = 0
    rows: Sequence[int] = ()
    repeated: Sequence[int] = ()
    ranks: tuple[int, ...] = ()


def _dealt_out(seen: _RowsSeen) -> Finding | None:
    if seen.alike < _SURE:
        return None
    rows = f" (rows {list(seen.rows)[:8]})" if seen.rows else ""
    what = f"in {seen.alike} updates in a row all ranks trained on the same rows{rows}: nothing deals them out"
    return Finding(what, seen.step, (), "global batch")


def _given_apart(seen: _RowsSeen) -> Finding | None:
    if seen.unseen < _LIKELY:
        return None
    what = f"in {seen.unseen} updates in a row all ranks gave the model the same, or had the same raw gradients"
    return Finding(f"{what}, to the bit: do they train on the same rows?", seen.step, (), "global batch")


def _once_in_a_pass(seen: _RowsSeen) -> Finding | None:
    if not seen.repeated:
        return None
    what = f"rows {list(seen.repeated)[:8]} came again in one pass over the data, before its end"
    return Finding(what, seen.step, seen.ranks, "global batch")


def _order_renewed(seen: Seen[object]) -> Finding | None:
    number = max(seen.column("order again"))
    if not number:
        return None
    ranks = [each.rank for each in seen.said if each.values["order again"]]
    what = f"pass {number} over the data has the order of the pass before, though its sampler shuffles"
    return Finding(what, seen.step, seen.some(ranks), "order of rows")


_ROWS = (
    Law("samples-once/drawn", ("drawn", "drawn keys", "given"), _dealt_out),
    Law("samples-once/given", ("given", "raw"), _given_apart, suspicion=True),
)
_PASS = (Law("samples-once/pass", ("held",), _once_in_a_pass),)
_ORDER = (Law("order-renewed/pass", ("order again",), _order_renewed),)


class LoadedRows(Check):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._waiting: deque[Yielded] = deque(maxlen=_AHEAD)
        self._latest: Pass | None = None
        self._used: Yielded | None = None
        self._window: list[Yielded] = []
        """The batches of this update."""
        self._held: list[Yielded] = []
        """The batches since their rows were gathered last."""
        self._inputs: list[Tensor] = []
        self._observer = Observer()
        self._look: Look | None = None
        self._updates = 0
        self._alike = self._unseen = 0
        self._order_again = 0
        """The number of a pass that has the order of the pass before."""
        self._passes: dict[int, _Counted] = {}
        self._numbers: weakref.WeakKeyDictionary[Pass, int] = weakref.WeakKeyDictionary()
        """The passes that were trained on, numbered alike on all ranks."""
        self._begun = 0
        self._unended: list[Pass] = []
        self._spares: dict[str, None] = {}

    def cover(self) -> Mapping[str, Cover]:
        return {"order-renewed": LIVE}

    def yielded(self, batch: Yielded) -> None:
        self._waiting.append(batch)
        self._latest = batch.source

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        try:
            self._look_at_inputs(list(tensors_in((args, kwargs))))
        except Exception as error:  # noqa: BLE001 - what a model is given is the loop's own and may raise anything
            cannot_look("what the model is given", error)

    def _look_at_inputs(self, tensors: Sequence[Tensor]) -> None:
        batch = self._taken(places_of(tensors))
        if not torch.is_grad_enabled():
            return
        if self._updates < _ALWAYS or self._updates % _ALWAYS < _IN_A_ROW:
            self._inputs += [_sampled(each) for each in tensors if each.numel()]
        if batch is not None:
            whole = any(each.dim() and each.shape[0] == len(batch.ids or ()) for each in tensors)
            if not whole:  # a part of a batch that all ranks read, say: its rows are not known
                batch.ids = batch.keys = None
            self._train_on(batch)

    def _taken(self, places: frozenset[int]) -> Yielded | None:
        """The batch that a forward pass with this memory uses for the first time; None if it uses none."""
        known = next((each for each in reversed(self._waiting) if each.places & places), None)
        if known is None and self._used is not None and self._used.places & places:
            return None
        found = known or next((each for each in self._waiting if each.source is self._latest), None)
        if found is not None:
            passed = list(self._waiting)[: self._waiting.index(found) + 1]
            for each in passed:
                if each.source is found.source:
                    self._waiting.remove(each)
        self._used = found or self._used
        return found

    def _train_on(self, batch: Yielded) -> None:
        source = batch.source
        source.batches += 1
        if source not in self._numbers:
            self._numbers[source], self._begun = self._begun, self._begun + 1
            self._sort_out_ended()
            self._unended.append(source)
        self._window.append(batch)
        if batch.keys is not None and self.context.ranks_have_own_rows:
            self._held.append(batch)
        before = source.before
        if before is not None and source.shuffles and before.batches > 1 and source.batches > 1:
            count = min(len(source.order), len(before.order))
            first = source.order[:count]
            if count >= _LEAST and first == before.order[:count] and first != sorted(first):
                self._order_again = source.number
        elif source.batches > 1:
            source.before = None

    def look(self, probe: OptimizerProbe) -> list[list[Tensor]]:
        self._look = self._observer.look(self._inputs) if self._inputs else None
        return [] if self._look is None else [self._look.device_sums]

    def meanwhile(self, probe: OptimizerProbe) -> Values:
        ids = [each.ids for each in self._window]
        keys = [each.keys for each in self._window if each.keys is not None]
        known = bool(ids) and len(keys) == len(ids) and None not in ids
        return {
            "drawn": sum(len(each) for each in ids if each is not None) if known else 0,
            "drawn keys": total(torch.cat(keys)) if known else 0,
            "held": sum(len(each.ids or ()) for each in self._held),
            "order again": self._order_again,
        }

    def before(self, probe: OptimizerProbe) -> Values:
        # [0, 2^63); 0: nothing is known of the inputs
        return {"given": 0 if self._look is None else self._look.digest >> 1}

    def judge(self, probe: OptimizerProbe, said: Observations, aligned: Observations) -> None:
        verdicts, scene, seen = self.context.verdicts, self.context.scene(), Seen[object](said, None)
        verdicts.judge(_ORDER, seen, scene)
        if not self.context.ranks_have_own_rows:
            return
        if seen.any("drawn") or seen.any("given"):
            one = {name: len(set(seen.column(name))) == 1 and seen.any(name) for name in ("drawn keys", "given", "raw")}
            known = all(seen.column("drawn"))
            self._alike = self._alike + 1 if known and one["drawn keys"] and one["given"] else 0
            self._unseen = self._unseen + 1 if (one["given"] or one["raw"]) and not known else 0
        rows = [row for each in self._window for row in each.ids or ()]
        verdicts.judge(_ROWS, _RowsSeen(seen.step, self._alike, self._unseen, rows), scene)
        window = seen.step - self.context.settings.start
        if is_sampled(window) and seen.any("held"):
            self._judge_passes(seen.step)

    def _judge_passes(self, step: int) -> None:
        """Gather the rows since the last time, by pass: each pass has each row once."""
        columns: list[list[int]] = [[], [], [], [], [], []]
        for each in self._held:
            source, ids, keys = each.source, each.ids or (), [] if each.keys is None else each.keys.tolist()
            alike = (self._numbers[source], source.size, source.most, each.so_far)
            for row, key in zip(ids, keys, strict=True):
                for column, value in zip(columns, (row, key, *alike), strict=True):
                    column.append(value)
        self._held = []
        parts = self.context.exchange.columns(step, columns)
        numbers = sorted({number for part in parts for number in part[2]})
        for number in numbers:
            counted = self._passes.setdefault(number, _Counted())
            for rank, part in enumerate(parts):
                for row, key, of_pass, size, most, so_far in zip(*part, strict=True):
                    if of_pass == number:
                        counted.add(rank, row, key, size, most, so_far)
            again = counted.repeated()
            ranks = sorted({rank for key in again for rank in counted.ranks[key]})
            repeated = sorted(counted.row[key] for key in again)
            found = _RowsSeen(step, repeated=repeated, ranks=unless_all(ranks, self.context.world))
            self.context.verdicts.judge(_PASS, found, self.context.scene())
        for number in [each for each in self._passes if each < max(numbers, default=0) - 1]:
            del self._passes[number]

    def updated(self, probe: OptimizerProbe) -> None:
        self._window, self._inputs, self._order_again = [], [], 0
        self._updates += 1

    def closing_lines(self) -> list[str]:
        """What the passes that ended left out or had twice."""
        self._sort_out_ended()
        return list(self._spares)

    def _sort_out_ended(self) -> None:
        """Note what the passes that ended left out or had twice. Forget these, and those that were broken off."""
        for each in self._unended:
            spare = self.context.world * each.rows - each.size
            if each.over and each.most == 1 and 0 < abs(spare) < each.size:
                what = f"{spare} rows more than the {each.size} of the data fill up" if spare > 0 else ""
                what = what or f"{-spare} of the {each.size} rows of the data are left out of"
                self._spares[f"  rows: {what} a pass over them ({each.sampler})"] = None
        self._unended = [each for each in self._unended if is_under_way(each)]


@dataclass
class _Counted:
    """How often each row came in one pass, on all ranks."""

    row: dict[int, int] = field(default_factory=dict)
    """By key, the row's index."""
    ranks: dict[int, set[int]] = field(default_factory=dict)
    _count: Counter[int] = field(default_factory=Counter)
    _size: int = 0
    _most: int = 1
    _so_far: dict[int, int] = field(default_factory=dict)

    def add(self, rank: int, row: int, key: int, size: int, most: int, so_far: int) -> None:
        """A row came on a rank."""
        self._size, self._most = max(size, self._size), 0 if 0 in (most, self._most) else max(most, self._most)
        self._so_far[rank] = max(so_far, self._so_far.get(rank, 0))
        if len(self._count) < _MOST:
            self._count[key] += 1
            self.row[key] = row
            self.ranks.setdefault(key, set()).add(rank)

    def repeated(self) -> list[int]:
        """The keys of rows that came too often; none while that only fills up the end of the pass."""
        if not self._most:
            return []
        again = [key for key, count in self._count.items() if count > self._most]
        spare = sum(self._count[key] - self._most for key in again)
        return again if spare > max(0, sum(self._so_far.values()) - self._most * self._size) else []


def _sampled(tensor: Tensor) -> Tensor:
    """A copy of about `_SAMPLED` elements, spread over the tensor."""
    flat = tensor.reshape(-1)
    return flat[:: max(flat.numel() // _SAMPLED, 1)].clone()
