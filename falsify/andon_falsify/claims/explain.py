"""Why two numbers or tensors differ: a wrong average shows as a ratio that is a product of the layout's sizes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import isclose, isfinite, prod
from typing import TYPE_CHECKING

from andon_falsify.verdict import Counterexample, Outcome, Verdict

if TYPE_CHECKING:
    from andon_falsify.claims.laws import LoopLaw
    from andon_falsify.subjects.case import Case

_POWERS = (0, 1, -1, 2, -2)
_FITS = 1e-3
"""Relative: two ratios that differ by less are the same."""
SHORT_WINDOW = "a short window is divided as a full one"
"""The cause of a ratio: the last update has fewer rows or micro-batches, and its sum is divided by those of a full one.
By itself such a ratio looks like chance."""


def explain_ratio(ratio: float, factors: Mapping[str, int]) -> str:
    """`4.000 = accumulation 2 x world 2`, or the number alone if no product of `factors` is equal to it."""
    named = ratio_product(ratio, factors)
    return f"{show_ratio(ratio)} = {named}" if named else show_ratio(ratio)


def ratio_product(ratio: float, factors: Mapping[str, int]) -> str:
    """`accumulation 2 x world 2`: `ratio` as the simplest product of powers (-2 to 2) of `factors`, "" without one.

    Equally simple ones are joined by "or": one case cannot tell them apart.
    """
    if not isfinite(ratio) or ratio == 0 or isclose(ratio, 1.0, rel_tol=_FITS):
        return ""
    if isclose(ratio, -1.0, rel_tol=_FITS):
        return "the sign"
    named = sorted(name_product(factors, powers) for powers in fitting_powers([(ratio, factors)]))
    return f"{'-1 x ' if ratio < 0 else ''}{' or '.join(named)}" if named else ""


def show_ratio(ratio: float) -> str:
    """Three decimals, or three significant digits for a very small or large number."""
    return f"{ratio:.3f}" if 0.01 <= abs(ratio) < 1e6 else f"{ratio:.3g}"


def fitting_powers(
    measured: Sequence[tuple[float, Mapping[str, int]]], tolerance: float = _FITS
) -> list[Mapping[str, int]]:
    """The simplest products of powers that give each of the `measured` ratios from its factors, but for the sign.

    A product is a power (-2 to 2, not 0) by the name of its factor. All that are returned are equally simple; the list
    is empty if no product fits every ratio. Factors that are 1 everywhere are left out.
    """
    names = sorted({name for _, factors in measured for name, value in factors.items() if value > 1})
    if not names:
        return []
    (ratio, first), *others = measured
    values, tried = _products(tuple(first.get(name, 1) for name in names))
    first_near = bisect_left(values, abs(ratio) * (1 - 2 * tolerance))
    fits: dict[int, list[tuple[int, ...]]] = {}
    for place in range(first_near, bisect_right(values, abs(ratio) / (1 - tolerance))):
        value, powers = values[place], tried[place]
        if isclose(value, abs(ratio), rel_tol=tolerance) and all(
            isclose(_product([factors.get(name, 1) for name in names], powers), abs(other), rel_tol=tolerance)
            for other, factors in others
        ):
            fits.setdefault(sum(power * power for power in powers), []).append(powers)
    simplest = fits[min(fits)] if fits else []
    return [{name: power for name, power in zip(names, powers, strict=True) if power} for powers in sorted(simplest)]


@lru_cache(maxsize=64)
def _products(factors: tuple[int, ...]) -> tuple[list[float], list[tuple[int, ...]]]:
    powers = [each for each in product(_POWERS, repeat=len(factors)) if any(each)]
    found = sorted((_product(factors, each), each) for each in powers)
    return [value for value, _ in found], [each for _, each in found]


def _product(factors: Sequence[int], powers: Sequence[int]) -> float:
    return prod(float(factor) ** power for factor, power in zip(factors, powers, strict=True))


def name_product(factors: Mapping[str, int], powers: Mapping[str, int]) -> str:
    """`accumulation 2 x world 2`, `1 / world 2`, `world 2 squared / accumulation 3`."""
    named = [(by, f"{name} {factors[name]}{' squared' * (abs(by) == 2)}") for name, by in sorted(powers.items())]
    above, below = ([text for power, text in named if power * sign > 0] for sign in (1, -1))
    return " / ".join([" x ".join(above) or "1", *below])


def short_window(ratio: float, visits: Sequence[Sequence[tuple[int, ...]]], case: Case) -> str:
    """`2 of 3 micro-batches`, if that is `ratio` for an update of these `visits` (as `LoopLaw.visits`); else ""."""
    windows = [sum(map(bool, leaves)) for leaves in visits]
    rows = sum(len(leaf) for leaves in visits for leaf in leaves)
    alike = len(set(windows)) == 1
    present = {
        "micro-batches": (windows[0], case.accumulation) if alike else (sum(windows), case.accumulation * case.world),
        "rows": (rows, case.global_batch),
        "ranks with rows": (sum(map(bool, windows)), case.world),
    }
    return " or ".join(
        f"{held} of {full} {name}"
        for name, (held, full) in present.items()
        if 0 < held < full and isclose(ratio, held / full, rel_tol=_FITS)
    )


def explain_window(ratio: float, law: LoopLaw, step: int) -> str:
    """`0.667 = 2 of 3 micro-batches: CAUSE` for the ratio of a short window, else ""."""
    held = short_window(ratio, law.visits(step), law.case)
    return f"{show_ratio(ratio)} = {held}: {SHORT_WINDOW}" if held else ""


def name_short_windows(law: LoopLaw, verdicts: Mapping[int, Verdict]) -> list[Verdict]:
    """The verdicts by update, with `SHORT_WINDOW` as the cause of each ratio that a short window gives.

    Without a full window that holds, a short window cannot be told from a wrong average, and the verdicts stay.
    """
    full = [step for step in verdicts if law.visited(step) == law.case.global_batch]
    if not full or any(verdicts[step].outcome is Outcome.FALSIFIED for step in full):
        return list(verdicts.values())

    def named(found: Counterexample, step: int) -> Counterexample:
        equals = "" if found.ratio is None else explain_window(found.ratio, law, step)
        return replace(found, equals=equals, cause=SHORT_WINDOW) if equals else found

    return [
        replace(verdict, counterexamples=tuple(named(each, step) for each in verdict.counterexamples))
        for step, verdict in verdicts.items()
    ]
