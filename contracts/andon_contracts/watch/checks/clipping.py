"""Clipping: once for an update, to the declared limit, of the whole reduced and unscaled gradient, on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from andon_contracts.agree import bits_of, by_rank, real_of
from andon_contracts.laws.law import Law, Observations, Seen
from andon_contracts.laws.update import Reduced, clipped_norm, is_clipped_once
from andon_contracts.observe import norm_of, plain
from andon_contracts.violation import Finding
from andon_contracts.watch.check import LIVE, Check, Context, Cover, OptimizerProbe, Values
from andon_contracts.watch.gradient_hooks import same_memory

_NORM_TOLERANCE = 1e-3
"""The relative error of torch's norms. Ranks whose norms differ by more have different gradients."""


def torch_norm_error(elements: int) -> float:
    """The largest relative error of torch's fp32 norm of one CPU tensor of `elements`.

    Torch adds the squares into 8 running sums. Each addition rounds by up to 2^-24, and the root halves the error of
    the sum: (elements / 8) * 2^-24 / 2. That is 0.37 for 100 million elements; 1e-2 was measured on normal numbers.
    """
    return elements * 2.0**-28


def alike(norms: Sequence[float]) -> bool:
    """Whether the norms of all ranks are equal up to rounding."""
    return not max(norms) - min(norms) > _NORM_TOLERANCE * max(norms)


def clip_once(limit: float, longest: int) -> Law[Seen[object]]:
    """The law that every rank clipped once to `limit`, and all by the same norm.

    longest: the elements of the largest trained tensor on a CPU. The loop clips by torch's norm of it.
    """
    want = Reduced(limit=limit, norm_tolerance=max(_NORM_TOLERANCE, torch_norm_error(longest)))

    def check(seen: Seen[object]) -> Finding | None:
        norms, results = (list(map(real_of, seen.column(name))) for name in ("norm", "clipped"))
        pairs = list(zip(norms, results, strict=True))
        wrong = [rank for rank, (norm, clipped) in enumerate(pairs) if not is_clipped_once(clipped, norm, want)]
        if wrong:
            norm, clipped = pairs[wrong[0]]
            what = (
                f"the gradient's norm was {norm:.6g}; one clip to {limit:g} gives {clipped_norm(norm, limit):.6g}, "
                f"but the optimizer received a gradient of norm {clipped:.6g}"
            )
            likely = f"clip={limit:g} was declared, but the loop does not clip, clips to another limit or norm"
            return Finding(what, seen.step, seen.unless_all(wrong), "clipped gradient", likely=likely)
        # A reduced gradient has one norm. If the gradients themselves differ, clipping is not the cause.
        if "gradient" in seen.differing or alike(norms):
            return None
        shown = ", ".join(f"rank {rank}: {norm:.6g}" for rank, norm in enumerate(norms))
        what = f"the ranks clipped by different norms ({shown}): each clipped its own gradient, before the reduction"
        return Finding(what, seen.step, (), "clipped gradient")

    return Law("clip-once/before", ("norm", "clipped", "gradient"), check)


UNEVEN = 2.0**-6
"""The relative differences of two scaled elements that the rounding of bfloat16 explains."""
_LOCAL = "the norm was computed from local tensors: use torch's clip on the DTensors, or FSDP1's own `clip_grad_norm_`"
_CLIPPED, _SCALED, _UNREDUCED, _UNFINISHED = 1, 2, 4, 8
"""The bits of the value `clipping`: there was a clip call, and the reasons why one came too early."""


def _not_early(seen: Seen[object]) -> Finding | None:
    scaled, unreduced = (any(each & bit for each in seen.column("clipping")) for bit in (_SCALED, _UNREDUCED))
    when = "before the loss scaler unscaled them" if scaled else "before they were reduced"
    what = f"the gradients were clipped {when}: the norm was not that of the applied gradient"
    return Finding(what, seen.step, (), "gradient") if scaled or unreduced else None


def _not_by_micro_batch(seen: Seen[object]) -> Finding | None:
    what = "the gradients were clipped for each micro-batch, and not once for the update"
    early = any(each & _UNFINISHED for each in seen.column("clipping"))
    return Finding(what, seen.step, (), "gradient") if early else None


