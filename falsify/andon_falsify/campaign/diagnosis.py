"""What a measured ratio equals, and which mistake gives just that: "4.000 = accumulation 2 x world 2".

One case cannot tell accumulation 2 from world 2; the ratios of all cases in which a claim fell are explained together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose, isfinite, prod
from types import MappingProxyType

from andon_falsify.claims.explain import fitting_powers, name_product, show_ratio
from andon_falsify.subjects.case import Case
from andon_falsify.verdict import Counterexample

Powers = Mapping[str, int]
Measured = tuple[float, Case]
Held = Mapping[Case, Sequence[Case]]
"""Cases of which a claim holds, by what they are but for their layout. See `held_by_rest`."""
_LAYOUT = ("accumulation", "world")

_CAUSES: Mapping[frozenset[tuple[str, int]], str] = {
    frozenset(powers.items()): cause
    for powers, cause in (
        ({"accumulation": 1, "world": 1}, "the loss was not divided"),
        ({"world": 1}, "summed over the ranks instead of averaged"),
        ({"accumulation": 1}, "summed over the micro-batches of a rank instead of averaged"),
        ({"world": -1}, "divided by the number of ranks once too often, or not summed over them"),
        ({"accumulation": -1}, "divided by the accumulation once too often, or only one micro-batch of it counts"),
        ({"accumulation": -1, "world": -1}, "divided by accumulation and world size once too often"),
        ({"world": 2}, "multiplied by the number of ranks twice"),
        ({"world": -2}, "divided by the number of ranks twice"),
        ({"global batch": 1}, "summed over the rows instead of averaged"),
        ({"global batch": -1}, "divided by the rows of the batch once too often"),
        ({"local batch": 1}, "summed over the rows of a micro-batch instead of averaged"),
        ({"local batch": -1}, "divided by the rows of a micro-batch once too often"),
        ({"updates of an epoch": 1}, "summed over the updates of an epoch"),
    )
}
"""What usually makes a ratio of a gradient, by the powers of its factors."""

_NAME, _NUMBERS = r"\w+(?:\.\w+)+", r"\d[\d.e+-]*(?:, \d[\d.e+-]*)*"
_VARYING = re.compile(f"{_NAME}|{_NUMBERS}")
"""Names with dots in them and lists of numbers, in the words of a counterexample."""
_NO_GRADIENTS = ("the learning rate is ", "the loss that is told is ", "the norm of the weights ")
"""How a counterexample begins that is about another number of an update: it is no sum, so no sum went wrong in it."""


@dataclass(frozen=True)
class Explanation:
    """Powers of factors that give every measured ratio; several where the cases cannot tell them apart.

    sign: -1 where all ratios are negative. With no powers at all it is the sign alone.
    """

    products: tuple[Powers, ...]
    sign: int = 1

    def fits(self, ratio: float, case: Case) -> bool:
        """Whether it gives this ratio too."""
        factors = _factors(case)
        values = [
            prod(float(factors[name]) ** power for name, power in each.items()) for each in self.products or ({},)
        ]
        return all(isclose(self.sign * value, ratio, rel_tol=1e-3) for value in values)

    def of(self, ratio: float, case: Case, what: str = "") -> str:
        """`4.000 = accumulation 2 x world 2: the loss was not divided`, for a ratio that it fits.

        what: the counterexample in words; where it is about no gradient, only the factors are named.
        """
        named = " or ".join(sorted(name_product(_factors(case), powers) for powers in self.products)) or "the sign"
        signed = f"-1 x {named}" if self.sign < 0 and self.products else named
        if what.startswith(_NO_GRADIENTS):
            return f"{show_ratio(ratio)} = {signed.replace('world ', 'world size ')}"
        cause = _CAUSES.get(frozenset(self.products[0].items()), "") if len(self.products) == 1 else ""
        return f"{show_ratio(ratio)} = {signed}" + (f": {cause}" if cause and self.sign > 0 else "")


def held_by_rest(cases: Iterable[Case]) -> Held:
    """`cases`, so that those like a measured one but for its layout are found at once, among thousands too."""
    found: dict[Case, list[Case]] = {}
    for case in cases:
        found.setdefault(_but_for_layout(case), []).append(case)
    return found


def explain(measured: Sequence[Measured], held: Held = MappingProxyType({})) -> Explanation | None:
    """The simplest products that give every ratio of `measured`; None where there are none, or none but 1.

    Of several, those are ruled out that would have shown in a case of `held`, which differs in its layout alone.
    World size and accumulation go before sizes of batches that are no simpler: a batch is a product of the two, so that
    it fits by chance whatever they fit.
    """
    signs = {1 if ratio > 0 else -1 for ratio, _ in measured}
    if len(signs) != 1 or any(not isfinite(ratio) or ratio == 0 for ratio, _ in measured):
        return None
    (sign,) = signs
    if all(isclose(abs(ratio), 1.0, rel_tol=1e-3) for ratio, _ in measured):
        return Explanation((), sign) if sign < 0 else None
    cases = [(ratio, _factors(case)) for ratio, case in measured]
    layout = fitting_powers([(ratio, {name: factors[name] for name in _LAYOUT}) for ratio, factors in cases])
    sizes = fitting_powers(cases)
    simplest = layout if layout and (not sizes or _complexity(layout) <= max(2, _complexity(sizes))) else sizes
    if not simplest:
        return None
    alike = [each for _, case in measured for each in held.get(_but_for_layout(case), ())] if held else []
    unseen = [powers for powers in simplest if not any(_shows(powers, case) for case in alike)]
    return Explanation(tuple(unseen or simplest), sign)


def _shows(powers: Powers, held: Case) -> bool:
    """Whether `powers` would have given another number than 1 in `held`."""
    factors = _factors(held)
    return not isclose(prod(float(factors[name]) ** power for name, power in powers.items()), 1.0, rel_tol=1e-3)


def _but_for_layout(case: Case) -> Case:
    return case.but(world=1, micro_batches=1, batch_size=1)


def _complexity(fitting: Sequence[Powers]) -> int:
    return sum(power * power for power in fitting[0].values())


def diagnosed(
    found: Counterexample, case: Case, common: Explanation | None, held: Held = MappingProxyType({})
) -> Counterexample:
    """`found` with what its ratio equals: by `common`, what all cases have in common, where that fits, else by itself.

    held: cases of which the claim holds. See `explain`.

    As it is where it has no ratio, one that nothing explains, or one of which its judge knows the cause.
    """
    if found.ratio is None or cause_of(found):
        return found
    own = common if common is not None and common.fits(found.ratio, case) else explain([(found.ratio, case)], held)
    return found if own is None else replace(found, equals=own.of(found.ratio, case, found.what))


def cause_of(found: Counterexample) -> str:
    """What a judge that saw the whole run says of the ratio, "" if nothing: `0.667 = 2 of 3 micro-batches: CAUSE`."""
    return found.equals.partition(": ")[2]


def reason(found: Counterexample, case: Case) -> tuple[str, ...]:
    """What a smaller counterexample must keep, to be one of the same mistake.

    The cause that its judge names; or the factors of its ratio by name; or, where nothing explains a ratio, what was
    found, in words without the numbers and names of tensors that another case changes.
    """
    if cause_of(found):
        return (cause_of(found),)
    return factors_of(found, case) or (_VARYING.sub("#", found.what),)


def factors_of(found: Counterexample, case: Case) -> tuple[str, ...]:
    """The names of the factors that explain its ratio; none where it has no ratio, or nothing explains it."""
    explanation = explain([(found.ratio, case)]) if found.ratio is not None else None
    return tuple(sorted({name for each in explanation.products for name in each})) if explanation is not None else ()


def _factors(case: Case) -> dict[str, int]:
    return {
        "accumulation": case.accumulation,
        "world": case.world,
        "local batch": case.local_batch,
        "global batch": case.global_batch,
        "updates of an epoch": case.updates_of_epoch(case.global_batch),
    }
