"""A run that was cut short and resumed is the run that was not: the same updates, the same bits."""

from __future__ import annotations

from andon_falsify.history import History, StepEvent
from andon_falsify.verdict import Claim, Counterexample, Verdict, conclude, unknown

CLAIM = Claim(
    "resume-equal",
    1,
    "A resumed run makes every update exactly as the uninterrupted one, on any number of workers; an update done again "
    "carries the digests that it had (seed 5.3 D10; faults F77).",
)


def check(resumed: History, uninterrupted: History | None = None) -> Verdict:
    """Compare updates done again with their first occurrence, and the trajectory with that of `uninterrupted`.

    Unknown where `resumed` was never resumed, or nothing was done again and there is no other history to compare with.
    A gap in the trajectory falsifies, and so do an end before the uninterrupted run's last update and updates that were
    taken back without a violation after them.
    """
    if not any(run.resumed for run in resumed.runs):
        return unknown(CLAIM, f"{resumed.name} was never resumed")
    checked, found = _repeated(resumed)
    found += _taken_back(resumed)
    found += _gaps(resumed)
    missing = ""
    if uninterrupted is not None:
        compared, differing = _against(resumed, uninterrupted)
        checked += compared
        found += differing
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


def _taken_back(history: History) -> list[Counterexample]:
    """Only a violation takes updates back: else a run that does not repeat itself could disown what it did."""
    found = []
    for event in history.of_kind("retraction"):
        gone = [step for step in history.steps if step.line < event.line and step.number > (event.step or 0)]
        last = max((step.line for step in gone), default=0)
        if not any(last < violation.line < event.line for violation in history.of_kind("violation")):
            what = f"{len(gone)} updates were taken back without a violation after them"
            found.append(Counterexample(what, f"line {event.line}", "a violation", "none"))
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
    """Updates compared, and the first that differs."""
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
    held, other = _state(event), _state(twin)
    field = next((field for field in other if field in held and held[field] != other[field]), None)
    if field is None:
        return []
    return [Counterexample(f"the {field} {how}", f"step {event.number} of {name}", other[field], held[field])]


def _state(event: StepEvent) -> dict[str, str]:
    """What must be equal, in causal order; what was not recorded is absent."""
    digests = event.digests
    state = {
        "rows": " ".join(map(str, event.ids)) or None,
        "learning rate": None if event.lr is None else event.lr.hex,
        "loss": None if event.loss is None else event.loss.hex,
        "content": digests.get("content"),
        "gradient": digests.get("gradient"),
        "gradient norm": None if event.grad_norm is None else event.grad_norm.hex,
        "weights": digests.get("weights"),
        "optimizer": digests.get("optimizer"),
    }
    return {name: value for name, value in state.items() if value is not None}
