"""The gradients: finite as they are computed and reduced, fresh, present, and the same on all replicas."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from andon_contracts.agree import bits_of, real_of
from andon_contracts.laws.law import Law, Seen, difference
from andon_contracts.laws.update import GRADIENTS
from andon_contracts.multi_tensor import to_cpu
from andon_contracts.observe import ORDINARY, Look, Observer, plain
from andon_contracts.violation import Finding
from andon_contracts.watch.check import LIVE, Check, Context, Cover, OptimizerProbe, Values, indexed, none_has
from andon_contracts.watch.checks.scale import GradientScale
from andon_contracts.watch.gradient_hooks import GradientHooks, Raw, Reductions
from andon_contracts.watch.model_probe import ForwardTap
from andon_contracts.watch.values import CachedDigest

_CALLED = 2
"""A parameter whose module was called in so many windows and that got no gradient is reported."""
_PATIENCE = 16
"""After so many windows a parameter is reported that was not used, or had a gradient that was always zero."""


def _raw_finite(seen: Seen[object]) -> Finding | None:
    found = indexed(seen, "nonfinite", "has a raw local gradient that is not finite")
    if found is None:
        return None
    repaired = ", and it was made finite before it was used" * seen.any("repaired")
    return Finding(found.seen + repaired, found.step, found.ranks, found.tensor)


def _norm_finite(seen: Seen[object]) -> Finding | None:
    norms = list(map(real_of, seen.column("norm")))
    ranks = [rank for rank, norm in enumerate(norms) if not math.isfinite(norm)]
    if not ranks:
        return None
    shown = ", ".join(f"rank {rank}: {norm!r}" for rank, norm in enumerate(norms))
    what = f"the norm of the gradient is not finite ({shown}); clipping by it gives zero or NaN"
    return Finding(what, seen.step, seen.some(ranks), "gradient")


def _collectives_agree(seen: Seen[object]) -> Finding | None:
    if seen.any("strided"):
        return indexed(seen, "strided", "was given to a collective although it is not dense in memory")
    if "collectives" in seen.differing:
        return difference(seen, "collectives", "the ranks reduced different tensors, or in a different order")
    return None


class Gradients(Check):
    """The gradients of one optimizer: raw ones from hooks, and the one that the optimizer gets."""

    before_laws = (
        Law("finite/raw", ("nonfinite", "repaired"), _raw_finite),
        none_has(
            "gradient-fresh/before",
            "stale",
            "still had a gradient of the step before when this one began",
            suspicion=True,
        ),
        none_has(
            "gradient-present/before",
            "missing",
            "has had no gradient, or none but zero, since the start",
            suspicion=True,
        ),
        Law("collectives-agree/before", ("strided", "collectives"), _collectives_agree),
        GRADIENTS,
        Law("finite/norm", ("norm",), _norm_finite),
    )

    def __init__(self, context: Context, probe: OptimizerProbe, scale: GradientScale) -> None:
        super().__init__(context)
        self._probe = probe
        self.raw_hooks = GradientHooks(probe.members, probe.gradients_vanished, (scale.place, scale.see))
        scale.arrived = lambda: self.raw_hooks.arrived
        self._coverage = GradientCoverage(context, probe, self.raw_hooks)
        self._reductions = Reductions(probe.members)
        self._observer = Observer()
        self._present = CachedDigest()
        self._look: Look | None = None
        self._needs_norm = context.settings.clip is not None or context.settings.recording
        self.loop_norm: float | Tensor | None = None
        """The norm by which the loop clipped: a tensor if it lies on a GPU, which is not waited for while it clips."""
        self._loop_norm_arrives: list[Tensor] = []
        self.norm = 0.0
        """Of the gradient that the optimizer gets, after `before`."""
        self._reduced: Look | None = None
        """The gradient before clipping."""
        self._share = 0.0

    def cover(self) -> Mapping[str, Cover]:
        subject, dark = self.context.subject, Cover("not observable", "the shards show no raw gradient")
        present = collectives = LIVE
        if subject.unused_expected:
            why = "find_unused_parameters says that some have none: only an adapter wholly without one is reported"
            present = Cover("degraded", why)
        if self.context.world > 1 and subject.reducers:
            collectives = Cover("degraded", "DDP's own reductions run below Python")
        why = "what the optimizer gets: the shards show no raw gradient"
        return {
            "gradients-agree": self.context.between_replicas(),
            "collectives-agree": collectives if self.context.world > 1 else self.context.between_ranks(),
            "finite": Cover("degraded", why) if subject.sharded else LIVE,
            "gradient-fresh": dark if subject.sharded else LIVE,
            "gradient-present": present,
        }

    def hooks(self) -> list[Callable[[], None]]:
        """The hooks on parameters are there already; `zero_grad` says when the loop throws gradients away."""
        return [self.close, _intercept_zero(self._probe.optimizer, self._zeroed)]

    def close(self) -> None:
        """Remove the hooks on parameters and modules."""
        self.raw_hooks.close()
        self._coverage.close()

    def _zeroed(self) -> None:
        rows = self.context.rows
        if self.raw_hooks.backward_seen:
            rows.spent()
        if self.raw_hooks.started or rows.ids:
            self.raw_hooks.discard()
        else:
            self._probe.discarded()

    def observers(self) -> Iterator[Observer]:
        yield self._observer

    def backward(self, loss: Tensor | None) -> None:
        self.raw_hooks.arrived = False
        self.raw_hooks.called()

    def backward_over(self) -> None:
        self.raw_hooks.call_over()

    def reducing(self, tensor: Tensor, group: object, waits: bool) -> None:
        if not self.context.muted and (group is None or group is dist.group.WORLD):
            self.raw_hooks.reducing(gradient=self._reductions.add(tensor))

    def clipping(self, parameters: Sequence[Tensor], norm: Tensor | None) -> None:
        if self.context.muted or not any(id(each) in self._probe.held for each in parameters):
            return
        if norm is not None and self.loop_norm is None and not self._needs_norm:
            self.loop_norm = norm.detach() if norm.is_cuda and type(norm) in ORDINARY else float(norm)
        self._probe.reduced()

    def reduced(self, probe: OptimizerProbe) -> None:
        if self.loop_norm is None and self._needs_norm:
            look = self._look_at_gradient(norm=True)
            to_cpu(look.waiting, look.norms)
            self.loop_norm = look.norm
            if self.context.settings.recording:
                self._reduced, self._share = look, self._probe.norm_share(self._probe.gradients(), look.norm)

    def _look_at_gradient(self, *, norm: bool) -> Look:
        gradients = [each.grad for each in self._probe.members]
        present = self._present.digest([each is not None for each in gradients])
        return self._observer.look([each for each in gradients if each is not None], norm=norm, beside=present)

    def look(self, probe: OptimizerProbe) -> list[list[Tensor]]:
        # If the loop's own clipping computed the norm, the norm after clipping is seldom needed.
        self._look = self._look_at_gradient(norm=self.loop_norm is None or self._needs_norm)
        self._loop_norm_arrives = [self.loop_norm] if isinstance(self.loop_norm, Tensor) else []
        return [*self.raw_hooks.waiting(), self._look.waiting, self._look.norms, self._loop_norm_arrives]

    def meanwhile(self, probe: OptimizerProbe) -> Values:
        return {"collectives": self._reductions.digest(), "strided": probe.place(self._reductions.strided)}

    def before(self, probe: OptimizerProbe) -> Values:
        look, recording = self._look, self.context.settings.recording
        assert look is not None
        on_gpu = self._loop_norm_arrives
        told = float(on_gpu[0]) if on_gpu else None if self.loop_norm is None else float(self.loop_norm)
        has_norm = told is None or self._needs_norm
        raw = self.raw_hooks.read()
        if raw.nonfinite and not has_norm:
            has_norm, look = True, self._look_at_gradient(norm=True)
        self.norm = look.norm if has_norm or told is None else told
        skipped = bool(getattr(probe.optimizer, "found_inf", None))
        self._coverage.window(raw)
        share = self._share
        if recording and self._reduced is None:
            share = probe.norm_share(probe.gradients(), self.norm)
        bad = 0 if skipped else raw.nonfinite
        return {
            "nonfinite": probe.place(bad),
            "repaired": int(bad > 0 and self.norm < math.inf),
            "gradient": look.digest,
            "reduced seen": int(self._reduced is not None),
            "reduced": 0 if self._reduced is None else self._reduced.digest,
            "norm share": bits_of(share),
            "skipped": int(skipped),
            "norm": bits_of(0.0 if skipped else self.norm if told is None else told),
            "clipped": bits_of(0.0 if skipped else self.norm),
            "stale": probe.place(raw.stale),
            "raw": raw.sign,
            "missing": probe.place(self._coverage.missing()),
        }

    def new_window(self, probe: OptimizerProbe) -> None:
        self.raw_hooks.reset()
        self.discarded(probe)

    def discarded(self, probe: OptimizerProbe) -> None:
        self.loop_norm, self._reduced = None, None
        self._reductions.clear()


def _intercept_zero(optimizer: torch.optim.Optimizer, zeroed: Callable[[], None]) -> Callable[[], None]:
    """Call `zeroed` after each `optimizer.zero_grad`. Returns what ends that."""
    original, own = optimizer.zero_grad, vars(optimizer).get("zero_grad")
    watching = [True]

    def zero_grad(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        if watching[0]:  # the loop may have kept this function and call it after the watch was closed
            zeroed()

    def put_back() -> None:
        watching[0] = False
        # What the loop itself set, before or since, stays.
        if vars(optimizer).get("zero_grad") is zero_grad:
            del vars(optimizer)["zero_grad"]
            vars(optimizer).update({} if own is None else {"zero_grad": own})

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    return put_back


class GradientCoverage:
    """The parameters of one optimizer that still wait for a nonzero gradient, by their index.

    A layer that a forward pass leaves out rightly gets no gradient. A layer that a forward pass calls and that still
    gets none is detached from the loss.
    """

    def __init__(self, context: Context, probe: OptimizerProbe, raw_hooks: GradientHooks) -> None:
        self._context = context
        self._members, self._names = probe.members, probe.names
        self._index = {name: index for index, name in enumerate(probe.names)}
        self._adapter = {index for index, name in enumerate(probe.names) if "lora_" in name}
        # What has no elements cannot have a gradient.
        self._absent = {index for index, member in enumerate(probe.members) if member.numel()}
        self._zero = set(self._absent)
        self._windows = 0
        self._called: set[int] = set()
        self._uses: Counter[int] = Counter()
        self._handles: dict[int, list[RemovableHandle]] = {}
        subject, index = context.subject, {id(parameter): i for i, parameter in enumerate(probe.members)}
        for slot in subject.slots if not subject.compiled else ():
            place = index.get(id(slot.parameter))
            if place is not None:
                tap = ForwardTap(partial(self._used, place))
                self._handles.setdefault(place, []).append(slot.owner.register_forward_pre_hook(tap))

    def _used(self, index: int) -> None:
        """The parameter's module is called; a backward pass may follow."""
        if torch.is_grad_enabled() and not self._context.muted:
            self._called.add(index)

    def window(self, raw: Raw) -> None:
        """A window is over, in which the raw hooks saw `raw`."""
        self._windows += 1
        if not self._zero:
            return
        touched, nonzero = raw.touched, raw.nonzero
        there = {index: g for index in self._zero if (g := self._members[index].grad) is not None}
        self._absent -= {*touched, *there}
        self._zero -= {*nonzero, *(i for i, g in there.items() if i not in nonzero and _any(g))}
        self._uses.update(self._called & self._absent)
        self._called.clear()
        for index in [i for i in self._handles if i not in self._absent]:
            self._remove(index)

    def missing(self) -> int:
        """The index + 1 of the first parameter that should have had a gradient by now; 0: there is none."""
        if not self._zero:
            return 0
        late = self._windows >= _PATIENCE
        # Layer drop never leaves all adapter tensors at once without a gradient, so one window is enough for these.
        found = set(self._adapter) if self._adapter and self._adapter <= self._absent else set()
        if not self._context.subject.unused_expected:
            found |= {i for i in self._absent if late or self._uses[i] >= _CALLED}
            found |= {i for i in self._zero if late and not self._waits_for_other_half(i)}
        return min(found, default=-1) + 1

    def _waits_for_other_half(self, index: int) -> bool:
        """LoRA's A has a zero gradient as long as its B is zero."""
        other = self._index.get(self._names[index].replace("lora_A", "lora_B"), index)
        return other != index and not _any(self._members[other])

    def _remove(self, index: int) -> None:
        for handle in self._handles.pop(index):
            handle.remove()

    def close(self) -> None:
        for index in list(self._handles):
            self._remove(index)


def _any(tensor: Tensor) -> bool:
    return bool(plain(tensor).any())
