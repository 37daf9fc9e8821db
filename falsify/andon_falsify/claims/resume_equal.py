"""A run that was interrupted and resumed is the run that was not: the same updates, the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

from andon_falsify.claims.evidence import Evidence
from andon_falsify.claims.halt_together import stops
from andon_falsify.claims.rounding import Rounding, roughly
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
    runs=("cut", "cut again", "resumed"),
    needs=(lambda evidence: "" if evidence.declares("restores") else _UNSAVED,),
    clauses=(Clause("checkpoint-whole"), Clause("resume-exact", "same")),
    statements={
        "loop": "A resumed run makes the remaining updates with the same rows and learning rates. The weights differ "
        "by at most 30 times the measured fp32 rounding, or by no bit if the loop promises equal bits.",
        "script": "A run that is killed and resumed twice makes the updates of an uninterrupted run, with the same "
        "rows. On one or two ranks all bits agree. On more or other numbers of ranks, learning rates agree; losses and "
        "norms agree to 0.0001 at the first update, and to 0.0064 later.",
    },
)
_ONE_ORDER = 2
"""Ranks whose sum is the same in any order."""


def check(evidence: Evidence) -> Verdict:
    """The run against a killed one (`others["cut"]`) and the run that resumed it (`others["resumed"]`).

    A ledger is judged by the updates that it holds twice, and against an uninterrupted run `elsewhere`.
    """
    if evidence.of_script:
        killed, last = evidence.other("cut").history, evidence.other("resumed").history
        between = evidence.others.get("cut again")
        return check_script(evidence.history, killed, last, None if between is None else between.history)
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
    return merge([alike(CLAIM, evidence.trace, again, noisy=evidence.trace), gap])


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


def check_script(whole: History, cut: History, resumed: History, between: History | None = None) -> Verdict:
    """The resumed run of a script ends as the whole one: its updates are the last of those, and continue from the kill.

    between: a run that resumed the first killed one, and was killed itself. Its updates are a part of those of the
    whole run that begins at the latest after the first kill.

    Its ledger may count from 1 again, so updates are matched from the end. The sum of two ranks has one order, so bits
    are compared. More ranks may sum in another order after a start (DDP rebuilds its buckets in its second update), and
    another number of ranks does, so norms are compared, as between layouts.
    """
    every, done, again = (list(history.trajectory.values()) for history in (whole, cut, resumed))
    second = list(between.trajectory.values()) if between is not None else []
    if not done or len(done) >= len(every):
        why = f"the run was to be killed before its end, and made {len(done)} of {len(every)} updates"
        return conclude(CLAIM, 0, [], why)
    if not again:
        return conclude(CLAIM, 0, [], "the resumed run made no update")
    killed = f"killed after update {len(done)}" + f", and once more {len(second)} updates later" * bool(second)
    began = again[0].state.get("weights before")
    states = [every[0].state.get("weights before"), *(step.digests.get("weights") for step in every)]
    most = len(every) - (max(1, states.index(began)) if began is not None and began in states else 1)
    if len(again) > most:
        over, repeated = "was not resumed: it started over", "repeated updates after the resume: it began an epoch anew"
        what = f"a run that was {killed}, {over if began in (None, states[0]) else repeated}"
        return conclude(CLAIM, 1, [Counterexample(what, "", f"at most {most} updates", str(len(again)))])
    least = len(every) - len(done) - len(second)
    if len(again) < least:
        what = f"{killed}, it was resumed at a later one"
        return conclude(CLAIM, 1, [Counterexample(what, "", f"at least {least} updates", str(len(again)))])
    world, elsewhere = every[0].world or 1, [step.world for step in (*second, *again) if step.world != every[0].world]
    exact = world <= _ONE_ORDER and not elsewhere
    if open_ := unseeded(CLAIM, f"two runs on {world} ranks", whole, cut, exact=exact):
        return open_
    draws = next((step.draws for step in every if step.draws), "")
    # A killed run does not show where it began. It is compared from the update with which it agrees longest.
    starts = [every[first : first + len(second)] for first in range(len(done) + 1)]
    differences = partial(_differences, first=whole, noise=None if exact else roughly(whole.bits), draws=draws)
    middle = max(starts, key=lambda part: _agreeing(part, second, differences)) if second else []
    found = next(differences(middle, second[: len(middle)], "resumed once"), None)
    if found is None:
        found = next(differences(every[-len(again) :], again, "resumed twice" if second else "resumed"), None)
    if found and elsewhere and draws and found.quantity not in INPUTS:
        why = f"{found.where}: {found.what}. The random numbers of the forward passes depend on the number of ranks"
        return conclude(CLAIM, 0, [], f"{why}: {draws}")
    ranks = f"{world} ranks" + (f", resumed on {elsewhere[0]}" if elsewhere else "")
    note = "" if exact else f"{ranks}: norms are compared, not bits"
    return conclude(CLAIM, len(again) + len(middle), [found] if found else [], note=note)


def _agreeing(
    part: list[StepEvent], second: list[StepEvent], differences: Callable[..., Iterator[Counterexample]]
) -> tuple[int, int, int]:
    """How many updates agree before the first that does not, and how many in their inputs; else the later part."""
    pairs = zip(part, second, strict=False)
    apart = [{each.quantity for each in differences([ours], [theirs], "")} for ours, theirs in pairs]
    same = sum(1 for _ in takewhile(lambda quantities: not quantities, apart))
    inputs = sum(1 for _ in takewhile(INPUTS.isdisjoint, apart))
    return same, inputs, part[0].number if part else 0


def _differences(
    whole: list[StepEvent], again: list[StepEvent], how: str, first: History, noise: Rounding | None, draws: str
) -> Iterator[Counterexample]:
    """The differences, in causal order. first: the uninterrupted run. noise: None if bits are compared."""
    for number, (ours, theirs) in enumerate(zip(whole, again, strict=True), start=1):
        where, before = f"step {ours.number}, {how}", first.trajectory.get(ours.number - 1)
        cause = f" (likely not restored: {_likely(ours, theirs, before, draws)})"
        yield from different_rows(ours, theirs, where)
        numbers = {} if noise is None else different_numbers(ours, theirs, where, number, noise)[1]
        yield from (replace(each, what=f"{each.what}{cause}") for each in numbers.values())
        for name in DIGESTS if noise is None else ():
            held, seen = ours.digests.get(name), theirs.digests.get(name)
            if held != seen:
                what = f"the {name} digest differs from that of the run without the kill{cause}"
                yield Counterexample(what, where, str(held), str(seen), quantity=QUANTITIES[name])


def _likely(ours: StepEvent, theirs: StepEvent, before: StepEvent | None, draws: str) -> str:
    """Which state it may not restore, by what the updates have in common. before: that before `ours`, if known."""
    streams = [name for name, held in ours.state.items() if "stream" in name and theirs.state.get(name, held) != held]
    after = {} if before is None else before.digests
    held = [name for name in DIGESTS[1:] if name in after and theirs.state.get(f"{name} before") == after[name]]
    what = "buffers" if "weights" in held else "weights and buffers"
    what = what if ours.same_rows(theirs) else f"{what}, or other rows"
    what += f" ({' and '.join(held)} are those of step {before.number})" if before is not None and held else ""
    if ours.lr and theirs.lr and ours.lr.hex != theirs.lr.hex:
        what = f"the learning rate ({theirs.lr}, not {ours.lr}), which a schedule and an optimizer hold"
    elif "rows" in theirs.state and ours.state.get("rows", "") != theirs.state["rows"]:
        what = "the position in the data (its data loader drew other rows)"
    elif "optimizer" not in held and ours.digests.get("gradient") == theirs.digests.get("gradient") is not None:
        what = "the state of the optimizer (the gradient is the same)"
    elif streams and draws:
        names = ", ".join(name.removeprefix("random stream of ") for name in streams)
        what = f"random streams ({names}), from which the forward passes draw: {draws}"
    return what
