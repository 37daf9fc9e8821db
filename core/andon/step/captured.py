"""Eager passes of a GPU as CUDA graphs, with the same bits.

A pass of a small model is a thousand kernels, which the host launches one by one while the GPU waits. A graph holds
these kernels with their arguments, and launching it is one call. Nothing is compiled: they are the kernels of the eager
pass in its order, and dropout draws from the seed that the device's generator has when the graph runs. So whether a
pass is captured, here or on another rank, changes no bit of the result.

A graph repeats what the device did, and nothing that the host did: a pass that waits for the device or draws on the
host stays eager. Other state on the host, such as a counter of calls, would be frozen; audits compute eagerly, so they
would find that.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, fields
from typing import Any
from weakref import WeakSet

import torch

from andon.step.micro_batch import PassResult
from andon.step.task import Batch

_MOST_GRAPHS = 256
"""Each takes some MiB besides the memory that all of them share."""
_FAILURES = (RuntimeError, ValueError, TypeError)
"""As what torch, and models that ask for values on the host, refuse a wait or a capture."""

_everywhere: WeakSet[CapturedPasses] = WeakSet()
"""Of this process: those of one device draw from one generator."""

Drawing = Callable[[], AbstractContextManager[object]]
Pass = Callable[[Batch], PassResult]


@dataclass(frozen=True)
class _Graph:
    """A captured pass: the tensors that it reads, and the bits of its result as one int64 vector."""

    graph: torch.cuda.CUDAGraph
    given: Batch
    bits: torch.Tensor
    like: PassResult


class CapturedPasses:
    """The passes of one replica on a GPU: the first of each shape is eager, and the second becomes a graph.

    eager: why no pass is captured any more; "" otherwise. All graphs share one pool of memory beside that of eager
    passes.
    """

    def __init__(self, device: torch.device) -> None:
        self.eager = ""
        self._device = device
        self._graphs: dict[object, _Graph] = {}
        self._tried: dict[object, bool] = {}
        """By shape that had an eager pass: whether that could be captured."""
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        _everywhere.add(self)

    def __len__(self) -> int:
        return len(self._graphs)

    def __call__(self, kind: object, batch: Batch, drawing: Drawing, compute: Pass) -> PassResult:
        """`compute(batch)`, which must not keep the batch's tensors and must overwrite its own state.

        kind: decides, besides the shapes of a batch, which kernels `compute` launches. drawing: a context manager that
        starts the pass's randomness.
        """
        shape = (kind, *((name, tensor.shape, tensor.dtype) for name, tensor in batch.items()))
        graph = self._graphs.get(shape)
        if graph is None and not self.eager:
            if self._tried.get(shape):
                graph = self._capture(shape, batch, drawing, compute)
            elif len(self._tried) < _MOST_GRAPHS:
                return self._try(shape, batch, drawing, compute)
        with drawing():
            if graph is None:
                return compute(batch)
            torch._foreach_copy_(list(graph.given.values()), [batch[name] for name in graph.given])
            graph.graph.replay()
            return _unpacked(graph.bits.clone(), graph.like)

    def _try(self, shape: object, batch: Batch, drawing: Drawing, compute: Pass) -> PassResult:
        """An eager pass that finds out whether a graph could replace it.

        The first pass of a shape may wait, if a model caches a table of positions for example; a second one that waits
        always will.
        """
        before: Any = torch.cuda.get_sync_debug_mode()
        with drawing():
            drawn = _host_randomness()
            _refuse_waits("error")
            try:
                found = compute(batch)
            except _FAILURES as error:
                if shape in self._tried:
                    self.eager = f"a pass waits for the device: {_first_line(error)}"
                self._tried[shape] = False
            else:
                if _host_randomness() != drawn:
                    self.eager = "the model draws random numbers on the host"
                self._tried[shape] = True
                return found
            finally:
                _refuse_waits(before)
        with drawing():
            return compute(batch)  # what was no wait fails here again, as itself

    def _capture(self, shape: object, batch: Batch, drawing: Drawing, compute: Pass) -> _Graph | None:
        """The graph of `compute`, not yet launched. None if it cannot be captured; then no other pass is captured."""
        with torch.cuda.device(self._device), drawing():
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
                self._pool = torch.cuda.graph_pool_handle()
            given = {name: tensor.clone() for name, tensor in batch.items()}
            graph = torch.cuda.CUDAGraph()
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            torch.cuda.empty_cache()  # inside of a capture what is held and not used cannot be given back for more
            with torch.cuda.stream(self._stream):
                # Of this thread alone: others look at the device meanwhile, as that of NCCL does.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    found = compute(given)
                    bits = _packed(found)
                except BaseException as error:  # an interrupt too: nothing could be launched beside an open capture
                    self.eager = f"a pass could not be captured: {_first_line(error)}"
                    self._end(graph)
                    if not isinstance(error, _FAILURES):
                        raise
                else:
                    self._end(graph)
            current.wait_stream(self._stream)
        if self.eager:
            return None
        self._graphs[shape] = _Graph(graph, given, bits, PassResult(*(_without_memory(part) for part in _parts(found))))
        return self._graphs[shape]

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """End the capture into `graph`. If torch fails at that, repair what it leaves half done.

        The allocator would continue to use the pool, and never free memory that other streams used. The device's
        generator would refuse to draw: a new one replaces it, from which no graph of the device draws.
        """
        try:
            graph.capture_end()
        except RuntimeError as error:
            self.eager = self.eager or f"a pass could not be captured: {_first_line(error)}"
            index = self._device.index or 0
            with suppress(RuntimeError):  # where the end came as far as to the graph itself, it is done already
                torch._C._cuda_endAllocateToPool(index, self._pool)
            fresh = torch.Generator(device=self._device)
            torch.cuda.default_generators[index].graphsafe_set_state(fresh)
            for each in _everywhere:
                if each._device == self._device:
                    each._graphs.clear()
                    each.eager = each.eager or self.eager


def _without_memory(part: torch.Tensor | None) -> Any:
    return None if part is None else part.to("meta")


def _refuse_waits(mode: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a prototype, which a user can do nothing about
        torch.cuda.set_sync_debug_mode(mode)


def _host_randomness() -> tuple[object, ...]:
    return torch.random.get_rng_state().numpy().tobytes(), random.getstate()


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _packed(result: PassResult) -> torch.Tensor:
    """int64: the bits of all parts of `result`, so that one copy moves it out of memory that graphs share."""
    there = [part for part in _parts(result) if part is not None]
    return torch.cat([_bits(part).reshape(-1) for part in there])


def _parts(result: PassResult) -> list[torch.Tensor | None]:
    return [getattr(result, each.name) for each in fields(result)]


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.double().view(torch.int64) if value.is_floating_point() else value.to(torch.int64)


def _unpacked(bits: torch.Tensor, like: PassResult) -> PassResult:
    """The result of which `_packed` made `bits`, with parts like those of `like`, in fp64 and int64."""
    sizes = [part.numel() for part in _parts(like) if part is not None]
    pieces = iter(torch.split(bits, sizes))

    def taken(part: torch.Tensor | None) -> Any:
        if part is None:
            return None
        piece = next(pieces).view(part.shape)
        return piece.view(torch.float64) if part.is_floating_point() else piece

    return PassResult(*map(taken, _parts(like)))
