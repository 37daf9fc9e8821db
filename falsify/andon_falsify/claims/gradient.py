"""Gradient, norm and loss of every update against the law of the rows that it was made of."""

from __future__ import annotations

import math
from dataclasses import replace

from andon_falsify.checkers import gradient_law, losses_close
from andon_falsify.claims.diagnosis import diagnosed, named_by_window
from andon_falsify.claims.evidence import Evidence
from andon_falsify.claims.loop_law import LoopLaw
from andon_falsify.claims.run_law import Expected
from andon_falsify.claims.statements import NORM
from andon_falsify.verdict import Counterexample, Verdict, conclude, merge, not_applicable, unknown

GRADIENT_FLOOR = 0.1
"""A tensor with less than this share of all that was summed is measured by it: where rows cancel, rounding is left."""
UNMIXED_TOLERANCE = 1e-3
"""Relative, of a loss: ranks on CPUs and GPUs against the same run on one CPU. F-DP-005 asks for a hundredth."""


def gradient(evidence: Evidence) -> Verdict:
    """Rank 0's reduced gradient of every update against the law; a wrong one of a loop is said to be what it is."""
    law = evidence.law
    found = {expected.step: _of_update(evidence, expected) for expected in law.expected}
    if isinstance(law, LoopLaw):
        return diagnosed(law, found)
    return merge(found.values()) if found else unknown(gradient_law.CLAIM, "no update was made")


def _of_update(evidence: Evidence, expected: Expected) -> Verdict:
    return gradient_law.check(
        evidence.law.seen(expected.step),
        expected.gradients,
        tolerance=evidence.noise.gradient,
        floor=GRADIENT_FLOOR * max(1.0, expected.summed / (expected.norm or 1.0)),
        factors=evidence.law.factors,
        where=f"step {expected.step}",
    )


def norms(evidence: Evidence) -> Verdict:
    """The reported norm of every update against that of the law's gradient from the same weights."""
    reported = {each.step: each.norm for each in evidence.sightings.first.reported}
    found, checked = [], 0
    for expected in evidence.law.expected:
        norm, seen = expected.norm, reported[expected.step]
        checked += 1
        if not abs(seen - norm) <= evidence.noise.norm * max(norm, GRADIENT_FLOOR * expected.summed):
            what = "the reported norm is not that of the law"
            ratio = seen / norm if norm else None
            found.append(Counterexample(what, f"step {expected.step}", f"{norm:.9g}", f"{seen:.9g}", ratio))
    return conclude(NORM, checked, found)


def losses(evidence: Evidence) -> Verdict:
    """The reported loss of every update against that of the law from the same weights, where there is one.

    `others["alone"]`: the same on one CPU, which losses of ranks on CPUs and GPUs are held against as well.
    """
    law = evidence.law
    if isinstance(law, LoopLaw):
        return _told_losses(evidence, law)
    against = [verdict for alone in evidence.others.get("alone", ()) for verdict in unmixed(alone, evidence)]
    if law.why_not:
        return merge([not_applicable(losses_close.CLAIM, law.why_not), *against])
    wanted = [expected.loss for expected in law.expected]
    seen = [_finite(reported.loss) for reported in evidence.sightings.first.reported]
    by_law = losses_close.check(seen, wanted, start=1, bound=evidence.noise.loss, factors=law.factors)
    return merge([by_law, *against])


def unmixed(alone: Evidence, evidence: Evidence) -> list[Verdict]:
    """One verdict on the losses of ranks on CPUs and GPUs against `alone`, the same run on one CPU; else none.

    With dropout neither, since a GPU draws other masks than a CPU.
    """
    trace = evidence.sightings
    if alone.sightings.place == trace.place or trace.case.backend != "mixed" or trace.case.dropout:
        return []
    seen, wanted = ([_finite(each.loss) for each in of.sightings.first.reported] for of in (evidence, alone))
    return [losses_close.check(seen, wanted, start=1, bound=UNMIXED_TOLERANCE, factors=evidence.law.factors)]


def _told_losses(evidence: Evidence, law: LoopLaw) -> Verdict:
    """What a loop reports as loss on rank 0, update by update, since it need not report every one."""
    claim, told = losses_close.CLAIM, law.first.told_losses
    if law.why_not:
        return not_applicable(claim, law.why_not)
    known = {expected.step: expected.loss for expected in law.expected if expected.step in told}
    if not known:
        return not_applicable(claim, "the loop tells no loss (told.loss)")
    found = {}
    for step, wanted in known.items():
        one = losses_close.check([told[step]], [wanted], start=1, bound=evidence.noise.loss, factors=law.factors)
        what, where = "the reported loss is not that of the law", f"step {step}"
        named = tuple(replace(each, what=what, where=where) for each in one.counterexamples)
        found[step] = replace(one, counterexamples=named)
    merged = merge(_without_chance(verdict) for verdict in named_by_window(law, found))
    return replace(merged, reasons=merged.reasons or tuple(filter(None, [law.note])))


def _without_chance(verdict: Verdict) -> Verdict:
    """A ratio that is no product of the case's sizes is chance, and not said."""
    kept = tuple(
        each if " = " in each.equals else replace(each, ratio=None, equals="") for each in verdict.counterexamples
    )
    return replace(verdict, counterexamples=kept)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
