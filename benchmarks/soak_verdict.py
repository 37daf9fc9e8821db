"""Whether what a run holds stays flat: robust slopes over looks at the same age, and the end against the start."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.soak_samples import Held, Sample

_LASTING = ("launcher", "fork server", "agent")
"""Roles whose processes outlive a generation of workers; ranks are born with it."""
_ENDS = 3
"""Looks at the start and at the end of a series, of which the medians are compared."""
_SETTLED = 100
"""Steps after which the folder has all the checkpoints that it keeps."""
_GROWN = 700
"""Lines of the ledger after which a rank has evaluated once, and its allocator all that an epoch needs."""
_PAIRS = 100_000

Series = Mapping[Any, Sequence[tuple[float, float]]]
"""Points (when, how much) that may be compared with each other, by what they are of."""


@dataclass(frozen=True)
class Row:
    """One quantity. `start` and `end`: the medians of the first and last three looks of the series that moved most.

    `slope`: the median over all pairs of looks of one series, in the quantity's unit for each `per`. Flat: the slope is
    at most `bound`, and the ends differ by at most `apart`.
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
        slope = f"{self.slope:.3g} a {self.per} (at most {self.bound:g})"
        verdict = "flat" if self.flat else "NOT FLAT" if self.series else "NOT SEEN TWICE"
        return self.what, f"{self.looks} in {self.series}", f"{self.start:g}", f"{self.end:g}", slope, verdict


def theil_sen(series: Series) -> float:
    """The median slope over all pairs of points of the same series; 0 where there is none."""
    slopes: list[float] = []
    for points in series.values():
        pairs = itertools.islice(itertools.combinations(points, 2), _PAIRS)
        slopes += [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs if b[0] != a[0]]
    return median(slopes) if slopes else 0.0


def judge(samples: Sequence[Sample]) -> list[Row]:
    """Every quantity of the soak."""
    matched = [sample for sample in samples if sample.matched and sample.step >= _SETTLED]
    rows = []
    for role in _LASTING:
        rows.append(_row(f"{role}: memory, KiB", _each(matched, role, _memory), 32.0, math.inf))
        rows += _counts(role, matched)
    rows.append(_row("ranks: memory at the same age, KiB", _each(matched, "rank", _memory), 32.0, math.inf))
    rows += _counts("rank", matched)
    calm = [sample for sample in samples if sample.calm and sample.age >= _GROWN]
    grown = _each(calm, "rank", _memory, lambda sample: sample.step / 100, by_pid=True)
    rows.append(_row("ranks: memory while left alone, KiB", grown, 64.0, math.inf, "hundred steps"))
    for what, value, bound, apart in _WHOLE:
        points: dict[Any, list[tuple[float, float]]] = defaultdict(list)
        for sample in matched:
            points[sample.world].append((sample.generation, value(sample)))
        rows.append(_row(what, points, bound, apart))
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
    when: Callable[[Sample], float] = lambda sample: sample.generation,
    *,
    by_pid: bool = False,
) -> Series:
    """Points of each process of a role in a world of one size; a rank's go on with its heirs, unless by pid."""
    points: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        for held in sample.held:
            if held.role.startswith(role):
                key = held.pid if by_pid or held.role in _LASTING else held.role
                points[key, sample.world].append((when(sample), value(held)))
    return points


def _row(what: str, series: Series, bound: float, apart: float, per: str = "generation") -> Row:
    long = {key: points for key, points in series.items() if len(points) > 1}
    ends = [(_median(points[:_ENDS]), _median(points[-_ENDS:])) for points in long.values()]
    start, end = max(ends, key=lambda pair: abs(pair[1] - pair[0]), default=(0.0, 0.0))
    looks = sum(map(len, long.values()))
    return Row(what, len(long), looks, start, end, theil_sen(long), per, bound, apart)


def _median(points: Sequence[tuple[float, float]]) -> float:
    return median(value for _, value in points)
