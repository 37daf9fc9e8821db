"""Does the suite see what is wrong with a foreign loop? Each fault, planted in a right one, must fall by its claim.

The control is the same loop without the fault. What a loop checks itself does not matter: it is judged from outside.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from andon_falsify.campaign.loop_bench import LoopBench
from andon_falsify.campaign.trial import LAW, Trial
from andon_falsify.claims import claims_of, judged
from andon_falsify.claims.evidence import RunUnavailable
from andon_falsify.loops.sightings import LoopSightings
from andon_falsify.loops.subject import LoopSubject
from andon_falsify.ranks.pool import RankPools
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.trace import Subject, Trace
from andon_falsify.verdict import Verdict, unknown

from .laboratory import Attempt, Observation
from .looped.fault import LoopFault

LOOP = "falsify.power.looped:make"
ONE_RUN = tuple(
    claim
    for claim in claims_of("loop")
    if claim.trial == LAW and claim.name not in ("same-everywhere", "randomness-apart")
)
"""The claims that one run of a loop decides."""


class LoopLaboratory:
    """Plants faults of loops on the ranks of `pools`; what was seen of right loops is kept.

    every_claim: judge all that there is to judge of a loop, in about eight runs of it; else what one run decides, and
    the claim that is named for the fault.
    """

    def __init__(self, pools: RankPools, *, every_claim: bool = False) -> None:
        self._subject = LoopSubject(LOOP, "looped", pools)
        self._every_claim = every_claim
        self._kept: dict[tuple[Case, str], Observation] = {}

    def attempt(self, fault: LoopFault) -> Attempt:
        """Plant `fault`, and observe the right loop on its case. Raises `ValueError` for one that has no claim."""
        outside = fault.outside
        if isinstance(outside, str):
            msg = f"no claim sees {fault.name}: {outside}"
            raise ValueError(msg)
        right = outside.case.but(fault=fault.right.__name__)
        further = "" if outside.claim in [claim.name for claim in ONE_RUN] else outside.claim
        if (right, further) not in self._kept:
            self._kept[right, further] = self._observe(right, further)
        planted = self._observe(outside.case.but(fault=fault.name), further)
        return Attempt(outside.claim, outside.reason, {"without the fault": self._kept[right, further]}, planted)

    def _observe(self, case: Case, further: str) -> Observation:
        seen = _Recording(self._subject)
        bench = LoopBench(seen, "looped")
        found: dict[str, Verdict] = {}
        if self._every_claim:
            for kind in bench.kinds:
                found |= bench.attempt(Trial(kind, case))
        else:
            found |= one_run(bench, case)
            for claim in bench.claims:
                if claim.name == further:
                    found |= bench.attempt(Trial(claim.trial, case), [further])
        return Observation(found, hashlib.sha256("".join(map(_signature, seen.traces)).encode()).hexdigest())


def one_run(bench: LoopBench, case: Case) -> dict[str, Verdict]:
    """What one run decides, without the further runs that a claim may ask for."""
    try:
        return judged(replace(bench.evidence(Trial(LAW, case)), others={}), ONE_RUN)
    except RunUnavailable as error:
        return {claim.name: unknown(claim, str(error)) for claim in ONE_RUN}


class _Recording:
    def __init__(self, subject: Subject) -> None:
        self.name = subject.name
        self.traces: list[Trace] = []
        self._subject = subject

    def run(self, case: Case) -> Trace:
        self.traces.append(self._subject.run(case))
        return self.traces[-1]


def _signature(trace: Trace) -> str:
    """A digest of everything that a fault could have changed."""
    own: list[object] = []
    for part in (part for part in trace.parts if isinstance(part, LoopSightings)):
        noted: tuple[Mapping[Any, Any], ...] = (part.evaluation, part.around_evaluation[1], part.running, part.draws)
        own += [*(sorted(each.items()) for each in noted), part.leftover]
    return f"{trace.signature()} {own!r}"
