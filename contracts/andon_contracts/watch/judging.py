"""Acts upon the laws that a watched loop breaks: counts, silences, prints, raises or calls, by the settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from andon_contracts.act import Scene, conclude
from andon_contracts.bundle import Evidence
from andon_contracts.clauses import CLAUSES
from andon_contracts.laws.law import Judgement, Law
from andon_contracts.legible import log
from andon_contracts.stacks import user_line
from andon_contracts.violation import Violation
from andon_contracts.watch.settings import Settings

S = TypeVar("S")

_PART = frozenset({"replicas-agree", "gradients-agree", "optimizers-agree", "hyperparameters-agree", "scaler-agrees"})
"""Clauses whose violation parts the ranks' weights for good."""
_PARTED = frozenset({"replicas-agree", "gradients-agree", "optimizers-agree", "buffers-agree"})
"""Clauses that say nothing new once the weights have parted."""


def say(text: str) -> None:
    """Print a message after the line of the user's loop that led here; no filter of warnings can hide it."""
    line = user_line()
    log(f"{line}: {text}" if line else text)


@dataclass
class _Cause:
    """A violation that was reported, the clauses of it and of its effects, and the last step of these."""

    finding: Violation
    clauses: set[str]
    until: int


@dataclass(frozen=True)
class _Case:
    """A broken law that is not silenced, and what is needed to report it; `Verdicts` says what the fields mean."""

    found: Violation
    suspicion: bool
    scene: Scene
    closer: Callable[[Violation], Scene] | None = None
    facts: Mapping[str, object] = field(default_factory=dict)
    alone: bool = False
    by_all: bool = False
    effects: Sequence[tuple[Violation, bool]] = ()
    """What else did not hold of the same observations, and whether it is a suspicion."""


