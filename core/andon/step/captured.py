"""Eager passes of a GPU as CUDA graphs, with the same bits.

A pass of a small model is a thousand kernels, which the host launches one by one while the GPU waits. A graph holds
these kernels with their arguments, and launching it is one call. Nothing is compiled: they are the kernels of the eager
pass in its order, and dropout draws from the seed that the device's generator has when the graph runs. So whether a
pass is captured, here or on another rank, changes no bit of the result.

A graph repeats what the device did, not the host: a pass that waits for the device or draws on the host stays eager.
Other state on the host, such as a counter of calls, would be frozen; audits compute eagerly, so they would find that.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch

from andon.step.micro_batch import PassResult
from andon.step.task import Batch

_MOST_GRAPHS = 256  # each takes some MiB besides the memory that all of them share
_FAILURES = (RuntimeError, ValueError, TypeError)
"""What torch, and models that ask for values on the host, raise to refuse a wait or a capture."""
_everywhere: WeakSet[CapturedPasses] = WeakSet()
"""Of this process: those of one device draw from one generator."""
Drawing = Callable[[], AbstractContextManager[object]]
Pass = Callable[[Batch], PassResult]


@dataclass(frozen=True)
class _Graph:
    """A captured pass: its input tensors, the bits of its result as one int64 vector, and the result without memory."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    bits: torch.Tensor  # one vector, so that one copy moves a result out of memory that graphs share
    like: Sequence[torch.Tensor | None]

    def replay(self, batch: Batch) -> PassResult:
        """The result for `batch`, in fp64 and int64."""
        torch._foreach_copy_(list(self.batch.values()), [batch[name] for name in self.batch])
        self.graph.replay()
        pieces = iter(torch.split(self.bits.clone(), [part.numel() for part in self.like if part is not None]))
        found: list[Any] = [None if part is None else next(pieces).view(part.shape) for part in self.like]
        for place, part in enumerate(self.like):
            if part is not None and part.is_floating_point():
                found[place] = found[place].view(torch.float64)
        return PassResult(*found)


class CapturedPasses:
    """The passes of one replica on a GPU: the first of each shape is eager, and the second becomes a graph.

    eager: why no pass is captured any more; "" otherwise. All graphs share one pool of memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.eager = ""
        self._device = device
        self._graphs: dict[object, _Graph] = {}
        # By shape that had an eager pass: whether that could be captured.
        self._tried: dict[object, bool] = {}
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
            return compute(batch) if graph is None else graph.replay(batch)

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
            return compute(batch)  # an error that was no wait is raised again

    def _capture(self, shape: object, batch: Batch, drawing: Drawing, compute: Pass) -> _Graph | None:
        """The graph of `compute`, not yet launched. None if it cannot be captured; then no other pass is captured."""
        with torch.cuda.device(self._device), drawing():
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
                self._pool = torch.cuda.graph_pool_handle()
            copy = {name: tensor.clone() for name, tensor in batch.items()}
            graph = torch.cuda.CUDAGraph()
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            torch.cuda.empty_cache()  # inside of a capture, unused memory cannot be given back for more
            with torch.cuda.stream(self._stream):
                # Of this thread alone: others look at the device meanwhile, as that of NCCL does.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    found = compute(copy)
                    parts = (found.loss, found.correct, found.terms, found.total, found.content)
                    bits = torch.cat([_bits(part).reshape(-1) for part in parts if part is not None])
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
        self._graphs[shape] = _Graph(graph, copy, bits, [None if part is None else part.to("meta") for part in parts])
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
            with suppress(RuntimeError):  # if the end came as far as to the graph itself, it is done already
                torch._C._cuda_endAllocateToPool(index, self._pool)
            fresh = torch.Generator(device=self._device)
            torch.cuda.default_generators[index].graphsafe_set_state(fresh)
            for each in _everywhere:
                if each._device == self._device:
                    each._graphs.clear()
                    each.eager = each.eager or self.eager


def _refuse_waits(mode: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a prototype, which a user can do nothing about
        torch.cuda.set_sync_debug_mode(mode)


def _host_randomness() -> tuple[object, ...]:
    return torch.random.get_rng_state().numpy().tobytes(), random.getstate()


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.double().view(torch.int64) if value.is_floating_point() else value.to(torch.int64)
