"""What ledgers of one script on several layouts of a global batch must have alike, without a reference.

Of a script there are norms and losses alone. Two layouts of one global batch must make the same updates; their fp32
sums are rounded differently, so these are compared to `SCRIPT.norm` at the first update, and to more later, since
differences grow. Only like runs are compared: where a script is not seeded, draws by rank, or has other rows on other
layouts, it differs for that reason alone, and nothing is proven.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from andon_falsify.checkers import resume_equal, same_everywhere, samples_once
from andon_falsify.checkers.equal_updates import DIGESTS, NUMBERS
from andon_falsify.checkers.ratio import fitting_powers, show_ratio
from andon_falsify.claims.evidence import SCRIPT
from andon_falsify.history import History, Number, StepEvent
from andon_falsify.verdict import Counterexample, Verdict, conclude, unknown

_COMPARED = 50
"""Updates; later ones differ by what differed before."""
_DOUBLINGS = 6
"""The tolerance of norms doubles with each update, so many times."""
_ONE_ORDER = 2
"""Ranks whose sum is the same in any order."""
_SCALED = ("grad_norm", "loss")
"""Numbers that are means over a batch, so that a wrong mean shows as a product of a layout's numbers."""
_SEED = (
    "Begin it with torch.manual_seed(0), and random.seed(0) and numpy.random.seed(0) where it draws from these, "
    "before the model and the data are made"
)
_TELL = "tell the rows of each micro-batch with w.batch(ids)"
_DEAL = (
    "Draw the rows of every global batch from one seed, whatever the number of ranks, and deal them to the ranks "
    "(DistributedSampler; Accelerate: DataLoaderConfiguration(use_seedable_sampler=True))"
)
_DRAWS = (
    "dropout and augmentation that draw by rank do this, and so does a mean of unequal means. Switch those off, or "
    "tell the loss with w.loss: one that is the same on both shows that nothing else was drawn"
)

_NO_DRAWS = "Switch this off (p = 0) in the run that is compared"


def same_layouts(base: History, other: History, layout: Mapping[str, int]) -> Verdict:
    """`other` against `base`, the run on one rank at once. layout: the numbers of `other`'s by name, as `world`.

    Falsified is what other draws cannot explain, see `_proven`. Unknown, with the remedy, where the two trained on
    other rows, and where a difference may come of that.
    """
    claim = same_everywhere.CLAIM
    ours, theirs = base.trajectory, other.trajectory
    if not ours:
        return unknown(claim, "the run on one rank made no update")
    checked = 0
    for number in sorted(ours.keys() & theirs.keys())[:_COMPARED]:
        step, twin, where = ours[number], theirs[number], f"step {number}, {other.name}"
        if rows := other_rows(step, twin, where):
            said = f"{where}: other rows are trained on (expected {rows[0].expected}, seen {rows[0].seen})"
            return unknown(claim, f"{said}, so that nothing can be compared. {_DEAL}", checked)
        compared, apart = measured(step, twin, where, number)
        checked += compared + bool(step.ids and twin.ids)
        if apart:
            if found := _proven(apart, step, theirs, layout):
                return conclude(claim, checked, [*_scheduled(apart, base, other), *found])
            why = _unproven(apart, step, twin, layout, _draws(base) or _draws(other))
            return unknown(claim, why, checked)
    if len(ours) != len(theirs):
        what, counts = "another number of updates", (str(len(ours)), str(len(theirs)))
        if not all(step.ids for step in (*ours.values(), *theirs.values())):
            said = f"{other.name}: {what} (expected {counts[0]}, seen {counts[1]}), and the rows are not known"
            return unknown(claim, f"{said}. {_TELL}", checked)
        return conclude(claim, checked, [Counterexample(what, other.name, *counts)])
    return conclude(claim, checked, [], note=_unseen(base))


def unlike(first: History, again: History, *, exact: bool = False) -> str:
    """The first thing that two runs of one layout do not have alike, as far as both went; "" where there is none.

    exact: bits are compared, and norms otherwise. A script that is not seeded has other ones in every run.
    """
    started = [run.start.initial_weights for run in (first, again) if run.start is not None]
    if len(set(started)) > 1 and None not in started:
        return "the weights that it begins with"
    for number in sorted(first.trajectory.keys() & again.trajectory.keys()):
        step, twin = first.trajectory[number], again.trajectory[number]
        apart = ["the rows"] if other_rows(step, twin, "") else []
        apart += [NUMBERS[field] for field in measured(step, twin, "", 1)[1]]
        apart += [f"the {name}" for name in DIGESTS if exact and _digests_differ(name, step, twin)]
        if apart:
            return f"{apart[0]} at step {number}"
    return ""


def _digests_differ(name: str, step: StepEvent, twin: StepEvent) -> bool:
    return step.digests.get(name) != twin.digests.get(name)


def _proven(
    apart: Mapping[str, Counterexample], step: StepEvent, theirs: Mapping[int, StepEvent], layout: Mapping[str, int]
) -> list[Counterexample]:
    """What of the numbers that are `apart` in `step`, the first with such, is a mistake, whatever was drawn.

    Where the gradient is the same, all of it, since other rows, weights or draws would have given another one. Where it
    is not: a rate, which nothing is drawn for; a ratio that is a product of the layout's numbers; and all of it where
    rows are the same, and the loss that is told too, or the batch is the first that cannot be dealt evenly.
    """
    twin = theirs[step.number]
    if "grad_norm" not in apart and step.grad_norm is not None and twin.grad_norm is not None:
        return list(apart.values())
    if step.ids and twin.ids:
        if uneven := _unequal_means(theirs, step.number):
            return [replace(found, what=f"{found.what} ({uneven})") for found in apart.values()]
        if "loss" not in apart and step.loss is not None and twin.loss is not None:
            return list(apart.values())
    scaled = [
        field
        for field, found in apart.items()
        if field in _SCALED
        and found.ratio is not None
        and fitting_powers([(found.ratio, layout)], _allowed(step.number))
    ]
    return [found for field, found in apart.items() if field == "lr" or field in scaled]


