"""A run that was interrupted and resumed is the run that was not: the same updates, the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from andon_falsify.claims.evidence import Evidence
from andon_falsify.claims.halt_together import stops
from andon_falsify.claims.updates import DIGESTS, INPUTS, QUANTITIES, bits, different_numbers, different_rows, unseeded
from andon_falsify.history import History, StepEvent
from andon_falsify.verdict import Claim, Clause, Counterexample, Outcome, Verdict, conclude, merge, not_applicable

if TYPE_CHECKING:
    from andon_falsify.subjects.trace import Trace

_UNSAVED = "the loop does not save and load (`save`, `load`)"
CLAIM = Claim(
    "resume-equal",
    1,
    "A resumed run makes every update of an uninterrupted run to the bit, on any number of workers. A repeated "
    "update has the same digests.",
    order=60,
    subjects=("trainer", "loop", "script", "ledger"),
    trial="resume",
    runs=("cut", "resumed"),
    needs=(lambda evidence: "" if evidence.declares("restores") else _UNSAVED,),
    clauses=(Clause("checkpoint-whole"), Clause("resume-exact", "same")),
    statements={
        "loop": "A resumed run makes the remaining updates with the same rows and learning rates. The weights differ "
        "by at most 30 times the measured fp32 rounding, or by no bit if the loop promises equal bits.",
        "script": "A run that is killed and resumed makes the updates of an uninterrupted run, with the same rows. On "
        "one or two ranks all bits agree. On more ranks learning rates agree; losses and norms agree to 0.0001 at the "
        "first update, and to 0.0064 later.",
    },
)
_ONE_ORDER = 2
"""Ranks whose sum is the same in any order."""


def check(evidence: Evidence) -> Verdict:
    """The run against a killed one (`others["cut"]`) and the run that resumed it (`others["resumed"]`).

    A ledger is judged by the updates that it holds twice, and against an uninterrupted run `elsewhere`.
    """
    if evidence.of_script:
        return check_script(evidence.history, evidence.other("cut").history, evidence.other("resumed").history)
    if evidence.trace is None:
        return _check_ledgers([evidence, *evidence.elsewhere])
    cut, again = evidence.other("cut").observed, evidence.other("resumed").observed
    if evidence.declares("to_the_bit"):
        return _check_bits(evidence.trace, cut, again)
    from andon_falsify.claims.alike import alike

    wanted = [step for step in evidence.trace.seen.trajectory if step > again.first.resumed_from]
    made = list(again.seen.trajectory)
    apart = [Counterexample("updates that differ from those that were left", "", f"{wanted}", f"{made}")]
    gap = conclude(CLAIM, len(wanted), [] if made == wanted else apart)
    return merge([alike(CLAIM, evidence.trace, [again]), gap])


def _check_bits(whole: Trace, cut: Trace, resumed: Trace) -> Verdict:
    """As the witness saw it, and by the subject's own ledger; not if the resumed ranks are on other kinds of device."""
    if whole.place and resumed.place not in ("", whole.place):
        why = f"it ran on {whole.place} and was resumed on {resumed.place}, which round differently"
        return not_applicable(CLAIM, why)
    seen = check_history(History("resumed", cut.seen.events + resumed.seen.events), whole.seen)
    if resumed.ledger is None or whole.ledger is None or not whole.case.contracts:
        return seen
    return merge([seen, check_history(resumed.ledger, whole.ledger)])


def _check_ledgers(runs: Sequence[Evidence]) -> Verdict:
    """Each resumed run by itself and, if there is one, against the first that was not resumed."""
    histories = [run.history for run in runs]
    cut = [each for each in histories if any(run.resumed for run in each.runs) or disowned(each)]
    whole = [history for history in histories if history not in cut]
    if not cut:
        return not_applicable(CLAIM, "no run was resumed")
    if whole:
        return merge(check_history(history, whole[0]) for history in cut)
    alone = not_applicable(CLAIM, "no step was repeated; also give the uninterrupted run, to compare with")
    verdicts = map(check_history, cut)
    return merge(alone if each.outcome is Outcome.UNKNOWN and not each.checked else each for each in verdicts)


