"""Claims that need the reference or more than one run, as verdicts of a trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from andon_falsify.checkers import CLAIMS as CHECKED
from andon_falsify.checkers import (
    chain_intact,
    gradient_law,
    halts,
    layout_equal,
    loss_finite,
    losses_close,
    memory_within,
    plan_followed,
    replicas_agree,
    same_everywhere,
    samples_once,
    schedule,
)
from andon_falsify.compliance.law import Reference, optimizer_law, planned, short_name
from andon_falsify.reference.update import State, clip, global_norm
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.trace import Trace
from andon_falsify.verdict import Claim, Counterexample, Verdict, conclude, judge, merge, not_applicable, unknown

GRADIENT_TOLERANCE = 2e-6
"""Relative L2 per tensor: the noise of fp32 against float64, with a margin that the gradient benchmark prints."""
GRADIENT_FLOOR = 0.1
"""A tensor with less than this share of all that was summed is measured by it: where rows cancel, rounding is left."""
LOSS_TOLERANCE = 1e-6
NORM_TOLERANCE = 2e-6
UNMIXED_TOLERANCE = 1e-3
"""Relative, of a loss: ranks on CPUs and GPUs against the same run on one CPU. F-DP-005 asks for a hundredth."""

UPDATE = Claim(
    "update-law",
    1,
    "The weights after an update are those of one optimizer step from the weights before it, with the reduced "
    "gradient clipped once and the rate of the schedule (seed V5, V7, V38).",
)
NORM = Claim(
    "norm-law", 1, "The reported norm is that of the reduced gradient of the law before clipping (seed V6, D4)."
)
BASE = Claim("base-frozen", 1, "No frozen weight or buffer of any rank changes in a run (seed V35, F-FREEZE-003).")
FALLBACK = Claim(
    "cpu-fallback", 1, "Without a usable GPU a run goes on on the CPU, says so, and has the same loss (seed F-DP-004)."
)
AVERAGE = Claim(
    "average-law", 1, "average_gradients is the mean over workers; finite for finite input, NaN and Inf propagate."
)
NON_FINITE = Claim("non-finite-seen", 1, "has_non_finite sees NaN, Inf and -Inf at every place (seed R28).")
SHARDS = Claim("shards-law", 1, "shard_samples gives contiguous shards in order, the last with the remainder (R26).")
FACE = Claim(
    "coordinator-face", 1, "The coordinator refuses an empty list of devices, and its primary is replica 0 (R9, R14)."
)

MEMORY_ON_GPUS = "bytes are counted on the CPU alone; on GPUs every run holds its peak against its plan"

CLAIMS: tuple[Claim, ...] = (*CHECKED, UPDATE, NORM, BASE, FALLBACK, AVERAGE, NON_FINITE, SHARDS, FACE)
"""Every claim of the suite."""


def verdicts(trace: Trace, base: Trace | None = None) -> dict[str, Verdict]:
    """What can be said of `trace`, by claim. `base` is the same case on one rank, to compare with (see `alone`)."""
    found: dict[str, Verdict] = {}

    def enter(claim: Claim, check: Callable[[], Verdict]) -> None:
        found[claim.name] = judge(claim, check)

    seen, case = trace.seen, trace.case
    if not trace.parts:
        return {replicas_agree.CLAIM.name: unknown(replicas_agree.CLAIM, "; ".join(trace.errors.values()))}
    enter(replicas_agree.CLAIM, lambda: replicas_agree.check(seen))
    enter(samples_once.CLAIM, lambda: samples_once.check(seen))
    enter(plan_followed.CLAIM, lambda: plan_followed.check(seen, planned(case)))
    enter(loss_finite.CLAIM, lambda: loss_finite.check(seen))
    enter(schedule.CLAIM, lambda: schedule.check(seen, rate_law(case)))
    enter(layout_equal.CLAIM, lambda: layouts(trace))
    enter(BASE, lambda: base_frozen(trace))
    if trace.ledger is not None:
        ledger = trace.ledger
        enter(chain_intact.CLAIM, lambda: chain_intact.check(ledger))
    if case.poison is not None:
        enter(halts.CLAIM, lambda: halted(trace))
    if case.memory:
        enter(memory_within.CLAIM, lambda: memory(trace))
    if base is not None:
        enter(same_everywhere.CLAIM, lambda: same_bits(base, trace))
    if case.values and case.poison is None:
        law = Reference(trace)
        enter(gradient_law.CLAIM, lambda: gradients(trace, law))
        enter(losses_close.CLAIM, lambda: merge([losses(trace, law), *unmixed(base, trace)]))
        enter(NORM, lambda: norms(trace, law))
        enter(UPDATE, lambda: updates(trace))
    return found


def alone(case: Case) -> Case:
    """The run that `case` is compared with: on one rank, of the same kind of device, or of a CPU where it has both."""
    return case.but(world=1, backend="nccl" if case.backend == "nccl" else "inline")


def same_bits(base: Trace, *others: Trace) -> Verdict:
    """Rows, losses, gradients and states of every update, to the bit, where the devices allow it."""
    elsewhere = sorted({other.place for other in others} - {base.place, ""})
    if elsewhere and base.place:
        why = f"other kinds of device round otherwise: {' and '.join(elsewhere)} against {base.place}"
        return not_applicable(same_everywhere.CLAIM, why)
    return same_everywhere.check([base.seen, *(other.seen for other in others)])


def unmixed(base: Trace | None, trace: Trace) -> list[Verdict]:
    """One verdict on the losses of ranks on CPUs and GPUs against `base`, the same run on one CPU; else none.

    With dropout too: what is dropped belongs to the micro-batch and not to who computes it.
    """
    if base is None or base.place == trace.place or trace.case.backend != "mixed":
        return []
    seen, wanted = ([_finite(each.loss) for each in of.first.reported] for of in (trace, base))
    return [losses_close.check(seen, wanted, start=1, bound=UNMIXED_TOLERANCE, factors=factors(trace.case))]


def rate_law(case: Case) -> schedule.WarmupCosine:
    """The published schedule."""
    return schedule.WarmupCosine(case.lr, len(planned(case)), 0.1, 1e-6)


def factors(case: Case) -> dict[str, int]:
    """What a wrong ratio is explained by."""
    return {"world": case.world, "micro-batches": case.micro_batches, "batch": case.batch_size}


def gradients(trace: Trace, law: Reference) -> Verdict:
    """Rank 0's reduced gradient of every update against the law."""
    if law.why_not:
        return not_applicable(gradient_law.CLAIM, law.why_not)
    found = []
    for expected in law.expected:
        held = trace.first.values[expected.step].gradients
        seen = {short_name(name): tensor for name, tensor in held.items()}
        where = f"step {expected.step}"
        found.append(
            gradient_law.check(
                seen,
                expected.gradients,
                tolerance=GRADIENT_TOLERANCE,
                floor=GRADIENT_FLOOR * expected.summed / (global_norm(expected.gradients) or 1.0),
                factors=factors(trace.case),
                where=where,
            )
        )
    return merge(found) if found else unknown(gradient_law.CLAIM, "no update was made")


