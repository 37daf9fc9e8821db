"""What a loop keeps beside its model and of its form: an average of weights, a teacher, a list or table of shadows.

Nobody names it, so it is looked for among the objects of the process, now and then. What is no nearer to the weights
than nothing would be (moments, residuals of a compression, a rank's own gradients) is none of it.
"""

from __future__ import annotations

import gc
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import compress
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
        self._found: list[Any] = []
        self._states: list[int] = []

    def values(self, update: int) -> dict[str, int]:
        """Before an update: the state of each copy, 0 for none, and which of them are kept up.

        They are searched for before update 2, and each time 16 times as far, since that takes as long as a step; and
        looked at again before the next update. A copy that has another state then, and is not the weights as they are,
        is kept up: what was taken in between (the best so far, by what this rank saw) is the weights.
        """
        if _is_due(update):
            self._found = self._search()
        seen, before = self._look(), self._states
        if _is_due(update):
            self._states = [state for state, _ in seen]
        else:
            self._found, self._states = [], []
        states = [*(state for state, _ in seen), *[0] * COPIES][:COPIES]
        changed = sum(1 << i for i, (state, fresh) in enumerate(seen) if before and not fresh and state not in before)
        return {**{f"copy {place}": state for place, state in enumerate(states)}, "copies changed": changed}

    def _search(self) -> list[Any]:
        """What has a tensor of the same form for each parameter, and holds none that is trained, and no gradient."""
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

    def _look(self) -> list[tuple[int, bool]]:
        """The states of all copies found, and which are the weights as they are; none where there are too many."""
        seen: list[tuple[int, bool]] = []
        for each in self._found:
            held = self._tensors_of(each)
            apart = _distance(held, self._subject.parameters.values()) if held else math.inf
            if apart <= _NEAR:
                seen.append(((flat_digest(held) + text_digest(type(each).__name__)) >> 2 or 1, apart == 0.0))
        return sorted(seen) if len(seen) <= COPIES else []

    def _tensors_of(self, each: Any) -> list[Tensor]:
        """The tensors of an object that holds one of the same form for each parameter, or for each trained one."""
        tensors = dict(self._subject.parameters)
        forms = (tensors, {name: p for name, p in tensors.items() if p.requires_grad})
        if isinstance(each, nn.Module):
            named = {} if each is self._subject.inner else dict(each.named_parameters())
            forms = (tensors, tensors)
        elif isinstance(each, dict):
            named = (
                {}
                if len(each) < 2 or any(isinstance(v, nn.Parameter) or _has_graph(v) for v in each.values())
                else each
            )
        else:
            lone = len(each) < 2 or not isinstance(each[0], Tensor) or any(map(_has_graph, each))
            names = next((form for form in forms if len(form) == len(each)), {})
            named = {} if lone else dict(zip(names, each, strict=True))
        return next((list(named.values()) for form in forms if named and _alike(named, form)), [])


def _is_due(update: int) -> bool:
    """Whether the update is number 2, 32, 512, 8,192 and so on."""
    return update > 1 and update & (update - 1) == 0 and update.bit_length() % 4 == 2


@torch.no_grad()
def _distance(held: Sequence[Tensor], parameters: Iterable[Tensor]) -> float:
    """How far the tensors are from the parameters, or from the trained ones, in norms of those; 0.0: they are equal."""
    whole = list(parameters)
    wanted = whole if len(held) == len(whole) else [each for each in whole if each.requires_grad]
    pairs = [(plain(one), plain(other)) for one, other in zip(held, wanted, strict=True)]
    apart = sum(float((one.to(other.device).float() - other.float()).square().sum()) for one, other in pairs)
    norm = sum(float(other.float().square().sum()) for _, other in pairs)
    return math.sqrt(apart / norm) if norm else math.inf


def _has_graph(held: object) -> bool:
    """Whether it is a tensor that is trained, or computed of such, as the weights of a step within a step are.

    It may be anything, modules that load themselves when they are asked for an attribute among it.
    """
    return issubclass(type(held), Tensor) and bool(getattr(held, "requires_grad", False))


def _alike(held: dict[Any, Any], parameters: dict[str, nn.Parameter]) -> bool:
    """Whether the one has a tensor of the same name and shape for each of the others, in order."""
    return list(held) == list(parameters) and all(
        isinstance(one, Tensor) and one.shape == other.shape and not one.is_meta
        for one, other in zip(held.values(), parameters.values(), strict=True)
    )
