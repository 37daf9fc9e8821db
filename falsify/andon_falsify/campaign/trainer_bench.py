"""Our own trainer on the bench: every claim of the compliance tests, from the same checkers and reference."""

from __future__ import annotations

from collections.abc import Mapping

from andon_falsify.campaign.further import cut_and_resume
from andon_falsify.campaign.reasons import blame
from andon_falsify.campaign.trial import HALT, LAW, MEMORY, RESUME, Trial
from andon_falsify.checkers import halts, memory_within, resume_equal, same_everywhere
from andon_falsify.claims.evidence import of_trace
from andon_falsify.claims.of_trainer import CLAIMS, alone, verdicts
from andon_falsify.claims.table import judged, judged_by
from andon_falsify.peers.registry import installed
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.placing import CPU_BACKENDS, GPU_BACKENDS, why_not
from andon_falsify.subjects.trace import Remembering, Subject, Trace
from andon_falsify.verdict import Claim, Verdict, not_applicable, unknown

_ALONE = {
    HALT: frozenset({halts.CLAIM.name}),
    RESUME: frozenset({resume_equal.CLAIM.name}),
    MEMORY: frozenset({memory_within.CLAIM.name}),
}
_ALONE_IS_THE_MEASURE = "one rank is what the others are compared with"
RESUME_EVERY = 2
"""A trial of resuming that says nothing else has a checkpoint at every second update."""


class AndonBench:
    """Runs trials on `subject`, which is our trainer or has its sightings. See `Bench`."""

    def __init__(self, subject: Subject, name: str = "andon", version: str = "") -> None:
        self.subject = name
        self.version = version or installed("andon")
        self.words: tuple[str, ...] = ()
        self.every_backend: tuple[str, ...] = (*CPU_BACKENDS, *GPU_BACKENDS)
        self.backends = tuple(name for name in self.every_backend if not why_not(name))
        self.claims: tuple[Claim, ...] = CLAIMS
        law = frozenset(claim.name for claim in CLAIMS) - frozenset().union(*_ALONE.values())
        self.kinds: Mapping[str, frozenset[str]] = {LAW: law, **_ALONE}
        self._trainer = Remembering(subject)

    @property
    def runs(self) -> int:
        """How often the trainer has been run."""
        return self._trainer.runs

    def suited(self, case: Case) -> Case:
        """See `Bench.suited`: our trainer understands every case."""
        return case

    def attempt(self, trial: Trial) -> Mapping[str, Verdict]:
        """See `Bench.attempt`."""
        if trial.lacking:
            return {name: not_applicable(self._claim(name), trial.lacking) for name in self.kinds[trial.kind]}
        if trial.kind == RESUME:
            return self._resumed(trial)
        trace = self._trainer.run(trial.case)
        if trace.errors:
            return self._unknown(trial.kind, trace)
        if trial.kind in (HALT, MEMORY):
            return judged(of_trace(trace), (claim for claim in self.claims if claim.name in self.kinds[trial.kind]))
        return self._law(trace)

    def _law(self, trace: Trace) -> Mapping[str, Verdict]:
        measure = alone(trace.case).but(contracts=True, fault=None)
        itself = (trace.case.world, trace.case.backend) == (1, measure.backend)
        base = None if itself else self._trainer.run(measure)
        found = dict(verdicts(trace, None if base is None or base.errors else base))
        if base is None:
            found[same_everywhere.CLAIM.name] = not_applicable(same_everywhere.CLAIM, _ALONE_IS_THE_MEASURE)
        elif base.errors:
            why = f"the run on one rank to compare with failed: {blame(base.errors)}"
            found[same_everywhere.CLAIM.name] = unknown(same_everywhere.CLAIM, why)
        return found

    def _resumed(self, trial: Trial) -> Mapping[str, Verdict]:
        case = trial.case
        after, every = case.stop_after or RESUME_EVERY + 1, case.checkpoint_every or RESUME_EVERY
        plain = case.but(stop_after=None, checkpoint_every=None, fault=None)
        found = cut_and_resume(
            self._trainer, plain, after=after, every=every, world=trial.then_world or case.world, fault=case.fault
        )
        for part in (found.whole, found.cut, found.taken_up):
            if part.errors:
                return self._unknown(RESUME, part)
        return {resume_equal.CLAIM.name: judged_by(resume_equal.CLAIM, found.evidence)}

    def _unknown(self, kind: str, trace: Trace) -> Mapping[str, Verdict]:
        why = blame(trace.errors)
        return {name: unknown(self._claim(name), why) for name in self.kinds[kind]}

    def _claim(self, name: str) -> Claim:
        return next(claim for claim in self.claims if claim.name == name)