def _by_all_ranks(seen: Seen[object]) -> Finding | None:
    ranks = tuple(rank for rank, each in enumerate(seen.column("clipping")) if each & _CLIPPED)
    some = 0 < len(ranks) < len(seen.observations)
    return Finding("only some ranks clipped their gradients", seen.step, ranks, "gradient") if some else None


def _of_whole_gradient(seen: Seen[object]) -> Finding | None:
    norms = list(map(real_of, seen.column("clip norm")))
    if not all(norms) or alike(norms):
        return None
    what = f"each rank clipped by the norm of its own shard ({by_rank([f'{norm:.6g}' for norm in norms])})"
    return Finding(what, seen.step, (), "gradient", likely=_LOCAL)


def _scaled_alike(seen: Seen[object]) -> Finding | None:
    factors = {rank: factor for rank, each in enumerate(seen.column("shard factor")) if (factor := real_of(each))}
    if not factors or max(factors.values()) - min(factors.values()) <= 2 * UNEVEN * max(map(abs, factors.values())):
        return None
    shown = ", ".join(f"rank {rank}: by {factor:.6g}" for rank, factor in factors.items())
    what = f"after the reduction, the ranks scaled their shards of one gradient by different factors ({shown})"
    return Finding(what, seen.step, (), "gradient", likely=_LOCAL)


_PLACE = (
    Law("clip-placed/before", ("clipping",), _not_early),
    Law("clip-placed/whole", ("clip norm",), _of_whole_gradient),
    Law("clip-placed/micro-batch", ("clipping",), _not_by_micro_batch, suspicion=True),
    Law("clip-placed/scaled", ("shard factor",), _scaled_alike, suspicion=True),
)
_BY_ALL_RANKS = Law("clip-placed/ranks", ("clipping",), _by_all_ranks)