def losses(trace: Trace, law: Reference) -> Verdict:
    """The reported loss of every update against that of the law from the same weights."""
    if law.why_not:
        return not_applicable(losses_close.CLAIM, law.why_not)
    wanted = [expected.loss for expected in law.expected]
    seen = [_finite(reported.loss) for reported in trace.first.reported]
    return losses_close.check(seen, wanted, start=1, bound=LOSS_TOLERANCE, factors=factors(trace.case))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def norms(trace: Trace, law: Reference) -> Verdict:
    """The reported norm of every update against that of the law's gradient from the same weights."""
    if law.why_not:
        return not_applicable(NORM, law.why_not)
    reported = {each.step: each.norm for each in trace.first.reported}
    found, checked = [], 0
    for expected in law.expected:
        norm, seen = global_norm(expected.gradients), reported[expected.step]
        checked += 1
        if not abs(seen - norm) <= NORM_TOLERANCE * max(norm, GRADIENT_FLOOR * expected.summed):
            what = "the reported norm is not that of the law"
            ratio = seen / norm if norm else None
            found.append(Counterexample(what, f"step {expected.step}", f"{norm:.9g}", f"{seen:.9g}", ratio))
    return conclude(NORM, checked, found)


def updates(trace: Trace) -> Verdict:
    """Rank 0's weights after every update against one optimizer step with his own reduced gradient.

    The distance may be a thousandth of the step itself and two roundings of the weights.
    """
    reference, law, state = Reference(trace), optimizer_law(trace.case), State()
    found, checked = [], 0
    rates = rate_law(trace.case)
    for step, values in sorted(trace.first.values.items()):
        if not values.weights:
            continue
        before = {name: tensor for name, tensor in reference.before(step).items() if name in reference.trainable}
        given = {short_name(name): tensor.double() for name, tensor in values.gradients.items()}
        wanted, state = law.step(before, clip(given, trace.case.clip_norm)[0], state, rates(step))
        for name, tensor in values.weights.items():
            checked += 1
            short = short_name(name)
            moved, off = (float((wanted[short] - other).norm()) for other in (before[short], tensor.double()))
            if not off <= 1e-3 * moved + 2.0**-23 * float(wanted[short].norm()) + 1e-12:
                what = f"{short} is not where one step of {trace.case.optimizer} leads"
                seen = f"a step that ends {off:.3g} away"
                found.append(Counterexample(what, f"step {step}", f"a step of length {moved:.3g}", seen))
    return conclude(UPDATE, checked, found)


