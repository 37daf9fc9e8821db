"""What becomes of a law that a watched loop breaks: counted, silenced, said, raised or called, as was asked."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from andon_contracts.act import Scene, conclude
from andon_contracts.bundle import Evidence
from andon_contracts.clauses import CLAUSES
from andon_contracts.laws.law import Judgement, Law
from andon_contracts.violation import Violation
from andon_contracts.watch.settings import Settings

S = TypeVar("S")


class AndonWarning(UserWarning):
    """A clause of a watched loop does not hold, and the watch was told to warn."""


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
    record: Callable[[Violation, str, bool], None] | None = None
    """Told of each finding that is acted upon: what is done, and whether the update had been made."""
    evidence: Evidence = field(default_factory=Evidence)
    """What this rank has for a bundle."""

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
        """Act upon each law that is broken.

        closer: looks closer, with collectives, at a finding: all ranks do it or none.
        Raises `Violation` on every rank alike where the action is to raise.
        """
        for law in judgement.broken():
            self.take(judgement.violation(law), scene, closer, facts, suspicion=law.suspicion)

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
    ) -> None:
        """Count a finding; the first of its clause is explained, bundled and acted upon.

        alone: this rank judges by itself, so that there is no bundle. by_all: each of the others finds the same.
        """
        if found.clause in self.settings.allow:
            self.silenced[found.clause] += 1
            return
        # What was only suspected before is said once more where it is certain.
        first = not (self.counts[found.clause] or (suspicion and self.suspected[found.clause]))
        (self.suspected if suspicion else self.counts)[found.clause] += 1
        if not first and (suspicion or self.settings.action != "raise"):
            return
        scene = scene if closer is None else closer(found)
        goes_on, applied = suspicion or self.settings.action == "warn", CLAUSES[found.clause].of_the_update_before
        by_command = self.settings.by_command
        scene = replace(scene, goes_on=goes_on, applied=scene.applied or applied, by_command=by_command)
        whole = conclude(found, scene, Evidence() if alone else self.evidence, facts or {})
        self.findings.append(whole)
        if self.record is not None:
            self.record(whole, self._word(suspicion=suspicion), scene.applied)
        self._act(whole, suspicion=suspicion, aloud=self.rank == 0 or (alone and not by_all))

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
            warnings.warn(f"andon.Violation: {whole}", AndonWarning, stackline())


def stackline() -> int:
    """How many frames up the first one is that is neither ours nor torch's: the line of the user's loop."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "").partition(".")[0]
        if name not in ("andon_contracts", "torch", "icontract"):
            return depth
        frame, depth = frame.f_back, depth + 1
    return depth
