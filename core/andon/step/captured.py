"""Captures eager GPU passes as CUDA graphs, with identical bits.

A pass of a small model launches about a thousand kernels one by one, while the GPU waits for the host. A graph records
these kernels with their arguments and launches them in one call. Nothing is compiled: the graph runs the eager pass's
kernels in the same order, and dropout uses the seed that the device's generator has at replay. So whether a pass is
captured, here or on another rank, changes no bit of the result.

A graph replays only device work: a pass that waits for the device or draws on the host stays eager. Other host state,
such as a call counter, would be frozen; audits compute eagerly, so they would detect that.
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

from andon.step.micro_batch import Batch, PassResult
from andon_contracts.violation import first_line

_MOST_GRAPHS = 256  # each uses a few MiB in addition to the shared pool
_FAILURES = (RuntimeError, ValueError, TypeError)
"""Errors that torch, or a model that reads values on the host, raises on a refused wait or capture."""
_everywhere: WeakSet[CapturedPasses] = WeakSet()
"""All instances of this process: those of one device share its generator."""
Drawing = Callable[[], AbstractContextManager[object]]
Pass = Callable[[Batch], PassResult]


@dataclass(frozen=True)
class _Graph:
    """A captured pass: its input tensors, its result as one int64 vector, and the result as meta tensors."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    bits: torch.Tensor  # one vector, so that one copy moves the result out of the shared pool
    like: Sequence[torch.Tensor | None]

    def replay(self, batch: Batch) -> PassResult:
        """The result for `batch`: reals as fp64, integers as int64."""
        torch._foreach_copy_(list(self.batch.values()), [batch[name] for name in self.batch])
        self.graph.replay()
        pieces = iter(torch.split(self.bits.clone(), [part.numel() for part in self.like if part is not None]))
        values: list[Any] = [None if part is None else next(pieces).view(part.shape) for part in self.like]
        for index, part in enumerate(self.like):
            if part is not None and part.is_floating_point():
                values[index] = values[index].view(torch.float64)
        return PassResult(*values)


class CapturedPasses:
    """Runs the passes of one replica on a GPU. The first pass of each shape is eager, the second becomes a graph.

    eager: why capturing was turned off; "" if it is on. All graphs share one memory pool.
    """

    def __init__(self, device: torch.device) -> None:
        self.eager = ""
        self._device = device
        self._graphs: dict[object, _Graph] = {}
        # For each shape that ran eagerly: whether that pass could be captured.
        self._tried: dict[object, bool] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        _everywhere.add(self)

    def __len__(self) -> int:
        return len(self._graphs)

    def __call__(self, kind: object, batch: Batch, drawing: Drawing, compute: Pass) -> PassResult:
        """`compute(batch)`. `compute` must not keep the batch's tensors and must overwrite its own state.

        kind: together with the batch's shapes, determines which kernels `compute` launches. drawing: returns a context
        manager that seeds the pass's randomness.
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
        """Run an eager pass and record whether it could be captured.

        The first pass of a shape may wait for the device, for example to build a table of positions that the model
        caches. If a second one waits, all later ones will, and capturing is turned off.
        """
        before: Any = torch.cuda.get_sync_debug_mode()
        with drawing():
            drawn = _host_randomness()
            _refuse_waits("error")
            try:
                result = compute(batch)
            except _FAILURES as error:
                if shape in self._tried:
                    self.eager = f"a pass waits for the device: {first_line(error)}"
                self._tried[shape] = False
            else:
                if _host_randomness() != drawn:
                    self.eager = "the model draws random numbers on the host"
                self._tried[shape] = True
                return result
            finally:
                _refuse_waits(before)
        with drawing():
            return compute(batch)  # raises again if the error was not caused by a wait

    def _capture(self, shape: object, batch: Batch, drawing: Drawing, compute: Pass) -> _Graph | None:
        with torch.cuda.device(self._device), drawing():
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
                self._pool = torch.cuda.graph_pool_handle()
            copy = {name: tensor.clone() for name, tensor in batch.items()}
            graph = torch.cuda.CUDAGraph()
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            torch.cuda.empty_cache()  # cached memory cannot be released during a capture
            with torch.cuda.stream(self._stream):
                # Only for this thread: others, such as NCCL's, query the device meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = compute(copy)
                    parts = (result.loss, result.correct, result.terms, result.total, result.content)
                    bits = torch.cat([_bits(part).reshape(-1) for part in parts if part is not None])
                except BaseException as error:  # interrupts too: an open capture blocks all other launches
                    self.eager = f"a pass could not be captured: {first_line(error)}"
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
        """End the capture into `graph`. If torch fails to, repair the state that it leaves.

        Otherwise the allocator would keep using the pool and never free memory of other streams, and the device's
        generator would refuse to draw. Existing graphs do not use the generator's new state, so they are dropped.
        """
        try:
            graph.capture_end()
        except RuntimeError as error:
            self.eager = self.eager or f"a pass could not be captured: {first_line(error)}"
            index = self._device.index or 0
            with suppress(RuntimeError):  # already done if torch got as far as ending the graph itself
                torch._C._cuda_endAllocateToPool(index, self._pool)
            fresh = torch.Generator(device=self._device)
            torch.cuda.default_generators[index].graphsafe_set_state(fresh)
            for each in _everywhere:
                if each._device == self._device:
                    each._graphs.clear()
                    each.eager = each.eager or self.eager


def _refuse_waits(mode: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this is a prototype, which a user cannot change
        torch.cuda.set_sync_debug_mode(mode)


def _host_randomness() -> tuple[object, ...]:
    return torch.random.get_rng_state().numpy().tobytes(), random.getstate()


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.double().view(torch.int64) if value.is_floating_point() else value.to(torch.int64)
