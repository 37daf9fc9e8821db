"""Further runs that claims ask for: one that is cut off and taken up, one with a planted NaN, one with dropout, others.

The campaign makes them; a claim only reads what they left.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace

from andon_falsify.checkers import halts, resume_equal, same_everywhere
from andon_falsify.claims.between import resumed
from andon_falsify.claims.evidence import Evidence, of_trace
from andon_falsify.claims.of_loop import CLAIMS, failed, head_of, shortened, verdicts
from andon_falsify.claims.statements import EVALUATION, RANDOMNESS
from andon_falsify.claims.table import judged_by, unmet
from andon_falsify.loops.sightings import first_of
from andon_falsify.subjects.case import Case, Poison, make_rows
from andon_falsify.subjects.trace import Subject, Trace
from andon_falsify.verdict import Counterexample, Outcome, Verdict, conclude, judge, merge, unknown


@dataclass(frozen=True)
class Resumed:
    """The uninterrupted run, the one that was cut off, and the one that took it up."""

    whole: Trace
    cut: Trace
    taken_up: Trace

    @property
    def evidence(self) -> Evidence:
        """The whole run with the two others."""
        others = {"cut": (of_trace(self.cut),), "taken up": (of_trace(self.taken_up),)}
        return replace(of_trace(self.whole), others=others)

    @property
    def verdict(self) -> Verdict:
        """Whether the resumed run is the uninterrupted one."""
        return resumed(self.evidence)


def cut_and_resume(subject: Subject, case: Case, *, after: int, every: int, world: int, fault: str | None) -> Resumed:
    """Run `case` whole; cut another off after update `after`, with checkpoints every `every` updates; resume it.

    `world` and `fault` are those of the run that takes up. No checkpoint is written at the cut itself, as none is by a
    kill: updates after the last one are done again.
    """
    whole = subject.run(case)
    with tempfile.TemporaryDirectory(prefix="andon-resume-") as folder:
        kept = case.but(folder=folder, checkpoint_every=every)
        cut = subject.run(kept.but(stop_after=after))
        taken_up = subject.run(kept.but(world=world, fault=fault))
    return Resumed(whole, cut, taken_up)


def judge_loop(subject: Subject, case: Case, variants: Sequence[Case] = ()) -> dict[str, Verdict]:
    """Every claim on `case`: its own run, the same global batches as `variants` have them, a resume, a planted NaN."""
    trace = subject.run(case)
    found = verdicts(trace)
    why = failed(trace)
    if not why:
        others = [subject.run(variant) for variant in variants]
        found |= {
            same_everywhere.CLAIM.name: shortened(elsewhere(trace, others)),
            resume_equal.CLAIM.name: judge(resume_equal.CLAIM, resuming, subject, trace),
            halts.CLAIM.name: judge(halts.CLAIM, halting, subject, trace),
            RANDOMNESS.name: judge(RANDOMNESS, drawing, subject, trace),
            EVALUATION.name: evaluating(subject, trace),
        }
    return found | {claim.name: unknown(claim, why) for claim in CLAIMS if claim.name not in found}


def elsewhere(trace: Trace, others: Sequence[Trace]) -> Verdict:
    """The loop's run against the same global batches on other numbers of ranks and micro-batches."""
    broken = "; ".join(filter(None, map(failed, others)))
    if broken:
        return unknown(same_everywhere.CLAIM, broken)
    evidence = replace(of_trace(trace), others={"elsewhere": tuple(map(of_trace, others))})
    return judged_by(same_everywhere.CLAIM, evidence)


def resuming(subject: Subject, trace: Trace, after: int = 0) -> Verdict:
    """A run of a loop that is cut off after update `after` (by default at two thirds) and resumed, against `trace`.

    It saved before the cut, where the next update gives every rank rows, so that all ranks save at one place; for that
    it may be cut off later.
    """
    claim, first = resume_equal.CLAIM, first_of(trace)
    if unmet(claim, of_trace(trace)):
        return judged_by(claim, of_trace(trace))
    every, after = _saved_and_cut(trace, after or 2 * len(first.made) // 3)
    if not every:
        return unknown(claim, f"no place to save and cut off {len(first.made)} updates: too few, or too few rows")
    with tempfile.TemporaryDirectory(prefix="andon-resume-") as folder:
        case = trace.case.but(folder=folder, checkpoint_every=every)
        runs = Resumed(trace, subject.run(case.but(stop_after=after)), subject.run(case))
    broken = "; ".join(filter(None, map(failed, (runs.cut, runs.taken_up))))
    if broken:
        return unknown(claim, broken)
    if not runs.taken_up.first.resumed_from:
        return unknown(claim, f"nothing had been saved when the run was cut off after update {after}")
    return judged_by(claim, runs.evidence)


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


def poison_of(case: Case) -> Poison:
    """Where `halting` plants a NaN: in the last rank, in an update with all its rows, not the first if there is one."""
    size = case.global_batch
    later = 2 if len(case.rows) >= 2 * size else case.updates_of_epoch(size) + 1
    return Poison(later if later <= case.updates(size) else 1, case.world - 1, "nan")


def halting(subject: Subject, trace: Trace) -> Verdict:
    """A NaN in the gradient of one rank of a loop (see `poison_of`): every rank is to stop before that update.

    Judged only of loops that say they halt (`halts = True`): most trainers do not mean to.
    """
    claim = halts.CLAIM
    if unmet(claim, of_trace(trace)):
        return judged_by(claim, of_trace(trace))
    poison = poison_of(trace.case)
    poisoned = subject.run(trace.case.but(poison=poison))
    if poisoned.errors:
        texts = "; ".join(f"rank {rank}: {head_of(text)}" for rank, text in sorted(poisoned.errors.items()))
        where = f"step {poison.step}"
        apart = Counterexample("the ranks did not stop together", where, f"all stop at {where}", texts)
        return conclude(claim, 1, [apart])
    return judged_by(claim, of_trace(poisoned))


def with_dropout(case: Case) -> Case:
    """Two epochs of two updates of a model with dropout, on as many ranks as `case` has, two rows on each.

    So many that a loop that evaluates after an update or an epoch trains on behind it.
    """
    world = case.world
    return Case(
        rows=make_rows(4 * world),
        batch_size=2 * world,
        micro_batches=world,
        epochs=2,
        optimizer="sgd",
        clip_norm=None,
        weight_decay=0.0,
        dropout=0.1,
        fault=case.fault,
        world=world,
        backend="gloo",
    )


def drawing(subject: Subject, trace: Trace) -> Verdict:
    """What the forward passes of `trace` draw, or where it has no dropout, those of a case that has."""
    if not trace.case.dropout and not trace.gathered("draws"):
        trace = subject.run(with_dropout(trace.case))
    return unknown(RANDOMNESS, failed(trace)) if failed(trace) else judged_by(RANDOMNESS, of_trace(trace))


def evaluating(subject: Subject, trace: Trace) -> Verdict:
    """The evaluation of `trace`, and that of a model with dropout: an evaluation has it switched off."""
    plain = judged_by(EVALUATION, of_trace(trace))
    if plain.outcome is Outcome.NOT_APPLICABLE:
        return plain
    other = subject.run(with_dropout(trace.case))
    if failed(other):
        return merge([plain, unknown(EVALUATION, f"with dropout: {failed(other)}")])
    found = judged_by(EVALUATION, of_trace(other))
    named = tuple(replace(each, where=f"{each.where}, with dropout in the model") for each in found.counterexamples)
    return merge([plain, replace(found, counterexamples=named)])
