"""Clipping: once for an update, to the declared limit, of the whole reduced and unscaled gradient, on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from andon_contracts.agree import bits_of, real_of
from andon_contracts.laws.law import Law, Observations, Seen
from andon_contracts.laws.update import Reduced, clipped_norm, is_clipped_once
from andon_contracts.observe import norm_of, plain
from andon_contracts.violation import Finding
from andon_contracts.watch.check import LIVE, Check, Context, Cover, OptimizerProbe, Values, declared
from andon_contracts.watch.checks.gradients import Gradients

_NORM_TOLERANCE = 1e-3
"""Of torch's norms, relative. Ranks whose norms are further apart have different gradients."""


def torch_norm_error(elements: int) -> float:
    """The largest relative error of torch's fp32 norm of one CPU tensor of `elements`.

    Torch adds the squares into 8 running sums. Each addition rounds by up to 2^-24, and the root halves the error of
    the sum: (elements / 8) * 2^-24 / 2. That is 0.37 for 100 million elements; 1e-2 was measured on normal numbers.
    """
    return elements * 2.0**-28


def clip_once(limit: float, longest: int) -> Law[Seen[object]]:
    """On every rank one clipping to `limit` was made, of a norm that is one on all ranks.

    longest: the elements of the largest tensor that is trained on a CPU; the loop clips by torch's norm of it.
    """
    want = Reduced(limit=limit, norm_tolerance=max(_NORM_TOLERANCE, torch_norm_error(longest)))

    def check(seen: Seen[object]) -> Finding | None:
        odd = []
        for each in seen.observations:
            norm, clipped = real_of(each.values["norm"]), real_of(each.values["clipped"])
            if not is_clipped_once(clipped, norm, want):
                odd.append((each.rank, norm, clipped))
        if odd:
            _, norm, clipped = odd[0]
            what = (
                f"the gradient had norm {norm:.6g}; clipped once to {limit:g} it has {clipped_norm(norm, limit):.6g}, "
                f"the optimizer got {clipped:.6g}"
            )
            return Finding(what, seen.step, seen.unless_all([rank for rank, *_ in odd]), "clipped gradient")
        norms = list(map(real_of, seen.column("norm")))
        # A reduced gradient has one norm. If the gradients themselves differ, clipping is not the cause.
        if "gradient" in seen.differing or not max(norms) - min(norms) > _NORM_TOLERANCE * max(norms):
            return None
        shown = ", ".join(f"rank {rank}: {norm:.6g}" for rank, norm in enumerate(norms))
        what = f"the ranks clipped by different norms ({shown}): each its own gradient, before the reduction"
        return Finding(what, seen.step, (), "clipped gradient")

    return Law("clip-once/before", ("norm", "clipped", "gradient"), check)


class ClipSeen(IntFlag):
    """What was seen of an update's clip calls: that there was one, and what one of them came too early for."""

    CLIPPED = 1
    SCALED = 2
    UNREDUCED = 4
    UNFINISHED = 8


_EARLY = {ClipSeen.SCALED: "while a loss scaler had them multiplied", ClipSeen.UNREDUCED: "before they were reduced"}


def _not_early(seen: Seen[object]) -> Finding | None:
    when = next((text for flag, text in _EARLY.items() if any(each & flag for each in seen.column("clipping"))), "")
    what = f"the gradients were clipped {when}: not by the norm of what is applied"
    return Finding(what, seen.step, (), "gradient") if when else None


def _not_by_micro_batch(seen: Seen[object]) -> Finding | None:
    if not any(each & ClipSeen.UNFINISHED for each in seen.column("clipping")):
        return None
    what = "the gradients were clipped for each micro-batch, and not once for the update"
    return Finding(what, seen.step, (), "gradient")


def _by_all_ranks(seen: Seen[object]) -> Finding | None:
    ranks = tuple(rank for rank, each in enumerate(seen.column("clipping")) if each & ClipSeen.CLIPPED)
    if len(ranks) in (0, len(seen.observations)):
        return None
    return Finding("only some ranks clipped their gradients", seen.step, ranks, "gradient")


_PLACE = (
    Law("clip-placed/before", ("clipping",), _not_early),
    Law("clip-placed/micro-batch", ("clipping",), _not_by_micro_batch, suspicion=True),
)
_BY_ALL_RANKS = Law("clip-placed/ranks", ("clipping",), _by_all_ranks)


