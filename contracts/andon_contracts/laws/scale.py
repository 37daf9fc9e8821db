"""The scale of an update's gradient, as far as it can be known without computing it again.

How much a loss weighs stands in its graph: `cross_entropy(...) / 2` is a mean that counts half. By which factor a loop
reduces is seen of one parameter: its gradient before the update over the sum of what the backward passes of all ranks
gave it. The product, over all passes and ranks, is what all terms of the global batch weigh together. Of a mean it is
1, whoever divides by what; 4 where two micro-batches on two ranks were added and nobody divided. A loss may be
weighed on purpose, so a law stands here only for factors that come from the layout, and it is a suspicion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from andon_contracts.agree import Observation, real_of
from andon_contracts.laws.law import Law, Observations
from andon_contracts.violation import Finding

UNKNOWN = -1
"""In the place of the number of backward passes: what they weigh is not known."""
_CLOSE = 5e-3
"""Within this a product is a factor: it was read off gradients that were rounded, perhaps to 16 bits."""
_CANCELLED = 1e-3
"""Below this share of what they are made of, sums have lost too many digits to tell a factor by."""


def close(one: float, other: float) -> bool:
    """Whether two factors are the same, up to the rounding of the gradients that they were read off."""
    return math.isclose(one, other, rel_tol=_CLOSE)


@dataclass(frozen=True)
class Scale:
    """What all terms of one update weigh together: `first`, by the first part of each loss, and `alike`, by all parts
    that weigh as much as that.

    line: of the loop, as a digest, that asked for the backward passes. passes: those of each rank, 0 where ranks have
    different numbers. terms: in the means and sums of all ranks, 0 where that is not known. chosen: whether a factor is
    no whole number, as who weighs a loss writes it. squared: whether the losses are of squares. factor: of the sum over
    the ranks, what the loop made its gradient.
    """

    first: float
    alike: float
    line: int
    passes: int
    terms: int
    chosen: bool
    squared: bool
    factor: float

    def shown(self, world: int) -> str:
        """The factors of the total weight, on `world` ranks."""
        weight = self.first / self.factor / world
        passes = f"{self.passes} backward passes have loss weight {weight / max(self.passes, 1):.3f}"
        loss = passes if self.passes > 1 else f"the loss has weight {weight:.3f}"
        if world > 1:
            loss = f"on each of {world} ranks {loss}; the reduced gradient is {self.factor:.3f} of the sum"
        return f"{loss}: {self.first:.3f} times the gradient of a mean"

    @property
    def right(self) -> bool:
        """Whether it is that of one mean."""
        return close(self.first, 1) or close(self.alike, 1)


def _factor(said: Sequence[Observation], place: int) -> float | None:
    """The reduced gradient over the sum of the raw ones, by the product at this place; None where it does not tell."""
    raw, kept = ([real_of(each.values[f"dot {what} {place}"]) for each in said] for what in ("raw", "kept"))
    # Ranks that reduced differ in nothing; where they did not, each has its own factor.
    if len(set(kept)) > 1 or not all(map(math.isfinite, (*kept, *raw))):
        return None
    total = math.fsum(raw)
    lost = abs(total) <= _CANCELLED * math.fsum(map(abs, raw))
    return None if lost or not kept[0] else kept[0] / total


def scale_of(said: Sequence[Observation]) -> Scale | None:
    """The scale of an update by what all ranks said of it; None where that does not tell."""
    passes = [each.values["weight passes"] for each in said]
    lines = {each.values["weight line"] for each in said}
    if min(passes) < 1 or len(lines) != 1:
        return None
    factors = [_factor(said, place) for place in (0, 1)]
    factor = factors[0]
    # By two products, since a reduction that is no multiple of the sum has a quotient too.
    if factor is None or factors[1] is None or not close(factor, factors[1]):
        return None
    first, alike = ([real_of(each.values[name]) for each in said] for name in ("weight first", "weight alike"))
    terms = [each.values["weight terms"] for each in said]
    return Scale(
        factor * math.fsum(first),
        factor * math.fsum(alike),
        lines.pop(),
        passes[0] if len(set(passes)) == 1 else 0,
        sum(terms) if all(terms) else 0,
        any(each.values["weight chosen"] for each in said),
        all(each.values["weight squares"] for each in said),
        factor,
    )


@dataclass(frozen=True)
class Scaled:
    """The scale of this update, and of the one before of which it was known; None where it was not."""

    said: Observations
    now: Scale | None
    before: Scale | None

    @property
    def step(self) -> int:
        """The number of the update."""
        return self.said[0].step


def _short(seen: Scaled) -> Finding | None:
    """A window with less than a full one in it that is divided like the full one before."""
    now, before = seen.now, seen.before
    if now is None or before is None or now.right or not before.right or now.line != before.line or now.chosen:
        return None
    for what, here, full in (("micro-batches", now.passes, before.passes), ("terms", now.terms, before.terms)):
        if 0 < here < full and close(now.first / before.first, here / full):
            shown = f"{now.shown(len(seen.said))}, and {before.first:.3f} times in the window before"
            window = f"a window of {here} of {full} {what} is divided like a full one"
            return Finding(f"{shown}: {window}", seen.step, (), "gradient")
    return None


def _factor_of_layout(seen: Scaled) -> Finding | None:
    """A factor of the layout too much or too few, in this update and in the last one whose scale is known."""
    now, before = seen.now, seen.before
    if now is None or before is None or now.right or now.line != before.line or not close(now.first, before.first):
        return None
    # Halves of losses are common, and twice a loss is not.
    if now.chosen and now.first < 1:
        return None
    world, passes = len(seen.said), max(now.passes, 1)
    # Half a square is a loss by custom, if the half stands in the loss.
    if now.squared and close(now.first, 0.5) and now.first / now.factor / world < 0.5 * (1 + _CLOSE):
        return None
    layout = {world, passes, world * passes, world**2} - {1}
    if not any(close(now.first, each) or close(now.first, 1 / each) for each in layout):
        return None
    twice = "the loss is divided twice, by the number of micro-batches or the world size, or it is scaled on purpose"
    return Finding(now.shown(world), seen.step, (), "gradient", likely=twice if now.first < 1 else "")


_READS = (
    *("weight first", "weight alike", "weight line", "weight passes", "weight terms", "weight chosen"),
    "weight squares",
    *(f"dot {what} {place}" for what in ("raw", "kept") for place in (0, 1)),
)
SCALE: tuple[Law[Scaled], ...] = (
    Law("gradient-scale/short", _READS, _short, suspicion=True),
    Law("gradient-scale/before", _READS, _factor_of_layout, suspicion=True),
)
"""At every update whose scale is known: the terms of the global batch weigh together what those of a mean do."""
