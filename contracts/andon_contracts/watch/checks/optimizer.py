"""The optimizer: the same hyperparameters and state on all ranks, the planned rate, the declared groups, one scale."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from andon_contracts.agree import bits_of, real_of
from andon_contracts.laws.law import Law, Seen, agreeing, difference
from andon_contracts.laws.update import OPTIMIZERS
from andon_contracts.observe import Look, Observer
from andon_contracts.violation import Finding
from andon_contracts.watch.check import Check, Context, Cover, OptimizerProbe, Values, declared, none_has
from andon_contracts.watch.values import CachedDigest, learning_rate_of, lenient_digest, state_tensors

_RATE_TOLERANCE = 1e-9


def _hyperparameters_agree(seen: Seen[object]) -> Finding | None:
    if "rate" in seen.differing:
        return difference(seen, "rate", "the learning rates are not the same", real=True)
    # The groups of ranks that train different parameters have only the learning rate in common.
    if "hyperparameters" not in seen.differing or "layout" in seen.differing:
        return None
    # The second look gives keys of groups, not tensors: the text names them, and the finding has no tensor.
    odd = seen.differing_tensors("hyperparameters")
    what = "the hyperparameters of the optimizers are not the same" + f": {', '.join(odd[:4])}" * bool(odd)
    return difference(Seen(seen.observations, None), "hyperparameters", what)


def _rate_planned(seen: Seen[object]) -> Finding | None:
    rates = [(each.rank, real_of(each.values["rate"]), real_of(each.values["planned"])) for each in seen.observations]
    odd = [each for each in rates if not math.isclose(*each[1:], rel_tol=_RATE_TOLERANCE, abs_tol=1e-15)]
    if not odd:
        return None
    shown = ", ".join(f"rank {rank}: {rate!r}, not {planned!r}" for rank, rate, planned in odd)
    what = f"the learning rate is not the schedule's ({shown})"
    return Finding(what, seen.step, seen.unless_all([rank for rank, *_ in odd]), "learning rate")


_HYPERPARAMETERS = ("hyperparameters", "rate", "layout")


class Optimizer(Check):
    before_laws = (
        Law("hyperparameters-agree/before", _HYPERPARAMETERS, _hyperparameters_agree, look=("hyperparameters",)),
        Law("learning-rate-planned/before", ("rate", "planned"), _rate_planned),
        none_has("groups-planned/before", "ungrouped", "has not the hyperparameters that were declared for its name"),
        agreeing("scaler-agrees/before", ("scale",), "the loss scales are not the same", real=True),
    )
    after_laws = (OPTIMIZERS,)

    def __init__(self, context: Context, probe: OptimizerProbe) -> None:
        super().__init__(context)
        self._nest = CachedDigest(nested=True)
        self._state = OptimizerState(probe.optimizer, probe.members)
        self.observers = (self._state.observer,)
        self._look: Look
        group_of = {id(p): g for g, group in enumerate(probe.optimizer.param_groups) for p in group["params"]}
        self._declared = [
            (index, group_of[id(parameter)], key, value)
            for index, (name, parameter) in enumerate(probe.parameters.items())
            for pattern, values in context.settings.groups.items()
            if fnmatch.fnmatchcase(name, pattern)
            for key, value in values.items()
        ]
        """(parameter, group, hyperparameter, value) of the declarations in `groups=`."""

    def cover(self) -> Mapping[str, Cover]:
        settings, context = self.context.settings, self.context
        return {
            "optimizers-agree": context.between_replicas(),
            "hyperparameters-agree": context.between_ranks(),
            "learning-rate-planned": declared(settings.schedule, "schedule="),
            "groups-planned": declared(settings.groups, "groups="),
            "scaler-agrees": declared(settings.scaler if context.world > 1 else None, "scaler="),
        }

    def meanwhile(self, probe: OptimizerProbe) -> Values:
        groups, settings = probe.optimizer.param_groups, self.context.settings
        rate = learning_rate_of(groups[0], 0.0)
        wrong = (
            index
            for index, group, key, value in self._declared
            if group >= len(groups) or not _equals(groups[group].get(key), value)  # the loop may remove groups
        )
        hyperparameters = [_hyperparameters_of(probe.optimizer), [len(group["params"]) for group in groups]]
        planned = rate if settings.schedule is None else float(settings.schedule(probe.updates + 1))
        if settings.schedule is not None and _equals(groups[0].get("lr", 0.0), planned):
            planned = rate
        return {
            "hyperparameters": self._nest.digest(hyperparameters),
            "rate": bits_of(rate),
            "planned": bits_of(planned),
            "ungrouped": probe.place(next(wrong, -1) + 1),
            "scale": 0 if settings.scaler is None else bits_of(float(settings.scaler.get_scale())),
        }

    def look_after(self, probe: OptimizerProbe) -> list[list[Tensor]]:
        self._look = self._state.look()
        return [self._look.device_sums]

    def after(self, probe: OptimizerProbe) -> Callable[[], Values]:
        look, updates = self._look, probe.updates
        return lambda: {"optimizer": look.digest, "updates": updates}


def hyperparameters_by_key(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """The digest of each hyperparameter of each group, as it is compared."""
    groups = enumerate(_hyperparameters_of(optimizer))
    return {f"{key} of group {i}": lenient_digest(value) for i, group in groups for key, value in group.items()}


def _hyperparameters_of(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    """The hyperparameters of each group. Tensors of one element count as numbers."""
    return [
        {
            key: float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
            for key, value in group.items()
            if not key.startswith("param")
        }
        for group in optimizer.param_groups
    ]


def _equals(actual: object, value: Any) -> bool:
    """Whether `actual` is `value`, at the precision of `actual` if that is a tensor."""
    number = isinstance(value, float | int)
    if number and isinstance(actual, Tensor) and actual.numel() == 1 and actual.is_floating_point():
        return math.isclose(float(actual), value, rel_tol=torch.finfo(actual.dtype).eps)
    return bool(actual == value)


class OptimizerState:
    """Digests the state of `optimizer` for `members`, in the same order on all ranks: by member, then by name.

    `_sizes`, `_names` and `_values` are the layout of the last look. `_sizes` stays unset if some value was no tensor.
    `_values` holds the tensors, so that no new tensor can have the identity of an old one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, members: Sequence[torch.nn.Parameter]) -> None:
        self.observer = Observer(stable=True)
        self._optimizer = optimizer
        self._members = members
        self._rest = CachedDigest(nested=True)
        self._sorted: dict[tuple[Hashable, ...], tuple[Hashable, ...]] = {}
        self._tensors: tuple[Tensor, ...] = ()
        self._digest_of_rest = 0
        self._sizes: list[int] | None = None
        self._names: list[Hashable] = []
        self._values: list[object] = []

    def look(self) -> Look:
        """Read all tensors, names and other values of the state as it is now. Waits for no device."""
        states = list(map(self._optimizer.state.get, self._members))
        same_layout = (
            self._sizes is not None
            and set(map(type, states)) == {dict}
            and list(map(len, states)) == self._sizes  # type: ignore[arg-type]
            and list(chain.from_iterable(states)) == self._names  # type: ignore[arg-type]
            and all(map(is_, chain.from_iterable(map(dict.values, states)), self._values))  # type: ignore[arg-type]
        )
        if not same_layout:
            self._read_layout(states)
        return self.observer.look(self._tensors, extra=self._digest_of_rest)

    def _read_layout(self, states: Sequence[object]) -> None:
        tensors: list[Tensor] = []
        rest: list[object] = []
        for state in states:
            if not isinstance(state, dict):
                state_tensors(state, tensors, rest)
                continue
            names = tuple(state)
            if names not in self._sorted:
                # Ranks may have filled it in different orders, and names may be of several types.
                self._sorted[names] = tuple(sorted(names, key=repr))
            rest.append(self._sorted[names])
            for name in self._sorted[names]:
                state_tensors(state[name], tensors, rest)
        # Tensors of whole 8-byte words first. After a count of 4 bytes, as every parameter has one, a GPU would have to
        # copy all moments to align them.
        tensors.sort(key=lambda each: each.numel() * each.element_size() % 8 != 0)
        self._tensors, self._digest_of_rest = tuple(tensors), self._rest.digest(rest)
        tables = [each for each in states if type(each) is dict]
        self._names = list(chain.from_iterable(tables))
        self._values = [value for table in tables for value in table.values()]
        all_tensors = len(tables) == len(states) and all(isinstance(value, Tensor) for value in self._values)
        self._sizes = list(map(len, tables)) if all_tensors else None
