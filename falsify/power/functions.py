"""The seed's free functions and its coordinator's devices: tables of calls, and mutants that the tables must notice.

The expected results come from the definitions (seed R8, R9, R14, R26 to R28, V8, V11 to V13).
"""

from __future__ import annotations

import inspect
import math
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from andon.backend.devices import named_devices, placement
from andon.config.schema import Run
from andon.console.messages import InputError
from andon.coordinator import DataParallelCoordinator, resolve_devices
from andon.gradients import average_gradients, has_non_finite, shard_samples
from andon_contracts.violation import Violation
from andon_falsify.compliance.cases import PLAIN

from .coordinator import coordinator_of
from .planting import patched

NAN, INF = math.nan, math.inf
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Call:
    """A call, and whether its result, or the error that it raised, is the expected one."""

    what: str
    make: Callable[[], object]
    right: Callable[[Any], bool]


def wrong_calls(table: Callable[[], Iterator[Call]]) -> list[str]:
    """The calls of `table` with another result than the expected one."""
    found = []
    for call in table():
        result: object
        try:
            result = call.make()
        except (Exception, Violation) as error:  # noqa: BLE001 -- an error is a result
            result = error
        if not call.right(result):
            found.append(f"{call.what}: {result!r}")
    return found


def averages() -> Iterator[Call]:
    """`average_gradients`: the mean over the workers; finite for finite input, NaN and infinities propagate."""
    drawn = random.Random("gradients")
    tables: list[list[list[float]]] = [[[1.0, 2.0], [3.0, 6.0]], [[5.0]], [[3e38], [3e38]], [[-3e38, 1.0], [3e38, 1.0]]]
    tables += [[[_fp32(drawn.gauss(0, 1)) for _ in range(7)] for _ in range(workers)] for workers in (2, 3, 5)]
    for bad in (NAN, INF, -INF):
        for worker in range(3):
            rows = [[1.0, 2.0, 3.0] for _ in range(3)]
            rows[worker][worker] = bad
            tables.append(rows)
    for rows in [*tables, [[INF], [-INF]]]:
        yield Call(f"average {rows}", partial(average_gradients, rows), partial(_are_means, rows))
    yield Call("average of none", partial(average_gradients, []), _is([]))
    yield Call("average of ragged", partial(average_gradients, [[1.0, 2.0], [3.0]]), _raises(ValueError))


def _fp32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _are_means(workers: Sequence[Sequence[float]], result: Any) -> bool:
    if not isinstance(result, list) or len(result) != len(workers[0]):
        return False
    for seen, column in zip(result, zip(*workers, strict=True), strict=True):
        finite = all(map(math.isfinite, column))
        # As IEEE has it: NaN and opposed infinities give NaN, a single infinity gives itself.
        wanted = math.fsum(each / len(column) for each in column) if finite else sum(column)
        rounding = 2.0**-24 * abs(wanted) + 2.0**-40 * max(map(abs, column)) + 1e-45 if finite else 0.0
        if not (math.isnan(wanted) and math.isnan(seen)) and seen != wanted and not abs(seen - wanted) <= rounding:
            return False
    return True


def non_finite() -> Iterator[Call]:
    """`has_non_finite`: sees NaN, Inf and -Inf at every position."""
    for size in (0, 1, 5):
        yield Call(f"search {size} finite values", partial(has_non_finite, [1.0] * size), _is(wanted=False))
        for bad in (NAN, INF, -INF):
            for position in range(size):
                values = [1.0] * size
                values[position] = bad
                yield Call(f"search {values}", partial(has_non_finite, values), _is(wanted=True))


