"""The loop's own calls of torch, seen while a watch is open: backward, clip, all-reduce, loss scaling, data loaders.

Each call is made as before, after the listeners were told. `from torch.nn.utils import clip_grad_norm_` is seen too,
because it calls a function that is replaced here; `from torch.nn.utils import clip_grads_with_norm_` and
`from torch.distributed import all_reduce` are not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad
from torch.utils.data import dataloader

from andon_contracts.watch.loaders import Yielded, note_end, note_index, yielded


class Listener:
    """Is told of the loop's calls. A listener overrides what it needs."""

    def clipping(self, parameters: Sequence[torch.Tensor], norm: torch.Tensor | None) -> None:
        """The gradients of `parameters` are about to be clipped. norm: theirs; None: they are clipped by value."""

    def updates_of(self, optimizer: object) -> int | None:
        """The updates of `optimizer` so far; None: this listener does not follow it."""

    def skipped(self, optimizer: object) -> None:
        """A loss scaler skipped an update of an optimizer that this listener follows."""

    def unscaling(self, scaler: Any, optimizer: Any) -> None:
        """A loss scaler is about to divide the gradients of `optimizer`."""

    def reducing(self, tensor: torch.Tensor, group: object, waits: bool) -> None:
        """`tensor` is about to be all-reduced over `group`. waits: the call blocks; `resumed` follows."""

    def resumed(self) -> None:
        """The all-reduce returned or failed."""

    def lost(self, error: BaseException) -> None:
        """An all-reduce raised `error`."""

    def yielded(self, batch: Yielded) -> None:
        """A data loader gave the loop a batch, perhaps before it is used."""

    def backward(self, loss: torch.Tensor | None) -> None:
        """The backward pass of `loss` begins. None: of several tensors, or with a gradient given by the loop."""

    def backward_over(self) -> None:
        """The backward pass returned or failed."""


_listeners: list[Listener] = []
_originals: list[tuple[Any, str, Callable[..., Any]]] = []


def listen(listener: Listener) -> Callable[[], None]:
    """Tell `listener` from now on. Returns what ends that."""
    if not _listeners:
        for home, name, around in _PATCHES:
            original = getattr(home, name, None)
            if original is not None:
                _originals.append((home, name, original))
                setattr(home, name, _wrapped(original, around))
    _listeners.append(listener)
    return functools.partial(unlisten, listener)


def unlisten(listener: Listener) -> None:
    """Stop telling `listener`. After the last one torch's functions are restored."""
    if listener in _listeners:
        _listeners.remove(listener)
        while _originals and not _listeners:
            home, name, original = _originals.pop()
            setattr(home, name, original)


def _wrapped(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)  # a function, so that it binds as a method where it replaces one
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return call


def _told() -> list[Listener]:
    """The listeners of one call: a listener that is told may add or remove some."""
    return list(_listeners)


def _listed(parameters: Any) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _clip(original: Any, parameters: Any, max_norm: float, total_norm: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    found = _listed(parameters)
    for listener in _told():
        listener.clipping(found, total_norm)
    return original(found, max_norm, total_norm, *args, **kwargs)


def _clip_by_value(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    found = _listed(parameters)
    for listener in _told():
        listener.clipping(found, None)
    return original(found, *args, **kwargs)


def _scaled_step(original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    # A scaler tells nobody that it skipped an update, but the count of updates stands still.
    before = [(listener, listener.updates_of(optimizer)) for listener in _told()]
    result = original(scaler, optimizer, *args, **kwargs)
    for listener, updates in before:
        if updates is not None and listener.updates_of(optimizer) == updates:
            listener.skipped(optimizer)
    return result


def _unscale(original: Any, scaler: Any, optimizer: Any) -> Any:
    for listener in _told():
        listener.unscaling(scaler, optimizer)
    return original(scaler, optimizer)


def _all_reduce(
    original: Any, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    for listener in _told():
        listener.reducing(tensor, group, not async_op)
    try:
        return original(tensor, op, group, async_op)
    except RuntimeError as error:
        for listener in _told():
            listener.lost(error)
        raise
    finally:
        for listener in _told():
            listener.resumed()


_backward_passes: list[object] = []
"""Those that run: a checkpoint starts one inside another, for a part of the same loss, which is not told."""


def _backward(original: Any, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
    if _backward_passes:
        return original(tensors, grad_tensors, *args, **kwargs)
    alone = isinstance(tensors, torch.Tensor) and grad_tensors is None
    for listener in _told():
        listener.backward(tensors if alone else None)
    _backward_passes.append(tensors)
    try:
        return original(tensors, grad_tensors, *args, **kwargs)
    finally:
        _backward_passes.pop()
        for listener in _told():
            listener.backward_over()


def _draw(original: Any, iterator: Any) -> Any:
    index = original(iterator)
    note_index(iterator, index)
    return index


def _yield(original: Any, iterator: Any) -> Any:
    try:
        batch = original(iterator)
    except StopIteration:
        note_end(iterator)
        raise
    # Without gradients the loop evaluates: it does not train on these rows.
    if torch.is_grad_enabled():
        found = yielded(iterator, batch)
        for listener in _told():
            listener.yielded(found)
    return batch


_PATCHES: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (clip_grad, "_clip_grads_with_norm_", _clip),
    (torch.nn.utils, "clip_grads_with_norm_", _clip),
    (clip_grad, "clip_grad_value_", _clip_by_value),
    (torch.nn.utils, "clip_grad_value_", _clip_by_value),
    (torch.amp.GradScaler, "step", _scaled_step),
    (torch.amp.GradScaler, "unscale_", _unscale),
    (dist, "all_reduce", _all_reduce),
    (dist.distributed_c10d, "all_reduce", _all_reduce),
    (torch.autograd, "backward", _backward),
    (dataloader._BaseDataLoaderIter, "_next_index", _draw),
    (dataloader._BaseDataLoaderIter, "__next__", _yield),
)
"""What is replaced: its home, its name, and the function that is called with the original and the arguments."""
