"""What one run decides without a reference: replicas, layout, memory, rates, finite numbers, and how it halts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from andon_falsify.checkers import halts, layout_equal, memory_within, replicas_agree
from andon_falsify.claims.evidence import Evidence
from andon_falsify.verdict import Counterexample, Outcome, Verdict, conclude, merge, not_applicable, unknown

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


def halted(evidence: Evidence) -> Verdict:
    """A run in which a NaN or infinity was planted; or what a ledger tells of violations and of what is not finite.

    Of a loop that is `others["poisoned"]`, which must not end by errors of single ranks.
    """
    trace = evidence.others["poisoned"][0].trace if evidence.of_loop else evidence.trace
    if trace is None:
        return _recorded(evidence)
    poison = trace.case.poison
    assert poison is not None
    if evidence.of_loop and trace.errors:
        where = f"step {poison.step}"
        apart = Counterexample("the ranks did not stop together", where, f"all stop at {where}", trace.failures)
        return conclude(halts.CLAIM, 1, [apart])
    if evidence.of_loop and not any(getattr(part, "poisoned", False) for part in trace.parts):
        why = f"the NaN was never planted: the last rank had no row in update {poison.step}"
        return unknown(halts.CLAIM, why)
    seen = halts.check(trace.seen, poison.step, clause="finite", stopped_at=trace.stopped_at)
    return merge([seen, _unapplied(trace, poison.step)])


def _unapplied(trace: Trace, step: int) -> Verdict:
    """Weights and optimizer state at the end are those before `step`, on every rank."""
    found, checked = [], 0
    final: Mapping[int, tuple[str, str]] = trace.gathered("final")
    for part in trace.parts:
        for rank in part.ranks:
            before = part.of(rank, step - 1).weights if step > 1 else part.start[rank]
            moments = part.of(rank, step - 1).optimizer if step > 1 else ""
            checked += 1
            if final[rank][0] != before or (moments and final[rank][1] != moments):
                what = "weights or optimizer state changed in the update that was to be stopped"
                found.append(Counterexample(what, f"step {step}, rank {rank}", before, final[rank][0]))
    return conclude(halts.CLAIM, checked, found)


def _recorded(evidence: Evidence) -> Verdict:
    history = evidence.told
    if any(map(halts.stops, history.of_kind("violation"))) or not all(step.finite for step in history.steps):
        return halts.check(history)
    last = history.events[-1] if history.events else None
    if last is None or last.kind != "end":
        after = f"step {max(history.trajectory, default=0)}"
        why = f"no end is recorded after {after}: it was killed, or goes on still, and why it stopped is not known"
        return unknown(halts.CLAIM, why)
    if history.of_kind("violation"):
        return not_applicable(halts.CLAIM, "what is recorded was only to be told of, so that nothing had to stop")
    why = "no violation and nothing that is not finite is recorded, so that nothing had to stop"
    reason = last.fields.get("reason", "finished")
    return not_applicable(halts.CLAIM, why if reason == "finished" else f"{why}; it ended with {str(reason)!r}")
