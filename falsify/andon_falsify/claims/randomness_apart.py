"""The random numbers of forward passes: every pass draws some, and no two ranks draw from the same state."""

from __future__ import annotations

from andon_falsify.claims.evidence import Evidence, tensors
from andon_falsify.verdict import Claim, Clause, Counterexample, Verdict, conclude, not_applicable

CLAIM = Claim(
    "randomness-apart",
    2,
    "Dropout and other noise draw random numbers in every training forward pass, and each rank draws different ones.",
    order=180,
    subjects=("loop",),
    runs=("random",),
    needs=(tensors("state of a generator"),),
    clauses=(Clause("modes-agree"), Clause("training-mode"), Clause("randomness-declared")),
)


def check(evidence: Evidence) -> Verdict:
    """The generator states of the ranks in each update; two equal states give the same numbers.

    If nothing draws in the run, `others["random"]` is judged instead.
    """
    draws = evidence.observed.case.dropout or evidence.observed.gathered("draws")
    other = None if draws else evidence.find("random")
    further = ", in a further run with dropout" if other is not None else ""
    trace, law = (other or evidence).observed, (other or evidence).loop_law
    undrawn: dict[tuple[int, int], bool] = trace.gathered("undrawn")
    steps = [step for _, step in undrawn if step in law.first.made]
    if law.case.dropout and steps and not law.why_no_model:
        step = min(steps)
        ranks = {rank: training for (rank, of_step), training in sorted(undrawn.items()) if of_step == step}
        where = f"step {step}, rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        seen = "nothing drawn" + ("" if all(ranks.values()) else ", the model in evaluation mode")
        what = f"training goes on without dropout, which the model has (at {law.case.dropout:g})"
        silent = Counterexample(what, where, "masks drawn in every forward pass", seen)
        return conclude(CLAIM, len(law.first.made), [silent])
    if trace.case.world == 1:
        return not_applicable(CLAIM, "one rank has no other rank to compare with")
    held: dict[tuple[int, int], str] = trace.gathered("draws")
    if not held:
        return not_applicable(CLAIM, "no forward pass draws from torch's generator")
    checked, found = 0, []
    for step in sorted(law.first.made):
        by_state: dict[str, list[str]] = {}
        for (rank, of_step), state in sorted(held.items()):
            if of_step == step:
                by_state.setdefault(state, []).append(str(rank))
        checked += sum(map(len, by_state.values())) > 1
        for same in (each for each in by_state.values() if len(each) > 1):
            state = f"ranks {', '.join(same[:-1])} and {same[-1]} have the same generator state"
            what = f"ranks draw the same random numbers in their forward passes: {state}"
            found.append(Counterexample(what, f"step {step}{further}"))
    return conclude(CLAIM, checked, found, "" if checked else "in no update did two ranks draw")
