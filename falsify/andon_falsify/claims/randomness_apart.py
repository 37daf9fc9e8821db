"""Random numbers of forward passes: that they are drawn, and that no two ranks draw from the same state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from andon_falsify.claims.evidence import Evidence
from andon_falsify.claims.loop_law import LoopLaw
from andon_falsify.claims.run_law import RunLaw
from andon_falsify.claims.statements import RANDOMNESS
from andon_falsify.loops.sightings import first_of
from andon_falsify.subjects.trace import Trace
from andon_falsify.verdict import Counterexample, Verdict, conclude, not_applicable


def randomness(evidence: Evidence) -> Verdict:
    """The states from which the ranks drew in each update; two that are equal gave the same numbers.

    Before that, that the case's model with dropout draws at all, on one rank too.
    """
    trace = evidence.sightings
    still = list(_undrawn(trace, evidence.law))
    if still:
        return conclude(RANDOMNESS, len(first_of(trace).made), still)
    if trace.case.world == 1:
        return not_applicable(RANDOMNESS, "one rank has nobody to draw the same as")
    held: dict[tuple[int, int], str] = trace.gathered("draws")
    if not held:
        return not_applicable(RANDOMNESS, "no forward pass draws from torch's generator")
    found: list[Counterexample] = []
    checked = 0
    for step in sorted(first_of(trace).made):
        states = {rank: state for (rank, of_step), state in sorted(held.items()) if of_step == step}
        checked += len(states) > 1
        found += _same(step, states)
    missing = "" if checked else "in no update did two ranks draw"
    return conclude(RANDOMNESS, checked, found, missing)


def _same(step: int, states: Mapping[int, str]) -> Iterator[Counterexample]:
    by_state: dict[str, list[str]] = {}
    for rank, state in states.items():
        by_state.setdefault(state, []).append(str(rank))
    if len(by_state) < len(states):
        same = "; ".join(f"ranks {', '.join(ranks)}" for ranks in by_state.values() if len(ranks) > 1)
        what = "ranks draw the same random numbers in their forward passes"
        yield Counterexample(what, f"step {step}", "another state of the generator on every rank", same)


def _undrawn(trace: Trace, law: RunLaw) -> Iterator[Counterexample]:
    """The first update in which a rank's forward pass drew nothing, though the case's model has dropout."""
    held: dict[tuple[int, int], bool] = trace.gathered("undrawn")
    steps = [step for _, step in held if step in first_of(trace).made]
    if not trace.case.dropout or not steps or not isinstance(law, LoopLaw) or law.why_no_model:
        return
    step = min(steps)
    ranks = {rank: training for (rank, of_step), training in sorted(held.items()) if of_step == step}
    where = f"step {step}, rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    seen = "nothing drawn" + ("" if all(ranks.values()) else ", the model in evaluation mode")
    what = f"training goes on without dropout, which the model has (at {trace.case.dropout:g})"
    yield Counterexample(what, where, "masks drawn in every forward pass", seen)
