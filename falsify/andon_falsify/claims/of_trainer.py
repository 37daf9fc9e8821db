"""What is claimed of our own trainer, and what one run of it decides."""

from __future__ import annotations

from dataclasses import replace

from andon_falsify import checkers
from andon_falsify.claims.evidence import of_trace
from andon_falsify.claims.statements import BASE, NORM, UPDATE
from andon_falsify.claims.table import judged
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.trace import Trace
from andon_falsify.verdict import Claim, Verdict, unknown

CLAIMS: tuple[Claim, ...] = (*checkers.CLAIMS, UPDATE, NORM, BASE)
"""Every claim about our trainer."""
_ALWAYS = (
    checkers.replicas_agree.CLAIM,
    checkers.samples_once.CLAIM,
    checkers.plan_followed.CLAIM,
    checkers.loss_finite.CLAIM,
    checkers.schedule.CLAIM,
    checkers.layout_equal.CLAIM,
    BASE,
)
_OF_VALUES = (checkers.gradient_law.CLAIM, checkers.losses_close.CLAIM, NORM, UPDATE)
"""What needs the tensors of every update, of a run in which all of them are finite."""


def verdicts(trace: Trace, base: Trace | None = None) -> dict[str, Verdict]:
    """What can be said of `trace`, by claim. `base` is the same case on one rank, to compare with (see `alone`)."""
    case = trace.case
    if not trace.parts:
        return {
            checkers.replicas_agree.CLAIM.name: unknown(checkers.replicas_agree.CLAIM, "; ".join(trace.errors.values()))
        }
    asked = [
        (True, _ALWAYS),
        (trace.ledger is not None, (checkers.chain_intact.CLAIM,)),
        (case.poison is not None, (checkers.halts.CLAIM,)),
        (case.memory, (checkers.memory_within.CLAIM,)),
        (base is not None, (checkers.same_everywhere.CLAIM,)),
        (case.values and case.poison is None, _OF_VALUES),
    ]
    evidence = of_trace(trace)
    if base is not None:
        evidence = replace(evidence, others={"alone": (of_trace(base),)})
    return judged(evidence, [claim for due, claims in asked if due for claim in claims])


def alone(case: Case) -> Case:
    """The run that `case` is compared with: on one rank, of the same kind of device, or of a CPU where it has both."""
    return case.but(world=1, backend="nccl" if case.backend == "nccl" else "inline")
