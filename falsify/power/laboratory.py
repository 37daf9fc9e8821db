"""The power of the suite: plant each fault, prove that it changes something, and require that its claim falls.

A fault counts as seen if its claim falls with the trainer's contracts off, by a counterexample that says what is wrong,
and if the claim holds without the fault, with the contracts on and with them off. Poisoned data and the plan of memory
need the contracts: these faults are judged with them on. Shipped checks decide all of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from andon_falsify.campaign.trainer_bench import alone, cut_and_resume
from andon_falsify.campaign.trial import HALT, LAW, MEMORY
from andon_falsify.claims import claims_of, judged, memory_budget, replicas_agree, resume_equal, same_everywhere
from andon_falsify.claims.evidence import of_trace
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.placing import devices_of, place_of_bits, why_not
from andon_falsify.subjects.trace import Subject, Trace
from andon_falsify.verdict import Counterexample, Outcome, Verdict, unknown

from .coordinator import CoordinatorSubject
from .planting import Fault
from .registry import reference


@dataclass(frozen=True)
class Observation:
    """Runs, or a table of calls: what each claim says, a digest of all, and the clause that stopped our trainer."""

    verdicts: Mapping[str, Verdict]
    signature: str
    clause: str = ""

    @property
    def fallen(self) -> tuple[str, ...]:
        """The claims that were falsified."""
        return tuple(name for name, verdict in self.verdicts.items() if verdict.outcome is Outcome.FALSIFIED)


@dataclass(frozen=True)
class Attempt:
    """A planted fault, what was observed of it, and of the same runs without it.

    claim, reason: what must fall, and a regular expression that the text of its counterexample must match. controls:
    runs without the fault, by description; the last one is like `planted`. guarded: planted with contracts on, where
    `planted` has them off; None for a loop.
    """

    claim: str
    reason: str
    controls: Mapping[str, Observation]
    planted: Observation
    guarded: Observation | None = None
    poisoned: bool = False

    @property
    def shown(self) -> Counterexample | None:
        """The first counterexample to the claim for the reason."""
        verdict = self.planted.verdicts.get(self.claim)
        found = verdict.counterexamples if verdict is not None else ()
        return next((each for each in found if re.search(self.reason, str(each))), None)

    @property
    def problems(self) -> list[str]:
        """What is wrong with the suite, or with the fault; empty if the claim catches the fault for its reason.

        Without the fault the claim must hold and no other claim may fall. A claim may be unknown only if a clause
        stopped the run. The fault must change something. With the contracts on, a clause or the claim must detect it.
        """
        found = []
        for words, control in self.controls.items():
            if self.claim not in control.verdicts:
                found.append(f"{words}: {self.claim} was not judged")
            for name, verdict in control.verdicts.items():
                unsure = verdict.outcome is Outcome.UNKNOWN and not control.clause
                unheld = name == self.claim and verdict.outcome is not Outcome.HOLDS
                if unheld or unsure or verdict.outcome is Outcome.FALSIFIED:
                    found.append(f"{words}: {verdict}")
            if control.clause and not self.poisoned:  # a NaN in the data is stopped without the fault, too
                found.append(f"{words}: stopped by {control.clause}")
        planted = self.planted
        if planted.signature == [*self.controls.values()][-1].signature:
            found.append("the fault changed nothing")
        if self.claim not in planted.fallen:
            fallen = planted.fallen or "none"
            found.append(f"not seen by {self.claim}; fallen: {fallen}; {planted.verdicts.get(self.claim)}")
        elif self.shown is None:
            found.append(f"seen for another reason than {self.reason!r}: {planted.verdicts[self.claim]}")
        if self.guarded is not None and not self.guarded.clause and self.claim not in self.guarded.fallen:
            found.append(f"with the contracts on neither a clause nor {self.claim} noticed it")
        return found


class Laboratory:
    """Observes faults and their controls; clean runs are kept, since many faults share one."""

    def __init__(self, trainer: Subject) -> None:
        self._trainer = trainer
        self._kept: dict[tuple[str, Case], Observation] = {}

    def attempt(self, fault: Fault, backend: str) -> Attempt:
        """Plant `fault` on `backend`, with contracts and without, and observe the same without it."""
        case = fault.case.but(backend=backend)
        # The plan of memory counts the contracts' digests. Only a contract stops a poisoned run: without them the right
        # trainer breaks the claim too.
        bare = case if case.memory or case.poison is not None else case.but(contracts=False)
        controls = {
            "without the fault": self._clean(fault, case),
            "without the fault and contracts": self._clean(fault, bare),
        }
        guarded, planted = (self._observe(fault, each, planted=True) for each in (case, bare))
        return Attempt(fault.claim, fault.reason, controls, planted, guarded, case.poison is not None)

    def _clean(self, fault: Fault, case: Case) -> Observation:
        key = (fault.kind, case)
        if key not in self._kept:
            self._kept[key] = self._observe(fault, case, planted=False)
        return self._kept[key]

    def _observe(self, fault: Fault, case: Case, *, planted: bool) -> Observation:
        if fault.kind == "coordinator":
            subject = CoordinatorSubject(fault.plant if planted else None)
            whole = CoordinatorSubject().run(alone(case).but(contracts=True))
            trace = subject.run(case)
            return _observed(_verdicts(trace, whole), trace)
        if fault.kind == "resume":
            wrong = reference(fault) if planted else None
            whole = self._trainer.run(case.but(epochs=2))
            cut, resumed = cut_and_resume(self._trainer, whole.case, after=3, every=2, fault=wrong)
            return _observed(judged(of_trace(whole, cut=cut, resumed=resumed), [resume_equal.CLAIM]), resumed)
        trace = self._trainer.run(case.but(fault=reference(fault) if planted else None))
        base = None if case.memory else self._trainer.run(alone(case).but(contracts=True))
        return _observed(_verdicts(trace, base), trace)


def _verdicts(trace: Trace, base: Trace | None) -> Mapping[str, Verdict]:
    """The verdicts on one run, by claim. base: the same case on one rank, to compare with."""
    if not trace.parts:
        return {replicas_agree.CLAIM.name: unknown(replicas_agree.CLAIM, "; ".join(trace.errors.values()))}
    kinds = {LAW} | ({HALT} if trace.case.poison else set()) | ({MEMORY} if trace.case.memory else set())
    claims = [claim for claim in claims_of("trainer") if claim.trial in kinds]
    if base is None:
        claims.remove(same_everywhere.CLAIM)
    return judged(of_trace(trace, alone=base), claims)


def untried(fault: Fault, backend: str, gpus: int | None = None) -> str:
    """Why `fault` cannot be shown on `backend`, or "" if it can: its claim must be applicable there.

    gpus: how many this machine has (None: ask torch).
    """
    case = fault.case
    if reason := why_not(backend, case.world, gpus):
        return reason
    place = place_of_bits(devices_of(backend, case.world, gpus))
    if case.memory and place != "cpu":
        return memory_budget.ON_GPUS
    if fault.claim == same_everywhere.CLAIM.name and place not in ("cpu", "cuda"):
        return f"{fault.claim} says nothing of ranks on {place}, which round otherwise"
    return ""


def _observed(found: Mapping[str, Verdict], trace: Trace) -> Observation:
    return Observation(found, trace.signature(), trace.violation[0] if trace.violation else "")
