"""The random numbers of forward passes: every pass draws some, and no two ranks draw from the same state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from andon_falsify.claims.evidence import Evidence, tensors
from andon_falsify.verdict import Claim, Clause, Counterexample, Verdict, conclude, not_applicable

if TYPE_CHECKING:
    from andon_falsify.claims.laws import LoopLaw

CLAIM = Claim(
    "randomness-apart",
    2,
    "Dropout and other noise draw random numbers in every training forward pass, and each rank draws different ones.",
    order=180,
    subjects=("loop",),
    runs=("random",),
    needs=(tensors("state of a generator"),),
    clauses=(
        Clause("modes-agree"),
        Clause("training-mode"),
        Clause("randomness-declared"),
    ),
)


def check(evidence: Evidence) -> Verdict:
    """The generator states of the ranks in each update; two equal states give the same numbers.

    If nothing draws in the run, `others["random"]` is judged instead.
    """
    if not evidence.observed.case.dropout and not evidence.observed.gathered("draws"):
        evidence = evidence.find("random") or evidence
    trace, law = evidence.observed, cast("LoopLaw", evidence.law)
    silent = list(_undrawn(law))
    if silent:
        return conclude(CLAIM, len(law.first.made), silent)
    if trace.case.world == 1:
        return not_applicable(CLAIM, "one rank has nobody to draw the same as")
    held: dict[tuple[int, int], str] = trace.gathered("draws")
    if not held:
        return not_applicable(CLAIM, "no forward pass draws from torch's generator")
    found: list[Counterexample] = []
    checked = 0
    for step in sorted(law.first.made):
        by_state: dict[str, list[str]] = {}
        for (rank, of_step), state in sorted(held.items()):
            if of_step == step:
                by_state.setdefault(state, []).append(str(rank))
        checked += sum(map(len, by_state.values())) > 1
        same = [f"ranks {', '.join(ranks)}" for ranks in by_state.values() if len(ranks) > 1]
        if same:
            what = "ranks draw the same random numbers in their forward passes"
            wanted = "another state of the generator on every rank"
            found.append(Counterexample(what, f"step {step}", wanted, "; ".join(same)))
    return conclude(CLAIM, checked, found, "" if checked else "in no update did two ranks draw")


def _undrawn(law: LoopLaw) -> Iterator[Counterexample]:
    """The first update in which a rank's forward pass drew nothing, though the case's model has dropout."""
    held: dict[tuple[int, int], bool] = law.trace.gathered("undrawn")
    steps = [step for _, step in held if step in law.first.made]
    if not law.case.dropout or not steps or law.why_no_model:
        return
    step = min(steps)
    ranks = {rank: training for (rank, of_step), training in sorted(held.items()) if of_step == step}
    where = f"step {step}, rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    seen = "nothing drawn" + ("" if all(ranks.values()) else ", the model in evaluation mode")
    what = f"training goes on without dropout, which the model has (at {law.case.dropout:g})"
    yield Counterexample(what, where, "masks drawn in every forward pass", seen)
