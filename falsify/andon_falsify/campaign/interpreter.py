"""Runs the trials of a campaign on a bench, one after the other, and collects what they say of each claim.

The only loop of the campaign with effects: everything else draws, judges, compares or writes down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from andon_falsify.campaign.budget import Budget
from andon_falsify.campaign.diagnosis import factors_of, reason
from andon_falsify.campaign.shrink import shrink
from andon_falsify.campaign.trial import Trial
from andon_falsify.subjects.case import Case
from andon_falsify.verdict import Claim, Outcome, Verdict, unknown

_FAILURES = 4
"""After this many identical failures, and no trial that worked, places that failed are not tried again."""
Told = Callable[[Trial, Mapping[str, Verdict]], None]
"""Is told of every trial that was run to be judged, when it is over."""


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

    def attempt(self, trial: Trial, claims: Collection[str]) -> Mapping[str, Verdict]:
        """Run the subject as `trial` says and judge `claims` by what it left; the verdicts by claim.

        Nothing is raised for what a subject does wrong: where it gave nothing to judge, every claim of the trial's kind
        is unknown, for the reason named.
        """
        ...


@dataclass(frozen=True)
class Campaign:
    """What is to be done. claims: the names of those selected. exact: the trials are run as they are and not shrunk.

    worlds, accumulations: those that a smaller counterexample may have; none for any smaller one.
    """

    bench: Bench
    trials: tuple[Trial, ...]
    claims: frozenset[str]
    budget: Budget
    worlds: tuple[int, ...] = ()
    accumulations: tuple[int, ...] = ()
    exact: bool = False


@dataclass(frozen=True)
class Said:
    """What one trial said of one claim. shrunk: it is the smallest counterexample that was found."""

    trial: Trial
    verdict: Verdict
    shrunk: bool = False


@dataclass
class Interpreter:
    """One campaign under way. `said` holds what is known by now, also after an interruption."""

    campaign: Campaign
    told: Told = lambda trial, verdicts: None
    said: list[Said] = field(default_factory=list)
    _known: dict[Trial, Mapping[str, Verdict]] = field(default_factory=dict)
    _late: dict[tuple[str, int], int] = field(default_factory=dict)
    _failures: list[str] = field(default_factory=list)
    _failed: set[tuple[str, int, int]] = field(default_factory=set)
    _worked: bool = False

    def run(self) -> Sequence[Said]:
        """Every trial, then the search for smaller counterexamples; what was said of the selected claims."""
        for trial in self.campaign.trials:
            if self.campaign.bench.kinds[trial.kind] & self.campaign.claims:
                found = self._tried(trial)
                self.said += [Said(trial, verdict) for verdict in found.values()]
                self.told(trial, found)
        if not self.campaign.exact:
            self.said += list(self._smallest())
        return self.said

    def _tried(self, trial: Trial) -> Mapping[str, Verdict]:
        """The verdicts of a trial, unless it is hopeless."""
        why = self._hopeless(trial)
        if why:
            names = self.campaign.bench.kinds[trial.kind] & self.campaign.claims
            return {claim.name: unknown(claim, why) for claim in self.campaign.bench.claims if claim.name in names}
        began = time.monotonic()
        found = self._verdicts(trial)
        if {verdict.outcome for verdict in found.values()} == {Outcome.UNKNOWN}:
            if time.monotonic() - began >= self.campaign.budget.deadline_s / 2:
                place = (trial.case.backend, max(_worlds(trial)))
                self._late[place] = self._late.get(place, 0) + 1
            self._failures.append(next(iter(found.values())).why)
            self._failed.add(trial.place)
        else:
            self._worked = True
        return found

    def _hopeless(self, trial: Trial) -> str:
        """Why a trial is not worth its time: its place had no answer in time too often, or nothing ever works.

        A place that has not failed yet is tried at least once: the places before it prove nothing about it.
        """
        budget = self.campaign.budget
        for world in _worlds(trial):
            if self._late.get((trial.case.backend, world), 0) >= budget.patience:
                return (
                    f"not tried: {budget.patience} runs on {world} ranks did not end within {budget.deadline_s:.0f} s"
                )
        if not self._worked and trial.place in self._failed and self._failures.count(self._failures[-1]) >= _FAILURES:
            return self._failures[-1]
        return ""

    def _verdicts(self, trial: Trial) -> Mapping[str, Verdict]:
        """The verdicts of a trial on the selected claims; a trial that was run before is not run again."""
        if trial not in self._known:
            self._known[trial] = self.campaign.bench.attempt(trial, self.campaign.claims)
        return self._known[trial]

    def _smallest(self) -> Iterator[Said]:
        """For each claim that fell, the smallest case in which it does, for the same reason as in one of the drawn."""
        began, limit = time.monotonic(), self.campaign.budget.shrink_s
        fallen: dict[str, list[Said]] = {}
        for said in self.said:
            if said.verdict.outcome is Outcome.FALSIFIED:
                fallen.setdefault(said.verdict.claim, []).append(said)
        for place, (claim, found) in enumerate(fallen.items()):
            left = limit - (time.monotonic() - began)
            trial = self._shrunk(claim, max(found, key=_telling).trial, left / (len(fallen) - place))
            yield Said(trial, self._verdicts(trial)[claim], shrunk=True)

    def _shrunk(self, claim: str, trial: Trial, limit_s: float) -> Trial:
        why = _reason(trial, self._verdicts(trial)[claim])

        def falls(smaller: Trial) -> bool:
            verdict = self._verdicts(smaller).get(claim)
            return verdict is not None and verdict.outcome is Outcome.FALSIFIED and _reason(smaller, verdict) == why

        return shrink(trial, falls, limit_s, self.campaign.worlds, self.campaign.accumulations)


def _worlds(trial: Trial) -> tuple[int, ...]:
    """The numbers of ranks that it runs on: a resumed run may go on with other ones than it began with."""
    return (trial.case.world, trial.then_world) if trial.then_world else (trial.case.world,)


def _telling(said: Said) -> tuple[int, int]:
    """Most factors in its ratio first; of these, fewest ranks."""
    found, case = said.verdict.counterexamples[0], said.trial.case
    return len(factors_of(found, case)), -case.world


def _reason(trial: Trial, verdict: Verdict) -> tuple[str, ...]:
    return reason(verdict.counterexamples[0], trial.case)
