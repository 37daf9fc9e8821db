"""What becomes of a law that a watched loop breaks: counted, silenced, said, raised or called, as was asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from andon_contracts.act import Scene, conclude
from andon_contracts.bundle import Evidence
from andon_contracts.clauses import CLAUSES
from andon_contracts.laws.law import Judgement, Law
from andon_contracts.legible import tell
from andon_contracts.stacks import line_here
from andon_contracts.violation import Violation
from andon_contracts.watch.settings import Settings

S = TypeVar("S")


_PART = frozenset({"replicas-agree", "gradients-agree", "optimizers-agree", "hyperparameters-agree", "scaler-agrees"})
"""What parts the ranks' weights for good."""
_PARTED = frozenset({"replicas-agree", "gradients-agree", "optimizers-agree", "buffers-agree"})
"""What no longer says anything of its own once the weights have parted."""


def say(text: str) -> None:
    """A message to the user, behind the line of his loop that led here; no filter of warnings can lose it."""
    line = line_here()
    tell(f"{line}: {text}" if line else text)


def _effect(found: Violation) -> str:
    return f"{found.clause}, step {found.step}: {found.finding.seen}"


@dataclass
class _Cause:
    """A violation, the clauses of it and of its effects, and the last step of these."""

    finding: Violation
    clauses: set[str]
    until: int


