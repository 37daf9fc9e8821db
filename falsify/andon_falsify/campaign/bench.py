"""Where a subject is tried: what can be tried on it, which claims that judges, and the verdicts of one trial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from andon_falsify.campaign.trial import Trial
from andon_falsify.subjects.case import Case
from andon_falsify.verdict import Claim, Verdict


class Bench(Protocol):
    """A subject with all that judges it. Every kind of subject (our trainer, a loop, a script) has one.

    subject, version: what findings call it. claims: every claim there is of it, in the order of reports.
    kinds: for each kind of trial that it can be put to, the names of the claims that such a trial judges.
    words: the options of `andon falsify` that name the subject. backends: those that this machine can try it on.
    every_backend: all that may be named for it; on one that this machine lacks, claims do not apply.
    """

    subject: str
    version: str
    words: tuple[str, ...]
    backends: tuple[str, ...]
    every_backend: tuple[str, ...]
    claims: tuple[Claim, ...]
    kinds: Mapping[str, frozenset[str]]

    @property
    def runs(self) -> int:
        """How often the subject has been run so far."""
        ...

    def suited(self, case: Case) -> Case:
        """A drawn case as this kind of subject understands it: without what it cannot be asked to do."""
        ...

    def attempt(self, trial: Trial) -> Mapping[str, Verdict]:
        """Run the subject as `trial` says and judge what it left; the verdicts by claim.

        Nothing is raised for what a subject does wrong: where it gave nothing to judge, every claim of the trial's kind
        is unknown, for the reason named.
        """
        ...
