"""The loop's own calls of torch while a watch is open: backward, clip, all-reduce, loss scaling, data loaders.

Each patched function notifies the listeners, then calls the original. A `clip_grad_norm_` that the loop imported by
name is covered, because it calls a patched function. Imported `clip_grads_with_norm_` and `all_reduce` are not.

A data loader's batch is known by the indices of its rows. With workers an iterator draws indices ahead, and with
`in_order=False` it yields batches in another order. So an index is stored under the iterator's own number for it, and
it belongs to the yielded batch once the iterator has dropped that number.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import clip_grad
from torch.utils.data import RandomSampler, Subset, dataloader
from torch.utils.data.distributed import DistributedSampler

from andon_contracts.digest import mix64
from andon_contracts.legible import log_once
from andon_contracts.violation import first_line
from andon_contracts.watch.exchange import element_bits

_SHUFFLERS = ("SeedableRandomSampler", "SubsetRandomSampler")
"""Samplers, besides `RandomSampler` and `DistributedSampler`, that promise a new permutation in each pass."""
_REPEATS = ("repetitions", "num_repeats")
"""The attribute with the number of repetitions, in samplers that repeat on purpose (RASampler, RepeatAugSampler)."""
_SAMPLED, _REMEMBERED, _DEEPEST = 64, 64, 4
"""Elements sampled of a row's content; rows of a pass whose order is stored; levels of nesting that are searched."""
_LONGEST, _IGNORED = 4096, -100
"""The most integers of a row that count as tokens, and the label that torch's losses ignore."""


class Listener:
    """Receives the loop's calls. A listener overrides the methods that it needs."""

    def clipping(self, parameters: Sequence[Tensor], norm: Tensor | None) -> None:
        """The gradients of `parameters` are about to be clipped. norm: their norm; None: they are clipped by value."""

    def limiting(self, parameters: Sequence[Tensor]) -> None:
        """The gradients of `parameters` are about to be clipped to a finite limit. Called after `clipping`."""

    def updates_of(self, optimizer: object) -> int | None:
        """The updates of `optimizer` so far; None: this listener does not follow it."""

    def skipped(self, optimizer: object) -> None:
        """A loss scaler skipped an update of an optimizer that this listener follows."""

    def unscaling(self, scaler: Any, optimizer: Any) -> None:
        """A loss scaler is about to divide the gradients of `optimizer`."""

    def reducing(self, tensor: Tensor, group: object, waits: bool) -> None:
        """`tensor` is about to be all-reduced over `group`. waits: the call blocks; `resumed` follows."""

    def resumed(self) -> None:
        """The all-reduce returned or failed."""

    def lost(self, error: BaseException) -> None:
        """An all-reduce raised `error`."""

    def yielded(self, batch: Yielded) -> None:
        """A data loader yielded a batch to the loop, perhaps long before the loop uses it."""

    def backward(self, loss: Tensor | None) -> None:
        """The backward pass of `loss` begins. None: of several tensors, or with a gradient given by the loop."""

    def backward_over(self) -> None:
        """The backward pass returned or failed."""


_listeners: list[Listener] = []
"""Most events iterate over a copy, because a listener may add or remove listeners."""
_originals: list[tuple[Any, str, Callable[..., Any]]] = []


def listen(*listeners: Listener) -> Callable[[], None]:
    """Pass the loop's calls to `listeners` from now on, in this order. Returns a function that removes them."""
    if not _listeners:
        for owner, name, around in _PATCHES:
            original = getattr(owner, name, None)
            if original is not None:
                _originals.append((owner, name, original))
                setattr(owner, name, _wrapped(original, around))
    _listeners.extend(listeners)
    return functools.partial(unlisten, *listeners)


def unlisten(*listeners: Listener) -> None:
    """Remove `listeners`. Without any listener torch's functions are restored."""
    _listeners[:] = [each for each in _listeners if each not in listeners]
    while _originals and not _listeners:
        setattr(*_originals.pop())


