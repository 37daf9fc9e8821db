"""One number an update as a line: where its points lie in a small picture, and what it shows in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from andon.inspection.report.curves import Scale
from andon_falsify.campaign.findings import Finding

WIDTH, HEIGHT = 420, 120
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 24
_MOST_DOTS = 60


@dataclass(frozen=True)
class Curve:
    """A curve in a picture of `WIDTH` x `HEIGHT`.

    lines: points of each unbroken piece, as SVG writes them. dots: x and y of each number. law: height of the line on
    which all should lie. ticks: height and number of the marks at the left.
    """

    words: str
    count: int
    lines: tuple[str, ...]
    dots: tuple[tuple[str, str], ...]
    law: str | None
    ticks: tuple[tuple[str, str], ...]


def draw(finding: Finding) -> Curve | None:
    """The curve of `finding`; None where it has no finite number. What is not finite is a gap."""
    finite = [number for number in finding.curve if isfinite(number)]
    if not finite:
        return None
    law = finding.curve_law
    low, high = _range([*finite, law] if law is not None else finite)
    height = Scale(low, high, HEIGHT - _BOTTOM, _TOP)
    across = Scale(1, max(2, len(finding.curve)), _LEFT, WIDTH - _RIGHT)
    pieces = _pieces(finding.curve)
    points = [[(across(update), height(number)) for update, number in piece] for piece in pieces]
    return Curve(
        words=_words(finding, finite),
        count=len(finding.curve),
        lines=tuple(" ".join(f"{x},{y}" for x, y in piece) for piece in points if len(piece) > 1),
        dots=tuple(point for piece in points for point in piece if len(finite) <= _MOST_DOTS or len(piece) == 1),
        law=None if law is None else height(law),
        ticks=_ticks(finite, law, height),
    )


def _range(numbers: Sequence[float]) -> tuple[float, float]:
    low, high = min(numbers), max(numbers)
    return (low, high) if low < high else (low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2)


def _pieces(curve: Sequence[float]) -> list[list[tuple[int, float]]]:
    pieces: list[list[tuple[int, float]]] = [[]]
    for update, number in enumerate(curve, start=1):
        if isfinite(number):
            pieces[-1].append((update, number))
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _ticks(finite: Sequence[float], law: float | None, height: Scale) -> tuple[tuple[str, str], ...]:
    """The law, and the lowest and highest number where their labels do not run into it."""
    chosen: list[float] = [] if law is None else [law]
    for number in (max(finite), min(finite)):
        if all(abs(float(height(number)) - float(height(other))) >= 12 for other in chosen):
            chosen.append(number)
    return tuple((height(number), f"{number:.4g}") for number in chosen)


def _words(finding: Finding, finite: Sequence[float]) -> str:
    lost = len(finding.curve) - len(finite)
    said = [f"{finding.curve_name or 'one number an update'}: {len(finding.curve)} numbers"]
    said.append(f"first {finite[0]:.4g}, last {finite[-1]:.4g}, lowest {min(finite):.4g}, highest {max(finite):.4g}")
    if finding.curve_law is not None:
        said.append(f"it should be {finding.curve_law:.4g}")
    if lost:
        said.append(f"{lost} not finite")
    return "; ".join(said)