class ClipPlace(Check):
    """Where in an update the loop clips, over all its optimizers."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._forwards = 0
        self._clipped: dict[int, tuple[Tensor, int]] = {}
        """The clipped parameters, each with the number of forward passes before its clip call."""
        self._discards = 0
        self._seen = ClipSeen(0)

    def cover(self) -> Mapping[str, Cover]:
        return {"clip-placed": LIVE}

    def forward(self, module: object, args: object, kwargs: object) -> None:
        self._forwards += torch.is_grad_enabled()

    def clipping(self, parameters: Sequence[Tensor], norm: Tensor | None) -> None:
        held = [each for each in parameters if any(id(each) in probe.held for probe in self.context.probes)]
        if self.context.rows.discarded != self._discards:
            self._clear()
        now = self._forwards
        if self._clipped and any(self._clipped.get(id(each), (each, now))[1] < now for each in held):
            self._seen |= ClipSeen.UNFINISHED
        self._clipped.update({id(each): (each, now) for each in held if each.grad is not None})
        if self._clipped:
            self._seen |= ClipSeen.CLIPPED

    def reducing(self, tensor: Tensor, group: object, waits: bool) -> None:
        if self._clipped and (group is None or group is dist.group.WORLD):
            gradients = [each.grad for each, _ in self._clipped.values() if each.grad is not None]
            if any(tensor is each or (tensor.data_ptr() == each.data_ptr() != 0) for each in gradients):
                self._seen |= ClipSeen.UNREDUCED

    def unscaling(self, scaler: Any, optimizer: Any) -> None:
        held = (each for group in optimizer.param_groups for each in group["params"])
        if any(id(each) in self._clipped for each in held) and scaler.is_enabled() and scaler.get_scale() != 1.0:
            self._seen |= ClipSeen.SCALED

    def meanwhile(self, probe: OptimizerProbe) -> Values:
        return {"clipping": int(self._seen)}

    def judge(self, probe: OptimizerProbe, said: Observations, aligned: Observations) -> None:
        verdicts, seen = self.context.verdicts, Seen[object](said, None)
        verdicts.judge(_PLACE, seen, self.context.scene())
        if self.context.ranks_have_own_rows:
            verdicts.judge((_BY_ALL_RANKS,), seen, self.context.scene())

    def skipped(self, optimizer: object) -> None:
        self._clear()

    def updated(self, probe: OptimizerProbe) -> None:
        self._clear()

    def _clear(self) -> None:
        self._clipped.clear()
        self._discards, self._seen = self.context.rows.discarded, ClipSeen(0)


@dataclass(frozen=True)
class _Call:
    """One clip call: the members that it clipped, the order of its norm, that norm, and the members' own norm."""

    members: frozenset[int]
    order: float
    norm: float
    own: float
    alone: bool
    """Whether it clipped no other parameters."""


class Clipping(Check):
    """The norms of one optimizer's clip calls. Groups clipped apart, and norms of another order, are judged by call."""

    def __init__(self, context: Context, probe: OptimizerProbe, gradients: Gradients) -> None:
        super().__init__(context)
        self._probe = probe
        self._gradients = gradients
        self._calls: list[_Call] = []

    @property
    def limit(self) -> float | None:
        return None if self.context.subject.sharded else self.context.settings.clip

    def cover(self) -> Mapping[str, Cover]:
        cover = declared(self.context.settings.clip, "clip=")
        if cover.live and self.context.subject.sharded:
            cover = Cover("not observable", "each rank has only shards of the gradient")
        return {"clip-once": cover}

    def ranks_met(self) -> None:
        if self.limit is not None:
            self.before_laws = (clip_once(self.limit, self.context.longest),)

    def clipping(self, parameters: Sequence[Tensor], norm: Tensor | None) -> None:
        if norm is None or self.limit is None or self.context.muted:
            return
        there = [each for each in parameters if each.grad is not None]
        mine = frozenset(self._probe.index[id(each)] for each in there if id(each) in self._probe.held)
        if any(id(each) in self._probe.held for each in parameters):
            order = _order_of([plain(each.grad) for each in there if each.grad is not None], float(norm))
            alone = len(mine) == len(there)
            self._calls.append(_Call(mine, order, float(norm), self._own(mine, order), alone))

    def _own(self, members: frozenset[int], order: float) -> float:
        found = [plain(g) for i in members if (g := self._probe.members[i].grad) is not None]
        return _norm(found, order)

    def before(self, probe: OptimizerProbe) -> Values:
        call = None if self.limit is None else self._worst_call(self.limit)
        if call is None or getattr(probe.optimizer, "found_inf", None):
            return {}
        norm, clipped = call
        return {"norm": bits_of(norm), "clipped": bits_of(clipped)}

    def _worst_call(self, limit: float) -> tuple[float, float] | None:
        """The norm that was clipped and what is left of it, of the call that is furthest from the law.

        None after one plain call, and if the calls do not partition what has a gradient: the gradient of the whole
        optimizer is then judged.
        """
        there = {index for index, parameter in enumerate(self._probe.members) if parameter.grad is not None}
        dealt = sum(len(call.members) for call in self._calls)
        if dealt != len(there) or there != frozenset[int]().union(*(call.members for call in self._calls)):
            return None
        if len(self._calls) == 1 and self._calls[0].order == 2 and self._calls[0].alone:
            return None
        found = [(c.norm, c.norm * self._own(c.members, c.order) / c.own if c.own else 0.0) for c in self._calls]
        return max(found, key=lambda pair: abs(pair[1] - clipped_norm(pair[0], limit)), default=None)

    def new_window(self, probe: OptimizerProbe) -> None:
        self._calls.clear()

    discarded = new_window


def _norm(tensors: Sequence[Tensor], order: float) -> float:
    if order == 2:
        return norm_of(tensors)
    norms = [float(torch.linalg.vector_norm(t.float(), order)) for t in tensors if t.numel()]
    return max(norms, default=0.0) if order == math.inf else sum(norms)


def _order_of(gradients: Sequence[Tensor], norm: float) -> float:
    """The order of `norm`: 2, unless it is only the norm of another order."""
    longest = max((t.numel() for t in gradients if t.device.type == "cpu"), default=0)
    alike = max(_NORM_TOLERANCE, torch_norm_error(longest))
    orders = (2.0, math.inf, 1.0)
    return next((o for o in orders if math.isclose(_norm(gradients, o), norm, rel_tol=alike)), 2.0)
