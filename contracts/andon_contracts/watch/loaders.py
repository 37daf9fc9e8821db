"""The rows of each batch that torch's data loaders yield to a loop, by their indices, pass by pass.

With workers an iterator draws indices ahead, and with `in_order=False` it yields batches in another order. So each draw
is kept under the number that the iterator gives it, until that number is no longer outstanding.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import RandomSampler, Subset
from torch.utils.data.distributed import DistributedSampler

from andon_contracts.causes import first_line
from andon_contracts.digest import mix64
from andon_contracts.legible import log_once

_SHUFFLERS = ("SeedableRandomSampler", "SubsetRandomSampler")
"""Samplers, beside torch's own, whose passes are permutations that must not come again."""
_REPEATS = ("repetitions", "num_repeats")
"""How samplers that repeat rows on purpose (RASampler, RepeatAugSampler) call the number of times."""
_SAMPLED, _REMEMBERED, _DEEPEST = 64, 64, 4
"""Elements of a row that stand for its content; rows of a pass that are kept in order; levels of nesting."""
_LONGEST, _IGNORED = 4096, -100
"""The most integers of a row that are taken for tokens, and the label that torch's losses ignore."""
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(eq=False)
class Pass:
    """One pass of a loop over a data loader, on this rank.

    number: 1 for the first one over this sampler. size: the rows of the data set; 0: unknown. shuffles: the sampler
    promises another permutation in each pass. most: how often a row may come in it; 0: unknown, or any number of times.
    order: the first rows, in order. batches: those that were trained on. rows: those that were yielded. over: the
    loader has come to its end. iterator: yields the batches; None once the loop has let it go.
    """

    number: int
    size: int
    shuffles: bool
    most: int
    sampler: str
    before: Pass | None = None
    order: list[int] = field(default_factory=list)
    batches: int = 0
    rows: int = 0
    over: bool = False
    iterator: Callable[[], Any] = lambda: None


@dataclass(eq=False)
class Yielded:
    """A batch of a data loader. keys: of each row its index and content; None if either cannot be seen.

    places: the storages of its tensors, by which a forward pass recognizes it. kept: keeps their addresses from being
    given to the next batch once their memory is free. so_far: the rows that the pass had yielded with it.
    """

    source: Pass
    ids: tuple[int, ...] | None
    keys: Tensor | None
    places: frozenset[int]
    kept: tuple[StorageWeakRef, ...]
    so_far: int = 0


_drawn: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()
_passes: weakref.WeakKeyDictionary[Any, Pass] = weakref.WeakKeyDictionary()
"""The present pass of each iterator."""
_latest: weakref.WeakKeyDictionary[Any, Pass] = weakref.WeakKeyDictionary()
"""The latest pass over each sampler."""


def drawn(iterator: Any, index: Any) -> None:
    """An iterator of a data loader has drawn the index of a batch, or of a row."""
    # Only an iterator with workers numbers what it draws; another has one batch under way.
    _drawn.setdefault(iterator, {})[getattr(iterator, "_send_idx", 0)] = index


def yielded(iterator: Any, batch: object) -> Yielded:
    """The batch that the loop receives now. Never raises: the rows of an unreadable batch stay unknown."""
    try:
        # A number is outstanding until its batch was yielded, in whatever order workers answer.
        outstanding, waiting = _drawn.get(iterator, {}), getattr(iterator, "_task_info", {})
        taken = [outstanding.pop(number) for number in list(outstanding) if number not in waiting]
        ids = _ids(taken[0] if len(taken) == 1 else None, iterator._dataset)
        found = _passes.get(iterator)
        if found is None or iterator._num_yielded == 1:
            found = _passes[iterator] = _begun(iterator)
        tensors = list(tensors_in(batch))
        keys = None if ids is None else row_keys(ids, tensors)
        found.rows += 0 if ids is None else len(ids)
        found.order += (ids or ())[: _REMEMBERED - len(found.order)]
        storages = (each.untyped_storage() for each in tensors if each.numel())
        kept = tuple(StorageWeakRef(each) for each in storages)  # type: ignore[no-untyped-call]
        return Yielded(found, ids, keys, places_of(tensors), kept, found.rows)
    except Exception as error:  # noqa: BLE001 - datasets, samplers and batches are the loop's own and may raise anything
        cannot_look("a batch of a data loader", error)
        return Yielded(Pass(1, 0, False, 0, ""), None, None, frozenset(), ())


def cannot_look(what: str, error: Exception) -> None:
    """Say, once, why rows are not looked at."""
    why = f"{what} raises {first_line(error)} if looked at"
    log_once(what, f"andon.watch: {why}: the rows of this run are not checked")


