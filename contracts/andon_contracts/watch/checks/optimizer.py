"""The optimizer: the same hyperparameters and state on all ranks, the planned rate, the declared groups, one scale."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
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
from andon_contracts.watch.values import CachedDigest, lenient_digest, state_tensors

_RATE_TOLERANCE = 1e-9


def _hyperparameters_agree(seen: Seen[object]) -> Finding | None:
    if "rate" in seen.differing:
        return difference(seen, "rate", "the learning rates are not the same", real=True)
    # The groups of ranks that train different parameters have only the learning rate in common.
    if "hyperparameters" not in seen.differing or "layout" in seen.differing:
        return None
    # The second look gives keys of groups, not tensors: the text names them, and the finding has no tensor.
    odd = seen.odd("hyperparameters")
    named = f": {', '.join(odd[:4])}" if odd else ""
    what = f"the hyperparameters of the optimizers are not the same{named}"
    return difference(Seen(seen.said, None), "hyperparameters", what)


def _rate_planned(seen: Seen[object]) -> Finding | None:
    odd = []
    for each in seen.said:
        rate, planned = real_of(each.values["rate"]), real_of(each.values["planned"])
        if not math.isclose(rate, planned, rel_tol=_RATE_TOLERANCE, abs_tol=1e-15):
            odd.append((each.rank, rate, planned))
    if not odd:
        return None
    shown = ", ".join(f"rank {rank}: {rate!r}, not {planned!r}" for rank, rate, planned in odd)
    ranks = [rank for rank, _, _ in odd]
    what = f"the learning rate is not the schedule's ({shown})"
    return Finding(what, seen.step, seen.some(ranks), "learning rate")


class Optimizer(Check):
    """The hyperparameters before an update of one optimizer, and its state after it."""

    before_laws = (
        Law(
            "hyperparameters-agree/before",
            ("hyperparameters", "rate", "layout"),
            _hyperparameters_agree,
            look=("hyperparameters",),
        ),
        Law("learning-rate-planned/before", ("rate", "planned"), _rate_planned),
        none_has("groups-planned/before", "ungrouped", "has not the hyperparameters that were declared for its name"),
        agreeing("scaler-agrees/before", ("scale",), "the loss scales are not the same", real=True),
    )
    after_laws = (OPTIMIZERS,)

    def __init__(self, context: Context, probe: OptimizerProbe) -> None:
        super().__init__(context)
        self._probe = probe
        self._nest = CachedDigest(nested=True)
        self._state = OptimizerState(probe.optimizer, probe.members)
        self._look: Look | None = None
        place = {id(p): g for g, group in enumerate(probe.optimizer.param_groups) for p in group["params"]}
        self._declared = [
            (index, place[id(parameter)], key, value)
            for index, (name, parameter) in enumerate(probe.parameters.items())
            for pattern, values in context.settings.groups.items()
            if fnmatch.fnmatchcase(name, pattern)
            for key, value in values.items()
        ]
        """(parameter, group, hyperparameter, value) of what `groups=` declares."""

    def cover(self) -> Mapping[str, Cover]:
        settings, context = self.context.settings, self.context
        return {
            "optimizers-agree": context.between_replicas(),
            "hyperparameters-agree": context.between_ranks(),
            "learning-rate-planned": declared(settings.schedule, "schedule="),
            "groups-planned": declared(settings.groups, "groups="),
            "scaler-agrees": declared(settings.scaler if context.world > 1 else None, "scaler="),
        }

    def observers(self) -> Iterator[Observer]:
        yield self._state.observer

    def meanwhile(self, probe: OptimizerProbe) -> Values:
        groups, scaler = probe.optimizer.param_groups, self.context.settings.scaler
        wrong = (
            index
            for index, group, key, value in self._declared
            if group >= len(groups) or not _holds(groups[group].get(key), value)  # the loop may remove groups
        )
        shown = _hyperparameters_of(probe.optimizer)
        return {
            "hyperparameters": self._nest.digest([shown, [len(group["params"]) for group in groups]]),
            "rate": bits_of(probe.rate),
            "planned": bits_of(self._planned(probe.updates + 1)),
            "ungrouped": probe.place(next(wrong, -1) + 1),
            "scale": 0 if scaler is None else bits_of(float(scaler.get_scale())),
        }

    def _planned(self, step: int) -> float:
        """The learning rate planned for update `step`, at the precision in which the optimizer holds its own."""
        schedule, rate = self.context.settings.schedule, self._probe.rate
        if schedule is None:
            return rate
        planned = float(schedule(step))
        return rate if _holds(self._probe.optimizer.param_groups[0].get("lr", 0.0), planned) else planned

    def look_after(self, probe: OptimizerProbe) -> list[list[Tensor]]:
        self._look = self._state.look()
        return [self._look.waiting]

    def after(self, probe: OptimizerProbe) -> Callable[[], Values]:
        look, updates = self._look, probe.updates
        assert look is not None
        return lambda: {"optimizer": look.digest, "updates": updates}


def hyperparameters_by_key(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """The digest of each hyperparameter of each group, as it is compared."""
    groups = enumerate(_hyperparameters_of(optimizer))
    return {f"{key} of group {i}": lenient_digest(value) for i, group in groups for key, value in group.items()}


def _hyperparameters_of(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    """By group, each hyperparameter as it is compared; tensors of one element as numbers."""
    return [
        {
            key: float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
            for key, value in group.items()
            if not key.startswith("param")
        }
        for group in optimizer.param_groups
    ]


def _holds(held: object, value: Any) -> bool:
    """Whether `held` is `value`, at the precision of a tensor that holds it."""
    if isinstance(held, Tensor) and held.numel() == 1 and held.is_floating_point() and isinstance(value, float | int):
        return math.isclose(float(held), value, rel_tol=torch.finfo(held.dtype).eps)
    return bool(held == value)


class OptimizerState:
    """The state of `optimizer` for `members`, in one order on all ranks: by member, then by the text of the names.

    `_sizes`, `_names` and `_values` are the layout of the last look, if all values were tensors. The tensors are held,
    so that no other one can have their identities.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, members: Sequence[torch.nn.Parameter]) -> None:
        self.observer = Observer(stable=True)
        self._optimizer = optimizer
        self._members = members
        self._rest = CachedDigest(nested=True)
        self._orders: dict[tuple[Hashable, ...], tuple[Hashable, ...]] = {}
        self._tensors: tuple[Tensor, ...] = ()
        self._digest_of_rest = 0
        self._sizes: list[int] | None = None
        self._names: list[Hashable] = []
        self._values: list[object] = []

    def look(self) -> Look:
        """Read all tensors, names and other values of the state as it is now. Waits for no device."""
        kept = list(map(self._optimizer.state.get, self._members))
        as_before = (
            self._sizes is not None
            and set(map(type, kept)) == {dict}
            and list(map(len, kept)) == self._sizes  # type: ignore[arg-type]
            and list(chain.from_iterable(kept)) == self._names  # type: ignore[arg-type]
            and all(map(is_, chain.from_iterable(map(dict.values, kept)), self._values))  # type: ignore[arg-type]
        )
        if not as_before:
            self._sort(kept)
        return self.observer.look(self._tensors, beside=self._digest_of_rest)

    def _sort(self, kept: Sequence[object]) -> None:
        tensors: list[Tensor] = []
        rest: list[object] = []
        for each in kept:
            if not isinstance(each, dict):
                state_tensors(each, tensors, rest)
                continue
            names = tuple(each)
            if names not in self._orders:
                # Ranks may have filled it in different orders, and names may be of several types.
                self._orders[names] = tuple(sorted(names, key=repr))
            rest.append(self._orders[names])
            for name in self._orders[names]:
                if isinstance(each[name], Tensor):
                    tensors.append(each[name])
                else:
                    state_tensors(each[name], tensors, rest)
        # Tensors of whole 8-byte words first: after a count of 4 bytes, as every parameter has one, a GPU would have to
        # copy all moments to where their words begin.
        tensors.sort(key=lambda each: each.numel() * each.element_size() % 8 != 0)
        self._tensors, self._digest_of_rest = tuple(tensors), self._rest.digest(rest)
        nests = [each for each in kept if type(each) is dict]
        self._values = [value for nest in nests for value in nest.values()]
        all_tensors = len(nests) == len(kept) and all(isinstance(value, Tensor) for value in self._values)
        self._sizes, self._names = list(map(len, nests)) if all_tensors else None, list(chain.from_iterable(nests))
