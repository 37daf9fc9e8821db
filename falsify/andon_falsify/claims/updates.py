"""Compares two records of one update: from another layout, or from a resumed run.

`bits` are compared if the subject promises equal bits. `NUMBERS` are compared, within rounding, if it only reports
numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from andon_falsify.claims.rounding import EXACT, Rounding, roughly
from andon_falsify.claims.samples_once import listed
from andon_falsify.history import History, StepEvent
from andon_falsify.verdict import Claim, Counterexample, Quantity, Verdict, unknown

NUMBERS: Mapping[str, tuple[Quantity, str]] = {
    "lr": ("learning rate", "the learning rate"),
    "grad_norm": ("norm", "the norm of the reduced gradient"),
    "loss": ("loss", "the reported loss"),
    "weights_norm": ("weights", "the norm of the weights after the update"),
}
"""The numbers of an update, in causal order: what they are of, and their name in words."""
DIGESTS: tuple[Quantity, ...] = ("gradient", "weights", "optimizer")
"""What an update computes, in causal order."""
INPUTS = frozenset({"rows", "learning rate", "content"})
"""The inputs of an update. If an input differs it is the cause; equal inputs alone prove nothing."""
QUANTITIES: Mapping[str, Quantity] = {
    **{name: name for name in (*DIGESTS, "rows", "loss", "learning rate")},
    "content": "rows",
    "grad_norm": "norm",
}
"""What each name of `bits` is a number of."""
_SEED = (
    "Call torch.manual_seed(0), and random.seed(0) and numpy.random.seed(0) if it uses them, before it creates the "
    "model and the data"
)


def bits(event: StepEvent) -> dict[str, str]:
    """Everything that must be equal to the bit, in causal order; what was not recorded is absent."""
    found = {
        "rows": " ".join(map(str, event.ids)) or None,
        "content": event.digests.get("content"),
        "loss": event.loss.hex if event.loss else None,
        "gradient": event.digests.get("gradient"),
        "grad_norm": event.grad_norm.hex if event.grad_norm else None,
        "learning rate": event.lr.hex if event.lr else None,
        "weights": event.digests.get("weights"),
        "optimizer": event.digests.get("optimizer"),
    }
    return {name: value for name, value in found.items() if value is not None}


def different_numbers(
    ours: StepEvent, theirs: StepEvent, where: str, number: int, noise: Rounding = EXACT
) -> tuple[int, dict[str, Counterexample]]:
    """How many numbers were compared, and by field those that differ, in causal order.

    number: of the update, counted from the one before which both runs were equal; rounding grows with it.
    """
    checked, found = 0, dict[str, Counterexample]()
    for field, (quantity, what) in NUMBERS.items():
        before, after = getattr(ours, field), getattr(theirs, field)
        if before is None or after is None:
            continue
        checked += 1
        mine, other = before.value, after.value
        both = mine is not None and other is not None
        if abs(other - mine) > noise.allowed(field, number) * max(abs(mine), 1e-12) if both else mine != other:
            ratio = other / mine if mine and other is not None else None
            shown = (where, str(before), str(after), ratio)
            found[field] = Counterexample(f"{what} differs", *shown, quantity=quantity)
    return checked, found


def different_rows(ours: StepEvent, theirs: StepEvent, where: str) -> list[Counterexample]:
    """The rows that only one of two updates has; empty if they have the same rows, or either reports none."""
    mine, others = Counter(ours.ids), Counter(theirs.ids)
    if not mine or not others or mine == others:
        return []
    shown = (listed(mine - others) or "no further", listed(others - mine) or "none")
    return [Counterexample("the rows differ", where, *shown, quantity="rows")]


def unseeded(claim: Claim, runs: str, first: History, again: History, *, exact: bool = False) -> Verdict | None:
    """Unknown if `runs` of one layout differ, which then prove nothing. None if they do not differ.

    exact: compare bits, not norms.
    """
    difference = _first_difference(first, again, exact=exact)
    why = f"your script is not seeded: {runs} differ, first in {difference}"
    return unknown(claim, why, remedy=_SEED) if difference else None


def _first_difference(first: History, again: History, *, exact: bool) -> str:
    started = [run.start.initial_weights for run in (first, again) if run.start is not None]
    if len(set(started)) > 1 and None not in started:
        return "the weights that it begins with"
    noise = roughly(first.bits)
    for number in sorted(first.trajectory.keys() & again.trajectory.keys()):
        step, twin = first.trajectory[number], again.trajectory[number]
        apart = ["the rows"] if different_rows(step, twin, "") else []
        since = number if noise.coarse else 1
        apart += [NUMBERS[field][1] for field in different_numbers(step, twin, "", since, noise)[1]]
        apart += [f"the {name}" for name in DIGESTS if exact and step.digests.get(name) != twin.digests.get(name)]
        if apart:
            return f"{apart[0]} at step {number}"
    return ""
