"""The seed's free functions and faces, tried on tables of inputs with expected values from their definitions.

Each check returns a verdict and a transcript of all that the functions gave, by which a planted change is proved.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from andon.backend import devices
from andon.config.schema import Run
from andon.console.messages import InputError
from andon.coordinator import DataParallelCoordinator, resolve_devices
from andon.gradients import average_gradients, has_non_finite, shard_samples
from andon_contracts.violation import Violation
from andon_falsify.claims.statements import AVERAGE, FACE, FALLBACK, NON_FINITE, SHARDS
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.coordinator import coordinator_of
from andon_falsify.verdict import Claim, Counterexample, Verdict, conclude

NAN, INF = math.nan, math.inf


@dataclass(frozen=True)
class Tabulated:
    """A verdict, all that was returned or raised, and the clause of the first violation, if there was one."""

    verdict: Verdict
    transcript: str
    clause: str = ""


class _Table:
    """Runs calls, compares what they give, and keeps the transcript."""

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        self._said: list[str] = []
        self._found: list[Counterexample] = []
        self._clause = ""

    def row(self, what: str, call: Callable[[], object], right: Callable[[object], bool], expected: str) -> None:
        """One input: `right` says whether the result is the expected one; an error is a result like any other."""
        result: object
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 -- whatever the accused raises is a result, and is judged
            result = error
            if isinstance(error, Violation):
                self._clause = self._clause or error.clause
        shown = f"{type(result).__name__}: {result}" if isinstance(result, Exception) else repr(result)
        self._said.append(f"{what} -> {shown}")
        if not right(result):
            self._found.append(Counterexample("the result is another", what, expected, shown[:200]))

    def end(self) -> Tabulated:
        """What came of it."""
        return Tabulated(conclude(self._claim, len(self._said), self._found), "\n".join(self._said), self._clause)


def _fp32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0]) if math.isfinite(value) else value


def _mean(values: Sequence[float]) -> float:
    """The mean as IEEE has it: NaN and opposed infinities give NaN, one infinity gives itself."""
    if not all(map(math.isfinite, values)):
        return sum(value for value in values if not math.isfinite(value))
    return math.fsum(value / len(values) for value in values)


def _near(seen: object, wanted: float, largest: float) -> bool:
    if not isinstance(seen, float):
        return False
    if not math.isfinite(wanted):
        return math.isnan(seen) if math.isnan(wanted) else seen == wanted
    return abs(seen - wanted) <= 2.0**-24 * abs(wanted) + 2.0**-40 * largest + 1e-45


def _are_means(workers: Sequence[Sequence[float]]) -> Callable[[object], bool]:
    columns = list(zip(*workers, strict=True))

    def right(result: object) -> bool:
        if not isinstance(result, list) or len(result) != len(columns):
            return False
        sizes = [max((abs(v) for v in column if math.isfinite(v)), default=0.0) for column in columns]
        return all(_near(r, _mean(c), size) for r, c, size in zip(result, columns, sizes, strict=True))

    return right


def average() -> Tabulated:
    """`average_gradients` on lists: plain, one worker, many, extreme, and not finite at every place (V8, V11, V12)."""
    table = _Table(AVERAGE)
    drawn = random.Random("gradients")
    tables: list[list[list[float]]] = [[[1.0, 2.0], [3.0, 6.0]], [[5.0]], [[3e38], [3e38]], [[-3e38, 1.0], [3e38, 1.0]]]
    tables += [[[_fp32(drawn.gauss(0, 1)) for _ in range(7)] for _ in range(workers)] for workers in (2, 3, 5)]
    for bad in (NAN, INF, -INF):
        for worker in range(3):
            rows = [[1.0, 2.0, 3.0] for _ in range(3)]
            rows[worker][worker] = bad
            tables.append(rows)
    tables.append([[INF], [-INF]])
    for rows in tables:
        table.row(f"average {rows}", lambda r=rows: average_gradients(r), _are_means(rows), "the mean")  # type: ignore[misc]
    table.row("average of none", lambda: average_gradients([]), lambda result: result == [], "[]")
    table.row("average of ragged", lambda: average_gradients([[1.0, 2.0], [3.0]]), _is(ValueError), "ValueError")
    return table.end()


def non_finite() -> Tabulated:
    """`has_non_finite` with NaN, Inf and -Inf at every place, and without (R28)."""
    table = _Table(NON_FINITE)
    for size in (0, 1, 5):
        table.row(f"{size} finite", lambda n=size: has_non_finite([1.0] * n), _equals(False), "False")  # type: ignore[misc]
        for bad in (NAN, INF, -INF):
            for place in range(size):
                values = [1.0] * size
                values[place] = bad
                table.row(f"search {values}", lambda v=values: has_non_finite(v), _equals(True), "True")  # type: ignore[misc]
    return table.end()


def shards() -> Tabulated:
    """`shard_samples`: contiguous, in order, the last with the remainder; empty shards; no workers (R26, V13)."""
    table = _Table(SHARDS)
    for count, workers in ((10, 3), (11, 4), (3, 4), (0, 3), (8, 2), (1, 1), (7, 7)):
        items, size = list(range(count)), count // workers
        wanted = [items[at * size : (at + 1) * size] for at in range(workers - 1)] + [items[(workers - 1) * size :]]
        what = f"{count} samples for {workers}"
        table.row(what, lambda i=items, w=workers: shard_samples(i, w), _equals(wanted), repr(wanted))  # type: ignore[misc]
    table.row("no workers", lambda: shard_samples([1], 0), _is(ValueError), "ValueError")
    return table.end()


def face() -> Tabulated:
    """No devices are refused; a replica for each device; the primary is the first (R8, R9, R14)."""
    table = _Table(FACE)
    case = Case(dropout=0.0, world=3)
    table.row("no devices", lambda: resolve_devices([]), _is(InputError), "InputError")
    table.row("two replicas on the CPU", lambda: len(resolve_devices(["cpu", "cpu"])), _equals(2), "2")

    def coordinator() -> DataParallelCoordinator:
        return coordinator_of(case)

    def place_of_primary() -> int:
        with coordinator() as made:
            return next(at for at, pipeline in enumerate(made.pipelines) if pipeline is made.primary_pipeline)

    table.row("primary of 3 replicas", place_of_primary, _equals(0), "0")
    return table.end()


def fallback() -> Tabulated:
    """Where no GPU is usable, ranks that were to use NCCL go on with gloo on the CPU only if that was asked for.

    The choice is asked as on a machine without a GPU, so that a machine that has some can be tried too.
    """
    table = _Table(FALLBACK)
    cpu = torch.device("cpu")

    def told(result: object) -> bool:
        return isinstance(result, tuple) and result[:2] == ("gloo", (cpu, cpu)) and "CPU" in str(result[2])

    wanted = [0, 1]

    def nccl(allowed: bool) -> object:
        return devices.placement(Run(backend="nccl", workers=2, cpu_fallback=allowed), 0)

    table.row("nccl without a GPU", lambda: nccl(True), told, "gloo on the CPU, said so")
    table.row("nccl without a GPU, CPU not allowed", lambda: nccl(False), _is(InputError), "InputError")
    call = lambda: devices.named_devices(wanted, 0, absent="cpu")  # noqa: E731
    table.row("GPUs 0 and 1 of none, CPU allowed", call, _equals((cpu, cpu)), "two CPUs")
    table.row("GPUs 0 and 1 of none", lambda: devices.named_devices(wanted, 0), _is(InputError), "InputError")
    if torch.cuda.device_count() == 0:
        face = lambda: resolve_devices(wanted, cpu_fallback=True)  # noqa: E731
        table.row("GPUs 0 and 1 of a coordinator, CPU allowed", face, _equals((cpu, cpu)), "two CPUs")
        table.row("GPUs 0 and 1 of a coordinator", lambda: resolve_devices(wanted), _is(InputError), "InputError")
    return table.end()


def _is(kind: type[Exception]) -> Callable[[object], bool]:
    return lambda result: isinstance(result, kind)


def _equals(wanted: object) -> Callable[[object], bool]:
    return lambda result: result == wanted


TABLES: dict[str, Callable[[], Tabulated]] = {
    AVERAGE.name: average,
    NON_FINITE.name: non_finite,
    SHARDS.name: shards,
    FACE.name: face,
    FALLBACK.name: fallback,
}
"""The checks by claim."""