class ClipPlace(Check):
    """At which point of an update the loop clips, over all its optimizers."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._forwards = 0
        self._clipped: dict[int, tuple[Tensor, int]] = {}
        """By id: a clipped parameter, and the number of forward passes before its clip call."""
        self._discards = self._calls = 0
        self._norm = 0.0  # of a clip call over shards, if it is that of this rank's gradients alone

    def cover(self) -> Mapping[str, Cover]:
        return {"clip-placed": LIVE}

    def forward(self, module: object, args: object, kwargs: object) -> None:
        self._forwards += torch.is_grad_enabled()

    def clipping(self, parameters: Sequence[Tensor], norm: Tensor | None) -> None:
        if not self.context.full:
            return
        held = frozenset[int]().union(*(probe.held for probe in self.context.probes))
        members = [each for each in parameters if id(each) in held]
        if self.context.rows.discarded != self._discards:
            self.new_window()
        now = self._forwards
        if self._clipped and any(self._clipped.get(id(each), (each, now))[1] < now for each in members):
            self._calls |= _UNFINISHED
        self._clipped.update({id(each): (each, now) for each in members if each.grad is not None})
        if self._clipped:
            self._calls |= _CLIPPED
        sampled = any(self.context.settings.is_sampled(probe.updates + 1) for probe in self.context.probes)
        # A distributed norm becomes that of the whole in torch's own arithmetic.
        of_shards = not (
            hasattr(norm, "full_tensor") or self.context.subject.shards.keys().isdisjoint(map(id, members))
        )
        if norm is not None and sampled and of_shards:
            own = norm_of(each.grad for each in parameters if each.grad is not None)
            self._norm = own if math.isclose(float(norm), own, rel_tol=_NORM_TOLERANCE) else 0.0

    def reducing(self, tensor: Tensor, group: object, waits: bool) -> None:
        is_clipped = any(same_memory(tensor, each.grad) for each, _ in self._clipped.values())
        if is_clipped and self.context.exchange.has_all_ranks(group):
            self._calls |= _UNREDUCED

    def unscaling(self, scaler: Any, optimizer: Any) -> None:
        members = (each for group in optimizer.param_groups for each in group["params"])
        if any(id(each) in self._clipped for each in members) and scaler.is_enabled() and scaler.get_scale() != 1.0:
            self._calls |= _SCALED

    def meanwhile(self, probe: OptimizerProbe) -> Values:
        return {"clipping": self._calls, "clip norm": bits_of(self._norm)}

    def judge(self, probe: OptimizerProbe, said: Observations, aligned: Observations) -> None:
        verdicts, seen = self.context.verdicts, Seen[object](said, None)
        verdicts.judge(_PLACE, seen, self.context.scene())
        if self.context.ranks_have_own_rows:
            verdicts.judge((_BY_ALL_RANKS,), seen, self.context.scene())

    def new_window(self, probe: OptimizerProbe | None = None) -> None:
        self._clipped.clear()
        self._discards, self._calls, self._norm = self.context.rows.discarded, 0, 0.0

    def discarded(self, probe: OptimizerProbe) -> None:
        self._clipped = {key: clip for key, clip in self._clipped.items() if key not in probe.held}


class _Call(NamedTuple):
    """One clip call. norm: the norm of all its parameters, by which it clipped. own: the norm of `members`, those of
    this optimizer. order: the order of both norms. alone: all its parameters belong to this optimizer.
    """

    members: frozenset[int]
    order: float
    norm: float
    own: float
    alone: bool


class Clipping(Check):
    """The norms of one optimizer's clip calls.

    The law compares the norms of the whole gradient. If the loop clips groups separately, or by a norm of another
    order, the law compares the norms of the call with the largest error.
    """

    def __init__(self, context: Context, probe: OptimizerProbe) -> None:
        super().__init__(context)
        self._probe = probe
        self._calls: list[_Call] = []
        self._limit = None if context.subject.sharded else context.settings.clip

    def cover(self) -> Mapping[str, Cover]:
        dark = Cover("not observable", "each rank has only shards of the gradient")
        return {"clip-once": dark if self.context.subject.sharded else LIVE}

    def ranks_met(self) -> None:
        if self._limit is not None:
            self.before_laws = (clip_once(self._limit, self.context.longest),)

    def clipping(self, parameters: Sequence[Tensor], norm: Tensor | None) -> None:
        held = self._probe.held
        aside = not self._probe.full or self.context.muted or held.isdisjoint(map(id, parameters))
        if aside or norm is None or self._limit is None:
            return
        gradients = [plain(p.grad) for p in parameters if p.grad is not None]
        members = frozenset(self._probe.index[id(p)] for p in parameters if p.grad is not None and id(p) in held)
        order, alone = _order_of(gradients, float(norm)), len(members) == len(gradients)
        self._calls.append(_Call(members, order, float(norm), self._norm(members, order), alone))

    def _norm(self, members: frozenset[int], order: float) -> float:
        return _norm([plain(g) for i in members if (g := self._probe.members[i].grad) is not None], order)

    def norms(self) -> tuple[float, float] | None:
        """The norms before and after the clip call with the largest error, which `Gradients` sends.

        None, for the norms of the whole gradient, if a plain call clipped it or the calls do not partition it.
        """
        limit, calls, probe = self._limit, self._calls, self._probe
        if limit is None or getattr(probe.optimizer, "found_inf", None):
            return None
        trained = {index for index, parameter in enumerate(probe.members) if parameter.grad is not None}
        clipped = [index for call in calls for index in call.members]
        is_plain = len(calls) == 1 and calls[0].order == 2 and calls[0].alone
        if not calls or is_plain or len(clipped) != len(trained) or set(clipped) != trained:
            return None
        norms = [(c.norm, c.norm * self._norm(c.members, c.order) / c.own if c.own else 0.0) for c in calls]
        return max(norms, key=lambda pair: abs(pair[1] - clipped_norm(pair[0], limit)))

    def new_window(self, probe: OptimizerProbe) -> None:
        self._calls.clear()

    discarded = new_window


def _norm(tensors: Sequence[Tensor], order: float) -> float:
    if order == 2:
        return norm_of(tensors)
    norms = [float(torch.linalg.vector_norm(t.float(), order)) for t in tensors if t.numel()]
    return max(norms, default=0.0) if order == math.inf else sum(norms)


def _order_of(gradients: Sequence[Tensor], norm: float) -> float:
    """The first of the orders 2, inf and 1 in which the norm of `gradients` is `norm`; 2 if it is `norm` in none."""
    longest = max((t.numel() for t in gradients if t.device.type == "cpu"), default=0)
    tolerance = max(_NORM_TOLERANCE, torch_norm_error(longest))
    orders = (2.0, math.inf, 1.0)
    return next((o for o in orders if math.isclose(_norm(gradients, o), norm, rel_tol=tolerance)), 2.0)
