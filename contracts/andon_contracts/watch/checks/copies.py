"""Copies of the model that the loop keeps beside it: averages of weights, teachers, a table of shadow weights.

Nobody names them, so they are searched for among the objects of the process, now and then. What is no nearer to the
weights than zero would be (moments, residuals of a compression, a rank's own gradients) is not a copy.
"""

from __future__ import annotations

import gc
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from andon_contracts.agree import Observation, bits_of, real_of
from andon_contracts.causes import first_line
from andon_contracts.laws.law import Law, Observations, Seen, hexadecimal
from andon_contracts.legible import log_once
from andon_contracts.observe import Observer, plain
from andon_contracts.violation import Finding
from andon_contracts.watch.check import Check, Context, Cover, OptimizerProbe, Values
from andon_contracts.watch.model_probe import ModelProbe
from andon_contracts.watch.values import text_digest

COPIES = 3
"""How many copies of the model are compared."""
_HOLDERS = frozenset({list, dict, OrderedDict})
_NEAR = 0.5
"""A copy is no farther from the weights than this share of their norm."""
_SIGNS = 8
"""Random sums of a copy that ranks compare. The mean square of their differences is that of the copies, within half."""
_SKETCH = (*(f"sum {index}" for index in range(_SIGNS)), "spacing", "norm")
_CHUNK = 1 << 16
_EPS = torch.finfo(torch.float32).eps
_ROUNDED = 2.0
"""Copies count as equal up to rounding within this many spacings of their dtype, times the root of the updates."""


