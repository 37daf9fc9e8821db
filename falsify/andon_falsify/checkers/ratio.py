"""What a measured ratio equals: a wrong average shows as a product of world size, accumulation and the like."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import isclose, isfinite, prod

_POWERS = (0, 1, -1, 2, -2)


def explain_ratio(ratio: float, factors: Mapping[str, int], tolerance: float = 1e-3) -> str:
    """`4.000 = accumulation 2 x world 2`: `ratio` as a product of powers (-2 to 2) of `factors`, if it is one.

    The simplest product is named; equally simple ones are joined by "or", because one case cannot tell them apart
    (repeat it with factors that differ). Factors of 1 explain nothing and are left out. A ratio that is no such product
    is given as a number alone. `tolerance` is relative.
    """
    shown = show_ratio(ratio)
    if not isfinite(ratio) or ratio == 0 or isclose(ratio, 1.0, rel_tol=tolerance):
        return shown
    if isclose(ratio, -1.0, rel_tol=tolerance):
        return f"{shown} = the sign"
    found = fitting_powers([(ratio, {name: value for name, value in factors.items() if value > 1})], tolerance)
    named = sorted(name_product(factors, powers) for powers in found)
    return f"{shown} = {'-1 x ' if ratio < 0 else ''}{' or '.join(named)}" if found else shown


def show_ratio(ratio: float) -> str:
    """With three digits behind the point, or where it is very small or large three significant ones."""
    return f"{ratio:.3f}" if 0.01 <= abs(ratio) < 1e6 else f"{ratio:.3g}"


def fitting_powers(
    measured: Sequence[tuple[float, Mapping[str, int]]], tolerance: float = 1e-3
) -> list[Mapping[str, int]]:
    """The simplest products of powers that give every one of `measured` ratios from its factors, but for the sign.

    Each is a power (-2 to 2, not 0) by the name of its factor; all are equally simple. Factors that are 1 everywhere
    are left out. None where no product fits all.
    """
    names = sorted({name for _, factors in measured for name, value in factors.items() if value > 1})
    if not names:
        return []
    (ratio, first), *others = measured
    values, tried = _products(tuple(first.get(name, 1) for name in names))
    near = slice(
        bisect_left(values, abs(ratio) * (1 - 2 * tolerance)), bisect_right(values, abs(ratio) / (1 - tolerance))
    )
    fits: dict[int, list[tuple[int, ...]]] = {}
    for value, powers in zip(values[near], tried[near], strict=True):
        if isclose(value, abs(ratio), rel_tol=tolerance) and all(
            isclose(_product([factors.get(name, 1) for name in names], powers), abs(other), rel_tol=tolerance)
            for other, factors in others
        ):
            fits.setdefault(sum(power * power for power in powers), []).append(powers)
    simplest = fits[min(fits)] if fits else []
    return [{name: power for name, power in zip(names, powers, strict=True) if power} for powers in sorted(simplest)]


@lru_cache(maxsize=64)
def _products(factors: tuple[int, ...]) -> tuple[list[float], list[tuple[int, ...]]]:
    """The values of all products of powers of `factors`, ascending, and the powers of each (campaigns repeat them)."""
    powers = [each for each in product(_POWERS, repeat=len(factors)) if any(each)]
    found = sorted((_product(factors, each), each) for each in powers)
    return [value for value, _ in found], [each for _, each in found]


def _product(factors: Sequence[int], powers: Sequence[int]) -> float:
    return prod(float(factor) ** power for factor, power in zip(factors, powers, strict=True))


def name_product(factors: Mapping[str, int], powers: Mapping[str, int]) -> str:
    """`accumulation 2 x world 2`, `1 / world 2`, `world 2 squared / accumulation 3`."""
    above = [_power(name, factors[name], power) for name, power in sorted(powers.items()) if power > 0]
    below = [_power(name, factors[name], -power) for name, power in sorted(powers.items()) if power < 0]
    return " / ".join([" x ".join(above) or "1", *below])


def _power(name: str, value: int, power: int) -> str:
    return f"{name} {value}{' squared' if power == 2 else ''}"
