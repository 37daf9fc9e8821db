"""Runs trials of a subject and judges them by its claims. Each kind of subject has a bench."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import replace

from andon_falsify.campaign.trial import KINDS, Trial
from andon_falsify.claims import claims_of, judged
from andon_falsify.claims.evidence import Evidence, RunUnavailable
from andon_falsify.verdict import Kind, Verdict, not_applicable, unknown


class Bench(ABC):
    """Runs trials of one subject and has the claims judge what it left.

    kind: of subject. subject, version: its name in findings. words: the options of `andon falsify` that select it.
    claims: all that there are of its kind, in the order of reports. kinds: the names of the claims that each kind of
    trial judges. every_backend: all that may be requested; claims do not apply on a backend that this machine lacks.
    backends: those that this machine can run it on. late_after: a failed trial that took this many of the budget's
    deadlines did not end in time. A collective of warm ranks gives up after half a deadline.
    """

    kind: Kind
    every_backend: tuple[str, ...]
    late_after = 0.5

    def __init__(self, subject: str, version: str = "", words: tuple[str, ...] = ()) -> None:
        self.subject = subject
        self.version = version
        self.words = words
        self.backends = self.every_backend
        self.claims = tuple(replace(claim, statement=claim.statement_for(self.kind)) for claim in claims_of(self.kind))
        kinds = {kind: frozenset(claim.name for claim in self.claims if claim.trial == kind) for kind in KINDS}
        self.kinds: Mapping[str, frozenset[str]] = {kind: names for kind, names in kinds.items() if names}

    @property
    @abstractmethod
    def runs(self) -> int:
        """How often the subject has been run."""

    def suited(self, trial: Trial) -> Trial:
        """`trial` without the settings that this kind of subject cannot be given, such as the model of a script."""
        return trial

    def inapplicable(self, trial: Trial) -> str:
        """Why no claim of this trial can apply to the subject, known without a run; or ""."""
        return trial.lacking

    @abstractmethod
    def evidence(self, trial: Trial) -> Evidence:
        """Run `trial`. Its evidence makes further runs when a check asks for them.

        Raises `RunUnavailable` if the run failed.
        """

    def attempt(self, trial: Trial, claims: Collection[str] = ()) -> Mapping[str, Verdict]:
        """Run the subject and judge it. Returns verdicts by claim: all of the kind of trial, or of `claims`.

        Errors of the subject are not raised: the claims are unknown, with the error as the reason.
        """
        names = self.kinds[trial.kind].intersection(claims or self.kinds[trial.kind])
        asked = [claim for claim in self.claims if claim.name in names]
        if why := self.inapplicable(trial):
            return {claim.name: not_applicable(claim, why) for claim in asked}
        try:
            evidence = self.evidence(trial)
        except RunUnavailable as error:
            return {claim.name: unknown(claim, str(error), remedy=error.remedy) for claim in asked}
        return judged(evidence, asked)
