"""What a loop keeps beside its model and of its form: an average of weights, a teacher, a list or table of shadows.

Nobody names it, so it is looked for among the objects of the process, now and then. What is no nearer to the weights
than nothing would be (moments, residuals of a compression, a rank's own gradients) is none of it.
"""

from __future__ import annotations

import gc
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from andon_contracts.laws.practice import COPIES
from andon_contracts.observe import flat_digest, plain
from andon_contracts.watch.model_probe import ModelProbe
from andon_contracts.watch.values import text_digest

_HOLDERS = frozenset({list, dict, OrderedDict})
_NEAR = 0.5
"""A copy is no farther from the weights than this share of their norm."""


class Copies:
    """The copies of a model that this rank keeps."""

    def __init__(self, subject: ModelProbe) -> None:
        self._subject = subject
        self._states: list[int] = []
        self._update = 0
        """The number of the update before which the copies were last looked at."""

    def values(self, update: int) -> dict[str, int]:
        """Before an update: the state of each copy, 0 for none, and which of them are kept up.

        They are looked for before the updates 1, 2, 4, 8 and so on, and before the next one after each. A copy that has
        another state then, and is not the weights as they are, is kept up: what was taken in between (the best so far,
        by what this rank saw) is the weights.
        """
        if not _doubled(update) and not _doubled(update - 1):
            return {**{f"copy {place}": 0 for place in range(COPIES)}, "copies changed": 0}
        found, before = self._look(), self._states if self._update == update - 1 else []
        self._states, self._update = [state for state, _ in found], update
        states = [*self._states, *[0] * COPIES][:COPIES]
        changed = sum(1 << i for i, (state, fresh) in enumerate(found) if before and not fresh and state not in before)
        return {**{f"copy {place}": state for place, state in enumerate(states)}, "copies changed": changed}

    def _look(self) -> list[tuple[int, bool]]:
        """The states of all copies, and which are the weights as they are; none where there are too many."""
        tensors = dict(self._subject.parameters)
        own = {id(each) for each in (*tensors.values(), *(each.grad for each in tensors.values()))}
        trained = set[int]()
        candidates: list[tuple[str, list[Tensor]]] = []
        counts = {len(tensors), sum(each.requires_grad for each in tensors.values())}
        model = type(self._subject.inner)
        objects = gc.get_objects()
        # Each type is asked once: there may be a million objects.
        optimizers = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.optim.Optimizer)}
        for each in objects:
            kind = type(each)
            if kind is model or (kind in _HOLDERS and len(each) in counts):
                candidates += self._of_this_form(each, tensors)
            elif kind in optimizers:
                trained |= {id(p) for group in each.param_groups for p in group["params"]}
        strange = [(name, held) for name, held in candidates if not ({*map(id, held)} & (own | trained))]
        found: list[tuple[int, bool]] = []
        for name, held in strange:
            apart = _distance(held, tensors.values())
            if apart <= _NEAR:
                found.append(((flat_digest(held) + text_digest(name)) >> 2 or 1, apart == 0.0))
        found.sort()
        return found if len(found) <= COPIES else []

    def _of_this_form(self, each: Any, tensors: dict[str, nn.Parameter]) -> Iterator[tuple[str, list[Tensor]]]:
        """The tensors of an object that holds one of the same form for each parameter, with the object's kind."""
        trainable = {name: p for name, p in tensors.items() if p.requires_grad}
        if isinstance(each, nn.Module):
            if each is not self._subject.inner:
                named = dict(each.named_parameters())
                if list(named) == list(tensors) and _alike(list(named.values()), list(tensors.values())):
                    yield "module", list(named.values())
        elif isinstance(each, dict):
            for names in (tensors, trainable):
                if len(names) > 1 and len(each) == len(names) and list(each) == list(names):
                    held = list(each.values())
                    if _alike(held, list(names.values())) and not any(isinstance(v, nn.Parameter) for v in held):
                        yield "table", held
                    break
        elif len(each) > 1 and len(each) in (len(tensors), len(trainable)) and isinstance(each[0], Tensor):
            for wanted in (tensors, trainable):
                if _alike(each, list(wanted.values())) and not any(t.requires_grad for t in each):
                    yield "list", list(each)
                    break


def _doubled(update: int) -> bool:
    return update > 0 and update & (update - 1) == 0


@torch.no_grad()
def _distance(held: Sequence[Tensor], parameters: Iterable[Tensor]) -> float:
    """How far the tensors are from the parameters, or from the trained ones, in norms of those; 0.0: they are equal."""
    whole = list(parameters)
    wanted = whole if len(held) == len(whole) else [each for each in whole if each.requires_grad]
    pairs = [(plain(one), plain(other)) for one, other in zip(held, wanted, strict=True)]
    apart = sum(float((one.to(other.device).float() - other.float()).square().sum()) for one, other in pairs)
    norm = sum(float(other.float().square().sum()) for _, other in pairs)
    return math.sqrt(apart / norm) if norm else math.inf


def _alike(held: Sequence[object], parameters: Sequence[Tensor]) -> bool:
    return len(held) == len(parameters) and all(
        isinstance(one, Tensor) and one.shape == other.shape and not one.is_meta
        for one, other in zip(held, parameters, strict=True)
    )
