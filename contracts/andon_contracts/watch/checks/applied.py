"""Updates that did not change a parameter, although its dtype or float32 could represent the change."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from andon_contracts.agree import bits_of, real_of
from andon_contracts.laws.law import Law, Seen
from andon_contracts.observe import Extremes, equal_each, plain
from andon_contracts.violation import Finding
from andon_contracts.watch.check import LIVE, Check, Context, Cover, OptimizerProbe, Values, indexed, is_sampled
from andon_contracts.watch.values import learning_rate_of

_FEW = 8
"""One update may rightly leave a parameter of this few elements unchanged, as Rprop does if a sign turns."""
_NOISE = 1e-5
"""Gradients this much smaller than the largest are rounding errors of zero, as before a batch norm."""
_CERTAIN = 2.0**-10
"""An optimizer of unknown arithmetic moves an element by at least this part of rate x min(gradient, 1): LARS scales by
1e-3 of the weights' norm, Adafactor by as much of their size."""


def _applied(seen: Seen[object]) -> Finding | None:
    first = next((each for each in seen.observations if each.values["unmoved"]), None)
    if first is None:
        return None
    due, spacing = (real_of(first.values[f"unmoved {name}"]) for name in ("due", "spacing"))
    lost = due <= spacing / 2
    what = (
        f"kept every bit, although its gradient and learning rate call for an update of about {due:.2g}; the values "
        f"that its dtype holds are {spacing:.2g} apart there{', so that the update is rounded away' * lost}"
    )
    applied = "the optimizer holds other parameters than the model"
    likely = "the precision is too low for this learning rate" if lost else applied
    found = indexed(seen, "unmoved", what)
    return None if found is None else replace(found, likely=likely)


@dataclass(frozen=True)
class Unmoved:
    """A member that kept every bit, at the element whose update was due most clearly.

    due: the update of that element, an estimate if the arithmetic of the optimizer is not known. spacing: the distance
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
        self._optimizer = probe.optimizer
        self._members = probe.members
        self._weights: list[Tensor] = []
        """Copies from before the update; empty if the window is not sampled."""
        self._gradients: dict[int, Tensor] = {}
        """By member, of those that have to move."""
        self._small_unmoved: set[int] = set()
        """Small members that kept every bit in the last window. They are reported if they do so twice in a row."""

    def cover(self) -> Mapping[str, Cover]:
        sharded = self.context.subject.sharded and self.context.world > 1
        return {"update-applied": Cover("degraded", "this rank's shards only") if sharded else LIVE}

    def before(self, probe: OptimizerProbe) -> Values:
        self.remember(probe.updates + 1 - self.context.settings.start)
        return {}

    def remember(self, window: int) -> None:
        """Copy the members before the update of this window, if it is sampled."""
        self._weights, self._gradients = [], {}
        if not (is_sampled(window) or self._small_unmoved):
            return
        self._weights = [plain(p).clone() for p in self._members]
        rates = {id(p): _rate(group) for group in self._optimizer.param_groups for p in group["params"]}
        gradients = {
            i: p.grad
            for i, p in enumerate(self._members)
            if p.grad is not None and plain(p.grad).numel() and rates.get(id(p))
        }
        tensors = list(map(plain, gradients.values()))
        extremes = Extremes(tensors)  # type: ignore[arg-type]
        extremes.add_all(range(len(tensors)), tensors)
        sizes = [max(abs(low), abs(high)) for _, low, high in sorted(extremes.read())]
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
        equal = equal_each([before[i] for i in gradients], [plain(self._members[i]) for i in gradients])
        unchanged = [i for i, same in zip(gradients, equal, strict=True) if same]
        found = [each for i in unchanged if (each := self._overdue(i, gradients[i])) is not None]
        small = {each.member for each in found if self._members[each.member].numel() <= _FEW}
        twice, self._small_unmoved = small & self._small_unmoved, small
        return [each for each in found if each.member not in small or each.member in twice]

    def _overdue(self, index: int, gradient: Tensor) -> Unmoved | None:
        """A member that kept every bit. None if its update may have been rounded away, if the loop removed it from the
        optimizer meanwhile, or if its elements are not stored one by one, as those of quantized weights.
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
    """The size of each element's update, in float64, and the part of it that is certain. g: the gradient before it."""
    kind, rate, weight = type(optimizer), _rate(group), plain(member)
    state = optimizer.state.get(member)  # of an optimizer that torch does not have this may be anything
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
    # A search along a line may find no better place, and rightly stays.
    certain = 0.0 if isinstance(optimizer, torch.optim.LBFGS) else _CERTAIN
    return rate * g.abs().double().clamp(max=1.0), certain
