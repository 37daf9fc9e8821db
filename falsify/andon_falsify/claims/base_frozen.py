"""No weight that is frozen, and no buffer, changes in a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from andon_falsify.claims.evidence import Evidence, tensors
from andon_falsify.verdict import Claim, Clause, Counterexample, Verdict, conclude, first_of_many

if TYPE_CHECKING:
    from andon_falsify.claims.laws import LoopLaw

CLAIM = Claim(
    "base-frozen",
    1,
    "No frozen weight or buffer changes on any rank.",
    order=160,
    subjects=("trainer", "loop"),
    needs=(tensors("frozen tensors"),),
    clauses=(Clause("base-frozen", "same"), Clause("parameters-kept")),
)


def check(evidence: Evidence) -> Verdict:
    """Every rank's frozen tensors at the end against the start. Of a loop, nothing else of the model trains either."""
    found, checked = [], 0
    for rank, (start, end) in sorted(evidence.observed.gathered("frozen").items()):
        checked += bool(end)
        if end and start != end:
            found.append(Counterexample("a frozen weight changed", f"rank {rank}", start, end, quantity="weights"))
    extra = _unfrozen(cast("LoopLaw", evidence.law)) if evidence.of_loop else set()
    if extra:
        what, named = f"{len(extra)} frozen tensors of the model train", first_of_many(sorted(extra), 3)
        found.append(Counterexample(what, "from the start", "frozen", named, quantity="weights"))
    return conclude(CLAIM, checked, found)


def _unfrozen(law: LoopLaw) -> set[str]:
    from andon_falsify.loops.parameters import trained

    return set() if law.why_no_model else law.made_trainable - set(trained(law.plain))
