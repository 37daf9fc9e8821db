"""Does the suite see what is wrong with a foreign loop? Each fault, planted in a right one, must fall by its claim.

The controls: the loop without the fault holds on every claim, and the fault changes what is seen. What the loop itself
checks does not matter here, since it is judged from outside alone: that "guard off is caught" is every trial.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from andon_falsify.campaign.loop_bench import FURTHER, judge_further, judge_loop
from andon_falsify.claims.of_loop import CLAIMS, verdicts
from andon_falsify.compliance.power import Observation
from andon_falsify.faults.looped.fault import LoopFault, Outside
from andon_falsify.loops.sightings import LoopSightings
from andon_falsify.loops.subject import LoopSubject
from andon_falsify.loops.task import shaped
from andon_falsify.ranks.pool import RankPools
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.trace import Subject, Trace
from andon_falsify.verdict import Counterexample, Outcome

LOOP = "andon_falsify.faults.looped:make"


@dataclass(frozen=True)
class LoopAttempt:
    """A fault that was planted, what is judged of it, and the right loop on the same case."""

    fault: LoopFault
    outside: Outside
    clean: Observation
    planted: Observation

    @property
    def changed(self) -> bool:
        """Whether anything was seen to be different."""
        return self.planted.signature != self.clean.signature

    @property
    def shown(self) -> Counterexample | None:
        """The counterexample to the claim of the fault, and for its reason; None where there is none."""
        verdict = self.planted.verdicts.get(self.outside.claim)
        found = verdict.counterexamples if verdict is not None else ()
        return next((each for each in found if re.search(self.outside.says, str(each))), None)

    @property
    def problems(self) -> list[str]:
        """What is wrong with the suite, or with the fault."""
        clean, verdict = self.clean.verdicts, self.planted.verdicts.get(self.outside.claim)
        found = [f"without the fault: {each}" for each in clean.values() if each.outcome in _BAD]
        if clean[self.outside.claim].outcome is not Outcome.HOLDS:
            found.append(f"without the fault: {clean[self.outside.claim]}")
        if not self.changed:
            found.append("the fault changed nothing")
        if self.outside.claim not in self.planted.fallen:
            found.append(f"not seen by {self.outside.claim}; fallen: {self.planted.fallen or 'none'}; {verdict}")
        elif self.shown is None:
            found.append(f"seen for another reason than {self.outside.says!r}: {verdict}")
        return found


_BAD = (Outcome.FALSIFIED, Outcome.UNKNOWN)


class LoopLaboratory:
    """Plants faults of loops on the ranks of `pools`; what was seen of right loops is kept.

    every_claim: judge all that there is to judge of a loop, in about eight runs of it; else what one run decides, and
    the claim that is named for the fault.
    """

    def __init__(self, pools: RankPools, *, every_claim: bool = False) -> None:
        self._subject = LoopSubject(LOOP, "looped", pools)
        self._every_claim = every_claim
        self._kept: dict[tuple[Case, str], Observation] = {}

    def attempt(self, fault: LoopFault) -> LoopAttempt:
        """Plant `fault`, and observe the right loop on its case. Raises `ValueError` for one that has no claim."""
        outside = fault.outside
        if isinstance(outside, str):
            msg = f"no claim sees {fault.name}: {outside}"
            raise ValueError(msg)
        right = outside.case.but(fault=fault.right.__name__)
        further = outside.claim if outside.claim in FURTHER else ""
        if (right, further) not in self._kept:
            self._kept[right, further] = self._observe(right, further)
        planted = self._observe(outside.case.but(fault=fault.name), further)
        return LoopAttempt(fault, outside, self._kept[right, further], planted)

    def _observe(self, case: Case, further: str) -> Observation:
        seen = _Recording(self._subject)
        if self._every_claim:
            found = judge_loop(seen, case, [shaped(case, 1, 1)])
        else:
            trace = seen.run(case)
            found = verdicts(trace)
            if further:
                claim = next(claim for claim in CLAIMS if claim.name == further)
                found[further] = judge_further(claim, seen, trace)
        return Observation(found, hashlib.sha256("".join(map(_signature, seen.traces)).encode()).hexdigest())


class _Recording:
    """A subject whose traces are kept."""

    def __init__(self, subject: Subject) -> None:
        self.name = subject.name
        self.traces: list[Trace] = []
        self._subject = subject

    def run(self, case: Case) -> Trace:
        """See `Subject.run`."""
        self.traces.append(self._subject.run(case))
        return self.traces[-1]


def _signature(trace: Trace) -> str:
    """A digest of everything that a fault could have changed."""
    own = [
        (
            sorted(part.evaluation.items()),
            sorted(part.around_evaluation[1].items()),
            sorted(part.running.items()),
            sorted(part.draws.items()),
            part.leftover,
        )
        for part in trace.parts
        if isinstance(part, LoopSightings)
    ]
    return f"{trace.signature()} {own!r}"


def matrix(trials: Sequence[LoopAttempt]) -> str:
    """Faults by claims as Markdown: the claims that fell, the named one in capitals; then what was said of each."""
    names = [claim.name for claim in CLAIMS if any(claim.name in trial.planted.fallen for trial in trials)]
    lines = ["| fault | what | " + " | ".join(names) + " |", "| " + " | ".join(["---"] * (2 + len(names))) + " |"]
    lines += [f"| {t.fault.code} | {t.fault.what} | {' | '.join(_cell(t, name) for name in names)} |" for t in trials]
    lines += ["", "| fault | what | the counterexample to the claim named for it |", "| --- | --- | --- |"]
    for trial in trials:
        said = "none" if trial.shown is None else str(trial.shown).replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| {trial.fault.code} | {trial.fault.what} | {said} |")
    return "\n".join(lines)


def _cell(trial: LoopAttempt, claim: str) -> str:
    if claim not in trial.planted.fallen:
        return ""
    return "**KILLED**" if claim == trial.outside.claim and trial.shown is not None else "fell"
