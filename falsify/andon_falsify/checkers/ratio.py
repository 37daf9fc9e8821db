"""What a measured ratio equals: a wrong average shows as a product of world size, accumulation and the like."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import isclose, isfinite, prod

_POWERS = (0, 1, -1, 2, -2)


def explain_ratio(ratio: float, factors: Mapping[str, int], tolerance: float = 1e-3) -> str:
    """`4.000 = accumulation 2 x world 2`: `ratio` as a product of powers (-2 to 2) of `factors`, if it is one.

    The simplest product is named; equally simple ones are joined by "or", because one case cannot tell them apart
    (repeat it with factors that differ). Factors of 1 explain nothing and are left out. A ratio that is no such product
    is given as a number alone. `tolerance` is relative.
    """
    shown = f"{ratio:.3f}" if 0.01 <= abs(ratio) < 1e6 else f"{ratio:.3g}"
    if not isfinite(ratio) or ratio == 0 or isclose(ratio, 1.0, rel_tol=tolerance):
        return shown
    useful = {name: value for name, value in sorted(factors.items()) if value > 1}
    sign = "-1 x " if ratio < 0 else ""
    fits: dict[int, list[str]] = {}
    for powers in product(_POWERS, repeat=len(useful)):
        value = prod(base**power for base, power in zip(useful.values(), powers, strict=True))
        if any(powers) and isclose(value, abs(ratio), rel_tol=tolerance):
            fits.setdefault(sum(power * power for power in powers), []).append(_product(useful, powers))
    if isclose(ratio, -1.0, rel_tol=tolerance):
        return f"{shown} = the sign"
    return f"{shown} = {sign}{' or '.join(sorted(fits[min(fits)]))}" if fits else shown


def _product(factors: Mapping[str, int], powers: tuple[int, ...]) -> str:
    """`accumulation 2 x world 2`, `1 / world 2`, `world 2 squared / accumulation 3`."""
    above = [
        _power(name, value, power) for (name, value), power in zip(factors.items(), powers, strict=True) if power > 0
    ]
    below = [
        _power(name, value, -power) for (name, value), power in zip(factors.items(), powers, strict=True) if power < 0
    ]
    return " / ".join([" x ".join(above) or "1", *below])


def _power(name: str, value: int, power: int) -> str:
    return f"{name} {value}{' squared' if power == 2 else ''}"
