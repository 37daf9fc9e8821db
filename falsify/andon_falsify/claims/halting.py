"""What is not finite stops all ranks together: where one was planted, and where a ledger tells of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from andon_falsify.checkers import halts
from andon_falsify.claims.evidence import Evidence
from andon_falsify.verdict import Counterexample, Verdict, conclude, merge, not_applicable, unknown

if TYPE_CHECKING:
    from andon_falsify.subjects.trace import Trace


def halted(evidence: Evidence) -> Verdict:
    """A run in which a NaN or infinity was planted; or what a ledger tells of violations and of what is not finite."""
    trace = evidence.trace
    if trace is None:
        return _recorded(evidence)
    poison = trace.case.poison
    assert poison is not None
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
