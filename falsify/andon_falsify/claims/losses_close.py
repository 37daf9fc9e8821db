"""Compares the reported loss of each update with the reference loss from the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isclose, isfinite, nan

from andon_falsify.claims.evidence import NOISE, Evidence, tensors
from andon_falsify.claims.explain import explain_ratio, name_short_windows, ratio_product
from andon_falsify.verdict import Claim, Clause, Counterexample, Verdict, conclude, merge, not_applicable, unknown

MIXED_TOLERANCE = 1e-3
"""Relative: ranks on CPUs and GPUs against the same run on one CPU."""
CLAIM = Claim(
    "losses-close",
    2,
    "Each reported loss is that of one float64 process with the same weights and rows, within fp32 rounding: "
    f"{NOISE['trainer'].loss:.0e} of it in Andon's trainer, {NOISE['loop'].loss:.0e} in a loop. If CPUs and GPUs train "
    f"together, it is within {MIXED_TOLERANCE:.0e} of that of one CPU.",
    order=100,
    subjects=("trainer", "loop"),
    runs=("alone",),
    needs=(tensors("loss of a reference", of_updates=True),),
    clauses=(Clause("loss-equivalent", "same"), Clause("loss-reported")),
)


def check(evidence: Evidence) -> Verdict:
    """As `CLAIM` says. `others["alone"]`: the same run on one CPU."""
    if evidence.of_loop:
        return _of_loop(evidence)
    law, trace, seen = evidence.law, evidence.observed, _reported(evidence)
    if law.why_not:
        verdicts = [not_applicable(CLAIM, law.why_not)]
    else:
        wanted = {expected.step: expected.loss for expected in law.expected}
        verdicts = [compare(seen, wanted, evidence.noise.loss, law.factors)]
    if trace.case.backend == "mixed" and not trace.case.dropout:  # a GPU draws other masks than a CPU
        alone = evidence.find("alone")
        if alone is not None and alone.observed.place != trace.place:
            verdicts.append(compare(seen, _reported(alone), MIXED_TOLERANCE, law.factors))
    return merge(verdicts)


def _reported(evidence: Evidence) -> dict[int, float]:
    return {reported.step: reported.loss for reported in evidence.observed.first.reported}


def compare(seen: Mapping[int, float], law: Mapping[int, float], bound: float, factors: Mapping[str, int]) -> Verdict:
    """Compare losses by update: |seen - law| < bound * |law|, or equal.

    A loss that is not finite falsifies. Unknown if an update is missing in either, or its law is not finite. The factor
    that all losses share is explained by `factors`, the sizes of the layout.
    """
    found = [
        Counterexample("the loss is not finite", f"step {step}", "a real number", str(loss), quantity="loss")
        for step, loss in seen.items()
        if not isfinite(loss)
    ]
    broken = [step for step, loss in law.items() if not isfinite(loss)]
    missing = f"the reference's loss at step {broken[0]} is not finite" if broken else ""
    if seen.keys() != law.keys():
        missing = f"{len(seen)} losses against {len(law)} of the reference"
    pairs = {step: (seen[step], law[step]) for step in law if isfinite(seen.get(step, nan)) and isfinite(law[step])}
    apart = [step for step, (one, other) in pairs.items() if one != other and not abs(one - other) < bound * abs(other)]
    if apart:
        ratios = [one / other for one, other in pairs.values() if other]
        single = len(ratios) == len(pairs) and all(isclose(each, ratios[0], rel_tol=1e-3) for each in ratios)
        ratio, equals = (ratios[0], explain_ratio(ratios[0], factors)) if single else (None, "")
        what, (one, other) = f"the loss is out of bounds at {len(apart)} of {len(pairs)} updates", pairs[apart[0]]
        shown = (f"step {apart[0]}", f"{other:.9g}", f"{one:.9g}", ratio, equals)
        found.append(Counterexample(what, *shown, quantity="loss"))
    return conclude(CLAIM, len(pairs), found, missing)


def _of_loop(evidence: Evidence) -> Verdict:
    law, verdicts = evidence.loop_law, dict[int, Verdict]()
    if law.why_not:
        return not_applicable(CLAIM, law.why_not)
    for expected in law.expected:
        if (step := expected.step) in law.first.told_losses:
            told, wanted = {step: law.first.told_losses[step]}, {step: expected.loss}
            one = compare(told, wanted, evidence.noise.loss, law.factors)
            what = "the reported loss is not that of the float64 reference"
            found = (replace(each, what=what, where=f"step {step}") for each in one.counterexamples)
            verdicts[step] = replace(one, counterexamples=tuple(found))
    if not verdicts:
        if law.first.told_losses:
            step = min(law.first.told_losses)
            return unknown(CLAIM, f"the rows of step {step} are not known (told.rows), only its loss")
        return not_applicable(CLAIM, "the loop reports no loss (told.loss)")

    def explained(found: Counterexample) -> Counterexample:
        known = found.ratio is None or found.cause or ratio_product(found.ratio, law.factors)
        return found if known else replace(found, ratio=None, equals="")

    merged = merge(name_short_windows(law, verdicts))
    merged = replace(merged, counterexamples=tuple(map(explained, merged.counterexamples)))
    return merged if merged.reasons or not law.note else replace(merged, reasons=(law.note,))
