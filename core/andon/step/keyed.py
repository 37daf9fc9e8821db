"""Randomness keyed by (seed, step, micro-batch), never by rank, process or thread.

On a CPU dropout draws from the process-global generator, so replicas in threads would race for it. `KeyedRandomness`
hands every random operation the micro-batch's own generator instead. Intercepting each ATen operation costs about a
quarter of a small forward pass, so only the functions that are known to draw (`STOCHASTIC`) pass through the
interceptor; `needs_full_interception` tries the model under full interception before step 1 and says whether that is
enough.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from andon.step.host_drawn import DROPOUT, STOCHASTIC, Dropout, HostDrawnDropout, UnkeyedRandomnessError


def key(seed: int, step: int, micro_batch: int) -> int:
    """A 63-bit generator seed for one micro-batch of one step; different arguments give unrelated streams."""
    data = f"andon {seed} {step} {micro_batch}".encode()
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little") >> 1


def _draws(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call of an ATen operation draws: attention is tagged as random even where its dropout is 0."""
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    for place, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(given != 0)
    return True


_WITH_GENERATOR = {"default": "generator", "low": "low_generator", "low_dtype": "low_generator_dtype"}


def _taking_generator(operation: Any) -> Any | None:
    """The operation, or the overload of it, that takes a generator; None where there is none."""
    if any(argument.name == "generator" for argument in operation._schema.arguments):
        return operation
    overload = _WITH_GENERATOR.get(operation._overloadname, "")
    packet = operation.overloadpacket
    return getattr(packet, overload) if overload in packet.overloads() else None


class _Interceptor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives every random ATen operation `generator`; notes those that it cannot key.

    These take no generator, or run in the backward pass: a forward that is computed again there (activation
    checkpointing) would go on in the stream and get other masks than those whose gradient it computes, unless it is
    inside `again`.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = generator
        self.refused: set[str] = set()
        self.intercepted = 0
        self._replaying = False

    def dropped(self, dropout: Dropout) -> torch.Tensor:
        """What that, which draws, gives with the generator, without a look at each operation of it."""
        self.intercepted += not self._replaying
        return dropout(self.generator)

    @contextmanager
    def again(self, state: torch.Tensor) -> Iterator[None]:
        """Inside, draws start from `state` of the generator, which afterwards is as it was before.

        The mode is entered anew: `Tensor.backward` leaves that of its caller, as every function does.
        """
        before = self.generator.get_state()
        self.generator.set_state(state)
        self._replaying = True
        try:
            with _StochasticFunctions(self):
                yield
        finally:
            self._replaying = False
            self.generator.set_state(before)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _draws(func, args, kwargs):
            return func(*args, **kwargs)
        keyed = _taking_generator(func)
        in_backward = torch._C._current_graph_task_id() != -1  # type: ignore[attr-defined,unused-ignore]
        late = in_backward and not self._replaying
        if keyed is None or late:
            self.refused.add(f"{func} in the backward pass" if late else str(func))
            return func(*args, **kwargs)
        self.intercepted += not self._replaying
        return keyed(*args, **{**kwargs, "generator": self.generator})

    def raise_if_refused(self) -> None:
        """Raise `UnkeyedRandomnessError` with the operations that could not be keyed, if there were any."""
        if self.refused:
            names, self.refused = ", ".join(sorted(self.refused)), set()
            msg = f"the model draws random numbers that cannot be keyed by micro-batch: {names}"
            raise UnkeyedRandomnessError(msg)


class _StochasticFunctions(TorchFunctionMode):
    """Sends the functions of `STOCHASTIC`, and only them, through the interceptor."""

    def __init__(self, interceptor: _Interceptor) -> None:
        super().__init__()
        self._interceptor = interceptor

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in STOCHASTIC:
            return func(*args, **kwargs)
        # The interceptor would look at each of its operations, which takes about as long as they do.
        if func in DROPOUT:
            try:
                call = Dropout(*args, **kwargs)
            except TypeError:  # which is torch's to raise
                return func(*args, **kwargs)
            if call.plain and call.draws:
                return self._interceptor.dropped(call)
        with self._interceptor:
            return func(*args, **kwargs)