def _wrapped(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)  # a function, so that it binds as a method if it replaces one
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return call


def _clip(original: Any, parameters: Any, max_norm: float, total_norm: Tensor, *args: Any, **kwargs: Any) -> Any:
    clipped = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for each in list(_listeners):
        each.clipping(clipped, total_norm)
        if float(max_norm) < math.inf:  # else the loop only measures
            each.limiting(clipped)
    return original(clipped, max_norm, total_norm, *args, **kwargs)


def _clip_by_value(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    clipped = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for each in list(_listeners):
        each.clipping(clipped, None)
        each.limiting(clipped)
    return original(clipped, *args, **kwargs)


def _scaled_step(original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    # A scaler does not report that it skipped an update, but the count of updates does not rise.
    before = [(each, each.updates_of(optimizer)) for each in _listeners]
    result = original(scaler, optimizer, *args, **kwargs)
    for each, updates in before:
        if updates is not None and each.updates_of(optimizer) == updates:
            each.skipped(optimizer)
    return result


def _unscale(original: Any, scaler: Any, optimizer: Any) -> Any:
    for each in list(_listeners):
        each.unscaling(scaler, optimizer)
    return original(scaler, optimizer)


def _all_reduce(
    original: Any, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    listeners = list(_listeners)
    for each in listeners:
        each.reducing(tensor, group, not async_op)
    try:
        return original(tensor, op, group, async_op)
    except RuntimeError as error:
        for each in listeners:
            each.lost(error)
        raise
    finally:
        for each in listeners:
            each.resumed()


_backward_passes: list[object] = []
"""The passes that run now. An activation checkpoint starts one inside another; listeners see only the outer one."""


def _backward(original: Any, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
    if _backward_passes:
        return original(tensors, grad_tensors, *args, **kwargs)
    loss = tensors if isinstance(tensors, Tensor) and grad_tensors is None else None
    heard = list(_listeners)
    for each in heard:
        each.backward(loss)
    _backward_passes.append(tensors)
    try:
        return original(tensors, grad_tensors, *args, **kwargs)
    finally:
        _backward_passes.pop()
        for each in [each for each in _listeners if each in heard]:
            each.backward_over()


def _draw_index(original: Any, iterator: Any) -> Any:
    index = original(iterator)
    # Only an iterator with workers numbers its indices. Without workers one batch is outstanding.
    _indices.setdefault(iterator, {})[getattr(iterator, "_send_idx", 0)] = index
    return index


def _yield(original: Any, iterator: Any) -> Any:
    try:
        batch = original(iterator)
    except StopIteration:
        if iterator in _passes:
            _passes[iterator].finished = True
        raise
    # Without gradients the loop evaluates: it does not train on these rows.
    if torch.is_grad_enabled():
        described = yielded(iterator, batch)
        for each in list(_listeners):
            each.yielded(described)
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
    (dataloader._BaseDataLoaderIter, "_next_index", _draw_index),
    (dataloader._BaseDataLoaderIter, "__next__", _yield),
)
"""What is replaced: its owner, its name, and the function that receives the original and the arguments."""


# the batches of data loaders


@dataclass(eq=False)
class LoaderPass:
    """One pass of a loop over a data loader, on this rank.

    number: 1 for the first pass over this sampler. size: the rows of the data set; 0: unknown. shuffles: the sampler
    promises another permutation in each pass. most_repeats: how often a row may occur; 0: unknown or unlimited.
    order: the first rows, in order. batches: the number that were trained on. rows: the number that were yielded.
    finished: the loader reached its end. iterator: returns the iterator, or None once the loop has dropped it.
    length: about how many rows this rank gets, by the length of the sampler; 0: unknown. even: all ranks get as many.
    ahead: how many batches the loop draws before it trains on the first. unclear: which ones it trains on is not known.
    """

    number: int = 1
    size: int = 0
    shuffles: bool = False
    most_repeats: int = 0
    sampler: str = ""
    before: LoaderPass | None = None
    order: list[int] = field(default_factory=list)
    batches: int = 0
    rows: int = 0
    finished: bool = False
    iterator: Callable[[], Any] = lambda: None
    length: int = 0
    even: bool = False
    ahead: int = 0
    unclear: bool = False


@dataclass(eq=False)
class Yielded:
    """A batch of a data loader. keys: each row's index and content, hashed; None if they cannot be read.

    storage_ids: the storages of its tensors, by which a forward pass recognizes it. storages: these references keep an
    address from being reused for the next batch. so_far: the rows that the pass has yielded, with this batch.
    """

    source: LoaderPass
    ids: tuple[int, ...] | None
    keys: Tensor | None
    storage_ids: frozenset[int]
    storages: tuple[StorageWeakRef, ...]
    so_far: int = 0


_indices: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()
"""By iterator and its number for them, the indices that it drew and that no yielded batch has used."""
_passes: weakref.WeakKeyDictionary[Any, LoaderPass] = weakref.WeakKeyDictionary()
"""The present pass of each iterator."""
_latest: weakref.WeakKeyDictionary[Any, LoaderPass] = weakref.WeakKeyDictionary()
"""The latest pass over each sampler."""


def yielded(iterator: Any, batch: object) -> Yielded:
    """Describes the batch that the loop receives now. Never raises: the rows of an unreadable batch stay unknown."""
    try:
        # A number is outstanding until its batch was yielded, in whatever order workers answer.
        drawn, outstanding = _indices.get(iterator, {}), getattr(iterator, "_task_info", {})
        indices = [drawn.pop(number) for number in list(drawn) if number not in outstanding]
        ids = _ids(indices[0] if len(indices) == 1 else None, iterator._dataset)
        source = _passes.get(iterator)
        if source is None or iterator._num_yielded == 1:
            source = _passes[iterator] = _new_pass(iterator)
            with suppress(Exception):  # an infinite sampler has no length
                source.length = len(iterator._index_sampler) * len(ids or ())
        tensors = list(tensors_in(batch))
        keys = None if ids is None else row_keys(ids, tensors)
        source.rows += len(ids or ())
        source.order += (ids or ())[: _REMEMBERED - len(source.order)]
        storages = (each.untyped_storage() for each in tensors if each.numel())
        references = tuple(StorageWeakRef(each) for each in storages)  # type: ignore[no-untyped-call]
        return Yielded(source, ids, keys, storage_ids(tensors), references, source.rows)
    except Exception as error:  # noqa: BLE001 - datasets, samplers and batches are the loop's own and may raise anything
        report_unreadable("a batch of a data loader", error)
        return Yielded(LoaderPass(), None, None, frozenset(), ())


def report_unreadable(what: str, error: Exception) -> None:
    """Print once that the rows of this run are not checked, because reading `what` raised `error`."""
    why = f"cannot read {what} ({first_line(error)})"
    log_once(what, f"andon.watch: {why}; rows are not checked in this run")


def is_running(source: LoaderPass) -> bool:
    """Whether the pass may yet yield a batch or end."""
    iterator = source.iterator()
    return not source.finished and iterator is not None and _passes.get(iterator) is source


def _ids(index: Any, dataset: Any) -> tuple[int, ...] | None:
    try:
        ids = [each.__index__() for each in (index if isinstance(index, list | tuple) else [index])]
        while isinstance(dataset, Subset):
            ids = [dataset.indices[each].__index__() for each in ids]
            dataset = dataset.dataset
    except (AttributeError, TypeError, IndexError):
        return None  # keys that are not integers, or an iterable dataset, which has none
    return tuple(ids)


def _new_pass(iterator: Any) -> LoaderPass:
    sampler = inner = iterator._index_sampler
    try:
        before = _latest.get(sampler)
    except TypeError:  # a list of indices, for example: weak references to it are impossible
        before = None
    if before is not None and not before.batches:
        before = before.before  # nothing was trained on: the loop looked at a first batch, or evaluated
    for _ in range(_DEEPEST):  # find the sampler of rows inside batch samplers and distributing samplers
        # Not by `or`: the truth of a sampler is its length, which it may not have.
        inside = (getattr(inner, name, None) for name in ("batch_sampler", "sampler"))
        inner = next((each for each in inside if each is not None), inner)
    if isinstance(inner, DistributedSampler):
        shuffles = bool(inner.shuffle) and type(inner) is DistributedSampler
    elif type(inner) is RandomSampler:
        shuffles = not inner.replacement
    else:
        shuffles = type(inner).__name__ in _SHUFFLERS
    try:
        size = len(iterator._dataset)
    except Exception:  # noqa: BLE001 - an iterable dataset has no length, and a custom sampler does not need one
        size = 0
    repeats = next((getattr(inner, name) for name in _REPEATS if isinstance(getattr(inner, name, None), int)), 1)
    most_repeats = 1 if shuffles or type(inner).__name__ == "SequentialSampler" else repeats if repeats > 1 else 0
    number = 1 if before is None else before.number + 1
    source = LoaderPass(number, size, shuffles, most_repeats, type(inner).__name__, before)
    source.iterator, source.even = weakref.ref(iterator), isinstance(inner, DistributedSampler)
    if before is not None:
        before.before = None  # only the pass before is needed: drop older ones
    with suppress(TypeError):
        _latest[sampler] = source
    return source


def tensors_in(value: object, depth: int = _DEEPEST) -> Iterator[Tensor]:
    """The tensors in a batch or in the arguments of a call, in order, detached."""
    if isinstance(value, Tensor):
        # A transform of `torch.func` wraps the tensor that has memory.
        while torch._C._functorch.is_functorch_wrapped_tensor(value):
            value = torch._C._functorch.get_unwrapped(value)
        if value.layout == torch.strided and not value.is_meta and not value.is_nested:
            yield value.detach()
    elif depth and isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(each, depth - 1)


def outside_of_transforms() -> AbstractContextManager[object]:
    """Context manager: `torch.func` transforms (`vmap`, `grad`) do not apply to operations in it."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    return temporarily_clear_interpreter_stack()


def storage_ids(tensors: Sequence[Tensor]) -> frozenset[int]:
    """Identifies the storages of `tensors`. A view has its tensor's storage, a copy has its own."""
    return frozenset(each.untyped_storage()._cdata for each in tensors if each.numel())


def row_keys(ids: Sequence[int], tensors: Sequence[Tensor]) -> Tensor | None:
    """int64 [rows]: a key of each row's index and content; None if no tensor on the CPU has as many rows."""
    own = [t for t in tensors if t.dim() and t.shape[0] == len(ids) and t.device.type == "cpu" and t.numel()]
    if not own or not ids:
        return None
    keys = mix64(torch.tensor(ids, dtype=torch.int64, device="cpu"))
    # A mask says which tokens of the other tensors are padding.
    mask = next((t for t in own if _is_tokens(t) and bool(((t == 0) | (t == 1)).all())), None)
    for position, tensor in enumerate(own, start=1):
        rows = tensor.reshape(tensor.shape[0], -1)
        if not _is_tokens(tensor):  # some elements, spread evenly over a long row
            rows = rows[:, :: max(rows.shape[1] // _SAMPLED, 1)]
        words = element_bits(rows).flatten(1)
        mixed = mix64(words + (position << 32))
        # Padding and positions are left out: they depend on the other rows of the batch.
        if _is_tokens(tensor):
            mixed = mixed * ((words != 0) & (words != _IGNORED))
            if mask is not None and mask.shape == tensor.shape:
                mixed = mixed * (mask != 0)
        keys = mix64(keys + mixed.sum(1))
    return keys


def _is_tokens(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and not tensor.dtype.is_floating_point and tensor.shape[1] <= _LONGEST
