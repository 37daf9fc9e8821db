"""Acts upon the laws that a watched loop breaks: counts, silences, prints, raises or calls, by the settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from andon_contracts.act import LASTING, Evidence, Scene, user_line, with_bundle
from andon_contracts.clauses import CLAUSES
from andon_contracts.laws.law import Judgement, Law
from andon_contracts.legible import counted, log
from andon_contracts.violation import Violation
from andon_contracts.watch.settings import RAISING, Settings

S = TypeVar("S")

_PART = frozenset({"replicas-agree", "gradients-agree", "optimizers-agree", "hyperparameters-agree", "scaler-agrees"})
"""Clauses whose violation makes the ranks' weights differ for good."""


def print_message(text: str) -> None:
    """Print a message after the line of the user's loop that led here. No filter of warnings can hide it."""
    line = user_line()
    log(f"{line}: {text}" if line else text)


@dataclass
class _Reported:
    violation: Violation
    clauses: set[str]
    """The clause of the violation and those of its effects."""
    until: int
    """The last step at which one of these was broken."""


@dataclass
class Verdicts:
    """Judges observations with the same result on every rank, counts, and warns, raises or calls by the settings.

    findings: the reported causes, without effects. record: receives each reported cause or effect, the action, and if
    the update was applied. evidence: what this rank can write into a bundle. first_steps: by clause.
    """

    settings: Settings
    live: frozenset[str]
    evaluations: Counter[str] = field(default_factory=Counter)
    findings: list[Violation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    silenced: Counter[str] = field(default_factory=Counter)
    suspected: Counter[str] = field(default_factory=Counter)
    first_steps: dict[str, int] = field(default_factory=dict)
    record: Callable[[Violation, str, bool], None] | None = None
    evidence: Evidence = field(default_factory=Evidence)
    _reported: list[_Reported] = field(default_factory=list)

    def judgement(self, laws: Sequence[Law[S]], seen: S) -> Judgement[S]:
        """The judgement of `seen` by those of `laws` that are live."""
        return Judgement([law for law in laws if law.clause in self.live], seen, self.evaluations)

    def judge(self, laws: Sequence[Law[S]], seen: S, scene: Scene) -> None:
        """Judge `seen` by those of `laws` that are live, and report what is broken."""
        self.report_all(self.judgement(laws, seen), scene)

    def closing_lines(self) -> Iterator[str]:
        for done, counts in (("broken", self.counts), ("suspected", self.suspected), ("silenced", self.silenced)):
            for name, count in counts.items():
                first = "" if counts is self.silenced else f", first at step {self.first_steps[name]}"
                yield f"  {name}: {done} in {count} of {counted(self.evaluations[name], 'check')}{first}"

    def is_reported(self, clause: str) -> bool:
        """True if a violation of the clause was reported, or is silenced: further ones are only counted."""
        return clause in self.settings.allow or self.counts[clause] > 0

    def report_all(
        self,
        judgement: Judgement[Any],
        scene: Scene,
        locate: Callable[[Violation], Scene] | None = None,
        facts: Mapping[str, object] | None = None,
    ) -> None:
        """Act upon the broken laws: the first violation is the cause, and the others are its effects.

        locate: adds the differing element to `scene`, with collectives, so all ranks call it or none. facts: more for
        the bundle. Raises `Violation` on every rank if the action is to raise.
        """
        broken = list(self._not_silenced(judgement))
        first = next((violation for violation, suspicion in broken if not suspicion), None)
        effects: list[tuple[Violation, bool]] = []
        is_new = first is not None and (self.settings.action in RAISING or not self.counts[first.clause])
        if first is not None and is_new and self._cause_of(first) is None:
            effects = [each for each in broken if each[0] is not first]
            broken = [(first, False)]
        for violation, suspicion in broken:
            self._report(violation, suspicion, scene, self.evidence, self.evidence.rank == 0, locate, facts, effects)

    def report_alone(self, judgement: Judgement[Any], scene: Scene, *, on_all_ranks: bool = False) -> None:
        """Act upon broken laws that this rank judges without gathers. Writes no bundle.

        on_all_ranks: every other rank finds the same, so only rank 0 prints it.
        """
        for violation, suspicion in self._not_silenced(judgement):
            self._report(violation, suspicion, scene, Evidence(), self.evidence.rank == 0 or not on_all_ranks)

    def _not_silenced(self, judgement: Judgement[Any]) -> Iterator[tuple[Violation, bool]]:
        for law in judgement.broken():
            if law.clause in self.settings.allow:
                self.silenced[law.clause] += 1
            else:
                yield judgement.violation(law), law.suspicion and self.settings.action != "strict"

    def _report(
        self,
        violation: Violation,
        suspicion: bool,
        scene: Scene,
        evidence: Evidence,
        prints: bool,
        locate: Callable[[Violation], Scene] | None = None,
        facts: Mapping[str, object] | None = None,
        effects: Sequence[tuple[Violation, bool]] = (),
    ) -> None:
        """Count a finding. Report it if it is the first of its clause or `action` raises. Effects get one line."""
        action, raises = self.settings.action, self.settings.action in RAISING
        # A clause that was only suspected before is reported once more if it is certain.
        is_first = not (self.counts[violation.clause] or (suspicion and self.suspected[violation.clause]))
        self._count(violation)
        if not is_first and (suspicion or not raises):
            return
        applied = scene.applied or CLAUSES[violation.clause].of_the_update_before
        cause = self._cause_of(violation)
        if cause is not None:
            self._note_effect(cause, violation, suspicion, applied)
            if prints:
                print_message(f"andon: same cause as {cause.violation.clause}: {_effect(violation)}")
            return

        known = self.counts + self.suspected
        news = [each for each in effects if not known[each[0].clause]]
        scene = replace(
            scene if locate is None else locate(violation),
            goes_on=suspicion or action == "warn",
            applied=applied,
            by_command=self.settings.by_command,
            also=tuple(_effect(each) for each, _ in news),
        )
        complete = with_bundle(violation, scene, evidence, {**(facts or {}), "suspicion": violation.finding.suspicion})
        self.findings.append(complete)
        self._record(complete, suspicion, applied)
        if not suspicion:
            cause = _Reported(complete, {violation.clause}, violation.step)
            self._reported.append(cause)
            for effect in news:
                self._note_effect(cause, *effect, applied)
        for effect in effects:
            self._count(effect[0])

        if self.settings.log is not None:
            about = {"andon/clause": complete.clause, "andon/step": complete.step, "andon/message": str(complete)}
            self.settings.log(about)
        if callable(action):
            action(complete)
        elif raises and not suspicion:
            raise complete
        elif prints:
            print_message(f"{'andon suspicion' if suspicion else 'andon.Violation'}: {complete}")

    def _count(self, violation: Violation) -> None:
        (self.suspected if violation.finding.suspicion else self.counts)[violation.clause] += 1
        self.first_steps.setdefault(violation.clause, violation.step)

    def _cause_of(self, violation: Violation) -> _Reported | None:
        """The reported violation that caused this one: at the same step, or one that made the ranks' weights differ."""
        if self.settings.action in RAISING:  # a violation ended the loop, or its caller caught it
            return None
        for cause in reversed(self._reported):
            parted = violation.clause in LASTING and not _PART.isdisjoint(cause.clauses)
            if parted or violation.step == cause.until:
                return cause
        return None

    def _note_effect(self, cause: _Reported, effect: Violation, suspicion: bool, applied: bool) -> None:
        if not suspicion:  # nothing follows from a suspicion
            cause.clauses.add(effect.clause)
            cause.until = max(cause.until, effect.step)
        self._record(effect, suspicion, applied)

    def _record(self, violation: Violation, suspicion: bool, applied: bool) -> None:
        if self.record is not None:
            done = {"warn": "warned", "raise": "raised", "strict": "raised"}.get(str(self.settings.action), "called")
            self.record(violation, "suspected" if suspicion else done, applied)


def _effect(violation: Violation) -> str:
    return f"{violation.clause}, step {violation.step}: {violation.finding.seen}"
