"""Copies of the model that the loop keeps outside the model: averages of weights, teachers, tables of shadow weights.

The user does not name them, so the watch sometimes searches for them among the objects of the process. Tensors farther
from the weights than half the weights' norm (moments, residuals of a compression, gradients) do not count as a copy,
unless they move straight towards the weights, as an average does that was begun from other weights.
"""

from __future__ import annotations

import gc
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from andon_contracts.agree import Observation
from andon_contracts.digest import hex64
from andon_contracts.laws.law import Law, Observations, Seen
from andon_contracts.legible import log_once
from andon_contracts.observe import Observer, plain
from andon_contracts.violation import Finding, first_line
from andon_contracts.watch.check import Check, Context, Cover, OptimizerProbe, Values
from andon_contracts.watch.model_probe import ModelProbe
from andon_contracts.watch.values import text_digest

MAX_COPIES = 3
_CONTAINERS = frozenset({list, dict, OrderedDict})
_NEAR, _FAR = 0.5, 4.0
"""The largest distance of a copy from the weights, and of one that follows them, as shares of the weights' norm."""
_SAMPLED, _STRAIGHT = 64, 0.05
"""Elements of each tensor that show how a copy moves, and the largest share of a move that leads elsewhere."""
_SIGNS = 8
"""Random sums of a copy that ranks compare; the mean square of their differences estimates that of the copies."""
_CHUNK = 1 << 16
_ROUNDED = 2.0
"""Copies that differ by at most this many spacings of their dtype, times the root of the updates, count as equal."""


def _copies_agree(seen: Seen[object], *, far: bool = False) -> Finding | None:
    """A finding if a rank lacks a copy that is updated by another rank with as many copies. far: with distant ones."""
    if "weights" in seen.differing or far != seen.any("copies far"):
        return None
    kept = [[state for i in range(MAX_COPIES) if (state := each.values[f"copy {i}"])] for each in seen.observations]
    changed = [
        (len(states), state)
        for each, states in zip(seen.observations, kept, strict=True)
        for place, state in enumerate(states)
        if each.values["copies changed"] >> place & 1
    ]
    ranks = tuple(
        rank
        for rank, states in enumerate(kept)
        if any(len(states) == count and state not in states for count, state in changed)
    )
    if not ranks:
        return None
    shown = ", ".join(f"rank {rank}: {' '.join(map(hex64, each))}" for rank, each in enumerate(kept))
    what = f"an updated copy of the model (an average, a teacher) differs between the ranks that keep one ({shown})"
    culprits = ranks if 2 * len(ranks) < len(seen.observations) else ()
    likely = "the average was begun before the ranks had the same weights, from those that each rank drew" * far
    return Finding(what, max(seen.step - 1, 0), culprits, "copy of the model", likely=likely or None)


_READS = (*(f"copy {i}" for i in range(MAX_COPIES)), "copies changed", "copies far")
COPIES_AGREE = (
    Law("copies-agree/before", _READS, _copies_agree),
    Law("copies-agree/far", _READS, partial(_copies_agree, far=True), suspicion=True),
)
"""A single rank may keep a copy. Of ranks with equally many copies, all must have any copy that one updates."""


class ModelCopies(Check):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._copies = Copies(context.subject)
        self._disabled = not context.ranks_have_own_rows

    def ranks_met(self) -> None:
        self._copies.portable = self.context.portable

    def cover(self) -> Mapping[str, Cover]:
        if not self.context.subject.sharded:
            return {"copies-agree": self.context.between_ranks()}
        what = "each rank copies its own shards"
        part = Cover("degraded", f"{what}: only whether it updates them is compared")
        return {"copies-agree": Cover("not observable", what) if self._disabled else part}

    def meanwhile(self, probe: OptimizerProbe) -> Values:
        try:
            return self._copies.values(0 if self._disabled else self.context.steps + 1)
        except Exception as error:  # noqa: BLE001 - any object of the process may raise if it is asked for its class
            self._copies, self._disabled = Copies(self.context.subject), True
            why = f"an object of the process raised {first_line(error)}"
            log_once("copies", f"andon.watch: copies of the model are not compared in this run: {why}")
            return self._copies.values(0)

    def judge(self, probe: OptimizerProbe, said: Observations, aligned: Observations) -> None:
        context, step = self.context, said[0].step
        if not context.ranks_have_own_rows or COPIES_AGREE[0].clause not in context.verdicts.live:
            return
        seen = Seen[object](aligned, None)
        if any(law.check(seen) is not None for law in COPIES_AGREE):
            sketches = context.exchange(step, "copies", {}, self._copies.sketches())
            seen = Seen(self._copies.merge_rounded(aligned, sketches, self.context.steps + 1), None)
        context.verdicts.judge(COPIES_AGREE, seen, context.scene())


