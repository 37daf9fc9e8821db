"""Does the suite see what is wrong with a foreign loop? Each fault, planted in a right one, must fall by its claim.

The control is the same loop without the fault. What a loop checks itself does not matter: it is judged from outside.
"""

from __future__ import annotations

from andon_falsify.campaign.loop_bench import FURTHER, judge_further, judge_loop
from andon_falsify.claims.of_loop import CLAIMS, verdicts
from andon_falsify.loops.subject import LoopSubject
from andon_falsify.loops.task import shaped
from andon_falsify.ranks.pool import RankPools
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.trace import Subject, Trace

from .laboratory import Attempt, Observation, signature
from .looped.fault import LoopFault

LOOP = "falsify.power.looped:make"


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
        further = outside.claim if outside.claim in FURTHER else ""
        if (right, further) not in self._kept:
            self._kept[right, further] = self._observe(right, further)
        planted = self._observe(outside.case.but(fault=fault.name), further)
        return Attempt(outside.claim, outside.reason, {"without the fault": self._kept[right, further]}, planted)

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
        return Observation(found, signature(*seen.traces))


class _Recording:
    def __init__(self, subject: Subject) -> None:
        self.name = subject.name
        self.traces: list[Trace] = []
        self._subject = subject

    def run(self, case: Case) -> Trace:
        self.traces.append(self._subject.run(case))
        return self.traces[-1]
