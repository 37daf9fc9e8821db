"""What a loop does without telling: which rows it trains on, by its data loaders and by what its model is given, and in
which mode the model is. Kept for the update at hand, held to the other ranks, and forgotten behind it.

Yielded is not trained: Accelerate reads one batch ahead, the Trainer of transformers a window. A batch is trained on
when a forward pass is given its memory; where none is (it was copied to a device), the oldest one of the loader that
yielded last is. What is left at the close was never used.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from andon_contracts.act import Scene
from andon_contracts.agree import Observation
from andon_contracts.causes import first_line
from andon_contracts.laws.law import Observations, Seen
from andon_contracts.laws.practice import CLIPPED_ALIKE, COPIED, COURSE, JOINED, PASS, ROWS
from andon_contracts.laws.practice import Practice as Practised
from andon_contracts.legible import tell_once
from andon_contracts.observe import Look, Observer
from andon_contracts.watch.clip_place import ClipPlace
from andon_contracts.watch.copies import Copies
from andon_contracts.watch.exchange import Exchange
from andon_contracts.watch.judging import Verdicts
from andon_contracts.watch.loaders import (
    Pass,
    Yielded,
    cannot_look,
    is_under_way,
    outside_of_transforms,
    places_of,
    tensors_in,
    total,
)
from andon_contracts.watch.model_probe import ForwardTap, ModelProbe, Several, random_state
from andon_contracts.watch.motion import is_sampled
from andon_contracts.watch.rows import Rows

_AHEAD = 64
"""So many batches may be yielded before they are used."""
_SAMPLED = 1024
"""About so many elements of a tensor stand for what a forward pass was given."""
_ALWAYS, _IN_A_ROW = 16, 4
"""What a forward pass is given is looked at in the first 16 updates, and then in 4 of each 16: who forgets to deal out
rows does so all the time.
"""
_DRAWING = 4
"""Number of updates in which forward passes are checked for random draws: a model that draws does so from the start."""
_NAMED = 3
_LEAST = 6
"""Fewer rows may come in the same order by chance."""
_MOST = 1 << 16
"""A pass of more rows than these is not held to the end."""


class Practice:
    """See the module. The ranks call `values` and `judge` alike, at each update."""

    def __init__(
        self,
        exchange: Exchange,
        verdicts: Verdicts,
        subject: ModelProbe,
        rows: Rows,
        *,
        apart: bool,
        muted: Callable[[], bool],
    ) -> None:
        """apart: whether ranks hold parts of the model, so that some rightly train on the same rows.

        muted: whether it is a watch that runs the model.
        """
        self._exchange = exchange
        self._verdicts = verdicts
        self._subject = subject
        self._apart = apart or exchange.world_size == 1
        self._joined = exchange.world_size > 1
        self._muted = muted
        self._waiting: deque[Yielded] = deque(maxlen=_AHEAD)
        self._latest: Pass | None = None
        self._used: Yielded | None = None
        self._window: list[Yielded] = []
        self._held: list[Yielded] = []
        self._given: list[Tensor] = []
        self._observer = Observer()
        self._look: Look | None = None
        self._modes: set[bool] = set()
        self._forwards = 0
        self.clips = ClipPlace(lambda: self._forwards, lambda: rows.discarded)
        self.copies, self._hidden = Copies(subject), False
        self._updates = 0
        self._trained = False
        self._random: Tensor | None = None
        self._drew = False
        self.draws = ""
        """What drew random numbers in the forward passes of the last update, in words. See `Step.draws`."""
        self._evaluating = 0
        self._alike = self._unseen = 0
        self._again = 0
        self._passes: dict[int, _Counted] = {}
        self._numbers: weakref.WeakKeyDictionary[Pass, int] = weakref.WeakKeyDictionary()
        """The passes that were trained on, each by its number, alike on all ranks."""
        self._begun = 0
        self._unended: list[Pass] = []
        """The passes that were trained on and may yet come to their end."""
        self._spares: dict[str, None] = {}

    def hooks(self) -> list[Callable[[], None]]:
        """See the forward passes from now on; what ends that."""
        several = isinstance(self._subject.inner, Several)
        whole = list(self._subject.inner.children()) if several else [self._subject.called]
        modules = {id(each): each for each in (*whole, *(home.called for home in self._subject.homes))}
        tap, after = ForwardTap(self._forward, arguments=True), ForwardTap(self._forwarded)
        before = [each.register_forward_pre_hook(tap, with_kwargs=True).remove for each in modules.values()]
        return [*before, *(each.register_forward_hook(after).remove for each in modules.values())]

    def yielded(self, batch: Yielded) -> None:
        """A data loader has given the loop a batch."""
        self._waiting.append(batch)
        self._latest = batch.source

    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._muted():
            return
        try:
            with outside_of_transforms():
                self._look_at_forward(module, args, kwargs)
        except Exception as error:  # noqa: BLE001 - what a model is given is the loop's own and may raise anything
            cannot_look("what the model is given", error)

    def _look_at_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        tensors = list(tensors_in((args, kwargs)))
        batch = self._taken(places_of(tensors))
        if not torch.is_grad_enabled():
            return
        self._forwards += 1
        self._modes.add(module.training)
        if self._updates < _DRAWING and not self._drew:
            self._random = self._random_state()
        if self._updates < _ALWAYS or self._updates % _ALWAYS < _IN_A_ROW:
            self._given += [_sampled(each) for each in tensors if each.numel()]
        if batch is not None:
            whole = any(each.dim() and each.shape[0] == len(batch.ids or ()) for each in tensors)
            if not whole:  # a part of a batch that all ranks read, say; which rows are in it cannot be seen
                batch.ids = batch.keys = None
            self._train_on(batch)

    def _forwarded(self) -> None:
        before, self._random = self._random, None
        after = None if before is None else self._random_state()
        if before is not None and after is not None:
            self._drew = not torch.equal(before, after)

    def _random_state(self) -> Tensor | None:
        """The random state that the model draws from; None if it cannot be read."""
        gpu = self._subject.gpu()
        if gpu is not None and torch.cuda.is_current_stream_capturing():
            return None
        return random_state(gpu or torch.device("cpu"))

    def _taken(self, places: frozenset[int]) -> Yielded | None:
        """The batch that a forward pass with this memory uses, if it is none that was used already."""
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
        if batch.keys is not None and not self._apart:  # not needed if no ranks are compared
            self._held.append(batch)
        before = source.before
        if before is not None and source.shuffles and before.batches > 1 and source.batches > 1:
            count = min(len(source.order), len(before.order))
            first = source.order[:count]
            if count >= _LEAST and first == before.order[:count] and first != sorted(first):
                self._again = source.number
        elif source.batches > 1:
            source.before = None

    def values(self) -> dict[str, int]:
        """The integers of an update, but for `given`, which is looked at here and read by that."""
        self.draws, self._drew = self._drawing() if self._drew else "", False
        self._look = self._observer.look(self._given) if self._given else None
        ids = [each.ids for each in self._window]
        known = (
            bool(ids) and all(each is not None for each in ids) and all(each.keys is not None for each in self._window)
        )
        keys = [each.keys for each in self._window if each.keys is not None]
        if self._modes:
            self._evaluating = self._evaluating + 1 if self._modes == {False} and self._moody() else 0
            self._trained = self._trained or True in self._modes
        return {
            "drawn": sum(len(each) for each in ids if each is not None) if known else 0,
            "drawn keys": total(torch.cat(keys)) if known else 0,
            "held": sum(len(each.ids or ()) for each in self._held),
            "given": 0,
            "order again": self._again,
            "clipping": self.clips.seen,
            **self._copied(),
            "alone": int(self._updates > 0 and self.is_alone()),
            "evaluating": (1 if self._trained else 2) if self._evaluating > 1 else 0,
        }

    def _copied(self) -> dict[str, int]:
        """What is seen of copies of the model; nothing, once an object of the process does not let itself be looked at.

        They are looked for among all objects, of which any may raise anything if it is asked for its class.
        """
        if not self._apart and not self._hidden:
            try:
                return self.copies.values(self._updates + 1)
            except Exception as error:  # noqa: BLE001 - see above
                self.copies, self._hidden = Copies(self._subject), True
                why = f"an object raises {first_line(error)}"
                tell_once("copies", f"andon.watch: copies of the model are not looked for: {why}")
        return self.copies.values(0)

    def waiting(self) -> list[Tensor]:
        """What devices have yet to say, in a list that may be brought to the CPU before `given`."""
        return [] if self._look is None else self._look.waiting

    def given(self) -> dict[str, int]:
        """What the model was given, in one integer in [0, 2^63); 0: nothing that is known."""
        return {"given": 0 if self._look is None else self._look.digest >> 1}

    def _moody(self) -> bool:
        """Whether any module does something else in evaluation mode."""
        return any(
            (isinstance(each, _BatchNorm) and each.track_running_stats) or _drops(each) > 0
            for each in self._subject.modules
        )

    def _drawing(self) -> str:
        """What draws random numbers in a forward pass: the dropout modules by name, else functional noise."""
        modules = self._subject.inner.named_modules()
        found = [
            f"{name or 'the model'} (p = {_drops(each):g})" for name, each in modules if each.training and _drops(each)
        ]
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        if not found:
            return "functional dropout or other noise"
        return f"dropout in module{'s' * (len(found) > 1)} {', '.join(found[:_NAMED])}{more}"

    def judge(self, observations: Observations) -> None:
        """Hold what all ranks said of an update to the laws. Gathers rows at some updates."""
        step, scene = observations[0].step, Scene(self._exchange.world_size)
        seen: Seen[object] = Seen(observations, None)
        self._verdicts.judge(COURSE, seen, scene)
        if self._apart:
            return
        if self._verdicts.alive((COPIED,)) and not COPIED.holds(seen):
            sketches = self._exchange(step, "copies", self.copies.sketches())
            seen = Seen(self.copies.without_roundings(observations, sketches, self._updates + 1), None)
        self._verdicts.judge((CLIPPED_ALIKE, COPIED), seen, scene)
        if seen.any("drawn") or seen.any("given"):
            one = {name: len(set(seen.column(name))) == 1 and seen.any(name) for name in ("drawn keys", "given", "raw")}
            known = all(seen.column("drawn"))
            self._alike = self._alike + 1 if known and one["drawn keys"] and one["given"] else 0
            alike = (one["given"] or one["raw"]) and not known
            self._unseen = self._unseen + 1 if alike else 0
        rows = [row for each in self._window for row in each.ids or ()]
        self._verdicts.judge(ROWS, Practised(observations, self._alike, self._unseen, rows=rows), scene)
        window = step - self._verdicts.settings.start
        if is_sampled(window) and seen.any("held"):
            self._judge_passes(observations, scene)

    def _judge_passes(self, observations: Observations, scene: Scene) -> None:
        """Gather the rows since the last time, by pass, and hold each pass to have each row once."""
        columns: list[list[int]] = [[], [], [], [], [], []]
        for each in self._held:
            source, ids, keys = each.source, each.ids or (), [] if each.keys is None else each.keys.tolist()
            alike = (self._numbers[source], source.size, source.most, each.so_far)
            for row, key in zip(ids, keys, strict=True):
                for column, value in zip(columns, (row, key, *alike), strict=True):
                    column.append(value)
        self._held = []
        parts = self._exchange.columns(observations[0].step, columns)
        numbers = sorted({number for part in parts for number in part[2]})
        for number in numbers:
            counted = self._passes.setdefault(number, _Counted())
            for rank, part in enumerate(parts):
                for row, key, of_pass, size, most, so_far in zip(*part, strict=True):
                    if of_pass == number:
                        counted.add(rank, row, key, size, most, so_far)
            keys = counted.repeated()
            ranks = counted.ranks_of(keys, self._exchange.world_size)
            self._verdicts.judge(PASS, Practised(observations, repeated=counted.rows(keys), ranks=ranks), scene)
        for number in [each for each in self._passes if each < max(numbers, default=0) - 1]:
            del self._passes[number]

    def turn(self) -> None:
        """The update was made."""
        self._window, self._given, self._again = [], [], 0
        self._modes.clear()
        self.clips.clear()
        self._updates += 1

    def is_alone(self) -> bool:
        """Whether a launcher started several processes, and this one has made no process group with the others."""
        asked = os.environ.get("WORLD_SIZE", "")
        # A script may take its group down before it ends.
        self._joined = self._joined or (dist.is_available() and dist.is_initialized())
        return not self._joined and asked.isdecimal() and int(asked) > 1

    def judge_close(self) -> None:
        """What only the end can tell: a process that never joined the others. This one alone says it."""
        if self._updates > 1 and self.is_alone() and JOINED.clause in self._verdicts.live:
            values = self.values() | {"alone": 1}
            said: Seen[object] = Seen((Observation(0, self._updates, 0, "close", values),), None)
            found = self._verdicts.judgement((JOINED,), said)
            if found.first is not None:
                self._verdicts.take(found.violation(JOINED), Scene(1, applied=True), alone=True)

    def line_of_copies(self) -> str:
        """How far copies are apart that differ by a rounding; "" if none were seen to."""
        apart = self.copies.apart
        what = f"  copies: those of the model that the ranks keep differ by up to {apart:.1g} of their norm"
        return f"{what}, which is rounding" if apart else ""

    def lines(self) -> list[str]:
        """What the passes that ended left out or had twice, for the end."""
        self._sort_out_ended()
        return list(self._spares)

    def _sort_out_ended(self) -> None:
        """Note what the passes that ended left out or had twice, and forget these and those that were broken off."""
        world = self._exchange.world_size
        for each in self._unended:
            spare = world * each.rows - each.size
            if each.over and each.most == 1 and 0 < abs(spare) < each.size:
                what = f"{spare} rows more than the {each.size} of the data fill up" if spare > 0 else ""
                what = what or f"{-spare} of the {each.size} rows of the data are left out of"
                self._spares[f"  rows: {what} a pass over them ({each.sampler})"] = None
        self._unended = [each for each in self._unended if is_under_way(each)]


class _Counted:
    """How often each row came in one pass, on all ranks."""

    def __init__(self) -> None:
        self._count = Counter[int]()
        self._row: dict[int, int] = {}
        self._ranks: dict[int, set[int]] = {}
        self._size, self._most, self._so_far = 0, 1, dict[int, int]()

    def add(self, rank: int, row: int, key: int, size: int, most: int, so_far: int) -> None:
        """A row came on a rank."""
        self._size, self._most = max(size, self._size), 0 if 0 in (most, self._most) else max(most, self._most)
        self._so_far[rank] = max(so_far, self._so_far.get(rank, 0))
        if len(self._count) < _MOST:
            self._count[key] += 1
            self._row[key] = row
            self._ranks.setdefault(key, set()).add(rank)

    def repeated(self) -> list[int]:
        """The keys of rows that came too often; none while that only fills up the end of the pass."""
        if not self._most:
            return []
        again = [key for key, count in self._count.items() if count > self._most]
        spare = sum(self._count[key] - self._most for key in again)
        return again if spare > max(0, sum(self._so_far.values()) - self._most * self._size) else []

    def ranks_of(self, keys: list[int], world: int) -> tuple[int, ...]:
        """The ranks that had any of these rows; none where that is all."""
        found = sorted({rank for key in keys for rank in self._ranks[key]})
        return tuple(found) if len(found) < world else ()

    def rows(self, keys: list[int]) -> list[int]:
        """Their indices."""
        return sorted(self._row[key] for key in keys)


def _drops(module: nn.Module) -> float:
    """The dropout probability of a module in training mode; 0 if it drops nothing."""
    if isinstance(module, _DropoutNd):
        return float(module.p)
    return float(module.dropout) if isinstance(module, nn.MultiheadAttention | nn.RNNBase) else 0.0


def _sampled(tensor: Tensor) -> Tensor:
    """A copy of about `_SAMPLED` elements, spread over the tensor."""
    flat = tensor.reshape(-1)
    return flat[:: max(flat.numel() // _SAMPLED, 1)].clone()