def _copies_agree(seen: Seen[object]) -> Finding | None:
    """A rank lacks a copy that another rank, with as many copies, kept up."""
    if "weights" in seen.differing:
        return None
    kept = [[state for i in range(COPIES) if (state := each.values[f"copy {i}"])] for each in seen.said]
    changed = [
        (len(states), state)
        for each, states in zip(seen.said, kept, strict=True)
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
    shown = ", ".join(f"rank {rank}: {' '.join(map(hexadecimal, each))}" for rank, each in enumerate(kept))
    what = f"a copy of the model beside it was kept up, and is not the same on the ranks that keep one ({shown})"
    culprits = ranks if 2 * len(ranks) < len(seen.said) else ()
    return Finding(what, max(seen.step - 1, 0), culprits, "copy of the model")


COPIED = Law("copies-agree/before", (*(f"copy {i}" for i in range(COPIES)), "copies changed"), _copies_agree)
"""One rank alone may keep a copy; all that keep one have the same."""


class ModelCopies(Check):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._copies = Copies(context.subject)
        self._updates = 0
        self._given_up = not context.ranks_have_own_rows

    def ranks_met(self) -> None:
        self._copies.portable = self.context.portable

    def cover(self) -> Mapping[str, Cover]:
        return {"copies-agree": self.context.between_ranks()}

    def meanwhile(self, probe: OptimizerProbe) -> Values:
        if self._given_up:
            return self._copies.values(0)
        try:
            return self._copies.values(self._updates + 1)
        except Exception as error:  # noqa: BLE001 - any object of the process may raise if it is asked for its class
            self._copies, self._given_up = Copies(self.context.subject), True
            why = f"an object raises {first_line(error)}"
            log_once("copies", f"andon.watch: copies of the model are not looked for: {why}")
            return self._copies.values(0)

    def judge(self, probe: OptimizerProbe, said: Observations, aligned: Observations) -> None:
        context, step = self.context, said[0].step
        if not context.ranks_have_own_rows or not context.verdicts.alive((COPIED,)):
            return
        seen = Seen[object](said, None)
        if COPIED.check(seen) is not None:
            sketches = context.exchange(step, "copies", self._copies.sketches())
            seen = Seen(self._copies.without_roundings(said, sketches, self._updates + 1), None)
        context.verdicts.judge((COPIED,), seen, context.scene())

    def updated(self, probe: OptimizerProbe) -> None:
        self._updates += 1

    def closing_lines(self) -> list[str]:
        apart = self._copies.apart
        what = f"  copies: those of the model that the ranks keep differ by up to {apart:.1g} of their norm"
        return [f"{what}, which is rounding"] if apart else []


def is_due(update: int) -> bool:
    """Whether copies are searched for before this update: 2, 32, 512, 8,192 and so on."""
    return update > 1 and update & (update - 1) == 0 and update.bit_length() % 4 == 2


class Copies:
    """The copies of a model that this rank keeps.

    portable: whether states must be equal on all kinds of devices, because the ranks' devices differ. apart: the
    largest difference between the ranks' copies that was taken for rounding, as a share of their norm.
    """

    def __init__(self, subject: ModelProbe) -> None:
        self._subject = subject
        self._found: list[Any] = []
        self._states: list[int] = []
        self._held: list[list[Tensor]] = []
        self.portable = False
        self.apart = 0.0

    def values(self, update: int) -> dict[str, int]:
        """Before an update: the state of each copy, 0 for none, and which of them are kept up.

        They are searched for before updates 2, 32, 512 and so on, which takes as long as a step. A copy is kept up if
        it has another state before the next update and does not equal the weights, as a copy of the best ones would.
        """
        due = is_due(update)
        if due:
            self._found = self._search()
        seen: list[tuple[int, bool, list[Tensor]]] = []
        for each in self._found:
            held = self._tensors_of(each)
            apart = _distance(held, self._subject.parameters.values()) if held else math.inf
            if apart <= _NEAR:
                digest = Observer(portable=self.portable).look(held).digest
                seen.append(((digest + text_digest(type(each).__name__)) >> 2 or 1, apart == 0.0, held))
        # Of too many none is compared.
        seen = sorted(seen, key=lambda each: each[:2]) if len(seen) <= COPIES else []
        self._held = [held for _, _, held in seen]
        states, before = [state for state, _, _ in seen], self._states
        self._found, self._states = (self._found, states) if due else ([], [])
        changed = sum(
            1 << i for i, (state, fresh, _) in enumerate(seen) if before and not fresh and state not in before
        )
        padded = [*states, *[0] * COPIES][:COPIES]
        return {**{f"copy {place}": state for place, state in enumerate(padded)}, "copies changed": changed}

    def sketches(self) -> dict[str, int]:
        """For each copy of the last look: random sums of its elements (equal signs on all ranks), and its rounding."""
        found: dict[str, int] = {}
        for place in range(COPIES):
            sketch = _sketch(self._held[place] if place < len(self._held) else ())
            found |= {f"{name} of copy {place}": bits_of(x) for name, x in zip(_SKETCH, sketch, strict=True)}
        return found

    def without_roundings(self, observations: Observations, sketches: Observations, updates: int) -> Observations:
        """`observations`, in which copies that are the same up to rounding have one state: that of the lowest rank.

        An average that each rank began with weights of its own, and whose first decay is 0, is the weights plus one
        rounding for each update: their sum grows as the root of `updates`. If some ranks keep up more copies than
        others, a rank does not update its own, and rounding explains nothing.
        """
        if len({each.values["copies changed"].bit_count() for each in observations}) > 1:
            self.apart = 0.0
            return observations
        known: list[tuple[int, list[float], float]] = []
        found: list[Observation] = []
        for each, sketch in zip(observations, sketches, strict=True):
            states: dict[str, int] = {}
            for place in range(COPIES):
                state = each.values[f"copy {place}"]
                *sums, spacing, norm = [real_of(sketch.values[f"{name} of copy {place}"]) for name in _SKETCH]
                for other, theirs, least in known:
                    apart = math.dist(sums, theirs) / math.sqrt(_SIGNS)
                    if state and other != state and apart <= _ROUNDED * math.sqrt(updates) * max(spacing, least):
                        self.apart = max(self.apart, apart / (norm or 1.0))
                        state = other
                        break
                known += [(state, sums, spacing)] * bool(state)
                states[f"copy {place}"] = state
            found.append(replace(each, values={**each.values, **states}))
        return found

    def _search(self) -> list[Any]:
        """The objects that have a tensor like each parameter, of which none is trained or a gradient."""
        tensors = self._subject.parameters
        sizes = {len(tensors), sum(each.requires_grad for each in tensors.values())}
        model = type(self._subject.inner)
        objects = gc.get_objects()
        # There may be a million objects: nothing here takes them up one by one.
        kinds = list(map(type, objects))
        optimizers = {kind for kind in set(kinds) if issubclass(kind, torch.optim.Optimizer)}
        chosen = list(compress(objects, map((_HOLDERS | optimizers | {model}).__contains__, kinds)))
        del objects
        known = {id(each) for each in (*tensors.values(), *(each.grad for each in tensors.values()))}
        for each in chosen:
            if type(each) in optimizers:
                known |= {id(p) for group in each.param_groups for p in group["params"]}
        return [
            each
            for each in chosen
            if (type(each) is model or (type(each) in _HOLDERS and len(each) in sizes))
            and known.isdisjoint(map(id, self._tensors_of(each) or tensors.values()))
        ]

    def _tensors_of(self, each: Any) -> list[Tensor]:
        """The tensors of an object that holds one of the same form for each parameter, or for each trained one."""
        tensors = dict(self._subject.parameters)
        forms = [tensors, {name: p for name, p in tensors.items() if p.requires_grad}]
        named: dict[Any, Any] = {}
        if isinstance(each, nn.Module):
            forms = [tensors]
            if each is not self._subject.inner:
                named = dict(each.named_parameters())
        elif len(each) < 2:
            pass
        elif isinstance(each, dict):
            if not any(isinstance(value, nn.Parameter) or _has_graph(value) for value in each.values()):
                named = each
        elif isinstance(each[0], Tensor) and not any(map(_has_graph, each)):
            names = next((form for form in forms if len(form) == len(each)), {})
            named = dict(zip(names, each, strict=True))
        form = next((form for form in forms if list(form) == list(named)), None)
        if not named or form is None:
            return []
        pairs = zip(named.values(), form.values(), strict=True)
        alike = all(isinstance(one, Tensor) and one.shape == other.shape and not one.is_meta for one, other in pairs)
        return list(named.values()) if alike else []


@torch.no_grad()
def _distance(held: Sequence[Tensor], parameters: Iterable[Tensor]) -> float:
    """How far the tensors are from the parameters, or from the trained ones, in norms of those; 0.0: they are equal."""
    whole = list(parameters)
    wanted = whole if len(held) == len(whole) else [each for each in whole if each.requires_grad]
    pairs = [(plain(one), plain(other)) for one, other in zip(held, wanted, strict=True)]
    apart = sum(float((one.to(other.device).float() - other.float()).square().sum()) for one, other in pairs)
    norm = sum(float(other.float().square().sum()) for _, other in pairs)
    return math.sqrt(apart / norm) if norm else math.inf


@torch.no_grad()
def _sketch(tensors: Sequence[Tensor]) -> list[float]:
    """Sums of all elements under random signs, the norm of the elements' spacings, and the norm of the elements."""
    generator = torch.Generator().manual_seed(_SIGNS)
    places = torch.arange(_SIGNS, dtype=torch.uint8, device="cpu")
    sums, spacings, squares = torch.zeros(_SIGNS, dtype=torch.float64, device="cpu"), 0.0, 0.0
    for each in map(plain, tensors):
        flat = torch.view_as_real(each) if each.is_complex() else each
        # 16-bit copies get the tolerance of float32: ranks that run the same operations round in the same way.
        eps = min(torch.finfo(flat.dtype).eps, _EPS) if flat.is_floating_point() else 0.0
        for part in torch.split(flat.reshape(-1), _CHUNK):
            drawn = torch.randint(256, (part.numel(), 1), generator=generator, dtype=torch.uint8, device="cpu")
            values = part.cpu().double()
            sums += values @ ((drawn >> places & 1).double() * 2 - 1)
            square = float(values.square().sum())
            spacings, squares = spacings + eps**2 * square, squares + square
    return [*sums.tolist(), math.sqrt(spacings), math.sqrt(squares)]


def _has_graph(held: object) -> bool:
    # By its type: some modules load themselves if they are asked for an attribute.
    return issubclass(type(held), Tensor) and bool(getattr(held, "requires_grad", False))
