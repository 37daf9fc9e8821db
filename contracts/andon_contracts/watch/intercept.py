"""The loop's own calls, seen while a watch is open: backward passes, clipping, reductions through `torch.distributed`,
loss scaling, and what torch's data loaders draw and yield.

The calls are made as before; the listeners are told first, each that was there when the call was made: one that is told
may begin or end to listen. A name that a script imported earlier (`from torch.nn.utils import clip_grad_norm_`) is seen
too, because it calls the function that is replaced here; for `from torch.nn.utils import clip_grads_with_norm_` and
`from torch.distributed import all_reduce` that is not so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad
from torch.utils.data import dataloader

from andon_contracts.liveness.halt import HaltSignal
from andon_contracts.stacks import line_here
from andon_contracts.watch.gradient_scale import Passes
from andon_contracts.watch.loaders import Yielded, drawn, ended, yielded
from andon_contracts.watch.optimizer_probe import OptimizerProbe
from andon_contracts.watch.practice import Practice


class Listener:
    """What can be heard of the loop's calls; a listener overrides the methods that it needs."""

    def clipping(self, parameters: Sequence[torch.Tensor], norm: torch.Tensor | None) -> None:
        """The gradients of `parameters`, whose norm is `norm` (None: clipped by value), are about to be clipped."""

    def updates_of(self, optimizer: object) -> int | None:
        """The updates of `optimizer` so far; None if it is not listened to."""
        return None

    def skipped(self, optimizer: object) -> None:
        """A loss scaler has left out an update of `optimizer`."""

    def unscaling(self, scaler: object, optimizer: object) -> None:
        """A loss scaler is about to divide the gradients of `optimizer`."""

    def reducing(self, tensor: torch.Tensor, group: object, waits: bool) -> None:
        """`tensor` is about to be reduced over `group`; `resumed` follows, if the loop waits for it."""

    def resumed(self) -> None:
        """What began with `reducing` is over, or has failed."""

    def lost(self, error: BaseException) -> None:
        """A reduction raised `error`."""

    def yielded(self, batch: Yielded) -> None:
        """A data loader has given the loop a batch, perhaps ahead of its use."""

    def backward(self, loss: torch.Tensor | None) -> None:
        """The backward pass of `loss` begins; None: of more than one tensor, or with a gradient of its own."""

    def backward_over(self) -> None:
        """It is over, or has failed."""


_listeners: list[Listener] = []
_originals: list[tuple[Any, str, Callable[..., Any]]] = []


def listen(listener: Listener) -> Callable[[], None]:
    """Tell `listener` from now on; what ends it."""
    if not _listeners:
        _install()
    _listeners.append(listener)
    return functools.partial(unlisten, listener)


def unlisten(listener: Listener) -> None:
    """No longer tell `listener`; with the last one everything is as it was."""
    if listener in _listeners:
        _listeners.remove(listener)
        while _originals and not _listeners:
            home, name, original = _originals.pop()
            setattr(home, name, original)


