"""A run that was cut short and resumed is the run that was not: the same updates, the same bits."""

from __future__ import annotations

from andon_falsify.checkers.equal_updates import GIVEN, bits
from andon_falsify.checkers.halts import stops
from andon_falsify.history import History, StepEvent
from andon_falsify.verdict import Claim, Counterexample, Verdict, conclude, unknown

CLAIM = Claim(
    "resume-equal",
    1,
    "A resumed run makes every update exactly as the uninterrupted one, on any number of workers; an update done again "
    "carries the digests that it had.",
    "seed 5.3 D10; faults F77",
)


def check(resumed: History, uninterrupted: History | None = None) -> Verdict:
    """Compare updates done again with their first occurrence, and the trajectory with that of `uninterrupted`.

    Unknown where `resumed` was never resumed, or nothing was done again and there is no other history to compare with.
    A gap in the trajectory falsifies, and so do an end before the uninterrupted run's last update and updates that were
    `disowned`, which is judged of a run that was never resumed too.
    """
    found = disowned(resumed)
    if not found and not any(run.resumed for run in resumed.runs):
        return unknown(CLAIM, f"{resumed.name} was never resumed")
    checked, differing = _repeated(resumed)
    found += differing
    found += _gaps(resumed)
    missing = ""
    if uninterrupted is not None:
        compared, apart = _against(resumed, uninterrupted)
        checked += compared
        found += apart
        last, reached = max(uninterrupted.trajectory, default=0), max(resumed.trajectory, default=0)
        if reached < last and resumed.runs[-1].finished:
            found.append(
                Counterexample("the resumed run ended early", f"step {reached}", f"{last} updates", str(reached))
            )
        elif reached < last:
            missing = f"{resumed.name} got to step {reached} of {last}"
    return conclude(CLAIM, checked, found, missing)


def _repeated(history: History) -> tuple[int, list[Counterexample]]:
    checked, found = 0, []
    first: dict[int, StepEvent] = {}
    for event in history.steps:
        if event.line in history.retracted:
            continue
        before = first.setdefault(event.number, event)
        if before is not event:
            checked += 1
            found += _differ(event, before, "done again after a resume", history.name)
    return checked, found


def disowned(history: History) -> list[Counterexample]:
    """Updates that were taken back without right: else a run that does not repeat itself could disown what it did.

    Only a violation that stops a run takes updates back, of its clause, with none made since, all that stand up to the
    last, and down to a checkpoint (or to a resume, or to the start).
    """
    found: list[Counterexample] = []
    checkpoints, last, broken = {0}, 0, None
    for event in history.events:
        if isinstance(event, StepEvent):
            last, broken = max(last, event.number), None
        elif event.kind in ("checkpoint", "resume"):
            checkpoints.add(event.step or 0)
            broken = None if event.kind == "resume" else broken
        elif event.kind == "violation" and stops(event):
            broken = event.fields.get("clause")
        elif event.kind == "retraction":
            kept, clause = event.step or 0, event.fields.get("clause")
            wanted = f"a violation of {clause} after step {last}, back to a checkpoint, up to step {last}"
            if broken is None or clause != broken or kept not in checkpoints or event.fields.get("last") != last:
                said = f"to step {event.fields.get('last')}, back to step {kept}, after {broken or 'no violation'}"
                found.append(
                    Counterexample("updates were taken back without right", f"line {event.line}", wanted, said)
                )
            last, broken = min(last, kept), None
    return found


def _gaps(history: History) -> list[Counterexample]:
    """Each run must go on from an update that an earlier one reached."""
    found = []
    done = 0
    for run in history.runs:
        expected = done + 1
        for event in run.steps:
            if event.number > expected:
                what = f"step {expected} was never done"
                found.append(Counterexample(what, f"step {event.number}", f"step {expected}", f"step {event.number}"))
            expected = event.number + 1
            done = max(done, event.number)
    return found


def _against(resumed: History, whole: History) -> tuple[int, list[Counterexample]]:
    checked = 0
    for number, event in resumed.trajectory.items():
        twin = whole.trajectory.get(number)
        if twin is None:
            continue
        checked += 1
        found = _differ(event, twin, "differs from the uninterrupted run", resumed.name)
        if found:
            return checked, found
    return checked, []


def _differ(event: StepEvent, twin: StepEvent, how: str, name: str) -> list[Counterexample]:
    """The first that differs of what both have; what the update was given comes before what came of it."""
    held, other = bits(event), bits(twin)
    differing = [field for field in other if field in held and held[field] != other[field]]
    field = min(differing, key=lambda field: field not in GIVEN, default="")
    if not field:
        return []
    said = "gradient norm" if field == "grad_norm" else field
    return [Counterexample(f"the {said} {how}", f"step {event.number} of {name}", other[field], held[field])]
