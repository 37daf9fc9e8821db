"""The optimizer: the same hyperparameters, state and loss scale on all ranks, the planned rate, the declared groups.

After an update, also: each parameter changed, if float32 could represent the change.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from andon_contracts.agree import bits_of, real_of
from andon_contracts.laws.law import Law, Seen, agreeing, difference
from andon_contracts.laws.update import OPTIMIZERS
from andon_contracts.observe import Look, Observer, extremes, plain, to_floats
from andon_contracts.violation import Finding
from andon_contracts.watch.check import LIVE, Check, Context, Cover, OptimizerProbe, Values, declared, indexed, none_has
from andon_contracts.watch.exchange import writes, written_alike
from andon_contracts.watch.values import learning_rate_of, lenient_digest, state_tensors

_RATE_TOLERANCE = 1e-9
_FEW = 8  # one update may rightly leave a parameter of this few elements unchanged, as Rprop does if a sign turns
_NOISE = 1e-5  # gradients below this share of the largest are rounding errors of zero, as before a batch norm
_CERTAIN = 2.0**-10
"""An optimizer of unknown arithmetic moves an element by at least this part of rate x min(gradient, 1): LARS scales by
1e-3 of the weights' norm, Adafactor by as much of their size."""


def _hyperparameters_agree(seen: Seen[object]) -> Finding | None:
    if "rate" in seen.differing:
        return difference(seen, "rate", "the learning rates are not the same", real=True)
    # The groups of ranks that train different parameters have only the learning rate in common.
    if "hyperparameters" not in seen.differing or "layout" in seen.differing:
        return None
    # The details name hyperparameters of groups instead of tensors. They go into the text, not into `Finding.tensor`.
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


def _applied(seen: Seen[object]) -> Finding | None:
    first = next((each for each in seen.observations if each.values["unmoved"]), None)
    if first is None:
        return None
    due, spacing = (real_of(first.values[f"unmoved {name}"]) for name in ("due", "spacing"))
    lost = due <= spacing / 2
    what = (
        f"did not change, although its gradient and learning rate call for an update of about {due:.2g}; "
        f"neighbouring values of its dtype are {spacing:.2g} apart there{', so the update is rounded away' * lost}"
    )
    applied = "the optimizer holds other parameters than the model"
    likely = "the precision is too low for this learning rate" if lost else applied
    found = indexed(seen, "unmoved", what)
    return None if found is None else replace(found, likely=likely)


_HYPERPARAMETERS = ("hyperparameters", "rate", "layout")


class Optimizer(Check):
    before_laws = (
        Law("hyperparameters-agree/before", _HYPERPARAMETERS, _hyperparameters_agree, by_tensor=("hyperparameters",)),
        Law("learning-rate-planned/before", ("rate", "planned"), _rate_planned),
        none_has(
            "groups-planned/before", "ungrouped", "does not have the hyperparameters that groups= declares for its name"
        ),
        agreeing("scaler-agrees/before", ("scale",), "the loss scales are not the same", real=True),
        written_alike("optimizers-agree", "optimizer state", "the last update"),
    )
    after_laws = (OPTIMIZERS,)

    def __init__(self, context: Context, probe: OptimizerProbe) -> None:
        super().__init__(context)
        self._states = [OptimizerState(probe.optimizer, members) for members in (probe.members, probe.whole)]
        self.observers = [state.observer for state in self._states]
        self._looks: list[Look]
        self._writes = self._state_writes(probe)
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
            "hyperparameters": lenient_digest(hyperparameters),
            "rate": bits_of(rate),
            "planned": bits_of(planned),
            "ungrouped": probe.place(next(wrong, -1) + 1),
            "scale": 0 if settings.scaler is None else bits_of(float(settings.scaler.get_scale())),
            "optimizer state writes": abs(self._state_writes(probe) - self._writes) * (not probe.unread),
        }

    def _state_writes(self, probe: OptimizerProbe) -> int:
        tensors: list[Tensor] = []
        for member in probe.even:
            state_tensors(probe.optimizer.state.get(member), tensors, [])
        return writes(tensors)

    def look_after(self, probe: OptimizerProbe) -> list[list[Tensor]]:
        self._looks = [state.look() for state in self._states]
        return [look.device_sums for look in self._looks]

    def after(self, probe: OptimizerProbe) -> Callable[[], Values]:
        (look, whole), updates, self._writes = self._looks, probe.updates, self._state_writes(probe)
        return lambda: {"optimizer": look.digest, "whole optimizer": whole.digest, "updates": updates}


