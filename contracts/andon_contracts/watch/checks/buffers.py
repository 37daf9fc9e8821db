"""The buffers with which a forward pass starts: the same on every rank that shares them.

Small buffers are read at the first forward pass of each update. Large ones are read if a version counter of torch
moved, and in parts, all of them within `ROUND` updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor

from andon_contracts.laws.law import Law, Seen, difference
from andon_contracts.observe import Observer, chained
from andon_contracts.violation import OTHER_SHAPES, Finding
from andon_contracts.watch.check import Check, Context, Cover, OptimizerProbe, Values
from andon_contracts.watch.checks.frozen import ROUND, parts_of
from andon_contracts.watch.checks.gradients import Gradients
from andon_contracts.watch.intercept import outside_of_transforms
from andon_contracts.watch.model_probe import ForwardHook, ModuleGroup
from andon_contracts.watch.values import text_digest

SMALL_BYTES = 1 << 18
"""A buffer of at most so many bytes is read at every update, as long as all such have at most `_SMALL_IN_ALL`."""
_SMALL_IN_ALL = 1 << 20
_NAMES = ("buffers", "caches", "cache shapes")
_version = attrgetter("_version")


def _parted(seen: Seen[object], name: str) -> bool:
    # A rank without a forward pass sends 0 and is not compared.
    return name in seen.differing and len({value for value in seen.column(name) if value}) > 1


def _buffers_agree(seen: Seen[object]) -> Finding | None:
    # A buffer that no checkpoint has (a cache) may be longer on one rank than on another.
    caches = _parted(seen, "caches") and not _parted(seen, "cache shapes")
    if not (_parted(seen, "buffers") or caches):
        return None
    reshaped = seen.differing_tensors("shapes of buffers")
    odd = reshaped or seen.differing_tensors("buffers")
    what = OTHER_SHAPES if reshaped else "are not the same"
    name = "buffers" if _parted(seen, "buffers") else "caches"
    found = difference(Seen(seen.observations, None), name, f"the buffers with which the forward pass began {what}")
    # What a forward pass begins with is what the update before it left.
    return Finding(found.seen, max(found.step - 1, 0), found.ranks, (*odd, "buffers")[0])


class Buffers(Check):
    before_laws = (Law("buffers-agree/before", ("buffers", "caches"), _buffers_agree, look=("buffers", "caches")),)

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        scopes = len(context.subject.buffer_scopes)
        self._readers = [(BufferReader(), BufferReader()) for _ in range(scopes)]
        """By scope, for the buffers that a checkpoint has, and for the others."""
        self._digests: dict[OptimizerProbe, list[tuple[int, int, int] | None]] = {}
        """By optimizer, what the forward passes of its window began with, by scope."""

    def cover(self) -> Mapping[str, Cover]:
        subject, found = self.context.subject, self.context.between_ranks()
        if self.context.world == 1:
            pass
        elif not subject.reducers and isinstance(subject.inner, ModuleGroup):
            found = Cover("not observable", "several modules: no one forward pass after which to look")
        elif not subject.buffer_scopes:
            found = Cover("not applicable", "DDP was told not to share buffers: each rank has its own")
        elif not subject.buffers_by_name():
            found = Cover("not applicable", "the model has no buffers")
        elif subject.forward_is_compiled:
            found = Cover("not observable", "compiled code broadcasts them, and hooks in it do not run")
        return {"buffers-agree": found}

    def ranks_met(self) -> None:
        for reader in (each for pair in self._readers for each in pair):
            reader.portable(self.context.portable)

    def hooks(self) -> list[Callable[[], None]]:
        buffer_scopes = (
            enumerate(self.context.subject.buffer_scopes) if "buffers-agree" in self.context.verdicts.live else ()
        )
        taps = [(home.hooked_module, ForwardHook(partial(self._called, scope))) for scope, home in buffer_scopes]
        return [called.register_forward_pre_hook(tap).remove for called, tap in taps]

    def _called(self, scope: int) -> None:
        context = self.context
        if not torch.is_grad_enabled() or context.muted:
            return
        probes = [probe for probe in context.probes if not probe.check(Gradients).raw_hooks.started]
        kept, caches = context.subject.buffer_scopes[scope].buffers()
        # A transform of `torch.func` may call the model with buffers of its own.
        if not probes or any(map(torch._C._functorch.is_functorch_wrapped_tensor, (*kept, *caches))):
            return
        with context.added, outside_of_transforms():
            of_kept, of_caches = self._readers[scope]
            digests = (
                of_kept.digest(kept, context.updates + 1) if kept else 0,
                of_caches.digest(caches, context.updates + 1) if caches else 0,
                text_digest([tuple(each.shape) for each in caches]) if caches else 0,
            )
            for probe in probes:
                self._digests.setdefault(probe, [None] * len(self._readers))[scope] = digests

    def meanwhile(self, probe: OptimizerProbe) -> Values:
        found = self._digests.get(probe, [])
        columns = zip(*[each or (0, 0, 0) for each in found], strict=True) if any(found) else ((0,),) * 3
        return {name: chained(len(c), c) if any(c) else 0 for name, c in zip(_NAMES, columns, strict=True)}

    def new_window(self, probe: OptimizerProbe) -> None:
        self._digests.pop(probe, None)


class BufferReader:
    """The digest of a model's buffers. What is read is decided by sizes and by the update alone, so that ranks that
    miss a look still compare the same.
    """

    def __init__(self) -> None:
        self._small, self._large, self._part = Observer(stable=True), Observer(), Observer()
        self._marks: list[int] | None = None
        self._now = 0

    def portable(self, portable: bool) -> None:
        """Whether digests must be the same on all kinds of devices, because the ranks' devices differ."""
        for reader in (self._small, self._large, self._part):
            reader.portable = portable
        self._marks = None

    def digest(self, buffers: Sequence[Tensor], update: int) -> int:
        """The digest in [0, 2^64) of the small ones of `buffers`, of what was last read of the large ones, and of the
        part of these whose turn is at `update`, read now.
        """
        small, large = _by_size(buffers)
        found = [self._small.look(small).digest]
        if large:
            marks = [*map(id, large), *map(_version, large), *map(Tensor.data_ptr, large)]
            if marks != self._marks:
                self._marks, self._now = marks, self._large.look(large).digest
            found += [self._now, self._part.look(_turn(large, update)).digest]
        return chained(len(found), found)


def _by_size(buffers: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The small ones of `buffers` and the others, each in order."""
    small: list[Tensor] = []
    large: list[Tensor] = []
    room = _SMALL_IN_ALL
    for buffer in buffers:
        size = buffer.numel() * buffer.element_size()
        if size <= min(SMALL_BYTES, room):
            room -= size
            small.append(buffer)
        else:
            large.append(buffer)
    return small, large


def _turn(tensors: Sequence[Tensor], update: int) -> list[Tensor]:
    """The parts of `tensors` whose turn it is: all of them within `ROUND` updates."""
    parts, turn = list(parts_of(tensors)), update % ROUND
    if len(parts) < ROUND:
        return parts[update % len(parts)]
    return [piece for part in parts[len(parts) * turn // ROUND : len(parts) * (turn + 1) // ROUND] for piece in part]
