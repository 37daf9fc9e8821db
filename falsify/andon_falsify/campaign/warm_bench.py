"""Benches for Andon's trainer and for a user's loop: both run on warm ranks, with the further runs that claims need."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from andon_falsify.campaign.bench import Bench
from andon_falsify.campaign.trial import HALT, RESUME, Trial
from andon_falsify.claims import judged_by, samples_once, unmet
from andon_falsify.claims.evidence import Evidence, RunUnavailable, of_trace
from andon_falsify.loops.sightings import LoopSightings, first_of
from andon_falsify.peers.registry import installed
from andon_falsify.ranks.pool import root_cause
from andon_falsify.subjects.case import Case, Poison, make_rows
from andon_falsify.subjects.placing import CPU_BACKENDS, GPU_BACKENDS, why_not
from andon_falsify.subjects.trace import Remembering, Subject, Trace
from andon_falsify.verdict import ExtraRun, Outcome

_EVERY = 2
"""Updates between checkpoints, if a trial of resuming does not say."""


class AndonBench(Bench):
    """Runs trials on `subject`: our trainer, or one with the same observations."""

    kind = "trainer"
    every_backend: tuple[str, ...] = (*CPU_BACKENDS, *GPU_BACKENDS)

    def __init__(self, subject: Subject) -> None:
        super().__init__("andon", installed("andon"))
        self.backends = tuple(name for name in self.every_backend if not why_not(name))
        self._trainer = Remembering(subject)

    @property
    def runs(self) -> int:
        return self._trainer.runs

    def evidence(self, trial: Trial) -> Evidence:
        """See `Bench.evidence`. A trial of resuming plants its fault in the run that resumes."""
        case = trial.case
        if trial.kind == RESUME:
            case = case.but(stop_after=None, checkpoint_every=None, fault=None)
        trace = self._trainer.run(case)
        return replace(_sound(trace), further=partial(self._further, trace, trial))

    def _further(self, trace: Trace, trial: Trial, name: ExtraRun) -> Mapping[ExtraRun, Evidence]:
        case = trial.case
        if name == "alone":
            measure = alone(case).but(contracts=True, fault=None)
            if (case.world, case.backend) == (1, measure.backend):
                return {}
            return {name: _sound(self._trainer.run(measure), "the run on one rank to compare with failed: ")}
        if name not in ("cut", "resumed"):
            return {}
        after, every = case.stop_after or _EVERY + 1, case.checkpoint_every or _EVERY
        world = trial.then_world or case.world
        cut, resumed = cut_and_resume(
            self._trainer, trace.case, after=after, every=every, world=world, fault=case.fault
        )
        return {"cut": _sound(cut), "resumed": _sound(resumed)}


def alone(case: Case) -> Case:
    """`case` on one rank, on the same kind of device, or on a CPU if it has both kinds."""
    return case.but(world=1, backend="nccl" if case.backend == "nccl" else "inline")


class LoopBench(Bench):
    """Runs trials on `subject`, a `LoopSubject`. version: of the library that it trains with, "" if unknown."""

    kind = "loop"
    every_backend: tuple[str, ...] = ("gloo", "nccl")

    def __init__(self, subject: Subject, name: str, version: str = "") -> None:
        super().__init__(name, version, ("--subject", name))
        self.backends = ("gloo",)
        self._loop = Remembering(subject)
        self._undeclared: dict[str, str] = {}
        """By kind of trial: what a loop declares of halting and resuming is the same in every case."""

    @property
    def runs(self) -> int:
        return self._loop.runs

    def suited(self, trial: Trial) -> Trial:
        """A foreign loop cannot be told to weigh classes, and its dropout masks are unknown. It saves when told to."""
        case = trial.case
        poison = None if case.poison is None else Poison(2, case.world - 1, "nan")
        case = case.but(dropout=0.0, class_weights=None, poison=poison, checkpoint_every=None)
        return replace(trial, case=case, then_world=0)

    def inapplicable(self, trial: Trial) -> str:
        return trial.lacking or self._undeclared.get(trial.kind, "")

    def evidence(self, trial: Trial) -> Evidence:
        """See `Bench.evidence`: the plain run, without what the trial does with it."""
        try:
            trace = self._loop.run(trial.case.but(poison=None, stop_after=None, checkpoint_every=None))
        except ValueError as error:  # a case that no loop can be judged on
            raise RunUnavailable(str(error)) from error
        found = _sound(trace)
        if trial.kind in (HALT, RESUME):
            whys = (unmet(claim, found) for claim in self.claims if claim.trial == trial.kind)
            self._undeclared[trial.kind] = next(whys)
        return replace(found, further=partial(self._further, trace, trial))

    def _further(self, trace: Trace, trial: Trial, name: ExtraRun) -> Mapping[ExtraRun, Evidence]:
        case = trace.case
        if name == "alone":  # at once, or row by row if the trace is of just that
            other = case.but(world=1, micro_batches=1 if case.micro_batches > 1 else case.batch_size)
            return {name: _sound(self._loop.run(other), "the run on one rank to compare with failed: ")}
        if name == "poisoned":
            return {name: of_trace(self._loop.run(_poisoned(case)))}
        if name == "random":
            return {name: _sound(self._loop.run(_with_dropout(case)), "with dropout: ")}
        if name not in ("cut", "resumed"):
            return {}
        every, after = _saved_and_cut(trace, trial.case.stop_after or 2 * len(first_of(trace).made) // 3)
        cut, resumed = cut_and_resume(self._loop, case, after=after, every=every, fault=case.fault)
        if not (resumed.errors or resumed.first.resumed_from):
            raise RunUnavailable(f"nothing had been saved when the run was cut off after update {after}")
        return {"cut": _sound(cut), "resumed": _sound(resumed)}


def _poisoned(case: Case) -> Case:
    """`case` with a NaN in the gradient of the last rank, in an update with all its rows, if possible not the first."""
    size = case.global_batch
    later = 2 if len(case.rows) >= 2 * size else case.updates_of_epoch(size) + 1
    return case.but(poison=Poison(later if later <= case.updates(size) else 1, case.world - 1, "nan"))


def _with_dropout(case: Case) -> Case:
    """Two epochs of two updates of a model with dropout: a loop that evaluates after an update or an epoch goes on."""
    world = case.world
    small = Case(make_rows(4 * world), batch_size=2 * world, micro_batches=world, epochs=2, fault=case.fault)
    return small.but(optimizer="sgd", clip_norm=None, weight_decay=0.0, dropout=0.1, world=world, backend=case.backend)


def _saved_and_cut(trace: Trace, after: int) -> tuple[int, int]:
    """The interval of saves in updates, and the update to interrupt after: `after`, or later if nothing was saved yet.

    The update after a save gives every rank rows, so that all ranks save at one step. Raises `RunUnavailable`.
    """
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
    why = f"cannot place a checkpoint and an interruption within {last} updates: too few updates or rows"
    lost = judged_by(samples_once.CLAIM, of_trace(trace)).outcome is Outcome.FALSIFIED
    raise RunUnavailable(why, "Mend samples-once first: it is falsified here, and may be the cause" * lost)


def cut_and_resume(
    subject: Subject, case: Case, *, after: int, every: int, world: int | None = None, fault: str | None = None
) -> tuple[Trace, Trace]:
    """Interrupt a run of `case` after update `after`, with checkpoints every `every` updates, and resume it.

    world, fault: of the run that resumes; by default the world of `case`. No checkpoint is written at the interruption,
    as by a kill, so updates after the last one are done again.
    """
    with tempfile.TemporaryDirectory(prefix="andon-resume-") as folder:
        saving = case.but(folder=folder, checkpoint_every=every)
        cut = subject.run(saving.but(stop_after=after))
        return cut, subject.run(saving.but(world=world or case.world, fault=fault))


def _sound(trace: Trace, what: str = "") -> Evidence:
    """The evidence of a run that can be judged. Raises `RunUnavailable` if a rank failed, or no verdict would be fair.

    An update of a loop must be one step of one optimizer over everything that trains, on every rank. Two designs that
    may be right are not: optimizers that share the parameters and step in turn, and ranks that each update a part of
    the parameters and broadcast it afterwards. (torch's `ZeroRedundancyOptimizer` does the latter within its step.)
    """
    why = root_cause(trace.errors) if trace.errors else ""
    parts = [part for part in trace.parts if isinstance(part, LoopSightings)]
    if not why and parts:
        first = first_of(trace)
        held = [_names(part, min(part.made)) for part in parts if part.made]
        if not first.made and not first.resumed_from:
            why = "no step of an optimizer over parameters of the loop's `model` was seen"
        elif len(held) > 1 and sum(map(len, held)) == len(frozenset().union(*held)):
            why = "the ranks' optimizers split the parameters; an update must be a step over all of them"
            why += " on every rank"
        for step in () if why else sorted(first.made.keys() - {min(first.made, default=0)}):
            idle = not any(part.of(rank, step).leaves or step in part.rowless for part in parts for rank in part.ranks)
            if step - 1 in first.made and idle and not _names(first, step) & _names(first, step - 1):
                why = "several optimizers share the parameters and step in turn; an update must be one optimizer's step"
    if why:
        raise RunUnavailable(f"{what}{why}")
    return of_trace(trace)


def _names(part: LoopSightings, step: int) -> frozenset[str]:
    return frozenset(name for group in part.made[step].groups for name in group.names)
