"""Whether what a run holds stays flat: robust slopes over looks at the same age, and the end against the start.

What a rank holds while it trains on is held to its own account (`soak_ranks`), from the step on at which everything
that comes again has come several times. Its pages are not: they go on growing, ever more slowly, as malloc touches what
it holds, and say neither that there is a leak nor that there is none.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from benchmarks.soak_ranks import Look
from benchmarks.soak_samples import Held, Sample

_LASTING = ("launcher", "fork server", "agent")
"""Roles whose processes outlive a generation of workers; ranks are born with it."""
_ENDS = 3
"""Looks at the start and at the end of a series, of which the medians are compared."""
_SETTLED = 100
"""Steps after which the folder has all the checkpoints that it keeps."""
GROWN = 250
"""Steps of a rank after which all that comes again has come three times or more (an audit, at the least often), and
torch's record of collectives is full."""
_SPAN = 200
"""Steps that the looks at one rank must span; from fewer, a few KiB of whatever else would be a slope."""
ALLOWED = 2**29 // 1_000_000
"""Bytes that a rank may grow by in a step: half a GiB in a million steps, which is weeks of training."""
_PAIRS = 100_000

Series = Mapping[Any, Sequence[tuple[float, float]]]
"""Points (when, how much) that may be compared with each other, by what they are of."""


@dataclass(frozen=True)
class Row:
    """One quantity. `start` and `end`: the medians of the first and last three looks of the series that moved most.

    `slope`: the median over all pairs of looks of one series (`theil_sen`), or that of the one series that grows most
    (`steepest`), in the quantity's unit for each `per`. Flat: the slope is at most `bound`, and the ends differ by at
    most `apart`.
    """

    what: str
    series: int
    looks: int
    start: float
    end: float
    slope: float
    per: str
    bound: float
    apart: float

    @property
    def flat(self) -> bool:
        """Whether it did not grow; a quantity that nobody could look at twice is not known to be flat."""
        return self.series > 0 and self.slope <= self.bound and abs(self.end - self.start) <= self.apart

    def cells(self) -> tuple[str, ...]:
        """The row of a table."""
        slope = f"{self.slope:.3g} a {self.per} (at most {self.bound:.3g})"
        verdict = "flat" if self.flat else "NOT FLAT" if self.series else "NOT SEEN TWICE"
        return self.what, f"{self.looks} in {self.series}", f"{self.start:g}", f"{self.end:g}", slope, verdict


def theil_sen(series: Series) -> float:
    """The median slope over all pairs of points of the same series; 0 where there is none."""
    slopes: list[float] = []
    for points in series.values():
        pairs = itertools.islice(itertools.combinations(points, 2), _PAIRS)
        slopes += [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs if b[0] != a[0]]
    return median(slopes) if slopes else 0.0


def steepest(series: Series) -> float:
    """The slope from the first to the last looks of the series in which it is largest: 0 where there is none.

    Not the median of all pairs: what leaks once an epoch is in few of them.
    """
    return max((_rise(points) for points in series.values()), default=0.0)


def _rise(points: Sequence[tuple[float, float]]) -> float:
    first, last = points[:_ENDS], points[-_ENDS:]
    return (_median(last) - _median(first)) / (median(at for at, _ in last) - median(at for at, _ in first))


def judge(samples: Sequence[Sample], looks: Iterable[Look]) -> list[Row]:
    """Every quantity of the soak. looks: what its ranks said of themselves."""
    matched = [sample for sample in samples if sample.matched and sample.step >= _SETTLED]
    rows = []
    for role in _LASTING:
        rows.append(_row(f"{role}: memory, KiB", _each(matched, role, _memory), 32.0, math.inf))
        rows += _counts(role, matched)
    rows.append(_row("ranks: memory at the same age, KiB", _each(matched, "rank", _memory), 32.0, math.inf))
    rows += _counts("rank", matched)
    rows += _accounts(list(looks))
    for what, value, bound, apart in _WHOLE:
        points: dict[Any, list[tuple[float, float]]] = defaultdict(list)
        for sample in matched:
            points[sample.world].append((sample.generation, value(sample)))
        rows.append(_row(what, points, bound, apart))
    return rows


def _accounts(looks: Sequence[Look]) -> list[Row]:
    """Lines on what ranks hold once they are grown; the one that grows most must not grow by more than is allowed."""
    values: dict[str, Callable[[Look], int]] = {
        "memory in use": lambda look: look.in_use,
        "memory beside malloc": lambda look: look.beside,
    }
    rows = []
    for what, value in values.items():
        points: dict[Any, list[tuple[float, float]]] = defaultdict(list)
        for look in looks:
            if look.age >= GROWN:
                points[look.pid].append((look.age / 100, value(look) / 1024))
        long = {pid: each for pid, each in points.items() if each[-1][0] - each[0][0] >= _SPAN / 100}
        name, bound = f"ranks: {what} once settled, KiB", ALLOWED * 100 / 1024
        rows.append(replace(_row(name, long, bound, math.inf, "hundred steps"), slope=steepest(long)))
    return rows


_WHOLE: tuple[tuple[str, Callable[[Sample], float], float, float], ...] = (
    ("processes", lambda sample: len(sample.held), 0.0, 0.0),
    ("run folder without its logs, KiB", lambda sample: sample.disk_kib, 1.0, math.inf),
    ("run folder, entries", lambda sample: sample.entries, 0.05, 6.0),
    ("run folder, temporary files", lambda sample: sample.leftovers, 0.0, 0.0),
    ("temporary folder, entries", lambda sample: sample.temporary, 0.0, 0.0),
    ("shared memory, entries", lambda sample: sample.shared, 0.0, 0.0),
)
"""A checkpoint has four entries, and the best may or may not be among the newest; a report of a rank may be there."""


def _memory(held: Held) -> float:
    return held.memory_kib


def _counts(role: str, matched: Sequence[Sample]) -> list[Row]:
    values: dict[str, Callable[[Held], float]] = {
        "open files": lambda held: held.files,
        "sockets": lambda held: held.sockets,
        "threads": lambda held: held.threads,
    }
    name = "ranks" if role == "rank" else role
    return [_row(f"{name}: {what}", _each(matched, role, value), 0.0, 0.0) for what, value in values.items()]


def _each(
    samples: Iterable[Sample],
    role: str,
    value: Callable[[Held], float],
) -> Series:
    """Points of each process of a role in a world of one size, by generation; a rank's go on with its heirs."""
    points: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        for held in sample.held:
            if held.role.startswith(role):
                key = held.pid if held.role in _LASTING else held.role
                points[key, sample.world].append((sample.generation, value(held)))
    return points


def _row(what: str, series: Series, bound: float, apart: float, per: str = "generation") -> Row:
    long = {key: points for key, points in series.items() if len(points) > 1}
    ends = [(_median(points[:_ENDS]), _median(points[-_ENDS:])) for points in long.values()]
    start, end = max(ends, key=lambda pair: abs(pair[1] - pair[0]), default=(0.0, 0.0))
    looks = sum(map(len, long.values()))
    return Row(what, len(long), looks, start, end, theil_sen(long), per, bound, apart)


def _median(points: Sequence[tuple[float, float]]) -> float:
    return median(value for _, value in points)
