"""Further runs that claims ask for: one that is cut off and taken up, one with a planted NaN, one with dropout, others.

They are made here, and what they left is handed on as evidence; a bench has the claims judge it (`judged_by`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace

from andon_falsify.claims.evidence import Evidence, of_trace
from andon_falsify.claims.of_loop import failed
from andon_falsify.loops.sightings import first_of
from andon_falsify.subjects.case import Case, Poison, make_rows
from andon_falsify.subjects.trace import Subject, Trace


class Unmade(LookupError):
    """Further runs could not be made, or failed; the text says why, and so why a claim stays open."""


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


def elsewhere(trace: Trace, others: Sequence[Trace]) -> Evidence:
    """The loop's run with the same global batches on other numbers of ranks and micro-batches. Raises `Unmade`."""
    _sound(*others)
    return replace(of_trace(trace), others={"elsewhere": tuple(map(of_trace, others))})


def _sound(*traces: Trace) -> None:
    """Raises `Unmade` if any of `traces` failed."""
    broken = "; ".join(filter(None, map(failed, traces)))
    if broken:
        raise Unmade(broken)


def resuming(subject: Subject, trace: Trace, after: int = 0) -> Evidence:
    """A run of a loop that is cut off after update `after` (by default at two thirds) and resumed, beside `trace`.

    It saved before the cut, where the next update gives every rank rows, so that all ranks save at one place; for that
    it may be cut off later. Raises `Unmade`.
    """
    made = len(first_of(trace).made)
    every, after = _saved_and_cut(trace, after or 2 * made // 3)
    if not every:
        raise Unmade(f"no place to save and cut off {made} updates: too few, or too few rows")
    with tempfile.TemporaryDirectory(prefix="andon-resume-") as folder:
        case = trace.case.but(folder=folder, checkpoint_every=every)
        runs = Resumed(trace, subject.run(case.but(stop_after=after)), subject.run(case))
    _sound(runs.cut, runs.taken_up)
    if not runs.taken_up.first.resumed_from:
        raise Unmade(f"nothing had been saved when the run was cut off after update {after}")
    return runs.evidence


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


def halting(subject: Subject, trace: Trace) -> Evidence:
    """The loop's run with one that has a NaN in the gradient of the last rank.

    It is in an update with all its rows, not the first if there is another.
    """
    case, size = trace.case, trace.case.global_batch
    later = 2 if len(case.rows) >= 2 * size else case.updates_of_epoch(size) + 1
    poison = Poison(later if later <= case.updates(size) else 1, case.world - 1, "nan")
    poisoned = subject.run(case.but(poison=poison))
    return replace(of_trace(trace), others={"poisoned": (of_trace(poisoned),)})


def with_dropout(subject: Subject, trace: Trace) -> Evidence:
    """Two epochs of two updates of a model with dropout, on as many ranks as `trace` has, two rows on each.

    So many that a loop that evaluates after an update or an epoch trains on behind it. Raises `Unmade`.
    """
    world = trace.case.world
    case = Case(
        rows=make_rows(4 * world),
        batch_size=2 * world,
        micro_batches=world,
        epochs=2,
        optimizer="sgd",
        clip_norm=None,
        weight_decay=0.0,
        dropout=0.1,
        fault=trace.case.fault,
        world=world,
        backend="gloo",
    )
    trace = subject.run(case)
    _sound(trace)
    return of_trace(trace)


def drawing(subject: Subject, trace: Trace) -> Evidence:
    """`trace` itself if its forward passes draw or should, else the run `with_dropout`. Raises `Unmade`."""
    if not trace.case.dropout and not trace.gathered("draws"):
        return with_dropout(subject, trace)
    _sound(trace)
    return of_trace(trace)
