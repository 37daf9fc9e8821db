"""What is not finite stops every rank, at one step, before the update, and says so."""

from __future__ import annotations

from collections.abc import Mapping

from andon_falsify.history import Event, History, Run, StepEvent
from andon_falsify.verdict import Claim, Counterexample, Verdict, conclude

CLAIM = Claim(
    "halt-together",
    1,
    "A NaN or infinity in any rank's loss or gradient stops all ranks at that step, before the update: no later step "
    "in that run, no changed weights, and a violation in the record.",
    "seed F-DP-003",
)


def check(
    history: History, planted: int | None = None, *, clause: str = "", stopped_at: Mapping[int, int] | None = None
) -> Verdict:
    """Check what follows each non-finite update and each violation, run by run (a resume is a run of its own).

    `planted` is the update at which a fault was planted: a run that reached it must stop at it, with a violation (of
    `clause`, if given). `stopped_at` gives for each rank the step it was at when it ended, from an observer outside.
    A violation that a watch was asked only to warn of stops nothing, and one that it found after an update had been
    made does not deny the update. Unknown where nothing ever went wrong: a halt that was never called for proves
    nothing.
    """
    found: list[Counterexample] = []
    checked = 0
    for run in history.runs:
        said = [event for event in run.events if event.kind == "violation"]
        violations = [event for event in said if stops(event)]
        poison = next((event for event in run.steps if not event.finite), None)
        if poison is not None:
            checked += 1
            found += _poisoned(history, run, poison, said)
        if violations:
            checked += 1
            found += _violated(run, violations)
    missing = ""
    if planted is not None:
        reached, wrong = _planted(history, planted, clause)
        checked += reached
        found += wrong
        missing = "" if reached else f"the run never reached step {planted}, where the fault was planted"
    if stopped_at:
        checked += 1
        found += _apart(stopped_at)
    return conclude(CLAIM, checked, found, missing or ("" if checked else "nothing ever went wrong in this history"))


def stops(violation: Event) -> bool:
    """Whether a recorded violation is one that has to stop the run: not one that was only to be told of."""
    return violation.fields.get("action") in (None, "raised")


def _poisoned(history: History, run: Run, poison: StepEvent, violations: list[Event]) -> list[Counterexample]:
    where = f"step {poison.number}"
    seen = f"loss {poison.loss}, gradient norm {poison.grad_norm}"
    found = []
    if later := [event.number for event in run.steps if event.line > poison.line]:
        what = f"{len(later)} more updates after a non-finite one"
        found.append(Counterexample(what, where, "no later step", f"{seen}, then step {later[0]}"))
    before = _weights_before(history, poison)
    after = poison.digests.get("weights")
    if before is not None and after is not None and before != after:
        found.append(Counterexample("the weights changed in a non-finite step", where, before, after))
    if not violations:
        found.append(Counterexample("a non-finite step without a violation in the record", where, "a violation", seen))
    return found


def _weights_before(history: History, event: StepEvent) -> str | None:
    earlier = [step for step in history.steps if step.line < event.line and step.number == event.number - 1]
    if earlier:
        return earlier[-1].digests.get("weights")
    return history.start.initial_weights if event.number == 1 and history.start is not None else None


def _violated(run: Run, violations: list[Event]) -> list[Counterexample]:
    first = violations[0]
    found = []
    if later := [event.number for event in run.steps if event.line > first.line]:
        what = f"{len(later)} more updates after a violation"
        found.append(Counterexample(what, f"step {first.step}", "no later step", f"step {later[0]}"))
    steps = {event.step for event in violations}
    if len(steps) > 1:
        seen = ", ".join(sorted(map(str, steps)))
        found.append(Counterexample("violations of one run at several steps", f"step {first.step}", "one step", seen))
    done = [event for event in run.steps if event.line < first.line and event.finite]
    applied = first.fields.get("applied") is True
    if first.step and any(event.number >= first.step + applied for event in done):
        what = "the violated step was recorded as an update"
        found.append(Counterexample(what, f"step {first.step}", "no update", "an update"))
    return found


def _planted(history: History, planted: int, clause: str) -> tuple[bool, list[Counterexample]]:
    """Whether the planted step was reached, and what is wrong with how it ended."""
    where = f"step {planted}"
    violations = history.of_kind("violation")
    last = max(history.trajectory, default=0)
    if not violations and last < planted - 1:
        return False, []
    found = []
    if not violations:
        seen = f"the run went on to step {last}" if last > planted else f"its last update is step {last}"
        found.append(Counterexample("a planted fault left no violation", where, f"a violation at step {planted}", seen))
    elif violations[0].step != planted:
        found.append(Counterexample("noticed at another step", where, str(planted), str(violations[0].step)))
    elif clause and violations[0].fields.get("clause") != clause:
        found.append(Counterexample("another clause was named", where, clause, str(violations[0].fields.get("clause"))))
    return True, found


def _apart(stopped_at: Mapping[int, int]) -> list[Counterexample]:
    if len(set(stopped_at.values())) == 1:
        return []
    seen = ", ".join(f"rank {rank} at step {step}" for rank, step in sorted(stopped_at.items()))
    return [Counterexample("the ranks did not stop together", f"step {min(stopped_at.values())}", "one step", seen)]