@dataclass
class Verdicts:
    """Judges observations alike on every rank, counts, and warns, raises or calls as was asked."""

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
    """Told of each finding that is acted upon: what is done, and whether the update had been made."""
    evidence: Evidence = field(default_factory=Evidence)
    """What this rank has for a bundle."""
    _causes: list[_Cause] = field(default_factory=list)

    def alive(self, laws: Sequence[Law[S]]) -> tuple[Law[S], ...]:
        """Those of `laws` that can be looked at here."""
        return tuple(law for law in laws if law.clause in self.live)

    def judgement(self, laws: Sequence[Law[S]], seen: S) -> Judgement[S]:
        """`laws`, which are alive, held against what was seen, and counted here."""
        return Judgement(laws, seen, self.evaluations)

    def judge(self, laws: Sequence[Law[S]], seen: S, scene: Scene) -> bool:
        """Whether every one of `laws` held that can be looked at here; what is broken is acted upon."""
        judgement = self.judgement(self.alive(laws), seen)
        self.take_all(judgement, scene)
        return judgement.first is None

    def take_all(
        self,
        judgement: Judgement[Any],
        scene: Scene,
        closer: Callable[[Violation], Scene] | None = None,
        facts: Mapping[str, object] | None = None,
    ) -> None:
        """Act upon the laws that are broken: the first that is certain is the finding, the others are its effects.

        closer: looks closer, with collectives, at a finding: all ranks do it or none.
        Raises `Violation` on every rank alike where the action is to raise.
        """
        broken = [(judgement.violation(law), law.suspicion) for law in judgement.broken()]
        certain = [found for found, suspicion in broken if not suspicion and found.clause not in self.settings.allow]
        first = certain[0] if certain and self._is_news(certain[0]) else None
        effects = [each for each in broken if each[0].clause not in self.settings.allow and each[0] is not first]
        for found, suspicion in broken:
            if first is None or found.clause in self.settings.allow:
                self.take(found, scene, closer, facts, suspicion=suspicion)
        if first is not None:
            self.take(first, scene, closer, facts, effects=effects)

    def known(self, clause: str) -> bool:
        """Whether a violation of the clause was reported, or is silenced: further ones are only counted."""
        return clause in self.settings.allow or self.counts[clause] > 0

    def take(
        self,
        found: Violation,
        scene: Scene,
        closer: Callable[[Violation], Scene] | None = None,
        facts: Mapping[str, object] | None = None,
        *,
        suspicion: bool = False,
        alone: bool = False,
        by_all: bool = False,
        effects: Sequence[tuple[Violation, bool]] = (),
    ) -> None:
        """Count a finding; the first of its clause is explained, bundled and acted upon, unless it is an effect.

        alone: this rank judges by itself, so that there is no bundle. by_all: each of the others finds the same.
        effects: what else did not hold of the same observations, and whether it is a suspicion; what is new of it is
        listed under the finding.
        """
        if found.clause in self.settings.allow:
            self.silenced[found.clause] += 1
            return
        # What was only suspected before is said once more where it is certain.
        first = not (self.counts[found.clause] or (suspicion and self.suspected[found.clause]))
        self._count(found, suspicion=suspicion)
        if not first and (suspicion or self.settings.action != "raise"):
            return
        goes_on, applied = suspicion or self.settings.action == "warn", CLAUSES[found.clause].of_the_update_before
        applied = scene.applied or applied
        aloud = self.rank == 0 or (alone and not by_all)
        cause = self._cause_of(found)
        if cause is not None:
            self._note_effect(cause, found, applied=applied, suspicion=suspicion)
            if aloud:
                say(f"andon: of the same cause as {cause.finding.clause}: {_effect(found)}")
            return
        scene = scene if closer is None else closer(found)
        known = self.counts + self.suspected
        news = [(each, doubtful) for each, doubtful in effects if not known[each.clause]]
        by_command, also = self.settings.by_command, tuple(_effect(each) for each, _ in news)
        scene = replace(scene, goes_on=goes_on, applied=applied, by_command=by_command, also=also)
        whole = conclude(found, scene, Evidence() if alone else self.evidence, facts or {})
        self.findings.append(whole)
        if self.record is not None:
            self.record(whole, self._word(suspicion=suspicion), scene.applied)
        if not suspicion:
            cause = _Cause(whole, {found.clause}, found.step)
            self._causes.append(cause)
            for each, doubtful in news:
                self._note_effect(cause, each, applied=scene.applied, suspicion=doubtful)
        for each, doubtful in effects:
            self._count(each, suspicion=doubtful)
        self._act(whole, suspicion=suspicion, aloud=aloud)

    def _count(self, found: Violation, *, suspicion: bool) -> None:
        (self.suspected if suspicion else self.counts)[found.clause] += 1
        self.first_steps.setdefault(found.clause, found.step)

    def _is_news(self, found: Violation) -> bool:
        return (self.settings.action == "raise" or not self.counts[found.clause]) and self._cause_of(found) is None

    def _cause_of(self, found: Violation) -> _Cause | None:
        """The violation whose effect this is: of the same update, or one by which the ranks' weights parted."""
        if self.settings.action == "raise":  # that ended the loop, or it goes on as if nothing had been
            return None
        for cause in reversed(self._causes):
            parted = found.clause in _PARTED and not _PART.isdisjoint(cause.clauses)
            if parted or found.step == cause.until:
                return cause
        return None

    def _note_effect(self, cause: _Cause, effect: Violation, *, applied: bool, suspicion: bool) -> None:
        if not suspicion:  # of what is only suspected nothing follows
            cause.clauses.add(effect.clause)
            cause.until = max(cause.until, effect.step)
        if self.record is not None:
            self.record(effect, self._word(suspicion=suspicion), applied)

    def _word(self, *, suspicion: bool) -> str:
        if suspicion:
            return "suspected"
        if callable(self.settings.action):
            return "called"
        return "raised" if self.settings.action == "raise" else "warned"

    def _act(self, whole: Violation, *, suspicion: bool, aloud: bool) -> None:
        if self.settings.log is not None:
            self.settings.log({"andon/clause": whole.clause, "andon/step": whole.step, "andon/message": str(whole)})
        action = self.settings.action
        if callable(action):
            action(whole)
        elif action == "raise" and not suspicion:
            raise whole
        elif aloud:
            say(f"{'andon suspicion' if suspicion else 'andon.Violation'}: {whole}")
