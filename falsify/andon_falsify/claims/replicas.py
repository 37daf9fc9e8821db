"""What ranks must have alike, and what they may take: replicas, layout, bytes of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from andon_falsify.checkers import layout_equal, memory_within, replicas_agree
from andon_falsify.claims.evidence import Evidence
from andon_falsify.verdict import Counterexample, Outcome, Verdict, conclude, merge, not_applicable

if TYPE_CHECKING:
    from andon_falsify.loops.sightings import LoopSightings
    from andon_falsify.subjects.trace import Trace

MEMORY_ON_GPUS = "bytes are counted on the CPU alone; on GPUs every run holds its peak against its plan"


def replicas(evidence: Evidence) -> Verdict:
    """Weights, optimizer state and gradient of all ranks at every update.

    Of a loop, the weights at the start and what does not train at the end as well, and running statistics before the
    first forward pass of an update, where DDP has just sent them round.
    """
    claim = replicas_agree.CLAIM
    if not evidence.of_loop:
        return replicas_agree.check(evidence.told)
    trace = evidence.sightings
    first = cast("LoopSightings", trace.first)
    if first.sharded:
        return not_applicable(claim, "the parameters are sharded: no rank has a replica")
    verdict = replicas_agree.check(evidence.told)
    if verdict.outcome is Outcome.NOT_APPLICABLE:
        return verdict
    ends = {rank: end for rank, (_, end) in trace.gathered("frozen").items() if end}
    found = [
        *replicas_agree.differing("the initial weights differ between ranks", "before step 1", trace.gathered("start")),
        *replicas_agree.differing("frozen weights or buffers differ between ranks", "at the end", ends),
        *_statistics(trace, sorted(first.made)),
    ]
    return merge([conclude(claim, len(ends), found), verdict] if found else [verdict])


def _statistics(trace: Trace, updates: list[int]) -> list[Counterexample]:
    """The first update before which running statistics differ."""
    held: dict[tuple[int, int], str] = trace.gathered("running")
    for step in updates:
        digests = {rank: digest for (rank, at), digest in held.items() if at == step}
        found = replicas_agree.differing("running statistics differ between ranks", f"before step {step}", digests)
        if found and 0 in digests:
            return found
    return []


def layouts(evidence: Evidence) -> Verdict:
    """The flat order of every rank's trained tensors, from their addresses."""
    held = sorted(evidence.sightings.gathered("layouts").items())
    return layout_equal.check({f"rank {rank}": layout for rank, layout in held})


def memory(evidence: Evidence) -> Verdict:
    """Every rank's peak of live tensor bytes against the trainer's plan, and what rests between updates."""
    trace = evidence.sightings
    if trace.place != "cpu":
        return not_applicable(memory_within.CLAIM, MEMORY_ON_GPUS)
    return memory_within.check(trace.gathered("peaks"), trace.first.planned_bytes, resting=trace.gathered("resting"))
