"""Placeholder: merged with copies.py."""

from __future__ import annotations

from collections.abc import Mapping

from andon_contracts.causes import first_line
from andon_contracts.laws.law import Law, Observations, Seen, hexadecimal
from andon_contracts.legible import tell_once
from andon_contracts.violation import Finding
from andon_contracts.watch.check import Check, Context, Cover, OptimizerProbe, Values
from andon_contracts.watch.copies import COPIES, Copies


def _copies_agree(seen: Seen[object]) -> Finding | None:
    """A rank lacks a copy that another rank, with as many copies, kept up."""
    if "weights" in seen.differing:
        return None
    kept = [[state for i in range(COPIES) if (state := each.values[f"copy {i}"])] for each in seen.said]
    changed = [
        (len(states), state)
        for each, states in zip(seen.said, kept, strict=True)
        for place, state in enumerate(states)
        if each.values["copies changed"] >> place & 1
    ]
    ranks = tuple(
        rank
        for rank, states in enumerate(kept)
        if any(len(states) == count and state not in states for count, state in changed)
    )
    if not ranks:
        return None
    shown = ", ".join(f"rank {rank}: {' '.join(map(hexadecimal, each))}" for rank, each in enumerate(kept))
    what = f"a copy of the model beside it was kept up, and is not the same on the ranks that keep one ({shown})"
    culprits = ranks if 2 * len(ranks) < len(seen.said) else ()
    return Finding(what, max(seen.step - 1, 0), culprits, "copy of the model")


COPIED = Law("copies-agree/before", (*(f"copy {i}" for i in range(COPIES)), "copies changed"), _copies_agree)
"""One rank alone may keep a copy; all that keep one have the same."""


class ModelCopies(Check):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._copies = Copies(context.subject)
        self._updates = 0
        self._given_up = not context.ranks_have_own_rows

    def ranks_met(self) -> None:
        self._copies.portable = self.context.portable

    def cover(self) -> Mapping[str, Cover]:
        return {"copies-agree": self.context.between_ranks()}

    def meanwhile(self, probe: OptimizerProbe) -> Values:
        if self._given_up:
            return self._copies.values(0)
        try:
            return self._copies.values(self._updates + 1)
        except Exception as error:  # noqa: BLE001 - any object of the process may raise if it is asked for its class
            self._copies, self._given_up = Copies(self.context.subject), True
            why = f"an object raises {first_line(error)}"
            tell_once("copies", f"andon.watch: copies of the model are not looked for: {why}")
            return self._copies.values(0)

    def judge(self, probe: OptimizerProbe, said: Observations, aligned: Observations) -> None:
        context, step = self.context, said[0].step
        if not context.ranks_have_own_rows or not context.verdicts.alive((COPIED,)):
            return
        seen = Seen[object](said, None)
        if COPIED.check(seen) is not None:
            sketches = context.exchange(step, "copies", self._copies.sketches())
            seen = Seen(self._copies.without_roundings(said, sketches, self._updates + 1), None)
        context.verdicts.judge((COPIED,), seen, context.scene())

    def updated(self, probe: OptimizerProbe) -> None:
        self._updates += 1

    def closing_lines(self) -> list[str]:
        apart = self._copies.apart
        what = f"  copies: those of the model that the ranks keep differ by up to {apart:.1g} of their norm"
        return [f"{what}, which is rounding"] if apart else []
