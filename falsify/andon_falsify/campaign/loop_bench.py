"""A training loop of anyone's on the bench: what is claimed of it, trial by trial or all at once on one case."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from andon_falsify.campaign import further
from andon_falsify.campaign.reasons import blame
from andon_falsify.campaign.trial import HALT, LAW, RESUME, Trial
from andon_falsify.checkers import halts, resume_equal, same_everywhere
from andon_falsify.claims import evaluation_law, of_loop, randomness_apart
from andon_falsify.claims.evidence import Evidence, of_trace
from andon_falsify.claims.of_loop import failed, outside, shortened
from andon_falsify.claims.table import judged_by, unmet
from andon_falsify.subjects.case import Case, Poison
from andon_falsify.subjects.trace import Remembering, Subject, Trace
from andon_falsify.verdict import Claim, Outcome, Verdict, judge, merge, unknown

_BACKEND = "gloo"
FURTHER: Mapping[str, Callable[..., Evidence]] = {
    resume_equal.CLAIM.name: further.resuming,
    halts.CLAIM.name: further.halting,
    randomness_apart.CLAIM.name: further.drawing,
}
"""What makes the runs that a claim asks for instead of the run itself, by the claim's name."""


def judge_loop(subject: Subject, case: Case, variants: Sequence[Case] = ()) -> dict[str, Verdict]:
    """Every claim on `case`: its own run, the same global batches as `variants` have them, a resume, a planted NaN."""
    trace = subject.run(case)
    found = of_loop.verdicts(trace)
    why = failed(trace)
    if not why:
        elsewhere = judge_elsewhere(trace, [subject.run(variant) for variant in variants])
        found[same_everywhere.CLAIM.name] = shortened(elsewhere)
        for claim in of_loop.MORE_RUNS:
            if claim.name in FURTHER:
                found[claim.name] = judge_further(claim, subject, trace)
        found[evaluation_law.CLAIM.name] = judge_evaluation(subject, trace)
    return found | {claim.name: unknown(claim, why) for claim in of_loop.CLAIMS if claim.name not in found}


def judge_further(claim: Claim, subject: Subject, trace: Trace, **asked: Any) -> Verdict:
    """What is said of `claim` by runs that `FURTHER` makes as `asked`; none where it does not apply to `trace`."""

    def check() -> Verdict:
        if unmet(claim, of_trace(trace)):
            return judged_by(claim, of_trace(trace))
        try:
            return judged_by(claim, FURTHER[claim.name](subject, trace, **asked))
        except further.Unmade as error:
            return unknown(claim, str(error))

    return judge(claim, check)


def judge_elsewhere(trace: Trace, others: Sequence[Trace]) -> Verdict:
    """The loop's run against the same global batches on other numbers of ranks and micro-batches."""
    try:
        return judged_by(same_everywhere.CLAIM, further.elsewhere(trace, others))
    except further.Unmade as error:
        return unknown(same_everywhere.CLAIM, str(error))


def judge_evaluation(subject: Subject, trace: Trace) -> Verdict:
    """The evaluation of `trace`, and that of a model with dropout: an evaluation has it switched off."""
    plain = judged_by(evaluation_law.CLAIM, of_trace(trace))
    if plain.outcome is Outcome.NOT_APPLICABLE:
        return plain
    try:
        found = judged_by(evaluation_law.CLAIM, further.with_dropout(subject, trace))
    except further.Unmade as error:
        found = unknown(evaluation_law.CLAIM, f"with dropout: {error}")
    named = tuple(replace(each, where=f"{each.where}, with dropout in the model") for each in found.counterexamples)
    return merge([plain, replace(found, counterexamples=named)])


class LoopBench:
    """Runs trials on `subject`, a `LoopSubject`. See `Bench`.

    name: how `--subject` names it, and findings. version: of what it trains with, "" where that is not known.
    """

    def __init__(self, subject: Subject, name: str, version: str = "") -> None:
        self.subject = name
        self.version = version
        self.words: tuple[str, ...] = ("--subject", name)
        self.backends: tuple[str, ...] = (_BACKEND,)
        self.every_backend: tuple[str, ...] = (_BACKEND,)
        self.claims: tuple[Claim, ...] = of_loop.CLAIMS
        one_run = frozenset(claim.name for claim in of_loop.ONE_RUN)
        self.kinds: Mapping[str, frozenset[str]] = {
            LAW: one_run | {same_everywhere.CLAIM.name, randomness_apart.CLAIM.name},
            HALT: frozenset({halts.CLAIM.name}),
            RESUME: frozenset({resume_equal.CLAIM.name}),
        }
        self._loop = Remembering(subject)
        self._undeclared: dict[str, Verdict] = {}

    @property
    def runs(self) -> int:
        """How often the loop has been run."""
        return self._loop.runs

    def suited(self, case: Case) -> Case:
        """See `Bench.suited`: a foreign loop's dropout masks are not known, and it is not told to weigh classes.

        A NaN is planted in the second update of the last rank; when a run saves is the loop's judge to say.
        """
        poison = None if case.poison is None else Poison(2, case.world - 1, "nan")
        return case.but(dropout=0.0, class_weights=None, poison=poison, checkpoint_every=None)

    def attempt(self, trial: Trial) -> Mapping[str, Verdict]:
        """See `Bench.attempt`.

        Halting and resuming apply by what the loop declares of itself, the same in every case: where it has once been
        seen not to, it is not run for them again.
        """
        if trial.kind in self._undeclared:
            return {self._undeclared[trial.kind].claim: self._undeclared[trial.kind]}
        plain = trial.case.but(poison=None, stop_after=None, checkpoint_every=None)
        try:
            trace = self._loop.run(plain)
        except ValueError as error:  # a case that no loop can be judged on
            return self._unknown(trial.kind, str(error))
        why = blame(trace.errors) if trace.errors else outside(trace)
        if why:
            return self._unknown(trial.kind, why)
        if trial.kind in (HALT, RESUME):
            asked = {"after": trial.case.stop_after or 0} if trial.kind == RESUME else {}
            claim = resume_equal.CLAIM if trial.kind == RESUME else halts.CLAIM
            if unmet(claim, of_trace(trace)):
                self._undeclared[trial.kind] = judged_by(claim, of_trace(trace))
            return {claim.name: judge_further(claim, self._loop, trace, **asked)}
        return of_loop.verdicts(trace) | {
            same_everywhere.CLAIM.name: self._elsewhere(trace),
            randomness_apart.CLAIM.name: judge_further(randomness_apart.CLAIM, self._loop, trace),
            evaluation_law.CLAIM.name: judge_evaluation(self._loop, trace),
        }

    def _elsewhere(self, trace: Trace) -> Verdict:
        """The same global batches on one rank: at once, or row by row where the trace is of just that."""
        case = trace.case
        alone = case.but(world=1, micro_batches=1 if case.micro_batches > 1 else case.batch_size)
        other = self._loop.run(alone)
        if other.errors:
            why = f"the run on one rank to compare with failed: {blame(other.errors)}"
            return unknown(same_everywhere.CLAIM, why)
        return judge_elsewhere(trace, [other])

    def _unknown(self, kind: str, why: str) -> Mapping[str, Verdict]:
        return {claim.name: unknown(claim, why) for claim in self.claims if claim.name in self.kinds[kind]}