def shards() -> Iterator[Call]:
    """`shard_samples`: contiguous and in order; the last shard also has the remainder."""
    for count, workers in ((10, 3), (11, 4), (3, 4), (0, 3), (8, 2), (1, 1), (7, 7)):
        items, size = list(range(count)), count // workers
        wanted = [items[at * size : (at + 1) * size] for at in range(workers - 1)] + [items[(workers - 1) * size :]]
        yield Call(f"{count} samples for {workers}", partial(shard_samples, items, workers), _is(wanted))
    yield Call("no workers", partial(shard_samples, [1], 0), _raises(ValueError))


def devices() -> Iterator[Call]:
    """The coordinator refuses an empty list of devices, has a replica for each device, and its primary is the first."""
    yield Call("no devices", partial(resolve_devices, []), _raises(InputError))
    yield Call("two replicas on the CPU", partial(resolve_devices, ["cpu", "cpu"]), _is((CPU, CPU)))

    def rank_of_primary() -> int:
        made = coordinator_of(PLAIN.but(world=3))
        return next(rank for rank, each in enumerate(made.pipelines) if each is made.primary_pipeline)

    yield Call("primary of 3 replicas", rank_of_primary, _is(0))


def fallback() -> Iterator[Call]:
    """If no GPU is usable, ranks use gloo on the CPU only with permission. The calls say that there are 0 GPUs."""
    named = partial(named_devices, [0, 1], 0)

    def place(*, fallback: bool = False) -> Any:
        return placement(Run(backend="nccl", workers=2, cpu_fallback=fallback), 0)

    def said_so(result: Any) -> bool:
        return isinstance(result, tuple) and result[:2] == ("gloo", (CPU, CPU)) and "CPU" in str(result[2])

    yield Call("nccl without a GPU, CPU allowed", partial(place, fallback=True), said_so)
    yield Call("nccl without a GPU", place, _raises(InputError))
    yield Call("GPUs 0 and 1 of none, CPU allowed", partial(named, absent="cpu"), _is((CPU, CPU)))
    yield Call("GPUs 0 and 1 of none", named, _raises(InputError))
    if torch.cuda.device_count() == 0:
        allowed = partial(resolve_devices, [0, 1], cpu_fallback=True)
        yield Call("GPUs 0 and 1 of a coordinator, CPU allowed", allowed, _is((CPU, CPU)))
        yield Call("GPUs 0 and 1 of a coordinator", partial(resolve_devices, [0, 1]), _raises(InputError))


def _is(wanted: object) -> Callable[[Any], bool]:
    return lambda result: type(result) is type(wanted) and result == wanted


def _raises(kind: type[Exception]) -> Callable[[Any], bool]:
    return lambda result: isinstance(result, kind)


TABLES = (averages, non_finite, shards, devices, fallback)


# mutants


def _nan_to_zero(grads: Any) -> Any:
    return [sum(0.0 if v != v else v for v in values) / len(grads) for values in zip(*grads, strict=True)]


def _inf_skipped(grads: Any) -> Any:
    finite = [[v for v in values if abs(v) != float("inf")] for values in zip(*grads, strict=True)]
    return [sum(values) / max(1, len(values)) for values in finite]


def _sum_in_fp32(grads: Any) -> Any:
    total: Any = sum(torch.tensor(gradient, dtype=torch.float32) for gradient in grads)
    return (total / len(grads)).tolist()


def _remainder_dropped(samples: Any, num_workers: int) -> Any:
    size = len(samples) // num_workers
    return [list(samples[at * size : (at + 1) * size]) for at in range(num_workers)]


def _reversed(samples: Any, num_workers: int) -> Any:
    size = len(samples) // num_workers
    return [list(samples[at * size : (at + 1) * size if at < num_workers - 1 else None]) for at in range(num_workers)][
        ::-1
    ]


def _accepts_no_devices(devices: Any, **_: Any) -> Any:
    return tuple(torch.device("cpu") for _ in devices or ["cpu"])


def _one_replica(devices: Any, **_: Any) -> Any:
    if not devices:
        raise InputError("no devices")
    return (torch.device("cpu"),)


