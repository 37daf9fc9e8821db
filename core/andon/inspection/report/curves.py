"""Line charts of values by step, as SVG coordinates, and their tables. A long series is thinned without hiding spikes.

Consecutive points share a bucket. Its lowest and highest value are drawn, each at its own step. Values that are not
finite leave a gap, and are counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 360, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 10, 24
MOST_BUCKETS = 250  # of one series: about one for each pixel of a chart's width
_MOST_DOTS = 60
_TICKS = 4

Point = tuple[int, float]  # step, value


@dataclass(frozen=True)
class Series:
    """Points in rising order of steps. run: 0 or 1. dots: 0 for a line, from 1 the kind of evaluation."""

    name: str
    points: Sequence[Point]
    run: int = 0
    dots: int = 0


@dataclass(frozen=True)
class Bucket:
    """`count` points from step `first` to `last`: the lowest and highest finite value; `lost` are not finite."""

    first: int
    last: int
    count: int
    low: Point | None
    high: Point | None
    lost: int

    @property
    def drawn(self) -> list[Point]:
        return sorted({point for point in (self.low, self.high) if point is not None})


def bucketed(points: Sequence[Point], most: int = MOST_BUCKETS) -> list[Bucket]:
    """Split `points` into at most `most` buckets of equal size; the last may be smaller."""
    size = max(1, math.ceil(len(points) / most))
    buckets = []
    for at in range(0, len(points), size):
        part = points[at : at + size]
        finite = [point for point in part if math.isfinite(point[1])]
        low = min(finite, key=lambda point: point[1], default=None)
        high = max(finite, key=lambda point: point[1], default=None)
        buckets.append(Bucket(part[0][0], part[-1][0], len(part), low, high, len(part) - len(finite)))
    return buckets


@dataclass(frozen=True)
class Scale:
    """Maps a value between `low` and `high` to a coordinate between `start` and `end`, with one decimal."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, number: float) -> str:
        # Halved first: the difference of two values near the largest float overflows.
        wide = self.high / 2 - self.low / 2
        share = (number / 2 - self.low / 2) / wide if wide else 0.5  # half of the smallest float is 0
        return f"{self.start + share * (self.end - self.start):.1f}"


@dataclass(frozen=True)
class Drawn:
    """SVG coordinates of a series: points of each piece without gaps, dots, and x of non-finite values (`lost`).

    thinned: a bucket holds more than one point. words: the series as text for screen readers.
    """

    series: Series
    buckets: Sequence[Bucket]
    lines: Sequence[str]
    dots: Sequence[tuple[str, str]]
    lost: Sequence[str]
    thinned: bool
    words: str


@dataclass(frozen=True)
class Picture:
    """A chart of `WIDTH` x `HEIGHT`. ticks, steps: coordinate and label of each tick on the y and x axis.

    mark: x of the first step at which two runs differ. words: the chart as text for screen readers.
    """

    title: str
    unit: str
    drawn: Sequence[Drawn]
    ticks: Sequence[tuple[str, str]]
    steps: Sequence[tuple[str, str, str]]
    mark: str | None
    words: str


def draw(title: str, unit: str, series: Sequence[Series], mark: int | None = None) -> Picture | None:
    """A chart of `series`; None without a finite value. mark: step of a vertical line."""
    split = [(each, bucketed(each.points)) for each in series if each.points]
    values = [value for _, buckets in split for bucket in buckets for _, value in bucket.drawn]
    if not values:
        return None
    ticks = _ticks(min(values), max(values))
    height = Scale(ticks[0], ticks[-1], HEIGHT - _BOTTOM, _TOP)
    first, last = min(each.points[0][0] for each, _ in split), max(each.points[-1][0] for each, _ in split)
    across = Scale(first, max(last, first + 1), _LEFT, WIDTH - _RIGHT)
    drawn = [_drawn(each, buckets, across, height) for each, buckets in split]
    return Picture(
        title=title,
        unit=unit,
        drawn=drawn,
        ticks=[(height(tick), f"{tick:.6g}") for tick in ticks],
        steps=[(across(at), str(at), side) for at, side in zip(sorted({first, last}), ("start", "end"), strict=False)],
        mark=None if mark is None or not first <= mark <= last else across(mark),
        words="; ".join(each.words for each in drawn) + (f"; the runs part at step {mark}" if mark else ""),
    )


def _drawn(series: Series, buckets: Sequence[Bucket], across: Scale, height: Scale) -> Drawn:
    pieces: list[list[tuple[str, str]]] = [[]]
    for bucket in buckets:
        pieces[-1] += [(across(step), height(value)) for step, value in bucket.drawn]
        if bucket.lost:
            pieces.append([])
    every = [place for piece in pieces for place in piece]
    finite = [value for _, value in series.points if math.isfinite(value)]
    words = [f"{series.name}: {len(series.points)} numbers"]
    if finite:
        ends = f"first {finite[0]:.4g}, last {finite[-1]:.4g}"
        words.append(f"{ends}, lowest {min(finite):.4g}, highest {max(finite):.4g}")
    if len(finite) < len(series.points):
        words.append(f"{len(series.points) - len(finite)} not finite")
    return Drawn(
        series=series,
        buckets=buckets,
        lines=[" ".join(f"{x},{y}" for x, y in piece) for piece in pieces if len(piece) > 1],
        dots=every if series.dots and len(every) <= _MOST_DOTS else [piece[0] for piece in pieces if len(piece) == 1],
        lost=[across(bucket.first) for bucket in buckets if bucket.lost],
        thinned=any(bucket.count > 1 for bucket in buckets),
        words=", ".join(words),
    )


def _ticks(low: float, high: float) -> list[float]:
    if low == high:
        room = abs(low) / 2 or 0.5
        return [tick for tick in (low - room, low, low + room) if math.isfinite(tick)]
    span = high / _TICKS - low / _TICKS
    if not math.isfinite(span) or span < 1e-300:
        return [low, high]
    power = 10.0 ** math.floor(math.log10(span))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= span)
    ticks = [number * step for number in range(math.floor(low / step), math.ceil(high / step) + 1)]
    # Round numbers beyond the largest float are infinite, and those between close values coincide.
    return ticks if math.isfinite(ticks[0]) and math.isfinite(ticks[-1]) and ticks[0] < ticks[-1] else [low, high]
