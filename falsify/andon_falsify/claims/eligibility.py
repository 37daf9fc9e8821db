"""Loops that cannot be judged, whatever they do: those whose update no single step of an optimizer makes."""

from __future__ import annotations

from andon_falsify.loops.sightings import LoopSightings, first_of
from andon_falsify.subjects.trace import Trace


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