def _no_fallback(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no CUDA-capable device is detected")


def _always_falls_back(backend: str, workers: int, *_: Any, **__: Any) -> Any:
    return "gloo", (torch.device("cpu"),) * workers, "on the CPU"


def _all_on_cpu(names: Any, *_: Any, **__: Any) -> Any:
    return (torch.device("cpu"),) * len(names)


def _none_on_cpu(*_: Any, **__: Any) -> Any:
    raise InputError("GPU 0 does not exist")


@dataclass(frozen=True)
class Mutant:
    """A wrong body of `function`, the table that must notice it, and a regular expression for its first wrong call.

    The body runs in place of the function's own, under its decorators and with the imports of its module.
    """

    name: str
    table: Callable[[], Iterator[Call]]
    reason: str
    function: Any
    body: Callable[..., Any]

    def plant(self, stack: ExitStack) -> None:
        """Replace the body until `stack` closes."""
        patched(stack, inspect.unwrap(self.function), "__code__", self.body.__code__)


_ONES = r"average \[\[1\.0, 2\.0\], \[3\.0, 6\.0\]\]: "
MUTANTS = (
    Mutant("average without division", averages, _ONES + r"\[4\.0, 8\.0\]", average_gradients,
           lambda grads: [sum(values) for values in zip(*grads, strict=True)]),
    Mutant("NaN averaged as 0", averages, r"\[\[nan, 2\.0, 3\.0\], .*: \[0\.666\d+, 2\.0, 3\.0\]", average_gradients,
           _nan_to_zero),
    Mutant("Inf skipped in the average", averages, r"\[\[inf, 2\.0, 3\.0\], .*: \[1\.0, 2\.0, 3\.0\]",
           average_gradients, _inf_skipped),
    Mutant("only worker 0 averaged", averages, _ONES + r"\[0\.5, 1\.0\]", average_gradients,
           lambda grads: [values[0] / len(grads) for values in zip(*grads, strict=True)]),
    Mutant("fp32 overflow in the average", averages, r"\[\[3e\+38\], \[3e\+38\]\]: \[inf\]", average_gradients,
           _sum_in_fp32),
    Mutant("has_non_finite ignores Inf", non_finite, r"search \[inf\]: False", has_non_finite,
           lambda values: any(float(value) != float(value) for value in values)),
    Mutant("only the first element", non_finite, r"search \[1\.0, nan, 1\.0, 1\.0, 1\.0\]: False", has_non_finite,
           lambda values: any(not abs(float(value)) < float("inf") for value in values[:1])),
    Mutant("remainder dropped", shards, r"10 samples for 3: .*\[6, 7, 8\]\]", shard_samples, _remainder_dropped),
    Mutant("shard order reversed", shards, r"10 samples for 3: \[\[6, 7, 8, 9\]", shard_samples, _reversed),
    Mutant("empty list of devices accepted", devices, r"no devices: \(device\(type='cpu'\),\)", resolve_devices,
           _accepts_no_devices),
    Mutant("one replica for two devices", devices, r"two replicas on the CPU: \(device\(type='cpu'\),\)",
           resolve_devices, _one_replica),
    Mutant("primary is the last replica", devices, "primary of 3 replicas: 2",
           vars(DataParallelCoordinator)["primary_pipeline"].fget, lambda self: self.pipelines[-1]),
    Mutant("no fallback to the CPU", fallback, "nccl without a GPU, CPU allowed: RuntimeError.*no CUDA", placement,
           _no_fallback),
    Mutant("a fallback that nobody allowed", fallback, r"nccl without a GPU: \('gloo'", placement, _always_falls_back),
    Mutant("an absent GPU accepted", fallback, r"GPUs 0 and 1 of none: \(device", named_devices, _all_on_cpu),
    Mutant("an absent GPU refused though the CPU is allowed", fallback, "of none, CPU allowed: InputError",
           named_devices, _none_on_cpu),
)  # fmt: skip
