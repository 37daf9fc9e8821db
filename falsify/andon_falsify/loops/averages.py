"""Gradient and loss of every update against the law; a wrong gradient is said to be what it is instead."""

from __future__ import annotations

from dataclasses import replace
from math import hypot

from andon_falsify.checkers import gradient_law, losses_close
from andon_falsify.loops.explain import Comparison, compare
from andon_falsify.loops.law import LoopLaw, laws, mean
from andon_falsify.loops.trainable import left_out
from andon_falsify.loops.windows import named_by_window
from andon_falsify.reference.update import clip, global_norm
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.trace import Trace
from andon_falsify.verdict import Counterexample, Outcome, Verdict, conclude, merge, not_applicable, unknown

GRADIENT_TOLERANCE = 2e-5
"""Relative L2 per tensor; ten times what our own trainer is allowed, for means of means of fp32 losses."""
GRADIENT_FLOOR = 0.1
"""A tensor with less than this share of all that was summed is measured by it: where rows cancel, rounding is left."""
LOSS_TOLERANCE = 1e-5
_EARLY = "it is what the optimizer got: torch's clip was called before it was whole"


def factors(case: Case) -> dict[str, int]:
    """What a wrong ratio is explained by."""
    return {"world": case.world, "accumulation": case.accumulation, "rows": case.local_batch}


def comparisons(trace: Trace) -> list[Comparison]:
    """The gradient of every update against the law's, for diagnosis; empty where there is no law."""
    law = LoopLaw(trace)
    return [] if law.why_not else [compare(law, step, factors(trace.case)) for step, _ in laws(law)]


def gradients(law: LoopLaw) -> Verdict:
    """Rank 0's gradient of every update against the law; a wrong one is said to be what it is.

    Where the case clips and torch's clip was not called, a gradient that is the law's but clipped is the law's.
    """
    claim = gradient_law.CLAIM
    if law.why_not:
        return not_applicable(claim, law.why_not)
    found = named_by_window(law, {step: _gradient(law, step) for step, _ in laws(law)})
    lost = list(left_out(law))
    if lost:
        found.append(conclude(claim, 1, lost))
    if law.unknown_updates:
        found.append(unknown(claim, f"the rows of update {min(law.unknown_updates)} are not all known"))
    if not found:
        return unknown(claim, "no update with known rows was made")
    merged = merge(found)
    return replace(merged, why="; ".join(filter(None, (_worst(merged), law.note))))


def _gradient(law: LoopLaw, step: int) -> Verdict:
    expected, seen = mean(law.of(step)), law.seen(step)
    size = global_norm(expected)
    limit = law.case.clip_norm
    if limit is not None and not law.first.made[step].clipped and global_norm(seen) <= limit * (1 + 1e-5) < size:
        expected = clip(expected, limit)[0]
    summed = hypot(*(float(part.flatten(1).norm(dim=1).sum()) for part in law.of(step).gradients.values()))
    verdict = gradient_law.check(
        seen,
        expected,
        tolerance=GRADIENT_TOLERANCE,
        floor=GRADIENT_FLOOR * max(1.0, summed / len(law.of(step).rows) / (size or 1.0)),
        factors=factors(law.case),
        where=f"step {step}",
    )
    if verdict.outcome is not Outcome.FALSIFIED:
        return verdict
    told = compare(law, step, factors(law.case))
    early = _EARLY if law.first.made[step].early else ""
    overall = "; ".join(filter(None, (f"relative error {told.relative:.3g} over all tensors", early, told.words)))
    named = tuple(replace(each, what=f"{each.what}; {overall}") for each in verdict.counterexamples)
    return replace(verdict, counterexamples=named)


def _worst(verdict: Verdict) -> str:
    """The largest of the errors that `gradient_law.check` noted."""
    notes = [note for note in verdict.why.split("; ") if note.startswith("largest relative error")]
    return max(notes, key=_error_in, default=verdict.why)


def _error_in(note: str) -> float:
    return float(note.removeprefix("largest relative error ").partition(",")[0])


def losses(law: LoopLaw) -> Verdict:
    """What the loop reports as loss on rank 0 against the law's, where it reports one."""
    claim, told = losses_close.CLAIM, law.first.told_losses
    if law.why_not:
        return not_applicable(claim, law.why_not)
    known = {step: float(each.losses.mean()) for step, each in laws(law) if step in told}
    if not known:
        return not_applicable(claim, "the loop tells no loss (told.loss)")
    found = {}
    for step, wanted in known.items():
        one = losses_close.check([told[step]], [wanted], start=1, bound=LOSS_TOLERANCE, factors=factors(law.case))
        found[step] = replace(one, counterexamples=tuple(_at(each, step) for each in one.counterexamples))
    named = [_without_chance(verdict) for verdict in named_by_window(law, found)]
    merged = merge(named)
    return replace(merged, why=merged.why or law.note)


def _at(found: Counterexample, step: int) -> Counterexample:
    return replace(found, what="the reported loss is not that of the law", where=f"step {step}")


def _without_chance(verdict: Verdict) -> Verdict:
    """A ratio that is no product of the case's sizes is chance, and not said."""
    kept = tuple(
        each if " = " in each.equals else replace(each, ratio=None, equals="") for each in verdict.counterexamples
    )
    return replace(verdict, counterexamples=kept)
