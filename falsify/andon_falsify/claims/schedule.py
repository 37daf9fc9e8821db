"""The learning rate of every update is a closed form of its number: nothing else can advance or restart it."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from andon_falsify.history import History
from andon_falsify.verdict import Claim, Counterexample, Verdict, conclude, not_applicable

CLAIM = Claim(
    "schedule",
    1,
    "The learning rate of update t is the schedule at t, whatever the world size, the accumulation or a resume.",
    "faults F14, F61, F77",
)

Schedule = Callable[[int], float]
"""From the number of an update (1 is the first) to its learning rate."""


@dataclass(frozen=True)
class Published:
    """Linear warm-up, then from `peak` half a cosine or a line down to `minimum` at the last update, or constant.

    With T = `total` updates, w = `steps`, or floor(`fraction` * T) if that is None, for update t from 1:
        lr = peak * t / w                                                       for t <= w
        lr = minimum + (peak - minimum) * (1 + cos(pi * (t - w) / (T - w))) / 2 for t >  w, cosine
        lr = peak - (peak - minimum) * (t - w) / (T - w)                        for t >  w, linear
        lr = peak                                                               for t >  w, constant
    The peak is reached at update w and the minimum at T. A `minimum` above the peak is taken as the peak.
    """

    peak: float
    total: int
    fraction: float = 0.1
    minimum: float = 0.0
    kind: str = "cosine"
    steps: int | None = None

    def __call__(self, step: int) -> float:
        """The learning rate of update `step`; beyond `total` it stays as it is there. Raises `KeyError` for a kind."""
        low = min(self.minimum, self.peak)
        warmup = math.floor(self.fraction * self.total) if self.steps is None else self.steps
        if step <= warmup:
            return self.peak * step / warmup
        turn = min(1.0, (step - warmup) / (self.total - warmup)) if self.total > warmup else 1.0
        left = {"cosine": 0.5 + 0.5 * math.cos(math.pi * turn), "linear": 1.0 - turn, "constant": 1.0}[self.kind]
        return low + (self.peak - low) * left  # not down from the peak, which would leave its last digits at the end


def check(history: History, law: Schedule | None, tolerance: float = 1e-12) -> Verdict:
    """Compare the rate of every update, repeated ones included, with `law`.

    The difference may be `tolerance` times the largest rate that the law gives to these updates. Not applicable
    without a law; unknown where an update records no rate. A wrong rate that is another update's is named as that.
    """
    if law is None:
        return not_applicable(CLAIM, "no schedule was declared")
    expected = {event.number: law(event.number) for event in history.steps}
    allowed = tolerance * max(map(abs, expected.values()), default=0.0)
    found: list[Counterexample] = []
    lawful: list[tuple[float, int]] = []
    checked, missing = 0, ""
    for event in history.steps:
        if event.lr is None:
            missing = missing or f"step {event.number} records no learning rate"
            continue
        checked += 1
        seen, planned = event.lr.value, expected[event.number]
        if seen is None or abs(seen - planned) > allowed:
            # A loop's law is NaN for updates that it did not make, and among NaNs nothing is sorted.
            rates = ((law(step), step) for step in range(1, 4 * len(history.steps) + 1))
            lawful = lawful or sorted(each for each in rates if not math.isnan(each[0]))
            what = f"the learning rate is off the schedule{_whose(seen, lawful, allowed)}"
            found.append(Counterexample(what, f"step {event.number}", f"{planned:.9g}", str(event.lr)))
    return conclude(CLAIM, checked, found, missing)


def _whose(seen: float | None, lawful: Sequence[tuple[float, int]], allowed: float) -> str:
    """Which updates have that rate, by the `lawful` rates of four times as many as were made, ascending."""
    if seen is None or math.isnan(seen):
        return ""
    first = bisect_left(lawful, seen - allowed, key=lambda each: each[0])
    behind = bisect_right(lawful, seen + allowed, key=lambda each: each[0])
    owners = sorted(step for _, step in lawful[first : min(behind, first + 3)])
    return f": it is that of step {' or '.join(map(str, owners))}" if 1 <= len(owners) <= 2 else ""
