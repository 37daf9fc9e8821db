"""The exchange of a divided optimizer: gradients during the backward pass, weights during the next forward pass.

Invariant: all ranks send the same buckets in the same order, because each is a collective. On a GPU a side stream sends
them: each bucket of the gradient when the rank's last pass has computed it, and the weights after the update, while
the next pass runs. Each layer waits for its own weights. Passes record and await only external events, so a pass that
is captured as a CUDA graph does so at every replay.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from andon.backend.base import Backend
from andon.step.flat import FlatParameters, Shards
from andon.step.reduce import Roots, TreeReduction

_BEFORE = -1
"""The owner of weights outside all layers. A pass waits for these before it starts."""


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The modules in the outermost lists of `model`, in order."""
    return [
        layer
        for child in model.children()
        for layer in (child if isinstance(child, nn.ModuleList) else layers_of(child))
    ]


class SliceExchange:
    """Reduces the gradient to this rank's slice, and gathers the weights from all slices. For one local rank.

    overlapping: during passes; otherwise on the caller's stream. On a CPU nothing overlaps.
    """

    def __init__(
        self,
        reduction: TreeReduction,
        backend: Backend,
        parameters: FlatParameters,
        shards: Shards,
        gradient: torch.Tensor,
        layers: Sequence[nn.Module],
        *,
        overlapping: bool,
    ) -> None:
        """gradient: [shards.length], where to write the reduced slice. layers: in the order in which the model runs
        them; each waits for its own weights only."""
        self.overlapping, self._device = overlapping, gradient.device
        self._reduction, self._backend, self._parameters, self._shards = reduction, backend, parameters, shards
        self._parts = dict(enumerate(shards.cut(gradient)))
        buckets = range(len(shards.buckets))
        self._unsent: list[int] | None = None  # buckets of the gradient; None: `reduce` was not called
        self._stream = torch.cuda.Stream(gradient.device) if gradient.is_cuda and overlapping else None
        self._complete = [torch.cuda.Event(external=True) for _ in buckets if self._stream]
        self._gathered = [torch.cuda.Event(external=True) for _ in buckets if self._stream]
        # For each bucket the number of its parameters, and of those that the running pass has no gradient of yet.
        self._users, self._missing = Counter[int](), Counter[int]()
        layer_of = {id(each): n for n, layer in reversed([*enumerate(layers)]) for each in layer.parameters()}
        self._owners = [layer_of.get(id(each), _BEFORE) for each in parameters.parameters]
        spans = [shards.buckets_of(slot.start, slot.end) for slot in parameters.slots]
        first = {b: min(n for n, span in zip(self._owners, spans, strict=True) if b in span) for b in buckets}
        # The order of gathering is that of the layers, and that of reducing is the reverse.
        self._turns = sorted(buckets, key=first.__getitem__)
        # For each owner the turn in which its last weights are gathered.
        self._awaited: dict[int, int] = {_BEFORE: 0}
        for owner, span in zip(self._owners, spans, strict=True):
            self._awaited[owner] = max(self._awaited.get(owner, 0), *map(self._turns.index, span))
        self._reads = _Reads(parameters, self._owners) if layers and self._stream else None
        if self._stream is None:
            return
        for event in self._gathered:
            event.record(torch.cuda.current_stream(self._device))
        for parameter, span in zip(parameters.parameters, spans, strict=True):
            self._users.update(span)
            hook: Any = functools.partial(self._accumulated, span)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(functools.partial(self._enter, number))

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Context manager of a pass: wait for the weights that it reads, and record when its gradients are complete."""
        self._await(_BEFORE)
        self._missing, reads = self._users.copy(), self._reads
        try:
            with nullcontext() if reads is None else reads:
                yield
            for bucket in +self._missing:  # of weights that the pass did not use
                self._record(bucket)
        finally:
            self._missing = Counter()
        if reads is not None and reads.seen:
            self._reads = None
            self._awaited[_BEFORE] = max(self._awaited[owner] for owner in {_BEFORE, *reads.early})

    def _await(self, owner: int) -> None:
        if self._gathered and owner in self._awaited:
            # Until a pass has been observed, for all weights.
            turn = self._awaited[owner] if self._reads is None else -1
            torch.cuda.current_stream(self._device).wait_event(self._gathered[turn])

    def _enter(self, number: int, layer: nn.Module, inputs: object) -> None:
        if self._reads is not None:
            self._reads.entered.add(number)
        self._await(number)

    def _accumulated(self, buckets: Sequence[int], parameter: nn.Parameter) -> None:
        for bucket in buckets if self._missing else ():
            self._missing[bucket] -= 1
            if self._missing[bucket] <= 0:
                self._record(bucket)

    def _record(self, bucket: int) -> None:
        if self._missing[bucket] < 0 and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a weight receives its gradient in several parts")  # a graph records an event once
        self._complete[bucket].record(torch.cuda.current_stream(self._device))

    def reduce(self, roots: Roots, lefts: Sequence[torch.Tensor] = (), last: torch.Tensor | None = None) -> None:
        """Start to reduce all buckets. last: the gradient of the last pass, to be added to `lefts`, from right to left,
        of which the first is then a root; its buckets are awaited one by one. None: `roots` are complete. Collective.
        """
        unsent = self._unsent = [*reversed(self._turns)] if self._unsent is None else self._unsent
        if self._stream is not None and last is None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):  # None: no change
            while unsent:
                bucket = unsent[0]
                if last is not None:
                    if self._stream is not None:
                        self._stream.wait_event(self._complete[bucket])
                    value = self._shards.bucket_of(last, bucket)
                    for left in reversed(lefts):
                        value = self._shards.bucket_of(left, bucket).add_(value)
                received = self._reduction.exchange(roots, *self._shards.buckets[bucket])
                unsent.pop(0)
                if bucket in self._parts:
                    part = self._parts[bucket]
                    part.copy_(self._reduction.finish(received)[: part.numel()])

    def finish(self, roots: Roots) -> None:
        """Make the current stream wait for all that was sent, after sending buckets of `roots` that `reduce` did not:
        if it was not called, or failed, because the other ranks wait for them."""
        if self._unsent != []:
            self.reduce(roots)
        self._unsent = None
        self.settle()

    def settle(self) -> None:
        """Make the current stream wait for all that was sent or computed aside."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context manager: the next pass does not wait for this work, except for the weights; `settle` does."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):  # None: no change
            yield

    def gather(self) -> None:
        """Copy the weights of every rank's slice to all ranks. Collective."""
        for turn, bucket in enumerate(self._turns):
            rows = self._shards.bucket_of(self._parameters.storage, bucket).view(self._shards.world, -1)
            self._backend.fill([rows])
            if self._gathered:
                self._gathered[turn].record(torch.cuda.current_stream(self._device))


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Observes a pass. early: owners whose weights are read before their layer runs. Later passes wait for these
    weights before they start."""

    def __init__(self, parameters: FlatParameters, owners: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entered, self.early, self.seen = set[int](), set[int](), False
        self._owners, self._starts = owners, [slot.start for slot in parameters.slots]
        self._storage = parameters.storage.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() == self._storage:
                owner = self._owners[bisect_right(self._starts, each.storage_offset()) - 1]
                self.seen = True
                self.early |= {owner} - self.entered - {_BEFORE}
        return func(*args, **(kwargs or {}))