def search_due(update: int) -> bool:
    """True before updates 2, 32, 512, 8,192 and so on: then the watch searches for copies."""
    return update > 1 and update & (update - 1) == 0 and update.bit_length() % 4 == 2


class Copies:
    """The copies of a model on this rank. portable: as for an `Observer`."""

    def __init__(self, subject: ModelProbe) -> None:
        self._subject = subject
        self._candidates: list[Any] = []
        self._states: list[int] = []
        self._tensors: list[list[Tensor]] = []
        self._samples: dict[int, Tensor] = {}  # by id: float64 [2, elements] of a copy that is far, and of the weights
        self.portable = False

    def values(self, update: int) -> dict[str, int]:
        """The digest of each copy before an update, 0 for none, a bit mask of the copies that the loop updates, and
        whether one of them is far from the weights.

        The search may take as long as a step and runs before updates 2, 32, 512 and so on. A copy counts as updated if
        its digest differs before the next update and it differs from the weights. A copy of the best weights changes
        too, but then equals the weights.
        """
        due = search_due(update)
        if due:
            self._candidates = self._search()
        seen: list[tuple[int, bool, bool, list[Tensor]]] = []
        samples, self._samples = self._samples, {}
        for each in self._candidates:
            tensors, parameters = self._tensors_of(each), list(self._subject.parameters.values())
            if not tensors:
                continue
            # A copy has one tensor for each parameter, or for each trained one.
            wanted = [p for p in parameters if len(tensors) == len(parameters) or p.requires_grad]
            pairs = [(plain(one), plain(other)) for one, other in zip(tensors, wanted, strict=True)]
            distance = _distance(pairs)
            if far := _NEAR < distance <= _FAR:
                both = zip(*pairs, strict=True)
                sample = torch.stack([torch.cat([t.flatten()[:_SAMPLED].cpu().double() for t in of]) for of in both])
                self._samples[id(each)] = sample
                far = id(each) in samples and _moves_to_weights(samples[id(each)], sample)
            if far or distance <= _NEAR:
                digest = Observer(portable=self.portable).look(tensors).digest
                seen.append(((digest + text_digest(type(each).__name__)) >> 2 or 1, distance == 0.0, far, tensors))
        seen = sorted(seen, key=lambda each: each[:2]) if len(seen) <= MAX_COPIES else []
        self._tensors = [tensors for *_, tensors in seen]
        states, before = [state for state, *_ in seen], self._states
        self._candidates, self._states = (self._candidates, states) if due else ([], [])
        self._samples = self._samples if due else {}
        differs = [far or (bool(before) and not equal and state not in before) for state, equal, far, _ in seen]
        changed = sum(1 << place for place, each in enumerate(differs) if each)
        # The bits of shards cannot be compared, but which copies the loop updates can.
        states = [1 + each for each in differs] if self._subject.sharded else states
        copies = {f"copy {place}": state for place, state in enumerate([*states, *[0] * MAX_COPIES][:MAX_COPIES])}
        return {**copies, "copies changed": changed, "copies far": int(any(far for _, _, far, _ in seen))}

    def sketches(self) -> Tensor:
        """int64 [MAX_COPIES * (_SIGNS + 1)]: the bits of the `_sketch` of each copy that `values` returned last."""
        tensors = [*self._tensors, *[[]] * MAX_COPIES][:MAX_COPIES]
        return torch.tensor(list(map(_sketch, tensors)), dtype=torch.float64, device="cpu").view(torch.int64).flatten()

    def merge_rounded(self, observations: Observations, sketches: Observations, updates: int) -> Observations:
        """Return `observations` with the digest of the lowest rank for copies that are equal up to rounding.

        An average whose first decay is 0 starts as the weights, and each update adds one rounding: their sum grows as
        the root of `updates`. If some ranks update more copies than others, a copy is not updated, which is not
        rounding: then the observations are returned unchanged.
        """
        if len({each.values["copies changed"].bit_count() for each in observations}) > 1:
            return observations
        known: list[tuple[int, list[float], float]] = []
        merged: list[Observation] = []
        for each, sketched in zip(observations, sketches, strict=True):
            states: dict[str, int] = {}
            assert sketched.payload is not None
            sketch_of = sketched.payload.cpu().view(torch.float64).view(MAX_COPIES, -1).tolist()
            for place, (*sums, spacing) in enumerate(sketch_of):
                state = each.values[f"copy {place}"]
                for other, theirs, least in known:
                    distance = math.dist(sums, theirs) / math.sqrt(_SIGNS)
                    if state and other != state and distance <= _ROUNDED * math.sqrt(updates) * max(spacing, least):
                        state = other
                        break
                known += [(state, sums, spacing)] * bool(state)
                states[f"copy {place}"] = state
            merged.append(replace(each, values={**each.values, **states}))
        return merged

    def _search(self) -> list[Any]:
        tensors = self._subject.parameters
        sizes = {len(tensors), sum(each.requires_grad for each in tensors.values())}
        model = type(self._subject.inner)
        objects = gc.get_objects()
        # There may be a million objects, so no Python loop visits each of them.
        kinds = list(map(type, objects))
        optimizers = {kind for kind in set(kinds) if issubclass(kind, torch.optim.Optimizer)}
        chosen = list(compress(objects, map((_CONTAINERS | optimizers | {model}).__contains__, kinds)))
        del objects
        known = {id(each) for each in (*tensors.values(), *(each.grad for each in tensors.values()))}
        for each in chosen:
            if type(each) in optimizers:
                known |= {id(p) for group in each.param_groups for p in group["params"]}
        return [
            each
            for each in chosen
            if (type(each) is model or (type(each) in _CONTAINERS and len(each) in sizes))
            and known.isdisjoint(map(id, self._tensors_of(each) or tensors.values()))
        ]

    def _tensors_of(self, candidate: Any) -> list[Tensor]:
        """The tensors of an object with one for each parameter, or for each trained one, of equal shape; else []."""
        tensors = dict(self._subject.parameters)
        forms = [tensors, {name: p for name, p in tensors.items() if p.requires_grad}]
        named: dict[Any, Any] = {}
        if isinstance(candidate, nn.Module):
            forms = [tensors]
            if candidate is not self._subject.inner:
                named = dict(candidate.named_parameters())
        elif len(candidate) < 2:
            pass
        elif isinstance(candidate, dict):
            if not any(isinstance(value, nn.Parameter) or _has_graph(value) for value in candidate.values()):
                named = candidate
        elif isinstance(candidate[0], Tensor) and not any(map(_has_graph, candidate)):
            names = next((form for form in forms if len(form) == len(candidate)), {})
            named = dict(zip(names, candidate, strict=True))
        form = next((form for form in forms if list(form) == list(named)), None)
        if not named or form is None:
            return []
        pairs = zip(named.values(), form.values(), strict=True)
        same = all(isinstance(one, Tensor) and one.shape == other.shape and not one.is_meta for one, other in pairs)
        return list(named.values()) if same else []