def is_under_way(found: Pass) -> bool:
    """Whether the pass may yet yield a batch or end."""
    iterator = found.iterator()
    return not found.over and iterator is not None and _passes.get(iterator) is found


def ended(iterator: Any) -> None:
    found = _passes.get(iterator)
    if found is not None:
        found.over = True


def _ids(index: Any, dataset: Any) -> tuple[int, ...] | None:
    listed = index if isinstance(index, list | tuple) else [index]
    try:
        found = [each.__index__() for each in listed]
        while isinstance(dataset, Subset):
            found = [dataset.indices[each].__index__() for each in found]
            dataset = dataset.dataset
    except (AttributeError, TypeError, IndexError):
        return None  # keys that are no integers, or an iterable data set, which has none
    return tuple(found)


def _begun(iterator: Any) -> Pass:
    sampler = iterator._index_sampler
    try:
        before = _latest.get(sampler)
    except TypeError:  # a list of indices, say, which cannot be known again
        before = None
    if before is not None and not before.batches:
        before = before.before  # a look at a first batch, or an evaluation
    inner = sampler
    for _ in range(_DEEPEST):  # the sampler of rows, inside those that make batches of them or deal them out
        # Not by their truth, for which Python would ask them for a length that they may not have.
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
    except Exception:  # noqa: BLE001 - an iterable dataset has no length, and one with a sampler of its own needs none
        size = 0
    repeats = next((getattr(inner, name) for name in _REPEATS if isinstance(getattr(inner, name, None), int)), 1)
    found = Pass(
        1 if before is None else before.number + 1,
        size,
        shuffles,
        1 if shuffles or type(inner).__name__ == "SequentialSampler" else repeats if repeats > 1 else 0,
        type(inner).__name__,
        before,
        iterator=weakref.ref(iterator),
    )
    if before is not None:
        before.before = None  # one is enough
    with suppress(TypeError):
        _latest[sampler] = found
    return found


def tensors_in(value: object, depth: int = _DEEPEST) -> Iterator[Tensor]:
    """The tensors in a batch or in the arguments of a call, in order, without their autograd."""
    if isinstance(value, Tensor):
        # Inside a transform of `torch.func` the tensor with memory is within others.
        while torch._C._functorch.is_functorch_wrapped_tensor(value):
            value = torch._C._functorch.get_unwrapped(value)
        if value.layout == torch.strided and not value.is_meta and not value.is_nested:
            yield value.detach()
    elif depth and isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each, depth - 1)


def outside_of_transforms() -> AbstractContextManager[object]:
    """Inside, operations are not a part of what `torch.func` transforms: of `vmap`, `grad` and the like."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    return temporarily_clear_interpreter_stack()


def places_of(tensors: Sequence[Tensor]) -> frozenset[int]:
    """Which storages hold `tensors`: their views have the same, copies others."""
    return frozenset(each.untyped_storage()._cdata for each in tensors if each.numel())


def row_keys(ids: Sequence[int], tensors: Sequence[Tensor]) -> Tensor | None:
    """int64 [rows]: a key of each row's index and content; None if no tensor on the CPU has as many rows."""
    own = [t for t in tensors if t.dim() and t.shape[0] == len(ids) and t.device.type == "cpu" and t.numel()]
    if not own or not ids:
        return None
    found = mix64(torch.tensor(ids, dtype=torch.int64, device="cpu"))
    # A mask says which tokens of the other tensors are padding.
    mask = next((t for t in own if _is_tokens(t) and bool(((t == 0) | (t == 1)).all())), None)
    for place, tensor in enumerate(own, start=1):
        rows, shown = tensor.reshape(tensor.shape[0], -1), None
        if not _is_tokens(tensor):  # of a long row some elements, spread evenly over it
            rows = rows[:, :: max(rows.shape[1] // _SAMPLED, 1)]
        real = torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows.contiguous()
        words = real.view(_INTEGER[real.element_size()]).to(torch.int64)
        if _is_tokens(tensor):
            shown = (words != 0) & (words != _IGNORED)
            if mask is not None and mask.shape == tensor.shape:
                shown &= mask != 0
        mixed = mix64(words + (place << 32))
        # Padding and positions are left out: they depend on the other rows of the batch.
        found = mix64(found + (mixed if shown is None else mixed * shown).sum(1))
    return found


def _is_tokens(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and not tensor.dtype.is_floating_point and tensor.shape[1] <= _LONGEST


def total(keys: Tensor) -> int:
    """One integer in int64 of a set of keys, whatever their order."""
    return int(mix64(keys).sum())
