"""The learning rate of every update is a closed form of its number: nothing else can advance or restart it."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from andon_falsify.claims.evidence import Evidence
from andon_falsify.history import History
from andon_falsify.reference.published import PublishedSchedule
from andon_falsify.verdict import Claim, Clause, Counterexample, Verdict, conclude, merge, not_applicable

if TYPE_CHECKING:
    from andon_falsify.subjects.trace import Trace

CLAIM = Claim(
    "schedule",
    1,
    "Each update has the learning rate of the schedule, for any world size and accumulation, and after a resume.",
    order=90,
    subjects=("trainer", "loop", "ledger"),
    clauses=(Clause("learning-rate-planned", "same"), Clause("hyperparameters-agree")),
)
Schedule = Callable[[int], float]
"""From the number of an update (1 is the first) to its learning rate."""
_ROUNDING = 1e-12
"""Relative to the largest rate of a run."""
_FP32 = 2.0**-22
"""An optimizer may keep its rate as an fp32 tensor."""


def check(evidence: Evidence) -> Verdict:
    """The schedule is the published one, from the case or the configuration beside a ledger; of a loop its own."""
    if evidence.of_loop:
        return _of_loop(evidence.observed)
    if evidence.trace is not None:
        from andon_falsify.claims.laws import rate_law

        return check_history(evidence.history, rate_law(evidence.trace.case))
    settings, total = evidence.settings, evidence.history.plan.steps
    names = ("optimizer.lr", "schedule.warmup_fraction", "schedule.min_lr", "schedule.warmup_steps")
    numbers = [settings.get(name) for name in names]
    peak, fraction, low, steps = (float(number) if isinstance(number, int | float) else None for number in numbers)
    if peak is None or fraction is None or low is None or not total:
        return not_applicable(CLAIM, "no schedule was declared")
    kind = str(settings.get("schedule.type", "cosine"))  # old runs, which had no other, do not name it
    law = PublishedSchedule(peak, total, fraction, low, kind, None if steps is None else int(steps))
    return check_history(evidence.history, law)


def check_history(history: History, law: Schedule) -> Verdict:
    """Compare the rate of every update, repeated ones included, with `law`.

    Unknown if an update has no rate. A wrong rate that is that of another update is named so.
    """
    expected = {event.number: law(event.number) for event in history.steps}
    allowed = _ROUNDING * max(map(abs, expected.values()), default=0.0)
    lawful: list[tuple[float, int]] = []
    checked, missing, found = 0, "", []
    for event in history.steps:
        if event.lr is None:
            missing = missing or f"step {event.number} records no learning rate"
            continue
        checked += 1
        seen, planned = event.lr.value, expected[event.number]
        if seen is None or abs(seen - planned) > allowed:
            # The law of a loop is NaN for updates that it did not make, and NaN cannot be sorted.
            rates = ((law(step), step) for step in range(1, 4 * len(history.steps) + 1))
            lawful = lawful or sorted(each for each in rates if not math.isnan(each[0]))
            what = f"the learning rate is off the schedule{_owner(seen, lawful, allowed)}"
            found.append(_rate(what, f"step {event.number}", f"{planned:.9g}", str(event.lr)))
    return conclude(CLAIM, checked, found, missing)


def _rate(what: str, where: str, expected: str, seen: str) -> Counterexample:
    return Counterexample(what, where, expected, seen, quantity="learning rate")


def _owner(seen: float | None, lawful: Sequence[tuple[float, int]], allowed: float) -> str:
    if seen is None or math.isnan(seen):
        return ""
    first = bisect_left(lawful, seen - allowed, key=lambda each: each[0])
    end = bisect_right(lawful, seen + allowed, key=lambda each: each[0])
    owners = sorted(step for _, step in lawful[first : min(end, first + 3)])
    return f": it is that of step {' or '.join(map(str, owners))}" if 1 <= len(owners) <= 2 else ""


def _of_loop(trace: Trace) -> Verdict:
    import torch

    from andon_falsify.loops.sightings import LoopSightings, first_of

    first = first_of(trace)
    made, declares = sorted(first.made.items()), "schedules" in first.claims

    def law(step: int) -> float:
        wanted = first.rates.get(step, math.nan) if declares else trace.case.lr
        seen = first.made[step].rate if step in first.made else wanted
        is_fp32 = float(torch.tensor(seen, dtype=torch.float32)) == seen
        return seen if is_fp32 and math.isclose(seen, wanted, rel_tol=_FP32) else wanted

    if not declares and len({update.rate for _, update in made}) > 1:
        verdict = not_applicable(CLAIM, "the rate changes, and the loop declares no schedule (`rate`)")
    else:
        verdict = check_history(trace.seen, law)
    apart = []
    for part in trace.parts[1:]:
        assert isinstance(part, LoopSightings)
        for step, update in made:
            theirs = part.made.get(step)
            if theirs is not None and theirs.rates != update.rates:
                mine, own = (", ".join(f"{rate:.9g}" for rate in each.rates) for each in (update, theirs))
                where = f"step {step}, rank {part.ranks[0]}"
                apart.append(_rate("a different learning rate than on rank 0", where, mine, own))
                break
    for step, update in () if declares else made:
        odd = [place for place, rate in enumerate(update.rates) if not math.isclose(rate, update.rate, rel_tol=_FP32)]
        if odd:
            what = f"group {odd[0]} of the optimizer has a different learning rate than group 0"
            apart.append(_rate(what, f"step {step}", f"{update.rate:.9g}", f"{update.rates[odd[0]]:.9g}"))
            break
    return merge([verdict, conclude(CLAIM, len(made), apart)]) if apart else verdict