@dataclass
class Verdicts:
    """Judges observations with the same result on every rank, counts, and warns, raises or calls by the settings."""

    settings: Settings
    rank: int
    names: Sequence[str]
    live: frozenset[str]
    evaluations: Counter[str] = field(default_factory=Counter)
    findings: list[Violation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    silenced: Counter[str] = field(default_factory=Counter)
    suspected: Counter[str] = field(default_factory=Counter)
    first_steps: dict[str, int] = field(default_factory=dict)
    """The step of the first violation or suspicion of each clause."""
    record: Callable[[Violation, str, bool], None] | None = None
    """Receives each finding that is acted upon, what is done, and whether the update had been made."""
    evidence: Evidence = field(default_factory=Evidence)
    """What this rank has for a bundle."""
    _causes: list[_Cause] = field(default_factory=list)

    def alive(self, laws: Sequence[Law[S]]) -> tuple[Law[S], ...]:
        return tuple(law for law in laws if law.clause in self.live)

    def judgement(self, laws: Sequence[Law[S]], seen: S) -> Judgement[S]:
        return Judgement(laws, seen, self.evaluations)

    def judge(self, laws: Sequence[Law[S]], seen: S, scene: Scene) -> bool:
        """Judge what was seen by those of `laws` that are alive, and act upon what is broken; True if all hold."""
        judgement = self.judgement(self.alive(laws), seen)
        self.take_all(judgement, scene)
        return judgement.first is None

    def known(self, clause: str) -> bool:
        """True if a violation of the clause was reported, or is silenced: further ones are only counted."""
        return clause in self.settings.allow or self.counts[clause] > 0

    def take_all(
        self,
        judgement: Judgement[Any],
        scene: Scene,
        closer: Callable[[Violation], Scene] | None = None,
        facts: Mapping[str, object] | None = None,
    ) -> None:
        """Act upon the broken laws: the first violation is the finding, and the others are its effects.

        closer: looks closer, with collectives, at a finding: all ranks do it or none. facts: more for the bundle.
        Raises `Violation` on every rank if the action is to raise.
        """
        broken: list[tuple[Violation, bool]] = []
        for law in judgement.broken():
            found = judgement.violation(law)
            if found.clause in self.settings.allow:
                self.silenced[found.clause] += 1
            else:
                broken.append((found, law.suspicion))
        first = next((found for found, suspicion in broken if not suspicion), None)
        is_news = first is not None and (self.settings.action == "raise" or not self.counts[first.clause])
        if first is not None and is_news and self._cause_of(first) is None:
            effects = [each for each in broken if each[0] is not first]
            self._take(_Case(first, False, scene, closer, facts or {}, effects=effects))
        else:
            for found, suspicion in broken:
                self._take(_Case(found, suspicion, scene, closer, facts or {}))

    def take(
        self, found: Violation, scene: Scene, *, suspicion: bool = False, alone: bool = False, by_all: bool = False
    ) -> None:
        """Act upon one finding.

        alone: only this rank judges here, so that there is no bundle. by_all: every other rank finds the same.
        """
        if found.clause in self.settings.allow:
            self.silenced[found.clause] += 1
        else:
            self._take(_Case(found, suspicion, scene, alone=alone, by_all=by_all))

    def _take(self, case: _Case) -> None:
        """Count a finding; explain, bundle and act upon the first of its clause, unless it is an effect of another."""
        found, suspicion, action = case.found, case.suspicion, self.settings.action
        # A clause that was only suspected before is reported once more if it is certain.
        is_first = not (self.counts[found.clause] or (suspicion and self.suspected[found.clause]))
        self._count(found, suspicion)
        if not is_first and (suspicion or action != "raise"):
            return
        aloud = self.rank == 0 or (case.alone and not case.by_all)
        applied = case.scene.applied or CLAUSES[found.clause].of_the_update_before
        cause = self._cause_of(found)
        if cause is not None:
            self._note_effect(cause, found, suspicion, applied)
            if aloud:
                say(f"andon: of the same cause as {cause.finding.clause}: {_effect(found)}")
            return

        scene = case.scene if case.closer is None else case.closer(found)
        known = self.counts + self.suspected
        news = [each for each in case.effects if not known[each[0].clause]]
        scene = replace(
            scene,
            goes_on=suspicion or action == "warn",
            applied=applied,
            by_command=self.settings.by_command,
            also=tuple(_effect(each) for each, _ in news),
        )
        whole = conclude(found, scene, Evidence() if case.alone else self.evidence, case.facts)
        self.findings.append(whole)
        self._record(whole, suspicion, applied)
        if not suspicion:
            cause = _Cause(whole, {found.clause}, found.step)
            self._causes.append(cause)
            for effect in news:
                self._note_effect(cause, *effect, applied)
        for effect in case.effects:
            self._count(*effect)

        if self.settings.log is not None:
            self.settings.log({"andon/clause": whole.clause, "andon/step": whole.step, "andon/message": str(whole)})
        if callable(action):
            action(whole)
        elif action == "raise" and not suspicion:
            raise whole
        elif aloud:
            say(f"{'andon suspicion' if suspicion else 'andon.Violation'}: {whole}")

    def _count(self, found: Violation, suspicion: bool) -> None:
        (self.suspected if suspicion else self.counts)[found.clause] += 1
        self.first_steps.setdefault(found.clause, found.step)

    def _cause_of(self, found: Violation) -> _Cause | None:
        """The violation whose effect this is: of the same update, or one by which the ranks' weights parted."""
        if self.settings.action == "raise":  # the violation ended the loop, or the loop goes on as if there were none
            return None
        for cause in reversed(self._causes):
            parted = found.clause in _PARTED and not _PART.isdisjoint(cause.clauses)
            if parted or found.step == cause.until:
                return cause
        return None

    def _note_effect(self, cause: _Cause, effect: Violation, suspicion: bool, applied: bool) -> None:
        if not suspicion:  # nothing follows from a suspicion
            cause.clauses.add(effect.clause)
            cause.until = max(cause.until, effect.step)
        self._record(effect, suspicion, applied)

    def _record(self, found: Violation, suspicion: bool, applied: bool) -> None:
        if self.record is not None:
            done = {"warn": "warned", "raise": "raised"}.get(str(self.settings.action), "called")
            self.record(found, "suspected" if suspicion else done, applied)


def _effect(found: Violation) -> str:
    return f"{found.clause}, step {found.step}: {found.finding.seen}"
