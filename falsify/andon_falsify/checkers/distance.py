"""Relative distance between two vectors, and the one factor between two sets of them, in plain double precision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import dist, hypot, inf, isclose, isfinite
from operator import mul
from typing import Protocol, runtime_checkable


@runtime_checkable
class Listable(Protocol):
    """A tensor or an array of any library: what gives its values as (nested) lists."""

    def tolist(self) -> object:
        """The values."""
        ...


Values = Sequence[float] | Sequence[Sequence[float]] | Listable


@dataclass(frozen=True)
class Gap:
    """`relative` = |seen - expected| / scale; `factor` = the c for which c * expected is nearest to seen.

    `residual` = |seen - c * expected| / |seen|: about 0 where seen is expected but for that factor. `factor` is None
    where expected is 0.
    """

    relative: float
    factor: float | None
    residual: float


def flat(values: Values) -> list[float]:
    """The values as one list, row by row. Raises `TypeError` for what is not made of numbers."""
    return list(_leaves(values.tolist() if isinstance(values, Listable) else values))


def norm(values: Sequence[float]) -> float:
    """The L2 norm, without overflow on the way."""
    return hypot(*values)


def gap(seen: Sequence[float], expected: Sequence[float], floor: float = 0.0) -> Gap:
    """How far `seen` is from `expected`, which have the same length; the scale is max(|expected|, floor).

    A scale of 0 gives 0 for equal vectors and infinity for others. NaN or infinity in `seen` gives infinity.
    """
    size, off = norm(expected), dist(seen, expected)
    if not isfinite(off):
        return Gap(inf, None, inf)
    scale = max(size, floor)
    relative = off / scale if scale else (0.0 if off == 0.0 else inf)
    if not size:
        return Gap(relative, None, inf)
    factor = sum(map(mul, (value / size for value in seen), (value / size for value in expected)))
    held = norm(seen)
    rest = dist(seen, [factor * value for value in expected])
    return Gap(relative, factor, rest / held if held else 0.0)


def common_factor(gaps: Mapping[str, Gap], tolerance: float = 1e-3) -> float | None:
    """The one factor of all `gaps` whose expected value is not 0, or None where there is no single one."""
    factors = [held.factor for held in gaps.values() if held.factor is not None and held.residual <= tolerance]
    informative = sum(held.factor is not None for held in gaps.values())
    if not factors or len(factors) < informative:
        return None
    middle = sorted(factors)[len(factors) // 2]
    return middle if all(isclose(factor, middle, rel_tol=tolerance) for factor in factors) else None


def _leaves(values: object) -> Iterable[float]:
    if isinstance(values, (int, float)):
        yield float(values)
    elif isinstance(values, Iterable) and not isinstance(values, (str, bytes)):
        for value in values:
            yield from _leaves(value)
    else:
        msg = f"{type(values).__name__} is not a number or a sequence of numbers"
        raise TypeError(msg)
