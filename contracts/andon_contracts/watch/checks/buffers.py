"""The buffers with which the first forward pass of an update starts: the same on every rank that shares them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from andon_contracts.laws.law import Law, Seen, difference
from andon_contracts.observe import Observer, chained
from andon_contracts.violation import Finding
from andon_contracts.watch.check import Check, Context, Cover, OptimizerProbe, Values
from andon_contracts.watch.checks.gradients import Gradients
from andon_contracts.watch.intercept import outside_of_transforms
from andon_contracts.watch.model_probe import ForwardHook, ModuleGroup
from andon_contracts.watch.values import text_digest


def _differ(seen: Seen[object], name: str) -> bool:
    # A rank without a forward pass sends 0 and is not compared.
    return name in seen.differing and len({value for value in seen.column(name) if value}) > 1


def _buffers_agree(seen: Seen[object]) -> Finding | None:
    # A buffer that no checkpoint has (a cache) may be longer on one rank than on another.
    caches = _differ(seen, "caches") and not _differ(seen, "cache shapes")
    if not (_differ(seen, "buffers") or caches):
        return None
    reshaped = seen.differing_tensors("shapes of buffers")
    odd = reshaped or seen.differing_tensors("buffers")
    what = "do not have the same shape on all ranks" if reshaped else "are not the same"
    name = "buffers" if _differ(seen, "buffers") else "caches"
    found = difference(Seen(seen.observations, None), name, f"the buffers with which the forward pass began {what}")
    # A forward pass begins with the buffers that the update before it left.
    tensor = (*odd, "buffers")[0]
    return Finding(found.seen, max(found.step - 1, 0), found.ranks, tensor, likely="" if reshaped else None)


class Buffers(Check):
    before_laws = (Law("buffers-agree/before", ("buffers", "caches"), _buffers_agree, by_tensor=("buffers", "caches")),)

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._readers = [(Observer(), Observer()) for _ in range(len(context.subject.buffer_scopes))]
        """By scope: of the buffers that a checkpoint has, and of the others."""
        self.observers = [each for pair in self._readers for each in pair]
        self._digests: dict[OptimizerProbe, list[tuple[int, int, int]]] = {}
        """By optimizer and scope: the values at the first forward pass of its window."""

    def cover(self) -> Mapping[str, Cover]:
        subject, found = self.context.subject, self.context.between_ranks()
        if self.context.world == 1:
            pass
        elif not subject.reducers and isinstance(subject.inner, ModuleGroup):
            found = Cover("not observable", "several modules: no single forward pass before which to read the buffers")
        elif not subject.buffer_scopes:
            found = Cover("not applicable", "DDP(broadcast_buffers=False): each rank has its own buffers")
        elif not subject.buffers_by_name():
            found = Cover("not applicable", "the model has no buffers")
        elif subject.forward_is_compiled:
            found = Cover("not observable", "compiled code broadcasts the buffers, and hooks do not run in it")
        return {"buffers-agree": found}

    def hooks(self) -> list[Callable[[], None]]:
        if "buffers-agree" not in self.context.verdicts.live:
            return []
        return [
            scope.hooked_module.register_forward_pre_hook(ForwardHook(partial(self._called, index))).remove
            for index, scope in enumerate(self.context.subject.buffer_scopes)
        ]

    def _called(self, scope: int) -> None:
        context = self.context
        if not context.full or context.muted or not torch.is_grad_enabled():
            return
        probes = [probe for probe in context.probes if not probe.check(Gradients).raw_hooks.started]
        saved, caches = context.subject.buffer_scopes[scope].buffers()
        # A transform of `torch.func` may call the model with other buffers.
        if not probes or any(map(torch._C._functorch.is_functorch_wrapped_tensor, (*saved, *caches))):
            return
        with context.timed(), outside_of_transforms():
            of_saved, of_caches = self._readers[scope]
            digests = (
                of_saved.look(saved).digest if saved else 0,
                of_caches.look(caches).digest if caches else 0,
                text_digest([tuple(each.shape) for each in caches]) if caches else 0,
            )
            for probe in probes:
                self._digests.setdefault(probe, [(0, 0, 0)] * len(self._readers))[scope] = digests

    def meanwhile(self, probe: OptimizerProbe) -> Values:
        columns = zip(*self._digests.get(probe, [(0, 0, 0)]), strict=True)
        names = ("buffers", "caches", "cache shapes")
        return {name: chained(len(c), c) if any(c) else 0 for name, c in zip(names, columns, strict=True)}

    def new_window(self, probe: OptimizerProbe) -> None:
        self._digests.pop(probe, None)
