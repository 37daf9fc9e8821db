"""Our own trainer on the bench, or another subject that is observed as it is."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from andon_falsify.campaign.bench import Bench
from andon_falsify.campaign.trial import RESUME, Trial
from andon_falsify.claims.evidence import Evidence, RunUnavailable, of_trace
from andon_falsify.peers.registry import installed
from andon_falsify.ranks.pool import root_cause
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.placing import CPU_BACKENDS, GPU_BACKENDS, why_not
from andon_falsify.subjects.trace import Remembering, Subject, Trace
from andon_falsify.verdict import ExtraRun

_EVERY = 2
"""Updates between checkpoints, if a trial of resuming does not say."""


class AndonBench(Bench):
    """Runs trials on `subject`: our trainer, or one with the same observations."""

    kind = "trainer"
    every_backend: tuple[str, ...] = (*CPU_BACKENDS, *GPU_BACKENDS)

    def __init__(self, subject: Subject, name: str = "andon", version: str = "") -> None:
        super().__init__(name, version or installed("andon"))
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


def _sound(trace: Trace, what: str = "") -> Evidence:
    if trace.errors:
        raise RunUnavailable(f"{what}{root_cause(trace.errors)}")
    return of_trace(trace)


def alone(case: Case) -> Case:
    """`case` on one rank, on the same kind of device, or on a CPU if it has both kinds."""
    return case.but(world=1, backend="nccl" if case.backend == "nccl" else "inline")


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