def hyperparameters_by_key(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    groups = enumerate(_hyperparameters_of(optimizer))
    return {f"{key} of group {i}": lenient_digest(value) for i, group in groups for key, value in group.items()}


def _hyperparameters_of(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    return [
        {
            key: float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
            for key, value in group.items()
            if not key.startswith("param")
        }
        for group in optimizer.param_groups
    ]


def _equals(actual: object, value: Any) -> bool:
    number = isinstance(value, float | int)
    if number and isinstance(actual, Tensor) and actual.numel() == 1 and actual.is_floating_point():
        return math.isclose(float(actual), value, rel_tol=torch.finfo(actual.dtype).eps)
    return bool(actual == value)


class OptimizerState:
    """Digests the state of `optimizer` for `members`, in an order that is the same on all ranks."""

    def __init__(self, optimizer: torch.optim.Optimizer, members: Sequence[torch.nn.Parameter]) -> None:
        self.observer = Observer()
        self._optimizer, self._members = optimizer, members

    def look(self) -> Look:
        """Start reading the tensors, names and other values of the state. Waits for no device."""
        tensors, rest = list[Tensor](), list[object]()
        for member in self._members:
            state_tensors(self._optimizer.state.get(member), tensors, rest)
        # Tensors of whole 8-byte words come first. After a step count of 4 bytes, a GPU would have to copy all moments
        # to align them.
        tensors = [t for t in tensors if not t.nbytes % 8] + [t for t in tensors if t.nbytes % 8]
        return self.observer.look(tensors, extra=lenient_digest(rest))


class Unmoved(NamedTuple):
    """A member that kept every bit, at the element whose expected update is the largest in units of its spacing.

    due: the expected update of that element, estimated if the optimizer's arithmetic is unknown. spacing: the distance
    to the next value in the dtype of the member.
    """

    member: int
    due: float
    spacing: float


class Applied(Check):
    """Finds the members of one optimizer that an update did not change, in sampled windows.

    A right update is rounded away if it is below half the distance to the next number: at a small rate (a warm-up from
    0) or with a small gradient (before a norm that starts at 0). So a member is reported only if the arithmetic of the
    optimizer asks for an update of some element that float32 represents. 16-bit weights are judged as float32 too: it
    is a fault if only their dtype rounds the update away.
    """

    after_laws = (Law("update-applied/after", ("unmoved", "unmoved due", "unmoved spacing"), _applied, suspicion=True),)

    def __init__(self, context: Context, probe: OptimizerProbe) -> None:
        super().__init__(context)
        self._optimizer, self._members = probe.optimizer, probe.members
        self._weights: list[Tensor] = []  # copies from before the update; empty if the window is not sampled
        self._gradients: dict[int, Tensor] = {}  # by member index: so large that the member must change
        self._small_unmoved: set[int] = set()
        """Small members that kept every bit in the last window. They are reported if they do so twice in a row."""

    def cover(self) -> Mapping[str, Cover]:
        sharded = self.context.subject.sharded and self.context.world > 1
        return {"update-applied": Cover("degraded", "this rank's shards only") if sharded else LIVE}

    def before(self, probe: OptimizerProbe) -> Values:
        if probe.unread:
            self._small_unmoved = set()
        self.remember(sampled=self.context.settings.is_sampled(probe.updates + 1))
        return {}

    def remember(self, *, sampled: bool) -> None:
        """Copy the members before an update, if it is sampled or small members did not change in the last one."""
        self._weights, self._gradients = [], {}
        if not (sampled or self._small_unmoved):
            return
        self._weights = [plain(p).clone() for p in self._members]
        rates = {id(p): _rate(group) for group in self._optimizer.param_groups for p in group["params"]}
        gradients = {
            i: p.grad
            for i, p in enumerate(self._members)
            if p.grad is not None and plain(p.grad).numel() and rates.get(id(p))
        }
        ends = list(map(abs, to_floats([end.float() for each in gradients.values() for end in extremes(each)])))
        sizes = list(map(max, ends[::2], ends[1::2]))
        least = _NOISE * max(sizes, default=0.0)
        self._gradients = {i: gradients[i] for i, size in zip(gradients, sizes, strict=True) if size > least}

    def after(self, probe: OptimizerProbe) -> Callable[[], Values]:
        first = (self.unmoved() or [Unmoved(-1, 0.0, 0.0)])[0]
        found = {
            "unmoved": probe.place(first.member + 1),
            "unmoved due": bits_of(first.due),
            "unmoved spacing": bits_of(first.spacing),
        }
        return lambda: found

    def unmoved(self) -> list[Unmoved]:
        """The members that kept every bit since `remember`, although an update was due that float32 represents."""
        (before, self._weights), (gradients, self._gradients) = (self._weights, []), (self._gradients, {})
        now = {i: weight for i in gradients if (weight := plain(self._members[i])).shape == before[i].shape}
        same = to_floats([weight.eq(before[i]).all() for i, weight in now.items()])  # a GPU is waited for once
        unchanged = [i for i, alike in zip(now, same, strict=True) if alike]
        found = [each for i in unchanged if (each := self._overdue(i, gradients[i])) is not None]
        small = {each.member for each in found if self._members[each.member].numel() <= _FEW}
        twice, self._small_unmoved = small & self._small_unmoved, small
        return [each for each in found if each.member not in small or each.member in twice]

    def _overdue(self, index: int, gradient: Tensor) -> Unmoved | None:
        """Describe member `index`, which kept every bit. None if its update may have been rounded away, if the loop
        removed it from the optimizer meanwhile, or if its elements are not stored one by one (quantized weights).
        """
        member = self._members[index]
        weight = plain(member)
        group = next((g for g in self._optimizer.param_groups if any(p is member for p in g["params"])), None)
        g = plain(gradient.to_dense() if gradient.layout != torch.strided else gradient)
        if group is None or weight.dtype != member.dtype or weight.shape != g.shape:
            return None
        due, certain = _due(self._optimizer, group, member, g)
        # An update and a decay are rounded one after the other, so that less than a whole spacing may be lost: the
        # distance to the next larger number of float32, or of float64.
        wide = weight.abs() if weight.dtype == torch.float64 else weight.abs().float()
        spacings = (torch.nextafter(wide, torch.full_like(wide, math.inf)) - wide).double()
        sizes = due * certain / spacings
        place = int(sizes.argmax())
        if not float(sizes.reshape(-1)[place]) > 1:
            return None
        limits = torch.finfo(member.dtype)
        size = max(float(weight.reshape(-1)[place].abs()), limits.smallest_normal)
        return Unmoved(index, float(due.reshape(-1)[place]), limits.eps * 2.0 ** math.floor(math.log2(size)))


def _rate(group: dict[str, Any]) -> float:
    """The learning rate of a group: 1 if it has none, 0 (which judges nothing) if it is not one number."""
    return learning_rate_of(group, 0.0 if "lr" in group else 1.0)


def _due(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], member: torch.nn.Parameter, g: Tensor
) -> tuple[Tensor, float]:
    """The expected size of each element's update, in fp64, and the certain part of it. g: the gradient before it."""
    kind, rate, weight = type(optimizer), _rate(group), plain(member)
    state = optimizer.state.get(member)  # may be anything in an optimizer that is not torch's
    kept = {key: plain(each) for key, each in state.items() if isinstance(each, Tensor)} if type(state) is dict else {}
    if kind is torch.optim.SGD and not weight.is_complex():
        g = (-g if group["maximize"] else g).double() + group["weight_decay"] * weight.double()
        momentum = float(group["momentum"])
        buffer = kept["momentum_buffer"].double() if momentum and "momentum_buffer" in kept else g
        return rate * (g + momentum * buffer if group["nesterov"] else buffer).abs(), 1.0
    if kind in (torch.optim.Adam, torch.optim.AdamW) and {"exp_avg", "step"} <= kept.keys() and not weight.is_complex():
        steps, betas = float(kept["step"]), [float(each) for each in group["betas"]]
        first, second = (1 - beta**steps for beta in betas)
        squares = kept["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"].double() / second
        moved = rate * kept["exp_avg"].double().abs() / first / (squares.sqrt() + group["eps"])
        decay = group["weight_decay"] if group.get("decoupled_weight_decay", kind is torch.optim.AdamW) else 0.0
        return torch.maximum(moved, rate * decay * weight.double().abs()), 1.0
    # A line search may find no better point, and rightly keeps the weights.
    certain = 0.0 if isinstance(optimizer, torch.optim.LBFGS) else _CERTAIN
    return rate * g.abs().double().clamp(max=1.0), certain
