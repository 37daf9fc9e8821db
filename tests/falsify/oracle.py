"""A fake bench for campaigns: the test supplies the verdicts, and nothing is trained."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from andon_falsify.campaign.trial import HALT, LAW, MEMORY, Trial
from andon_falsify.subjects.case import Case
from andon_falsify.verdict import Claim, Counterexample, Verdict, conclude

SUM, HALTS, TABLE = (Claim(name, 1, f"It is {name}.") for name in ("sum", "halts", "table"))
Says = Callable[[Trial], Verdict]


class Oracle:
    """Keeps the trials that it gets. Each claim has its own kind of trial; the subject is called "mine"."""

    subject, version = "mine", "1.0"
    words = ("--subject", "a b:make")
    backends = every_backend = ("gloo",)
    late_after = 2.0
    claims = (SUM, HALTS, TABLE)
    kinds: Mapping[str, frozenset[str]] = {
        LAW: frozenset({"sum"}),
        HALT: frozenset({"halts"}),
        MEMORY: frozenset({"table"}),
    }

    def __init__(self, says: Says) -> None:
        self._says = says
        self.asked: list[Trial] = []

    @property
    def runs(self) -> int:
        return len(self.asked)

    def suited(self, trial: Trial) -> Trial:
        return trial

    def attempt(self, trial: Trial, claims: Collection[str] = ()) -> Mapping[str, Verdict]:
        self.asked.append(trial)
        (name,) = self.kinds[trial.kind]
        return {name: replace(self._says(trial), claim=name)}


def holds(_: Trial) -> Verdict:
    return conclude(SUM, 1, [])


def falls_with(ratio: Callable[[Case], float]) -> Says:
    return lambda trial: conclude(SUM, 1, [Counterexample("off", "step 1", ratio=ratio(trial.case))])
