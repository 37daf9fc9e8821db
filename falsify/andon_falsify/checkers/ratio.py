"""What a measured ratio equals: a wrong average shows as a product of world size, accumulation and the like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    fits: dict[int, list[Mapping[str, int]]] = {}
    for tried in product(_POWERS, repeat=len(names)):
        powers = {name: power for name, power in zip(names, tried, strict=True) if power}
        made = [prod(float(factors.get(name, 1)) ** power for name, power in powers.items()) for _, factors in measured]
        if powers and all(
            isclose(each, abs(r), rel_tol=tolerance) for each, (r, _) in zip(made, measured, strict=True)
        ):
            fits.setdefault(sum(power * power for power in tried), []).append(powers)
    return fits[min(fits)] if fits else []


def name_product(factors: Mapping[str, int], powers: Mapping[str, int]) -> str:
    """`accumulation 2 x world 2`, `1 / world 2`, `world 2 squared / accumulation 3`."""
    above = [_power(name, factors[name], power) for name, power in sorted(powers.items()) if power > 0]
    below = [_power(name, factors[name], -power) for name, power in sorted(powers.items()) if power < 0]
    return " / ".join([" x ".join(above) or "1", *below])


def _power(name: str, value: int, power: int) -> str:
    return f"{name} {value}{' squared' if power == 2 else ''}"