def base_frozen(trace: Trace) -> Verdict:
    """Every rank's frozen tensors at the end against the start."""
    found, checked = [], 0
    for rank, (start, end) in sorted(trace.gathered("frozen").items()):
        checked += bool(end)
        if end and start != end:
            found.append(Counterexample("a frozen weight changed", f"rank {rank}", start, end))
    return conclude(BASE, checked, found)


def layouts(trace: Trace) -> Verdict:
    """The flat order of every rank's trained tensors, from their addresses."""
    held = sorted(trace.gathered("layouts").items())
    return layout_equal.check({f"rank {rank}": layout for rank, layout in held})


def memory(trace: Trace) -> Verdict:
    """Every rank's peak of live tensor bytes against the trainer's plan, and what rests between updates."""
    if trace.place != "cpu":
        return not_applicable(memory_within.CLAIM, MEMORY_ON_GPUS)
    return memory_within.check(trace.gathered("peaks"), trace.first.planned_bytes, resting=trace.gathered("resting"))


def halted(trace: Trace) -> Verdict:
    """A planted NaN or infinity stops all ranks at its update, names itself `finite`, and nothing of it is applied."""
    poison = trace.case.poison
    assert poison is not None
    seen = halts.check(trace.seen, poison.step, clause="finite", stopped_at=trace.stopped_at)
    return merge([seen, _unapplied(trace, poison.step)])


def _unapplied(trace: Trace, step: int) -> Verdict:
    """Weights and optimizer state at the end are those before `step`, on every rank."""
    found, checked = [], 0
    final: Mapping[int, tuple[str, str]] = trace.gathered("final")
    for part in trace.parts:
        for rank in part.ranks:
            before = part.of(rank, step - 1).weights if step > 1 else part.start[rank]
            moments = part.of(rank, step - 1).optimizer if step > 1 else ""
            checked += 1
            if final[rank][0] != before or (moments and final[rank][1] != moments):
                what = "weights or optimizer state changed in the update that was to be stopped"
                found.append(Counterexample(what, f"step {step}, rank {rank}", before, final[rank][0]))
    return conclude(halts.CLAIM, checked, found)
