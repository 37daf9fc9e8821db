"""What a loop keeps beside its model and of its form: an average of weights, a teacher, a list or table of shadows.

Nobody names it, so it is looked for among the objects of the process, now and then.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from andon_contracts.laws.practice import COPIES
from andon_contracts.observe import flat_digest
from andon_contracts.watch.model_probe import ModelProbe
from andon_contracts.watch.values import text_digest

_HOLDERS = frozenset({list, dict, OrderedDict})


class Copies:
    """The copies of a model that this rank keeps."""

    def __init__(self, subject: ModelProbe) -> None:
        self._subject = subject
        self._states: list[int] = []

    def values(self, *, due: bool) -> dict[str, int]:
        """The state of each copy, 0 for none, and which of them have another one than when it was last due."""
        found = self._look() if due else []
        states = [*found, *[0] * COPIES][:COPIES]
        changed = sum(1 << i for i, state in enumerate(found) if self._states and state not in self._states)
        self._states = found if due else self._states
        return {**{f"copy {place}": state for place, state in enumerate(states)}, "copies changed": changed}

    def _look(self) -> list[int]:
        """The states of all copies; none where there are too many to be compared."""
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
        found = sorted((flat_digest(held) + text_digest(name)) >> 2 or 1 for name, held in strange)
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


def _alike(held: Sequence[object], parameters: Sequence[Tensor]) -> bool:
    return len(held) == len(parameters) and all(
        isinstance(one, Tensor) and one.shape == other.shape and not one.is_meta
        for one, other in zip(held, parameters, strict=True)
    )
