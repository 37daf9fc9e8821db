"""The loss of the accused stays within a bound of the reference's, from some update on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isclose, isfinite

from andon_falsify.checkers.ratio import explain_ratio
from andon_falsify.verdict import Claim, Counterexample, Verdict, conclude

CLAIM = Claim(
    "losses-close",
    1,
    "From update 100 on the loss differs from that of one process by less than 1 % of it.",
    "seed F-DP-005, C-DP-001",
)


def check(
    accused: Sequence[float | None],
    reference: Sequence[float | None],
    *,
    start: int = 100,
    bound: float = 0.01,
    factors: Mapping[str, int] | None = None,
) -> Verdict:
    """Compare the losses of updates `start` and on; `accused[0]` is that of update 1, None stands for not finite.

    Strict: |accused - reference| < bound * |reference|, or equal. A loss of the accused that is not finite falsifies at
    any update; one of the reference makes that update incomparable. Unknown where the reference is incomparable at an
    update or either is too short. One factor between all compared losses is named in terms of `factors` (the world
    size, the accumulation).
    """
    found = [
        Counterexample("the loss is not finite", f"step {step}", "a real number", str(loss))
        for step, loss in enumerate(accused, start=1)
        if loss is None or not isfinite(loss)
    ]
    missing = _missing(accused, reference, start)
    pairs = {
        step: (seen, law)
        for step, (seen, law) in enumerate(zip(accused, reference, strict=False), start=1)
        if step >= start and seen is not None and law is not None and isfinite(seen) and isfinite(law)
    }
    apart = {
        step: (one, law) for step, (one, law) in pairs.items() if one != law and not abs(one - law) < bound * abs(law)
    }
    if apart:
        found.append(_worst(apart, pairs, factors or {}))
    return conclude(CLAIM, len(pairs), found, missing)


def _missing(accused: Sequence[float | None], reference: Sequence[float | None], start: int) -> str:
    if len(accused) != len(reference):
        return f"{len(accused)} losses against {len(reference)} of the reference"
    if len(accused) < start:
        return f"{len(accused)} updates, the claim begins at update {start}"
    broken = [step for step, loss in enumerate(reference, start=1) if loss is None or not isfinite(loss)]
    broken = [step for step in broken if step >= start]
    return f"the reference's loss at step {broken[0]} is not finite" if broken else ""


def _worst(
    apart: Mapping[int, tuple[float, float]], pairs: Mapping[int, tuple[float, float]], factors: Mapping[str, int]
) -> Counterexample:
    step, (seen, law) = next(iter(apart.items()))
    ratios = [one / other for one, other in pairs.values() if other]
    single = ratios and len(ratios) == len(pairs) and all(isclose(one, ratios[0], rel_tol=1e-3) for one in ratios)
    ratio = ratios[0] if single else None
    what = f"the loss is out of bounds at {len(apart)} of {len(pairs)} updates"
    equals = explain_ratio(ratio, factors) if ratio is not None else ""
    return Counterexample(what, f"step {step}", f"{law:.9g}", f"{seen:.9g}", ratio, equals)
