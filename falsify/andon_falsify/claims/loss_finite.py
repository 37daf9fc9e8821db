"""Every recorded loss and gradient norm is a real number."""

from __future__ import annotations

from andon_falsify.history import History
from andon_falsify.verdict import Claim, Counterexample, Verdict, conclude

CLAIM = Claim(
    "loss-finite",
    1,
    "The loss and the norm of the reduced gradient of every update are finite.",
    "seed F-DP-003, F-DP-004",
)


def check(history: History) -> Verdict:
    """Look at the loss and the gradient norm of every update.

    Unknown where an update records no loss; a watch of a loop that tells none of any update judges the norms alone.
    """
    untold = history.start is not None and history.start.watched and all(each.loss is None for each in history.steps)
    found: list[Counterexample] = []
    checked, missing = 0, ""
    for event in history.steps:
        if event.loss is None and not untold:
            missing = missing or f"step {event.number} records no loss"
        for name, number in (("loss", event.loss), ("gradient norm", event.grad_norm)):
            if number is None:
                continue
            checked += 1
            if not number.finite:
                what = f"the {name} is not finite"
                found.append(Counterexample(what, f"step {event.number}", "a real number", str(number)))
    return conclude(CLAIM, checked, found, missing, "the loop told no loss: gradient norms only" if untold else "")
