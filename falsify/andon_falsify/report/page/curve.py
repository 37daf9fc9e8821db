"""One number per update as a line in a small picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from andon.inspection.report.curves import Scale
from andon_falsify.report.findings import Finding

WIDTH, HEIGHT = 420, 120
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 24
_MOST_DOTS = 60


@dataclass(frozen=True)
class Curve:
    """A curve in a picture of `WIDTH` x `HEIGHT`.

    words: the curve in a sentence. lines: the points of each unbroken piece, in SVG's notation. dots: x and y of each
    number. law: the height of the line on which all points should lie. ticks: height and label of the left marks.
    """

    words: str
    count: int
    lines: tuple[str, ...]
    dots: tuple[tuple[str, str], ...]
    law: str | None
    ticks: tuple[tuple[str, str], ...]


def draw(finding: Finding) -> Curve | None:
    """The curve of `finding`; None if it has no finite number. Other numbers leave gaps."""
    finite, law = [number for number in finding.curve if isfinite(number)], finding.curve_law
    if not finite:
        return None
    low, high = min([*finite, *_given(law)]), max([*finite, *_given(law)])
    if low == high:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    height = Scale(low, high, HEIGHT - _BOTTOM, _TOP)
    across = Scale(1, max(2, len(finding.curve)), _LEFT, WIDTH - _RIGHT)
    pieces: list[list[tuple[str, str]]] = [[]]
    for update, number in enumerate(finding.curve, start=1):
        if isfinite(number):
            pieces[-1].append((across(update), height(number)))
        elif pieces[-1]:
            pieces.append([])
    ticks = [*_given(law)]
    for number in (max(finite), min(finite)):  # unless their labels overlap
        if all(abs(float(height(number)) - float(height(other))) >= 12 for other in ticks):
            ticks.append(number)
    return Curve(
        words=_words(finding, finite),
        count=len(finding.curve),
        lines=tuple(" ".join(f"{x},{y}" for x, y in piece) for piece in pieces if len(piece) > 1),
        dots=tuple(point for piece in pieces for point in piece if len(finite) <= _MOST_DOTS or len(piece) == 1),
        law=None if law is None else height(law),
        ticks=tuple((height(number), f"{number:.4g}") for number in ticks),
    )


def _given(law: float | None) -> list[float]:
    return [] if law is None else [law]


def _words(finding: Finding, finite: Sequence[float]) -> str:
    said = [f"{finding.curve_name or 'one number an update'}: {len(finding.curve)} numbers"]
    said.append(f"first {finite[0]:.4g}, last {finite[-1]:.4g}, lowest {min(finite):.4g}, highest {max(finite):.4g}")
    if finding.curve_law is not None:
        said.append(f"it should be {finding.curve_law:.4g}")
    if len(finding.curve) > len(finite):
        said.append(f"{len(finding.curve) - len(finite)} not finite")
    return "; ".join(said)
