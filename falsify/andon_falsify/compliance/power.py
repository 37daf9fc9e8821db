"""Does the suite see what it must? Each fault is planted, proved to change something, and must be seen by its claim.

Two controls go with every fault: without it the claim holds; and with the trainer's contracts switched off the checkers
see from outside what the contracts would have stopped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from andon_contracts.policy import suspended
from andon_falsify.campaign.further import cut_and_resume
from andon_falsify.checkers import resume_equal, same_everywhere
from andon_falsify.claims.functions import TABLES
from andon_falsify.claims.of_trainer import CLAIMS, alone, verdicts
from andon_falsify.claims.one_run import MEMORY_ON_GPUS
from andon_falsify.claims.statements import FACE
from andon_falsify.claims.table import judged_by
from andon_falsify.faults.planting import Fault
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.coordinator import CoordinatorSubject
from andon_falsify.subjects.placing import devices_of, place_of_bits, why_not
from andon_falsify.subjects.trace import Subject, Trace
from andon_falsify.verdict import Claim, Counterexample, Outcome, Verdict, conclude


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
    """A fault and its controls. guarded: planted, contracts on; bare: planted, contracts off; both clean ones alike."""

    fault: Fault
    backend: str
    clean: Observation
    clean_bare: Observation
    guarded: Observation
    bare: Observation

    @property
    def changed(self) -> bool:
        """Whether the fault changed anything, with the contracts off."""
        return self.bare.signature != self.clean_bare.signature

    @property
    def killed(self) -> bool:
        """Whether the claim named for the fault fell, seen from outside."""
        return self.fault.claim in self.bare.fallen

    @property
    def problems(self) -> list[str]:
        """What is wrong with the suite, or with the fault."""
        found = []
        clean = self.clean.verdicts.get(self.fault.claim)
        if clean is None or clean.outcome is not Outcome.HOLDS:
            found.append(f"without the fault: {clean}")
        found += [f"without the fault: {self.clean.verdicts[name]}" for name in self.clean.fallen]
        if not self.changed:
            found.append("the fault changed nothing")
        if not self.killed:
            held = self.bare.verdicts.get(self.fault.claim)
            found.append(f"not seen by {self.fault.claim}; fallen: {self.bare.fallen or 'none'}; {held}")
        if not self.guarded.clause and self.fault.claim not in self.guarded.fallen:
            found.append(f"with the contracts on neither a clause nor {self.fault.claim} noticed it")
        return found


class Laboratory:
    """Observes faults and their controls; clean runs are kept, since many faults share one."""

    def __init__(self, trainer: Subject) -> None:
        self._trainer = trainer
        self._kept: dict[tuple[str, Case, str], Observation] = {}

    def attempt(self, fault: Fault, backend: str) -> Attempt:
        """Plant `fault` on `backend`, with contracts and without, and observe the same without it."""
        case = fault.case.but(backend=backend)
        # What the contracts' own digests need is part of the memory plan, and no contract looks at memory.
        bare = case if case.memory else case.but(contracts=False)
        return Attempt(
            fault,
            backend,
            clean=self._clean(fault, case),
            clean_bare=self._clean(fault, bare),
            guarded=self._observe(fault, case, planted=True),
            bare=self._observe(fault, bare, planted=True),
        )

    def _clean(self, fault: Fault, case: Case) -> Observation:
        key = (fault.kind, case, fault.claim if fault.kind == "functions" else "")
        if key not in self._kept:
            self._kept[key] = self._observe(fault, case, planted=False)
        return self._kept[key]

    def _observe(self, fault: Fault, case: Case, *, planted: bool) -> Observation:
        if fault.kind == "functions":
            return _tabulate(fault, contracts=case.contracts, planted=planted)
        if fault.kind == "coordinator":
            subject = CoordinatorSubject(fault.plant if planted else None)
            return _of(subject.run(case), CoordinatorSubject().run(case.but(world=1, backend="inline", contracts=True)))
        if fault.kind == "resume":
            return self._resumed(fault.name if planted else None, case)
        return _of(self._trainer.run(case.but(fault=fault.name if planted else None)), self._base(case))

    def _base(self, case: Case) -> Trace | None:
        if case.memory:
            return None
        return self._trainer.run(alone(case).but(contracts=True))

    def _resumed(self, fault: str | None, case: Case) -> Observation:
        longer = case.but(epochs=2)
        found = cut_and_resume(self._trainer, longer, after=3, every=2, world=case.world, fault=fault)
        stopped, name = found.taken_up.violation, resume_equal.CLAIM.name
        verdict = judged_by(resume_equal.CLAIM, found.evidence)
        return Observation({name: verdict}, found.taken_up.signature(), stopped[0] if stopped else "")


def untried(fault: Fault, backend: str, gpus: int | None = None) -> str:
    """Why `fault` cannot be shown on `backend`, or "" if it can: its claim must be applicable there.

    gpus: how many this machine has (None: ask torch).
    """
    case = fault.case
    if reason := why_not(backend, case.world, gpus):
        return reason
    place = place_of_bits(devices_of(backend, case.world, gpus))
    if case.memory and place != "cpu":
        return MEMORY_ON_GPUS
    if fault.claim == same_everywhere.CLAIM.name and place not in ("cpu", "cuda"):
        return f"{fault.claim} says nothing of ranks on {place}, which round otherwise"
    return ""


def _of(trace: Trace, base: Trace | None) -> Observation:
    found = dict(verdicts(trace, base))
    if trace.first.primary or trace.seen.name.startswith("coordinator"):
        found[FACE.name] = _primary(trace)
    violation = trace.violation
    return Observation(found, trace.signature(), violation[0] if violation else "")


def _primary(trace: Trace) -> Verdict:
    at = trace.first.primary
    wrong = [Counterexample("the primary is another replica", "", "replica 0", f"replica {at}")] if at else []
    return conclude(FACE, 1, wrong)


def _tabulate(fault: Fault, *, contracts: bool, planted: bool) -> Observation:
    with ExitStack() as stack:
        if not contracts:
            stack.enter_context(suspended())
        if planted:
            fault.plant(None, stack)
        tried = TABLES[fault.claim]()
    signature = hashlib.sha256(tried.transcript.encode()).hexdigest()
    return Observation({fault.claim: tried.verdict}, signature, tried.clause)


def matrix(trials: Sequence[Attempt]) -> str:
    """Faults by claims as Markdown: the claims that fell, the named one in capitals, and the clause that stopped it."""
    shown = [claim for claim in CLAIMS if any(claim.name in trial.bare.fallen for trial in trials)]
    names = [claim.name for claim in shown]
    lines = ["| fault | source | backend | contract | " + " | ".join(names) + " |"]
    lines.append("| " + " | ".join(["---"] * (4 + len(names))) + " |")
    for trial in trials:
        cells = [_cell(trial, claim) for claim in shown]
        head = [trial.fault.name, trial.fault.source, trial.backend, trial.guarded.clause or "-"]
        lines.append("| " + " | ".join([*head, *cells]) + " |")
    return "\n".join(lines)


def _cell(trial: Attempt, claim: Claim) -> str:
    if claim.name not in trial.bare.fallen:
        return ""
    return "**KILLED**" if claim.name == trial.fault.claim else "fell"
