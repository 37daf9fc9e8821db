"""The checks of a watched step in their order, and what becomes of a clause that does not hold."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from andon_contracts import loop_clauses as clauses
from andon_contracts import told_clauses
from andon_contracts.act import OF_THE_UPDATE_BEFORE, Scene, conclude
from andon_contracts.bundle import Evidence
from andon_contracts.judge import Details, Observations
from andon_contracts.policy import ensure_all
from andon_contracts.violation import Violation
from andon_contracts.watch.settings import Settings


class AndonWarning(UserWarning):
    """A clause of a watched loop does not hold, and the watch was told to warn."""


@dataclass(frozen=True)
class Check:
    """One clause with its judge. A `suspicion` is a sign of a fault that has innocent causes too: it only warns."""

    clause: str
    judge: clauses.Judge
    suspicion: bool = False


START = (
    Check("halt-together", clauses.judge_lockstep),
    Check("parameters-kept", clauses.judge_parameters),
    Check("replicas-agree", clauses.judge_weights),
    Check("precision-sufficient", clauses.judge_precision, suspicion=True),
)
# Causes before effects: the first that is found is what a message should name.
BEFORE = (
    Check("halt-together", clauses.judge_lockstep),
    Check("parameters-kept", clauses.judge_parameters),
    Check("modes-agree", clauses.judge_modes),
    Check("hyperparameters-agree", clauses.judge_hyperparameters),
    Check("learning-rate-planned", clauses.judge_rate),
    Check("groups-planned", clauses.judge_groups),
    Check("scaler-agrees", clauses.judge_scaler),
    Check("buffers-agree", clauses.judge_buffers),
    Check("finite", clauses.judge_raw),
    Check("base-frozen", clauses.judge_frozen),
    Check("replicas-agree", clauses.judge_weights),
    Check("gradient-fresh", clauses.judge_fresh, suspicion=True),
    Check("gradient-present", clauses.judge_present, suspicion=True),
    Check("collectives-agree", clauses.judge_collectives),
    Check("gradients-agree", clauses.judge_gradients),
    Check("finite", clauses.judge_norm),
    Check("clip-once", told_clauses.judge_clip),
    Check("loss-reported", told_clauses.judge_loss),
    Check("randomness-declared", told_clauses.judge_streams),
)
AFTER = (
    Check("halt-together", clauses.judge_lockstep),
    Check("optimizers-agree", clauses.judge_optimizers),
    Check("replicas-agree", clauses.judge_weights),
    Check("update-applied", clauses.judge_applied, suspicion=True),
)


LAW = (Check("gradient-law", told_clauses.judge_law),)


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

    def judge(
        self,
        checks: Sequence[Check],
        observations: Observations,
        details: Details,
        scene: Scene,
        closer: Callable[[Violation], Scene] | None = None,
        facts: Mapping[str, object] | None = None,
    ) -> bool:
        """Whether every check held. `closer` looks closer, with collectives, at a finding: all ranks do it or none.

        Raises `Violation` on every rank alike where the action is to raise.
        """
        held = True
        for check in checks:
            if check.clause not in self.live:
                continue
            self.evaluations[check.clause] += 1
            try:
                check.judge(observations=observations, details=details, names=self.names)  # type: ignore[call-arg]
            except Violation as found:
                held = False
                self.take(found, scene, closer, facts, suspicion=check.suspicion)
                if check.clause == "halt-together":
                    break
        return held

    def quick(self, checks: Sequence[Check]) -> Callable[[Observations], bool]:
        """A function that says in one call whether all of `checks` hold. It counts them where they do.

        Where one does not, it says nothing more, and `judge` is to be asked.
        """
        live = [check for check in checks if check.clause in self.live]

        @ensure_all([check.judge for check in live])
        def judged(observations: Observations, details: Details, names: Sequence[str]) -> Observations:
            return observations

        def held(observations: Observations) -> bool:
            try:
                judged(observations, {}, self.names)
            except Violation:
                return False
            for check in live:
                self.evaluations[check.clause] += 1
            return True

        return held

    def known(self, clause: str) -> bool:
        """Whether the clause has been reported or silenced: its further findings are only counted."""
        return clause in self.settings.allow or self.counts[clause] + self.suspected[clause] > 0

    def take(
        self,
        found: Violation,
        scene: Scene,
        closer: Callable[[Violation], Scene] | None = None,
        facts: Mapping[str, object] | None = None,
        *,
        suspicion: bool = False,
        alone: bool = False,
    ) -> None:
        """Count a finding; the first of its clause is explained, bundled and acted upon.

        alone: only this rank knows it. It then says so itself, and there is no bundle.
        """
        if found.clause in self.settings.allow:
            self.silenced[found.clause] += 1
            return
        first = not self.known(found.clause)
        (self.suspected if suspicion else self.counts)[found.clause] += 1
        if not first and (suspicion or self.settings.action != "raise"):
            return
        scene = scene if closer is None else closer(found)
        goes_on, applied = suspicion or self.settings.action == "warn", found.clause in OF_THE_UPDATE_BEFORE
        by_command = self.settings.by_command
        scene = replace(scene, goes_on=goes_on, applied=scene.applied or applied, by_command=by_command)
        whole = conclude(found, scene, Evidence() if alone else self.evidence, facts or {})
        self.findings.append(whole)
        if self.record is not None:
            self.record(whole, self._word(suspicion=suspicion), scene.applied)
        self._act(whole, suspicion=suspicion, aloud=alone or self.rank == 0)

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
