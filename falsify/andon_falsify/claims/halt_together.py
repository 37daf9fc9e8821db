"""A NaN or an infinity stops every rank, at one step, before the update, and is recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from andon_falsify.claims.evidence import Evidence
from andon_falsify.history import Event, History, StepEvent
from andon_falsify.verdict import Claim, Clause, Counterexample, Quantity, Verdict, conclude, merge, not_applicable

if TYPE_CHECKING:
    from andon_falsify.subjects.trace import Trace

_UNDECLARED = "the loop does not declare `halts` (it stops at NaN or infinity)"
CLAIM = Claim(
    "halt-together",
    1,
    "A NaN or infinity in one rank's loss or gradient stops all ranks before that step's update. No weight changes, "
    "and the record has a violation.",
    order=50,
    subjects=("trainer", "loop", "ledger"),
    trial="halt",
    runs=("poisoned",),
    needs=(
        lambda run: "" if run.declares("halts") else _UNDECLARED,
        lambda run: "" if run.of_loop or run.trace is None or run.trace.case.poison else "a NaN was not planted",
    ),
    clauses=(Clause("finite", "other"), Clause("halt-together", "other", "only the halt that a NaN must cause")),
    statements={
        "loop": "A NaN in one rank's gradient stops all ranks before that update, by any error. No weight changes."
    },
)


def check(evidence: Evidence) -> Verdict:
    """A run in which a NaN was planted (of a loop `others["poisoned"]`); or the halts that a ledger records."""
    if evidence.trace is None:
        return _check_ledger(evidence.history)
    trace = evidence.other("poisoned").observed if evidence.of_loop else evidence.trace
    poison = trace.case.poison
    assert poison is not None
    if evidence.of_loop and trace.errors:  # ranks that end by errors of their own have not stopped together
        where = f"step {poison.step}"
        apart = Counterexample("the ranks did not stop together", where, f"all stop at {where}", trace.failures)
        return conclude(CLAIM, 1, [apart])
    if evidence.of_loop and not any(getattr(part, "poisoned", False) for part in trace.parts):
        return conclude(CLAIM, 0, [], f"the NaN was never planted: the last rank had no row in update {poison.step}")
    seen = check_history(trace.seen, poison.step, clause="finite", stopped_at=trace.stopped_at)
    return merge([seen, _check_unapplied(trace, poison.step)])


def _check_unapplied(trace: Trace, step: int) -> Verdict:
    found, checked = [], 0
    final: Mapping[int, tuple[str, str]] = trace.gathered("final")
    for part in trace.parts:
        for rank in part.ranks:
            earlier, checked = part.of(rank, step - 1) if step > 1 else None, checked + 1
            before, moments = (earlier.weights, earlier.optimizer) if earlier else (part.start[rank], "")
            if final[rank][0] != before or (moments and final[rank][1] != moments):
                what = "weights or optimizer state changed in the update that was to be stopped"
                shown = (f"step {step}, rank {rank}", before, final[rank][0])
                found.append(Counterexample(what, *shown, quantity="weights"))
    return conclude(CLAIM, checked, found)


def _check_ledger(history: History) -> Verdict:
    if any(map(stops, history.of_kind("violation"))) or not all(step.finite for step in history.steps):
        return check_history(history)
    last = history.events[-1] if history.events else None
    if last is None or last.kind != "end":
        after = f"step {max(history.trajectory, default=0)}"
        why = f"no end is recorded after {after}: the run was killed or is still running"
        return conclude(CLAIM, 0, [], why)
    if history.of_kind("violation"):
        return not_applicable(CLAIM, "the recorded violations were only reported (action warn), so nothing had to stop")
    why = "no violation, NaN or infinity is recorded, so nothing had to stop"
    reason = last.fields.get("reason", "finished")
    return not_applicable(CLAIM, why if reason == "finished" else f"{why}; it ended with {str(reason)!r}")


def check_history(
    history: History, planted: int | None = None, *, clause: str = "", stopped_at: Mapping[int, int] | None = None
) -> Verdict:
    """Check what follows each non-finite update and each violation, run by run (a resume begins a run).

    planted: the update at which a fault was planted; a run that reached it must stop there, with a violation (of
    `clause`, if given). stopped_at: the step at which each rank ended, as the witness saw it. A warning of a watch
    stops nothing, and a violation that was found after an update does not deny the update.
    """
    found: list[Counterexample] = []
    checked, missing = 0, ""

    def fail(what: str, step: int | None, expected: str, seen: str, quantity: Quantity = "other") -> None:
        found.append(Counterexample(what, f"step {step}", expected, seen, quantity=quantity))

    for run in history.runs:
        recorded = [event for event in run.events if event.kind == "violation"]
        if poison := next((event for event in run.steps if not event.finite), None):
            checked += 1
            seen = f"loss {poison.loss}, gradient norm {poison.grad_norm}"
            if later := [event.number for event in run.steps if event.line > poison.line]:
                what = f"{len(later)} more updates after a non-finite one"
                fail(what, poison.number, "no later step", f"{seen}, then step {later[0]}")
            before, after = _weights_before(history, poison), poison.digests.get("weights")
            if before is not None and after is not None and before != after:
                fail("the weights changed in a non-finite step", poison.number, before, after, "weights")
            if not recorded:
                fail("a non-finite step without a violation in the record", poison.number, "a violation", seen)
        if violations := tuple(filter(stops, recorded)):
            checked += 1
            first = violations[0]
            if later := [event.number for event in run.steps if event.line > first.line]:
                what = f"{len(later)} more updates after a violation"
                fail(what, first.step, "no later step", f"step {later[0]}")
            if len(steps := {event.step for event in violations}) > 1:
                seen = ", ".join(sorted(map(str, steps)))
                fail("violations of one run at several steps", first.step, "one step", seen)
            done = [event for event in run.steps if event.line < first.line and event.finite]
            applied = first.fields.get("applied") is True
            if first.step and any(event.number >= first.step + applied for event in done):
                fail("the violated step was recorded as an update", first.step, "no update", "an update")
    if planted is not None:
        violations, last = history.of_kind("violation"), max(history.trajectory, default=0)
        checked += bool(violations or last >= planted - 1)
        if not violations and last < planted - 1:
            missing = f"the run never reached step {planted}, where the fault was planted"
        elif not violations:
            seen = f"the run went on to step {last}" if last > planted else f"its last update is step {last}"
            fail("a planted fault left no violation", planted, f"a violation at step {planted}", seen)
        elif violations[0].step != planted:
            fail("noticed at another step", planted, str(planted), str(violations[0].step))
        elif clause and violations[0].fields.get("clause") != clause:
            fail("a different clause was named", planted, clause, str(violations[0].fields.get("clause")))
    if stopped_at:
        checked += 1
        if len(set(stopped_at.values())) > 1:
            seen = ", ".join(f"rank {rank} at step {step}" for rank, step in sorted(stopped_at.items()))
            fail("the ranks did not stop together", min(stopped_at.values()), "one step", seen)
    return conclude(CLAIM, checked, found, missing or ("" if checked else "nothing is recorded that had to stop it"))


def stops(violation: Event) -> bool:
    """Whether a recorded violation must stop the run: a warning need not."""
    return violation.fields.get("action") in (None, "raised")


def _weights_before(history: History, event: StepEvent) -> str | None:
    earlier = [step for step in history.steps if step.line < event.line and step.number == event.number - 1]
    if earlier:
        return earlier[-1].digests.get("weights")
    return history.start.initial_weights if event.number == 1 and history.start is not None else None
