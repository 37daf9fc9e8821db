"""The claims that are judged of a foreign loop, as verdicts. A claim that cannot be checked does not apply, and why."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from andon_falsify.checkers import (
    gradient_law,
    halts,
    layout_equal,
    loss_finite,
    losses_close,
    replicas_agree,
    resume_equal,
    same_everywhere,
    samples_once,
    schedule,
)
from andon_falsify.compliance.claims import BASE, UPDATE, halted, layouts
from andon_falsify.compliance.resume import Resumed
from andon_falsify.history import StepEvent
from andon_falsify.loops.agreeing import rates, replicas
from andon_falsify.loops.averages import gradients, losses
from andon_falsify.loops.drawing import RANDOMNESS, randomness, with_dropout
from andon_falsify.loops.evaluating import EVALUATION, evaluation
from andon_falsify.loops.jurisdiction import outside
from andon_falsify.loops.law import LoopLaw
from andon_falsify.loops.record import global_batch, planned_updates
from andon_falsify.loops.sameness import across, alike
from andon_falsify.loops.samples import samples
from andon_falsify.loops.sightings import first_of
from andon_falsify.loops.trainable import base
from andon_falsify.loops.updating import updates
from andon_falsify.subjects.case import Case, Poison
from andon_falsify.subjects.protocol import Subject
from andon_falsify.subjects.trace import Trace
from andon_falsify.verdict import (
    Claim,
    Counterexample,
    Outcome,
    Verdict,
    conclude,
    judge,
    merge,
    not_applicable,
    unknown,
)

_SHOWN = 4

ONE_RUN: tuple[Claim, ...] = (
    replicas_agree.CLAIM,
    samples_once.CLAIM,
    gradient_law.CLAIM,
    UPDATE,
    losses_close.CLAIM,
    loss_finite.CLAIM,
    schedule.CLAIM,
    BASE,
    layout_equal.CLAIM,
    EVALUATION,
)
"""What one run of a case decides."""
MORE_RUNS: tuple[Claim, ...] = (same_everywhere.CLAIM, resume_equal.CLAIM, halts.CLAIM, RANDOMNESS)
"""What needs further runs: `across`, `resuming`, `halting`, `drawing`."""
CLAIMS: tuple[Claim, ...] = (*ONE_RUN, *MORE_RUNS)
"""Every claim that is judged of a loop."""


def verdicts(trace: Trace) -> dict[str, Verdict]:
    """What one run says of every claim in `ONE_RUN`, by name. Where a rank failed, all of them are unknown."""
    why = _failed(trace)
    if why:
        return {claim.name: unknown(claim, why) for claim in ONE_RUN}
    law = LoopLaw(trace)
    checks: dict[Claim, Callable[[], Verdict]] = {
        replicas_agree.CLAIM: partial(replicas, trace),
        samples_once.CLAIM: partial(samples, law),
        gradient_law.CLAIM: partial(gradients, law),
        UPDATE: partial(updates, law),
        losses_close.CLAIM: partial(losses, law),
        loss_finite.CLAIM: partial(_finite, trace),
        schedule.CLAIM: partial(rates, trace),
        BASE: partial(base, law),
        layout_equal.CLAIM: partial(layouts, trace),
        EVALUATION: partial(evaluation, law),
    }
    return {claim.name: _shortened(judge(claim, check)) for claim, check in checks.items()}


def judge_loop(subject: Subject, case: Case, variants: Sequence[Case] = ()) -> dict[str, Verdict]:
    """Every claim on `case`: its own run, the same global batches as `variants` have them, a resume, a planted NaN."""
    trace = subject.run(case)
    found = verdicts(trace)
    if not _failed(trace):
        found |= {
            same_everywhere.CLAIM.name: _shortened(_everywhere(subject, trace, variants)),
            resume_equal.CLAIM.name: judge(resume_equal.CLAIM, resuming, subject, trace),
            halts.CLAIM.name: judge(halts.CLAIM, halting, subject, trace),
            RANDOMNESS.name: judge(RANDOMNESS, drawing, subject, trace),
            EVALUATION.name: evaluating(subject, trace),
        }
    return found | {claim.name: unknown(claim, _failed(trace)) for claim in CLAIMS if claim.name not in found}


def _finite(trace: Trace) -> Verdict:
    if not first_of(trace).told_losses:
        return not_applicable(loss_finite.CLAIM, "the loop tells no loss (told.loss)")
    told = [event for event in trace.seen.events if not (isinstance(event, StepEvent) and event.loss is None)]
    return loss_finite.check(replace(trace.seen, events=tuple(told)))


def _everywhere(subject: Subject, trace: Trace, variants: Sequence[Case]) -> Verdict:
    others = [subject.run(case) for case in variants]
    broken = "; ".join(filter(None, map(_failed, others)))
    if broken:
        return unknown(same_everywhere.CLAIM, broken)
    return judge(same_everywhere.CLAIM, across, [trace, *others])


def resuming(subject: Subject, trace: Trace, after: int = 0) -> Verdict:
    """A run that is cut off after update `after` (by default at two thirds) and resumed, against the whole `trace`.

    It saved before the cut, where the next update gives every rank rows, so that all ranks save at one place; for that
    it may be cut off later. To the bit where the loop says so, else within the noise of fp32.
    """
    claim, first = resume_equal.CLAIM, first_of(trace)
    if "restores" not in first.claims:
        return not_applicable(claim, "the loop does not save and load (`save`, `load`)")
    every, after = _saved_and_cut(trace, after or 2 * len(first.made) // 3)
    if not every:
        return unknown(claim, f"no place to save and cut off {len(first.made)} updates: too few, or too few rows")
    with tempfile.TemporaryDirectory(prefix="andon-resume-") as folder:
        case = trace.case.but(folder=folder, checkpoint_every=every)
        resumed = Resumed(trace, subject.run(case.but(stop_after=after)), subject.run(case))
    broken = "; ".join(filter(None, map(_failed, (resumed.cut, resumed.taken_up))))
    if broken:
        return unknown(claim, broken)
    if not resumed.taken_up.first.resumed_from:
        return unknown(claim, f"nothing had been saved when the run was cut off after update {after}")
    if "to_the_bit" in first.claims:
        return resumed.verdict
    found = [alike(claim, resumed.whole, [resumed.taken_up]), _gap(claim, resumed.whole, resumed.taken_up)]
    return merge(found)


def _saved_and_cut(trace: Trace, after: int) -> tuple[int, int]:
    """After which updates to save (the multiples of the first number), and after which to cut off; 0, 0 for nowhere."""
    last = len(first_of(trace).made)
    safe = {
        step
        for step in range(1, last)
        if all(any(part.of(rank, step + 1).leaves) for part in trace.parts for rank in part.ranks)
    }
    late = [(every, max(after, every)) for every in sorted(safe, key=lambda step: (step > after, abs(step - after)))]
    for every, cut in [pair for pair in late if pair[1] > pair[0]] + late:
        if cut < last and all(step in safe for step in range(every, cut + 1, every)):
            return every, cut
    return 0, 0


def _gap(claim: Claim, whole: Trace, taken_up: Trace) -> Verdict:
    """The resumed run begins with the update after the one that was saved, and ends with the last."""
    wanted = [step for step in whole.seen.trajectory if step > taken_up.first.resumed_from]
    made = list(taken_up.seen.trajectory)
    apart = [Counterexample("other updates than those that were left", "", f"{wanted}", f"{made}")]
    return conclude(claim, len(wanted), [] if made == wanted else apart)


def poison_of(case: Case) -> Poison:
    """Where `halting` plants a NaN: in the last rank, in an update with all its rows, not the first if there is one."""
    size = global_batch(case)
    later = 2 if len(case.rows) >= 2 * size else -(-len(case.rows) // size) + 1
    return Poison(later if later <= planned_updates(case) else 1, case.world - 1, "nan")


def halting(subject: Subject, trace: Trace) -> Verdict:
    """A NaN in the gradient of one rank (see `poison_of`): every rank is to stop before that update.

    Judged only of loops that say they halt (`halts = True`): most trainers do not mean to.
    """
    if "halts" not in first_of(trace).claims:
        return not_applicable(halts.CLAIM, "the loop does not say that it stops at what is not finite (`halts`)")
    poison = poison_of(trace.case)
    poisoned = subject.run(trace.case.but(poison=poison))
    if poisoned.errors:
        texts = "; ".join(f"rank {rank}: {_head(text)}" for rank, text in sorted(poisoned.errors.items()))
        where = f"step {poison.step}"
        return conclude(
            halts.CLAIM, 1, [Counterexample("the ranks did not stop together", where, f"all stop at {where}", texts)]
        )
    if not any(getattr(part, "poisoned", False) for part in poisoned.parts):
        return unknown(halts.CLAIM, f"the NaN was never planted: the last rank had no row in update {poison.step}")
    return halted(poisoned)


def drawing(subject: Subject, trace: Trace) -> Verdict:
    """What the forward passes of `trace` draw, or where it has no dropout, those of a case that has."""
    if not trace.case.dropout and not trace.gathered("draws"):
        trace = subject.run(with_dropout(trace.case))
    return unknown(RANDOMNESS, _failed(trace)) if _failed(trace) else randomness(trace)


def evaluating(subject: Subject, trace: Trace) -> Verdict:
    """The evaluation of `trace`, and that of a model with dropout: an evaluation has it switched off."""
    plain = judge(EVALUATION, evaluation, LoopLaw(trace))
    if plain.outcome is Outcome.NOT_APPLICABLE:
        return plain
    other = subject.run(with_dropout(trace.case))
    if _failed(other):
        return merge([plain, unknown(EVALUATION, f"with dropout: {_failed(other)}")])
    found = judge(EVALUATION, evaluation, LoopLaw(other))
    named = tuple(replace(each, where=f"{each.where}, with dropout in the model") for each in found.counterexamples)
    return merge([plain, replace(found, counterexamples=named)])


def _failed(trace: Trace) -> str:
    """What went wrong with the ranks, in words; "" where all of them came to the end."""
    if trace.errors:
        return "; ".join(f"rank {rank}: {_head(text)}" for rank, text in sorted(trace.errors.items()))
    if not first_of(trace).made and not first_of(trace).resumed_from:
        return "no step of an optimizer over parameters of the loop's `model` was seen"
    return outside(trace)


def _head(text: str) -> str:
    """An error without its traceback."""
    return text.partition("\nTraceback")[0].strip()


def _shortened(verdict: Verdict) -> Verdict:
    """The first counterexamples of many, with the number of the others."""
    more = len(verdict.counterexamples) - _SHOWN
    if more <= 0:
        return verdict
    why = f"{verdict.why}; {more} more counterexamples" if verdict.why else f"{more} more counterexamples"
    return replace(verdict, counterexamples=verdict.counterexamples[:_SHOWN], why=why)