def _scheduled(apart: Mapping[str, Counterexample], base: History, other: History) -> list[Counterexample]:
    """That the runs make different numbers of updates, where the learning rates differ: a schedule depends on it."""
    ours, theirs = (f"{len(history.trajectory)} updates" for history in (base, other))
    if "lr" not in apart or ours == theirs:
        return []
    what = "another number of updates, and so other learning rates where a schedule is as long as the run"
    return [Counterexample(what, other.name, ours, theirs)]


def _draws(history: History) -> str:
    return next((step.draws for step in history.steps if step.draws), "")


def _unproven(
    apart: Mapping[str, Counterexample], step: StepEvent, twin: StepEvent, layout: Mapping[str, int], draws: str
) -> str:
    """Why the numbers that are `apart` prove nothing, and what the script would have to do."""
    first = next(iter(apart.values()))
    numbers = " and ".join(f"{name} {value}" for name, value in layout.items() if value > 1)
    ratio = "" if first.ratio is None else f", ratio {show_ratio(first.ratio)}, which no product of {numbers} gives"
    said = f"{first.where}: {first.what} (expected {first.expected}, seen {first.seen}{ratio})"
    if draws:
        return f"{said}. The forward passes draw random numbers, which differ between layouts: {draws}. {_NO_DRAWS}"
    if step.ids and twin.ids:
        return f"{said}. The rows are the same: {_DRAWS}"
    return f"{said}, and the rows are not known. {_DEAL}, or {_TELL}"


def _unequal_means(theirs: Mapping[int, StepEvent], number: int) -> str:
    """What distinguishes the first update that differs, "" unless its rows alone do not divide among the ranks."""
    step = theirs[number]
    earlier = [theirs[each] for each in theirs if each < number]
    if not earlier or not _uneven(step) or any(map(_uneven, earlier)):
        return ""
    return f"{len(step.ids)} rows on {step.world} ranks, the first that do not divide evenly: a mean of unequal means?"


def _uneven(step: StepEvent) -> bool:
    return len(step.ids) % (step.world or 1) != 0


def _unseen(history: History) -> str:
    """What could not be compared, for those who read that it holds."""
    first = next(iter(history.trajectory.values()))
    missing = [] if first.ids else ["rows (w.batch)"]
    missing += [] if first.loss is not None else ["losses (w.loss)"]
    return f"not told, so not compared: {' and '.join(missing)}" if missing else ""


def not_seeded(runs: str, apart: str) -> str:
    """Why two `runs` of one layout say nothing, which differ in `apart`, and what to do about it."""
    return f"your script is not seeded: {runs} differ, first in {apart}. {_SEED}"


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
    if apart := unlike(whole, cut, exact=exact):
        return unknown(claim, not_seeded(f"two runs on {world} ranks", apart))
    found = next(_differences(every[-len(again) :], again, exact=exact), None)
    note = "" if exact else f"{world} ranks: norms are compared, not bits"
    return conclude(claim, len(again), [found] if found else [], note=note)


def _differences(whole: list[StepEvent], again: list[StepEvent], *, exact: bool) -> Iterator[Counterexample]:
    for number, (ours, theirs) in enumerate(zip(whole, again, strict=True), start=1):
        where = f"step {ours.number}, taken up"
        yield from other_rows(ours, theirs, where)
        yield from [] if exact else measured(ours, theirs, where, number)[1].values()
        for name in DIGESTS if exact else ():  # not what it was given, nor what was told
            if _digests_differ(name, ours, theirs):
                held, seen = ours.digests.get(name), theirs.digests.get(name)
                yield Counterexample(f"the {name} is another one than without the kill", where, str(held), str(seen))


def measured(ours: StepEvent, theirs: StepEvent, where: str, number: int) -> tuple[int, dict[str, Counterexample]]:
    """How many numbers were compared, and by field those that are apart in the update `number` since both were alike.

    In causal order; a gradient of another scale explains the loss that differs too.
    """
    checked, found = 0, dict[str, Counterexample]()
    for field, what in NUMBERS.items():
        before, after = getattr(ours, field), getattr(theirs, field)
        if before is None or after is None:
            continue
        checked += 1
        if not _close(before, after, number):
            ratio = after.value / before.value if before.value and after.value is not None else None
            found[field] = Counterexample(f"{what} is another one", where, str(before), str(after), ratio)
    return checked, found


def _close(ours: Number, theirs: Number, step: int) -> bool:
    if ours.value is None or theirs.value is None:
        return ours.value == theirs.value
    return abs(theirs.value - ours.value) <= _allowed(step) * max(abs(ours.value), 1e-12)


def _allowed(step: int) -> float:
    """What rounding may do to a norm, relatively, by the update `step`."""
    return float(SCRIPT.norm * 2.0 ** min(step - 1, _DOUBLINGS))


def other_rows(ours: StepEvent, theirs: StepEvent, where: str) -> list[Counterexample]:
    """The rows that only one of two updates has, each as often as it has it; none where either names no rows."""
    if not ours.ids or not theirs.ids or Counter(ours.ids) == Counter(theirs.ids):
        return []
    only, extra = Counter(ours.ids) - Counter(theirs.ids), Counter(theirs.ids) - Counter(ours.ids)
    mine, others = samples_once.listed(only) or "no further", samples_once.listed(extra) or "none"
    return [Counterexample("other rows are trained on", where, mine, others)]