def check_history(resumed: History, uninterrupted: History | None = None) -> Verdict:
    """Compare updates done again with their first occurrence, and the trajectory with that of `uninterrupted`.

    Falsified by a gap in the trajectory, by an end before the uninterrupted run's last update, and by updates that were
    `disowned` (also in a run that was never resumed).
    """
    found = disowned(resumed)
    if not found and not any(run.resumed for run in resumed.runs):
        return conclude(CLAIM, 0, [], f"{resumed.name} was never resumed")
    checked, missing = 0, ""
    first: dict[int, StepEvent] = {}
    watched = resumed.start is not None and resumed.start.watched
    began = next((run.events[0] for run in resumed.runs if run.steps), None)
    done = began.step or 0 if watched and began is not None and began.kind == "resume" else 0  # into a new ledger
    for run in resumed.runs:
        if watched and run.resumed and run.events[0].fields.get("name") is None:
            first = {}  # the loop began at step 1 again, and promises no equal bits
        expected = done + 1
        for event in run.steps:
            before = event if event.line in resumed.retracted else first.setdefault(event.number, event)
            if before is not event:
                checked += 1
                found += _differ(event, before, "done again after a resume", resumed.name)
            wanted, seen = f"step {expected}", f"step {event.number}"
            found += [Counterexample(f"{wanted} is missing", seen, wanted, seen)] * (event.number > expected)
            expected = event.number + 1
            done = max(done, event.number)
    if uninterrupted is not None:
        for number, event in resumed.trajectory.items():
            if (twin := uninterrupted.trajectory.get(number)) is None:
                continue
            checked += 1
            if apart := _differ(event, twin, "differs from the uninterrupted run", resumed.name):
                found += apart
                break
        last, reached = max(uninterrupted.trajectory, default=0), max(resumed.trajectory, default=0)
        if reached < last and resumed.runs[-1].finished:
            what, counts = "the resumed run ended early", (f"{last} updates", str(reached))
            found.append(Counterexample(what, f"step {reached}", *counts))
        elif reached < last:
            missing = f"{resumed.name} got to step {reached} of {last}"
    return conclude(CLAIM, checked, found, missing)


def disowned(history: History) -> list[Counterexample]:
    """Retractions without a reason. If they counted, a run that does not repeat itself could disown what it did.

    Only a violation that stops the run retracts updates: for its clause, with no update since, all from the last one
    down to a checkpoint (or to a resume, or to the start).
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
                what = "updates were retracted without a violation"
                found.append(Counterexample(what, f"line {event.line}", wanted, said, quantity="record"))
            last, broken = min(last, kept), None
    return found


def _differ(event: StepEvent, twin: StepEvent, how: str, name: str) -> list[Counterexample]:
    held, other = bits(event), bits(twin)
    differing = [field for field in other if field in held and held[field] != other[field]]
    if not differing:
        return []
    field = min(differing, key=lambda field: field not in INPUTS)
    what = f"the {'gradient norm' if field == 'grad_norm' else field} {how}"
    where = f"step {event.number} of {name}"
    return [Counterexample(what, where, other[field], held[field], quantity=QUANTITIES[field])]


def check_script(whole: History, cut: History, resumed: History) -> Verdict:
    """The resumed run of a script ends as the whole one: its updates are the last of those, and continue from the kill.

    Its ledger may count from 1 again, so updates are matched from the end. The sum of two ranks has one order, so bits
    are compared. More ranks may sum in another order after a start (DDP rebuilds its buckets in its second update), so
    norms are compared, as between layouts.
    """
    every, done, again = (list(history.trajectory.values()) for history in (whole, cut, resumed))
    if not done or len(done) >= len(every):
        why = f"the run was to be killed before its end, and made {len(done)} of {len(every)} updates"
        return conclude(CLAIM, 0, [], why)
    if not again:
        return conclude(CLAIM, 0, [], "the resumed run made no update")
    if len(again) >= len(every):
        what = f"a run that was killed after update {len(done)} was not resumed: it started over"
        return conclude(CLAIM, 1, [Counterexample(what, "", f"at most {len(every) - 1} updates", str(len(again)))])
    if len(again) < len(every) - len(done):
        what, least = f"killed after update {len(done)}, it was resumed at a later one", len(every) - len(done)
        return conclude(CLAIM, 1, [Counterexample(what, "", f"at least {least} updates", str(len(again)))])
    world = every[0].world or 1
    exact = world <= _ONE_ORDER
    if why := unseeded(f"two runs on {world} ranks", whole, cut, exact=exact):
        return conclude(CLAIM, 0, [], why)
    found = next(_differences(every[-len(again) :], again, exact=exact), None)
    note = "" if exact else f"{world} ranks: norms are compared, not bits"
    return conclude(CLAIM, len(again), [found] if found else [], note=note)


def _differences(whole: list[StepEvent], again: list[StepEvent], *, exact: bool) -> Iterator[Counterexample]:
    for number, (ours, theirs) in enumerate(zip(whole, again, strict=True), start=1):
        where = f"step {ours.number}, resumed"
        yield from different_rows(ours, theirs, where)
        yield from [] if exact else different_numbers(ours, theirs, where, number)[1].values()
        for name in DIGESTS if exact else ():
            held, seen = ours.digests.get(name), theirs.digests.get(name)
            if held != seen:
                what = f"the {name} is not that of the run without the kill"
                yield Counterexample(what, where, str(held), str(seen), quantity=QUANTITIES[name])