def _replace(home: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(home, name, None)
    if original is not None:
        _originals.append((home, name, original))
        setattr(home, name, around(original))


def _install() -> None:
    _replace(clip_grad, "_clip_grads_with_norm_", _around_clip)
    _replace(torch.nn.utils, "clip_grads_with_norm_", _around_clip)
    for home in (clip_grad, torch.nn.utils):
        _replace(home, "clip_grad_value_", _around_value_clip)
    _replace(torch.amp.GradScaler, "step", _around_scaled_step)
    _replace(torch.amp.GradScaler, "unscale_", _around_unscale)
    for home in (dist, dist.distributed_c10d):
        _replace(home, "all_reduce", _around_reduce)
    _replace(torch.autograd, "backward", _around_backward)
    _replace(dataloader._BaseDataLoaderIter, "_next_index", _around_draw)
    _replace(dataloader._BaseDataLoaderIter, "__next__", _around_yield)


def _listed(parameters: Any) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _around_clip(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(parameters: Any, max_norm: float, total_norm: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = _listed(parameters)
        for listener in list(_listeners):
            listener.clipping(found, total_norm)
        return original(found, max_norm, total_norm, *args, **kwargs)

    return clip


def _around_scaled_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        # A scaler tells nobody that it left an update out; that the count stood still does.
        before = [(listener, listener.updates_of(optimizer)) for listener in list(_listeners)]
        result = original(scaler, optimizer, *args, **kwargs)
        for listener, updates in before:
            if updates is not None and listener.updates_of(optimizer) == updates:
                listener.skipped(optimizer)
        return result

    return step


def _around_unscale(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def unscale(scaler: Any, optimizer: Any) -> Any:
        for listener in list(_listeners):
            listener.unscaling(scaler, optimizer)
        return original(scaler, optimizer)

    return unscale


def _around_value_clip(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        found = _listed(parameters)
        for listener in list(_listeners):
            listener.clipping(found, None)
        return original(found, *args, **kwargs)

    return clip


def _around_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        for listener in list(_listeners):
            listener.reducing(tensor, group, not async_op)
        try:
            return original(tensor, op, group, async_op)
        except RuntimeError as error:
            for listener in list(_listeners):
                listener.lost(error)
            raise
        finally:
            for listener in list(_listeners):
                listener.resumed()

    return reduce


_backward_passes: list[object] = []
"""Those that are under way: a checkpoint makes one within one, of a part of the same loss."""


def _around_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        if _backward_passes:
            return original(tensors, grad_tensors, *args, **kwargs)
        alone = isinstance(tensors, torch.Tensor) and grad_tensors is None
        for listener in list(_listeners):
            listener.backward(tensors if alone else None)
        _backward_passes.append(tensors)
        try:
            return original(tensors, grad_tensors, *args, **kwargs)
        finally:
            _backward_passes.pop()
            for listener in list(_listeners):
                listener.backward_over()

    return backward


def _around_draw(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def draw(iterator: Any) -> Any:
        index = original(iterator)
        drawn(iterator, index)
        return index

    return draw


def _around_yield(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def following(iterator: Any) -> Any:
        try:
            batch = original(iterator)
        except StopIteration:
            ended(iterator)
            raise
        # Without gradients it is an evaluation, whose rows nobody trains on.
        if torch.is_grad_enabled():
            found = yielded(iterator, batch)
            for listener in list(_listeners):
                listener.yielded(found)
        return batch

    return following


class Hearing(Listener):
    """What a watch hears of the loop's own calls, handed on to the optimizers that they concern."""

    def __init__(
        self, probes: Mapping[int, OptimizerProbe], signal: HaltSignal | None, practice: Practice, passes: Passes
    ) -> None:
        """probes: by the identity of their optimizer. signal: what stops all ranks, and knows who waits for whom."""
        self._passes = passes
        self._probes = probes
        self._held = frozenset[int]().union(*(probe.held for probe in probes.values()))
        self._practice = practice
        self._signal = signal
        self._begun = None if signal is None else signal.begun

    def clipping(self, parameters: Sequence[torch.Tensor], norm: torch.Tensor | None) -> None:
        """The loop is about to clip."""
        self._practice.clips.clipping([each for each in parameters if id(each) in self._held])
        for probe in self._probes.values():
            probe.clipping(parameters, norm)

    def updates_of(self, optimizer: object) -> int | None:
        """The updates of `optimizer` so far; None for one that is not watched."""
        probe = self._probes.get(id(optimizer))
        return None if probe is None else probe.updates

    def skipped(self, optimizer: object) -> None:
        """A loss scaler has left out an update."""
        self._practice.clips.clear()
        self._probes[id(optimizer)].skip()

    def reducing(self, tensor: torch.Tensor, group: object, waits: bool) -> None:
        """The loop is about to reduce."""
        self._practice.clips.reducing(tensor, group)
        if self._begun is not None:
            self._begun.reducing(group, waits=waits)
        for probe in self._probes.values():
            probe.reducing(tensor, group)

    def unscaling(self, scaler: object, optimizer: object) -> None:
        """A loss scaler is about to divide."""
        self._practice.clips.unscaling(scaler, optimizer)

    def resumed(self) -> None:
        """The call that reduces is over."""
        if self._begun is not None:
            self._begun.resumed()

    def lost(self, error: BaseException) -> None:
        """A reduction of the loop failed."""
        if self._signal is not None:
            self._signal.lost(error)

    def yielded(self, batch: Yielded) -> None:
        """A data loader has given the loop a batch."""
        self._practice.yielded(batch)

    def backward(self, loss: torch.Tensor | None) -> None:
        """A backward pass begins."""
        if not any(probe.taps.muted for probe in self._probes.values()):
            self._passes.begins(loss, line_here())
            for probe in self._probes.values():
                probe.taps.arrived = False
                probe.taps.called()

    def backward_over(self) -> None:
        """It is over."""
        if self._passes.now is not None:
            for probe in self._probes.values():
                probe.taps.call_over()
                probe.scale.passed(probe.taps.arrived)
        self._passes.ends()
