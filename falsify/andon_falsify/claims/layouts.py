"""What ledgers of one script on several layouts of a global batch must have alike, without a reference.

Of a script there are norms and losses alone. Two layouts of one global batch must make the same updates; their fp32
sums are rounded differently, so these are compared to `SCRIPT.norm` at the first update, and to more later, since
differences grow. Where a script draws at random by rank (dropout), its layouts differ for that reason too: such runs
can only be compared with it switched off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from andon_falsify.checkers import resume_equal, same_everywhere, samples_once
from andon_falsify.checkers.equal_updates import DIGESTS, NUMBERS
from andon_falsify.claims.evidence import SCRIPT
from andon_falsify.history import History, Number, StepEvent
from andon_falsify.verdict import Counterexample, Verdict, conclude, unknown

_COMPARED = 50
"""Updates; later ones differ by what differed before."""
_DOUBLINGS = 6
"""The tolerance of norms doubles with each update, so many times."""
_ONE_ORDER = 2
"""Ranks whose sum is the same in any order."""


def same_layouts(base: History, other: History, layout: str) -> Verdict:
    """`other` against `base`, the run on one rank at once; `layout` is what messages call `other`."""
    claim = same_everywhere.CLAIM
    ours, theirs = base.trajectory, other.trajectory
    if not ours:
        return unknown(claim, "the run on one rank made no update")
    found: list[Counterexample] = []
    checked = 0
    for number in sorted(ours.keys() & theirs.keys())[:_COMPARED]:
        compared, found = first_difference(ours[number], theirs[number], layout)
        checked += compared
        if found:
            found = [_explained(found[0], theirs, number), *found[1:]]
            break
    if not found and len(ours) != len(theirs):
        what = "another number of updates"
        found = [Counterexample(what, layout, str(len(ours)), str(len(theirs)))]
    return conclude(claim, checked, found, note=_unseen(base))


def _explained(found: Counterexample, theirs: Mapping[int, StepEvent], number: int) -> Counterexample:
    """With what distinguishes the first update that differs, where its rows alone do not divide among the ranks."""
    step = theirs[number]
    earlier = [theirs[each] for each in theirs if each < number]
    if not earlier or not _uneven(step) or any(map(_uneven, earlier)):
        return found
    uneven = (
        f"{len(step.ids)} rows on {step.world} ranks, the first that do not divide evenly: a mean of unequal means?"
    )
    return replace(found, what=f"{found.what} ({uneven})")


def _uneven(step: StepEvent) -> bool:
    return len(step.ids) % (step.world or 1) != 0


def _unseen(history: History) -> str:
    """What could not be compared, for those who read that it holds."""
    first = next(iter(history.trajectory.values()))
    missing = [] if first.ids else ["rows (w.batch)"]
    missing += [] if first.loss is not None else ["losses (w.loss)"]
    return f"not told, so not compared: {' and '.join(missing)}" if missing else ""


def gone_on_by_command(whole: History, cut: History, taken_up: History, world: int) -> Verdict:
    """The run that was taken up ends as the whole one: its updates are the last ones of that, and go on from the cut.

    Its ledger may count from 1 again, so updates are matched from the end. Two ranks' sum has one order, so that bits
    are compared; those of more may be summed in another one after a start (DDP lays its buckets out anew in its second
    update), so that norms are, as between layouts.
    """
    claim = resume_equal.CLAIM
    every, done, again = (list(history.trajectory.values()) for history in (whole, cut, taken_up))
    if not done or len(done) >= len(every):
        return unknown(claim, f"the run was to be killed before its end, and made {len(done)} of {len(every)} updates")
    if not again:
        return unknown(claim, "the run that was taken up made no update")
    if len(again) >= len(every):
        what = f"a run that was killed after update {len(done)} was not taken up: it began anew"
        return conclude(claim, 1, [Counterexample(what, "", f"at most {len(every) - 1} updates", str(len(again)))])
    if len(again) < len(every) - len(done):
        what = f"killed after update {len(done)}, it was taken up later than that"
        return conclude(
            claim, 1, [Counterexample(what, "", f"at least {len(every) - len(done)} updates", str(len(again)))]
        )
    exact = world <= _ONE_ORDER
    found = next(_differences(every[-len(again) :], again, exact=exact), None)
    note = "" if exact else f"{world} ranks: norms are compared, not bits"
    return conclude(claim, len(again), [found] if found else [], note=note)


def _differences(whole: list[StepEvent], again: list[StepEvent], *, exact: bool) -> Iterator[Counterexample]:
    for number, (ours, theirs) in enumerate(zip(whole, again, strict=True), start=1):
        where = f"step {ours.number}, taken up"
        yield from other_rows(ours, theirs, where)
        yield from [] if exact else measured(ours, theirs, where, number)[1]
        for name in DIGESTS if exact else ():  # not what it was given, nor what was told
            held, seen = ours.digests.get(name), theirs.digests.get(name)
            if held != seen:
                yield Counterexample(f"the {name} is another one than without the kill", where, str(held), str(seen))


def first_difference(ours: StepEvent, theirs: StepEvent, layout: str) -> tuple[int, list[Counterexample]]:
    """The first thing in causal order that differs; a gradient of another scale explains the loss that differs too."""
    where = f"step {ours.number}, {layout}"
    rows = other_rows(ours, theirs, where)
    if rows:
        return 1, rows
    checked, found = measured(ours, theirs, where, ours.number)
    return checked + bool(ours.ids), found


def measured(ours: StepEvent, theirs: StepEvent, where: str, number: int) -> tuple[int, list[Counterexample]]:
    """How many numbers were compared, and those that are apart in the update `number` since both were alike."""
    checked, found = 0, []
    for field, what in NUMBERS.items():
        before, after = getattr(ours, field), getattr(theirs, field)
        if before is None or after is None:
            continue
        checked += 1
        if not _close(before, after, number):
            ratio = after.value / before.value if before.value and after.value is not None else None
            found.append(Counterexample(f"{what} is another one", where, str(before), str(after), ratio))
    return checked, found


def _close(ours: Number, theirs: Number, step: int) -> bool:
    if ours.value is None or theirs.value is None:
        return ours.value == theirs.value
    allowed: float = SCRIPT.norm * 2.0 ** min(step - 1, _DOUBLINGS)
    return abs(theirs.value - ours.value) <= allowed * max(abs(ours.value), 1e-12)


def other_rows(ours: StepEvent, theirs: StepEvent, where: str) -> list[Counterexample]:
    """The rows that only one of two updates has, each as often as it has it; none where either names no rows."""
    if not ours.ids or not theirs.ids or Counter(ours.ids) == Counter(theirs.ids):
        return []
    only, extra = Counter(ours.ids) - Counter(theirs.ids), Counter(theirs.ids) - Counter(ours.ids)
    mine, others = samples_once.listed(only) or "no further", samples_once.listed(extra) or "none"
    return [Counterexample("other rows are trained on", where, mine, others)]
