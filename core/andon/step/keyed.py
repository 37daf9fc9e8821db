"""Randomness keyed by (seed, step, micro-batch), never by rank, process or thread.

On a CPU dropout draws from the process-global generator, so replicas in threads would race for it. `KeyedRandomness`
hands every random operation the micro-batch's own generator instead. Intercepting each ATen operation costs about a
quarter of a small forward pass, so only the functions that are known to draw (`STOCHASTIC`) pass through the
interceptor; `needs_full_interception` runs one forward under full interception before step 1 and says whether that is enough.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_functional = torch.nn.functional
STOCHASTIC: frozenset[Callable[..., Any]] = frozenset(
    {
        _functional.dropout,
        _functional.dropout1d,
        _functional.dropout2d,
        _functional.dropout3d,
        _functional.alpha_dropout,
        _functional.feature_alpha_dropout,
        _functional.scaled_dot_product_attention,
        _functional.multi_head_attention_forward,
        _functional.rrelu,
        torch.dropout,
        torch.alpha_dropout,
        torch.feature_dropout,
        torch.bernoulli,
        torch.rand,
        torch.randn,
        torch.rand_like,
        torch.randn_like,
        torch.randint,
        torch.randperm,
        torch.normal,
        torch.Tensor.bernoulli_,
        torch.Tensor.bernoulli,
        torch.Tensor.normal_,
        torch.Tensor.uniform_,
    }
)
"""Functions that may draw random numbers, as a model calls them."""


def key(seed: int, step: int, micro_batch: int) -> int:
    """A 63-bit generator seed for one micro-batch of one step; different arguments give unrelated streams."""
    data = f"andon {seed} {step} {micro_batch}".encode()
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little") >> 1


class UnkeyedRandomnessError(ValueError):
    """The model draws random numbers in a way that cannot be keyed by micro-batch."""


def _is_random(operation: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in operation.tags


def _takes_generator(operation: Any) -> bool:
    return any(argument.name == "generator" for argument in operation._schema.arguments)


class _Interceptor(TorchDispatchMode):
    """Gives every random ATen operation `generator`; notes those that take none."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator
        self.refused: set[str] = set()
        self.intercepted = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_random(func):
            return func(*args, **kwargs)
        if not _takes_generator(func):
            self.refused.add(str(func))
            return func(*args, **kwargs)
        self.intercepted += 1
        return func(*args, **{**kwargs, "generator": self.generator})


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
        with self._interceptor:
            return func(*args, **kwargs)


class KeyedRandomness:
    """The random numbers of one replica. On a CPU a generator of its own; on a GPU the device's, seeded anew.

    A GPU is driven by one process each, so there its default generator is nobody else's.
    """

    def __init__(self, seed: int, device: torch.device, *, intercept_all: bool = False) -> None:
        self._seed = seed
        self._device = device
        self._generator = torch.Generator(device="cpu")
        self._interceptor = _Interceptor(self._generator)
        self._mode = self._interceptor if intercept_all else _StochasticFunctions(self._interceptor)

    @contextmanager
    def micro_batch(self, step: int, index: int) -> Iterator[None]:
        """Inside, this thread's random operations draw from the stream of (seed, step, index)."""
        stream = key(self._seed, step, index)
        if self._device.type == "cuda":
            torch.cuda.default_generators[self._device.index or 0].manual_seed(stream)
            yield
            return
        self._generator.manual_seed(stream)
        with self._mode:
            yield


def needs_full_interception(forward: Callable[[], object], device: torch.device) -> bool:
    """Run `forward` once and say whether it draws outside of `STOCHASTIC`.

    Raises `UnkeyedRandomnessError` for a random operation that takes no generator. On a GPU nothing is intercepted,
    so nothing is refused.
    """
    if device.type == "cuda":
        return False
    full = _count(forward, intercept_all=True)
    return _count(forward, intercept_all=False) != full


def _count(forward: Callable[[], object], *, intercept_all: bool) -> int:
    interceptor = _Interceptor(torch.Generator(device="cpu").manual_seed(0))
    mode = interceptor if intercept_all else _StochasticFunctions(interceptor)
    with torch.random.fork_rng(devices=[]), mode:
        forward()
    if interceptor.refused:
        msg = f"the model draws random numbers that cannot be keyed by micro-batch: {', '.join(sorted(interceptor.refused))}"
        raise UnkeyedRandomnessError(msg)
    return interceptor.intercepted
