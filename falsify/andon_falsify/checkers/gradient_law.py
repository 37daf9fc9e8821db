"""The reduced gradient is the sample-weighted mean over the global batch, tensor by tensor, before clipping."""

from __future__ import annotations

from collections.abc import Mapping
from math import hypot, isfinite

from andon_falsify.checkers.distance import Gap, Values, common_factor, flat, gap, norm
from andon_falsify.checkers.ratio import explain_ratio
from andon_falsify.verdict import Claim, Counterexample, Verdict, conclude, first_of_many, unknown

CLAIM = Claim(
    "gradient-law",
    1,
    "The gradient before clipping is that of (sum of the rows' weighted losses) / (rows of the global batch), as one "
    "process computes it in float64.",
    "seed D1, D3, V8, V11",
)

_SHOWN = 3


def check(
    seen: Mapping[str, Values],
    expected: Mapping[str, Values],
    *,
    tolerance: float = 2e-6,
    floor: float = 0.0,
    factors: Mapping[str, int] | None = None,
    where: str = "",
) -> Verdict:
    """Compare by relative L2 norm per tensor, and name the one factor between the two, if there is one.

    A tensor's scale is its expected norm, or `floor` times the norm of the whole expected gradient if that is more:
    with 0, a tensor whose law is exactly 0 must be 0. `factors` (world 2, accumulation 2) is what a ratio is explained
    by, `where` the place to name. Unknown where the law itself is not finite or 0 everywhere: then anything agrees.
    """
    law = {name: flat(values) for name, values in expected.items()}
    total = hypot(*(norm(values) for values in law.values()))
    if not isfinite(total):
        return unknown(CLAIM, "the expected gradient is not finite")
    if total == 0:
        return unknown(CLAIM, "the expected gradient is 0 everywhere: nothing can be told from it")
    held = {name: flat(values) for name, values in seen.items()}
    found = _shapes(held, law, where)
    fitting = [name for name in law if len(held.get(name, ())) == len(law[name])]
    gaps = {name: gap(held[name], law[name], floor * total) for name in fitting}
    wrong = {name: off for name, off in gaps.items() if off.relative > tolerance}
    if wrong:
        found.append(_falsified(wrong, gaps, tolerance, factors or {}, where))
    worst = max((off.relative for off in gaps.values()), default=0.0)
    note = "" if wrong else f"largest relative error {worst:.2e}, allowed {tolerance:.2e}"
    return conclude(CLAIM, sum(any(law[name]) for name in gaps), found, note=note)


def _shapes(held: Mapping[str, list[float]], law: Mapping[str, list[float]], where: str) -> list[Counterexample]:
    found = []
    for name in sorted(held.keys() | law.keys()):
        planned, given = (f"{len(side[name])} elements" if name in side else "no gradient" for side in (law, held))
        if planned != given:
            found.append(Counterexample(f"{name} has another layout", where, planned, given))
    return found


def _falsified(
    wrong: Mapping[str, Gap], gaps: Mapping[str, Gap], tolerance: float, factors: Mapping[str, int], where: str
) -> Counterexample:
    order = sorted(wrong, key=lambda name: -wrong[name].relative)
    named = first_of_many([f"{name} {wrong[name].relative:.3g}" for name in order], _SHOWN)
    what = f"{len(wrong)} of {len(gaps)} tensors are off the law"
    ratio = common_factor(gaps)
    if ratio is not None and abs(ratio - 1.0) <= 1e-3:
        ratio = None
    equals = explain_ratio(ratio, factors) if ratio is not None else ""
    return Counterexample(what, where, f"relative error <= {tolerance:.3g}", named, ratio, equals)
