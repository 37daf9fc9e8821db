"""A short window that is divided as a full one: a ratio that is chance, unless it is read as what the window has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isclose

from andon_falsify.checkers.ratio import show_ratio
from andon_falsify.loops.law import LoopLaw
from andon_falsify.loops.record import global_batch
from andon_falsify.subjects.case import Case
from andon_falsify.verdict import Counterexample, Outcome, Verdict

CAUSE = "a short window is divided as a full one"


def short_window(ratio: float, visits: Sequence[Sequence[tuple[int, ...]]], case: Case) -> str:
    """`0.667 = 2 of 3 micro-batches: a short window ...`, where that is what the ratio of an update is; else "".

    visits: the rows of each micro-batch of each rank. A sum that should be divided by what there is, is divided by the
    micro-batches, rows or ranks of a full window instead.
    """
    windows = [sum(map(bool, leaves)) for leaves in visits]
    rows = sum(len(leaf) for leaves in visits for leaf in leaves)
    alike = len(set(windows)) == 1
    there = {
        "micro-batches": (windows[0], case.accumulation) if alike else (sum(windows), case.accumulation * case.world),
        "rows": (rows, global_batch(case)),
        "ranks with rows": (sum(map(bool, windows)), case.world),
    }
    fitting = [
        f"{held} of {full} {name}"
        for name, (held, full) in there.items()
        if 0 < held < full and isclose(ratio, held / full, rel_tol=1e-3)
    ]
    return f"{show_ratio(ratio)} = {' or '.join(fitting)}: {CAUSE}" if fitting else ""


def named_by_window(law: LoopLaw, found: Mapping[int, Verdict]) -> list[Verdict]:
    """The verdicts on updates, with ratios that are due to short windows named so: full windows are right then.

    Without a full window, or with one that fell, nothing tells a short one from a wrong average, and all stay.
    """
    full = [step for step in found if _rows(law, step) == global_batch(law.case)]
    if not full or any(found[step].outcome is Outcome.FALSIFIED for step in full):
        return list(found.values())
    return [
        replace(verdict, counterexamples=tuple(_named(law, step, each) for each in verdict.counterexamples))
        for step, verdict in found.items()
    ]


def _rows(law: LoopLaw, step: int) -> int:
    return sum(len(leaf) for leaves in law.visits(step) for leaf in leaves)


def _named(law: LoopLaw, step: int, found: Counterexample) -> Counterexample:
    equals = "" if found.ratio is None else short_window(found.ratio, law.visits(step), law.case)
    return replace(found, equals=equals) if equals else found