_active = threading.local()
"""`interceptor`: the one through which this thread's micro-batch draws, if there is one."""


@contextmanager
def _drawing_through(interceptor: _Interceptor) -> Iterator[None]:
    before = getattr(_active, "interceptor", None)
    _active.interceptor = interceptor
    try:
        yield
    finally:
        _active.interceptor = before


def replaying() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """The `context_fn` of `torch.utils.checkpoint` on a CPU: what is computed again draws what it drew before.

    To be called where a region begins, as checkpoint does: its second context goes back to the stream's place here.
    """
    interceptor: _Interceptor | None = getattr(_active, "interceptor", None)
    if interceptor is None:
        return nullcontext(), nullcontext()
    return nullcontext(), interceptor.again(interceptor.generator.get_state())


@contextmanager
def _host_keyed(stream: int) -> Iterator[None]:
    """Inside, the process's CPU generator draws from `stream`; afterwards it is as it was."""
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(stream)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


class KeyedRandomness:
    """The random numbers of one replica. On a CPU a generator of its own; on a GPU the device's, seeded anew.

    A GPU is driven by one process each, so there its default generator is nobody else's, nor is that of the CPU, from
    which models draw too (which layers to leave out, say).
    """

    def __init__(
        self, seed: int, device: torch.device, *, intercept_all: bool = False, host_drawn: bool = False
    ) -> None:
        """intercept_all: on a CPU, look at every operation. host_drawn: on a GPU, drop what a CPU would."""
        self._seed = seed
        self._device = device
        self._generator = torch.Generator(device="cpu")
        self._interceptor = _Interceptor(self._generator)
        self._mode = self._interceptor if intercept_all else _StochasticFunctions(self._interceptor)
        self._host_draws = HostDrawnDropout(self._generator) if host_drawn else nullcontext()

    @contextmanager
    def micro_batch(self, step: int, index: int) -> Iterator[None]:
        """Inside, this thread's random operations draw from the stream of (seed, step, index).

        Raises `UnkeyedRandomnessError` at the end if one could not, as in activation checkpointing on a CPU that does
        not use `replaying`.
        """
        stream = key(self._seed, step, index)
        if self._device.type == "cuda":
            torch.cuda.default_generators[self._device.index or 0].manual_seed(stream)
            self._generator.manual_seed(stream)
            with _host_keyed(stream), self._host_draws:
                yield
            return
        self._generator.manual_seed(stream)
        with _drawing_through(self._interceptor), self._mode:
            yield
        self._interceptor.raise_if_refused()


def needs_full_interception(forward: Callable[[], object], device: torch.device) -> bool:
    """Run `forward` twice and say whether it draws outside of `STOCHASTIC`.

    forward: returns a loss, or a `LeafLoss`. Where that has a graph its backward pass runs too, once, and leaves
    gradients on the leaves. Raises `UnkeyedRandomnessError` for a random operation that takes no generator, and for
    any in the backward pass. On a GPU nothing is intercepted, so nothing is refused.
    """
    if device.type == "cuda":
        return False
    full = _count(forward, intercept_all=True)
    return _count(forward, intercept_all=False) != full


def _backward(result: object) -> None:
    loss = getattr(result, "loss_sum", result)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        loss.sum().backward()  # type: ignore[no-untyped-call]


def _count(forward: Callable[[], object], *, intercept_all: bool) -> int:
    interceptor = _Interceptor(torch.Generator(device="cpu").manual_seed(0))
    mode = interceptor if intercept_all else _StochasticFunctions(interceptor)
    with torch.random.fork_rng(devices=[]), _drawing_through(interceptor), mode:
        result = forward()
        if intercept_all:
            _backward(result)
    interceptor.raise_if_refused()
    return interceptor.intercepted
