"""The power of the suite: plant each fault, prove that it changes something, and require that its claim falls.

A fault of our trainer is seen if its claim falls with the contracts off, by a counterexample that states the mistake,
and if the claim holds without the fault, with the contracts on and with them off. Poisoned data and the memory plan
need the contracts, so these faults are judged with them on. A fault of a loop is compared with the loop without it. The
shipped benches and checks decide all of it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch

from andon_falsify.campaign.bench import Bench
from andon_falsify.campaign.trial import HALT, LAW, MEMORY, RESUME, Trial
from andon_falsify.campaign.warm_bench import AndonBench, LoopBench
from andon_falsify.claims import claims_of, memory_budget, same_everywhere
from andon_falsify.loops.subject import LoopSubject
from andon_falsify.ranks.pool import RankPools
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.placing import devices_of, place_of_bits, why_not
from andon_falsify.subjects.trace import Subject, Trace, digest
from andon_falsify.verdict import Counterexample, Outcome, Verdict

from .coordinator import CoordinatorSubject
from .looped.fault import LoopFault
from .planting import Fault
from .registry import reference

LOOP = "falsify.power.looped:make"
ONE_RUN = tuple(claim for claim in claims_of("loop") if claim.trial == LAW and not {"alone", "random"} & {*claim.runs})
"""The claims that one run of a loop decides."""


@dataclass(frozen=True)
class TrialResult:
    """The verdicts on some runs, a digest of the observations, and the clause that stopped our trainer."""

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
    controls: Mapping[str, TrialResult]
    planted: TrialResult
    guarded: TrialResult | None = None
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
    """Observes faults of our trainer and their controls. Observations without a fault are cached."""

    def __init__(self, trainer: Subject) -> None:
        self._trainer = trainer
        self._clean: dict[tuple[str, Case], TrialResult] = {}

    def attempt(self, fault: Fault, backend: str) -> Attempt:
        """Plant `fault` on `backend`, with contracts and without, and observe both runs without it."""
        case = fault.case.but(backend=backend)
        # The memory plan counts the contracts' digests. Only a contract stops a poisoned run: without contracts the
        # right trainer breaks the claim too.
        bare = case if case.memory or case.poison is not None else case.but(contracts=False)
        for each in {case, bare}:
            if (fault.kind, each) not in self._clean:
                self._clean[fault.kind, each] = self._observe(fault.kind, each)
        controls = {
            "without the fault": self._clean[fault.kind, case],
            "without the fault and contracts": self._clean[fault.kind, bare],
        }
        guarded, planted = (self._observe(fault.kind, each.but(fault=reference(fault))) for each in (case, bare))
        return Attempt(fault.claim, fault.reason, controls, planted, guarded, case.poison is not None)

    def _observe(self, kind: str, case: Case) -> TrialResult:
        subject = CoordinatorSubject() if kind == "coordinator" else self._trainer
        if kind == "resume":
            return observed(AndonBench, subject, [Trial(RESUME, case.but(epochs=2))])
        further = {HALT: case.poison is not None, MEMORY: case.memory}
        return observed(AndonBench, subject, [Trial(each, case) for each in (LAW, *further) if further.get(each, True)])


class LoopLaboratory:
    """Observes faults of loops, on the ranks of `pools`, and the right loops, which are cached.

    every_claim: judge all claims, in about eight runs; else those that one run decides, and the claim of the fault.
    """

    def __init__(self, pools: RankPools, *, every_claim: bool = False) -> None:
        self._subject = LoopSubject(LOOP, "looped", pools)
        self._every_claim = every_claim
        self._clean: dict[tuple[Case, str], TrialResult] = {}

    def attempt(self, fault: LoopFault) -> Attempt:
        """Plant `fault`, and observe the right loop on its case. Raises `ValueError` for a fault without a claim."""
        outside = fault.outside
        if isinstance(outside, str):
            msg = f"no claim sees {fault.name}: {outside}"
            raise ValueError(msg)
        right = outside.case.but(fault=fault.right.__name__)
        if (right, outside.claim) not in self._clean:
            self._clean[right, outside.claim] = self._observe(right, outside.claim)
        planted = self._observe(outside.case.but(fault=fault.name), outside.claim)
        return Attempt(outside.claim, outside.reason, {"without the fault": self._clean[right, outside.claim]}, planted)

    def _observe(self, case: Case, claim: str) -> TrialResult:
        claims = () if self._every_claim else {claim, *(each.name for each in ONE_RUN)}
        trials = [Trial(kind, case) for kind in (LAW, HALT, RESUME)]
        found = observed(lambda subject: LoopBench(subject, "looped"), self._subject, trials, claims)
        return replace(found, clause="")  # a loop has no contracts


def observed(
    bench_of: Callable[[Subject], Bench], subject: Subject, trials: Sequence[Trial], claims: Collection[str] = ()
) -> TrialResult:
    """The verdicts of `trials` on `subject`: on all claims that each kind of trial judges, or on `claims` alone."""
    recording = _Recording(subject)
    bench, found = bench_of(recording), dict[str, Verdict]()
    for trial in trials:
        if not claims or bench.kinds[trial.kind] & {*claims}:
            found |= bench.attempt(trial, claims)
    # A trial also runs its case without the fault, to compare with.
    own = [trace for trace in recording.traces if trace.case.fault in {trial.case.fault for trial in trials}]
    clause = next((trace.violation[0] for trace in own if trace.violation), "")
    return TrialResult(found, signature(*recording.traces), clause)


class _Recording:
    def __init__(self, subject: Subject) -> None:
        self.name = subject.name
        self.traces: list[Trace] = []
        self._subject = subject

    def run(self, case: Case) -> Trace:
        self.traces.append(self._subject.run(case))
        return self.traces[-1]


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


def signature(*traces: Trace) -> str:
    """A digest of everything that was observed, in which every fault must change something."""
    seen = [_plain((trace.parts, trace.errors)) for trace in traces]
    return hashlib.sha256(repr(seen).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """`value` without tensors, and in an order that does not depend on how it was made."""
    if isinstance(value, torch.Tensor):
        return digest({"": value})
    if is_dataclass(value):
        return _plain(vars(value))
    if isinstance(value, Mapping):
        return sorted((repr(key), _plain(each)) for key, each in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        plain = [_plain(each) for each in value]
        return sorted(plain) if isinstance(value, set | frozenset) else plain
    return repr(value)
