"""What is claimed of anyone's loop, what one run of it decides, and which loops cannot be judged."""

from __future__ import annotations

from dataclasses import replace

from andon_falsify import checkers
from andon_falsify.claims.evidence import of_trace
from andon_falsify.claims.statements import BASE, EVALUATION, RANDOMNESS, UPDATE
from andon_falsify.claims.table import judged
from andon_falsify.loops.sightings import LoopSightings, first_of
from andon_falsify.subjects.trace import Trace
from andon_falsify.verdict import Claim, Verdict, unknown

_SHOWN = 4

ONE_RUN: tuple[Claim, ...] = (
    checkers.replicas_agree.CLAIM,
    checkers.samples_once.CLAIM,
    checkers.gradient_law.CLAIM,
    UPDATE,
    checkers.losses_close.CLAIM,
    checkers.loss_finite.CLAIM,
    checkers.schedule.CLAIM,
    BASE,
    checkers.layout_equal.CLAIM,
    EVALUATION,
)
"""What one run of a case decides."""
MORE_RUNS: tuple[Claim, ...] = (
    checkers.same_everywhere.CLAIM,
    checkers.resume_equal.CLAIM,
    checkers.halts.CLAIM,
    RANDOMNESS,
)
"""What needs further runs: see `campaign.loop_bench`."""
CLAIMS: tuple[Claim, ...] = (*ONE_RUN, *MORE_RUNS)
"""Every claim that is judged of a loop."""


def verdicts(trace: Trace) -> dict[str, Verdict]:
    """What one run says of every claim in `ONE_RUN`, by name. Where a rank failed, all of them are unknown."""
    why = failed(trace)
    if why:
        return {claim.name: unknown(claim, why) for claim in ONE_RUN}
    return {name: shortened(verdict) for name, verdict in judged(of_trace(trace), ONE_RUN).items()}


def failed(trace: Trace) -> str:
    """What went wrong with the ranks, in words; "" where all of them came to the end."""
    if trace.errors:
        return trace.failures
    if not first_of(trace).made and not first_of(trace).resumed_from:
        return "no step of an optimizer over parameters of the loop's `model` was seen"
    return outside(trace)


def shortened(verdict: Verdict) -> Verdict:
    """The first counterexamples of many, with the number of the others."""
    more = len(verdict.counterexamples) - _SHOWN
    if more <= 0:
        return verdict
    return replace(verdict, counterexamples=verdict.counterexamples[:_SHOWN], omitted=verdict.omitted + more)


def outside(trace: Trace) -> str:
    """Why no verdict on `trace` would be fair, or "".

    An update is seen as one step of one optimizer over all that trains, on every rank. Two designs that may well be
    right are not: optimizers that share out the parameters and step in turn, and ranks that share them out, each with
    an optimizer of its own part, and send the new weights round afterwards. (torch's `ZeroRedundancyOptimizer`, which
    does the latter within its step, is judged.)
    """
    if not isinstance(trace.first, LoopSightings):
        return ""
    return _in_turn(first_of(trace), trace) or _dealt_out(trace)


def _in_turn(first: LoopSightings, trace: Trace) -> str:
    """Steps of different parameters with no forward pass of any rank between them."""
    for step in sorted(first.made.keys() - {min(first.made, default=0)}):
        before = first.made.get(step - 1)
        idle = not any(
            part.of(rank, step).leaves or step in part.rowless
            for part in trace.parts
            if isinstance(part, LoopSightings)
            for rank in part.ranks
        )
        if before is not None and idle and not _names(first, step) & _names(first, step - 1):
            return "several optimizers share the parameters and step in turn; an update must be one optimizer's step"
    return ""


def _dealt_out(trace: Trace) -> str:
    """Ranks whose optimizers have no parameter in common."""
    held = [_names(part, min(part.made)) for part in trace.parts if isinstance(part, LoopSightings) and part.made]
    if len(held) > 1 and sum(map(len, held)) == len(frozenset().union(*held)):
        return "the ranks' optimizers share out the parameters; an update must be a step over all of them on every rank"
    return ""


def _names(part: LoopSightings, step: int) -> frozenset[str]:
    return frozenset(name for group in part.made[step].groups for name in group.names)