def _moves_to_weights(before: Tensor, now: Tensor) -> bool:
    """Whether all elements of a copy moved by one share of their distance from the weights."""
    moved, gap = now[0] - before[0], now[1] - before[0]
    share = float(moved @ gap) / (float(gap @ gap) or 1.0)
    return share > 0 and float((moved - share * gap).norm()) <= _STRAIGHT * float(moved.norm())


@torch.no_grad()
def _distance(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    squares = sum(float((one.to(other.device).float() - other.float()).square().sum()) for one, other in pairs)
    norm = sum(float(other.float().square().sum()) for _, other in pairs)
    return math.sqrt(squares / norm) if norm else math.inf


@torch.no_grad()
def _sketch(tensors: Sequence[Tensor]) -> list[float]:
    """Sums of all elements under random signs, and the norm of the elements' spacings."""
    generator = torch.Generator().manual_seed(_SIGNS)
    places = torch.arange(_SIGNS, dtype=torch.uint8, device="cpu")
    sums, spacings = torch.zeros(_SIGNS, dtype=torch.float64, device="cpu"), 0.0
    for each in map(plain, tensors):
        flat = torch.view_as_real(each) if each.is_complex() else each
        # 16-bit copies get the tolerance of float32, because ranks that run the same operations round equally.
        eps = min(torch.finfo(flat.dtype).eps, torch.finfo(torch.float32).eps) if flat.is_floating_point() else 0.0
        for part in torch.split(flat.reshape(-1), _CHUNK):
            drawn = torch.randint(256, (part.numel(), 1), generator=generator, dtype=torch.uint8, device="cpu")
            values = part.cpu().double()
            sums += values @ ((drawn >> places & 1).double() * 2 - 1)
            spacings += eps**2 * float(values.square().sum())
    return [*sums.tolist(), math.sqrt(spacings)]


def _has_graph(held: object) -> bool:
    # `type` instead of `isinstance`, because lazy modules load themselves when an attribute is read.
    return issubclass(type(held), Tensor) and bool(getattr(held, "requires_grad", False))
