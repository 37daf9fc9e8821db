"""Which claim judges which clause: the contracts' registry against the claims' own `clauses`.

The contracts check clauses inside a running loop; claims judge it from outside. If both are the same law, either name
selects the claim (`--claim learning-rate-planned` is `--claim schedule`). `python -m andon_falsify.claims.clauses`
prints the tables of docs/claims.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import get_args

from andon_falsify.claims import CLAIMS
from andon_falsify.verdict import Claim, Kind

NO_CLAIM: Mapping[str, str] = {
    "audit": "`gradient-law` computes the gradient again",
    "cpu-fallback": "a test of its own covers it",
    "copies-agree": "a trainer shows its model only",
    "collectives-agree": "only the effects are visible from outside",
    "scaler-agrees": "no case scales its loss",
    "trees-agree": "your code chooses the tree",
}
"""Clauses of which no claim judges a part, and why."""
ALIASES: Mapping[str, str] = {
    clause.name: claim.name
    for claim in CLAIMS
    for clause in claim.clauses
    if clause.relation == "same" and clause.name != claim.name
}
"""The claim that is the same law as a clause of another name."""
_RELATIONS = {"same": "", "part": "part of ", "other": "differs from "}


def claims_table() -> Iterator[str]:
    """Every claim in Markdown, line by line."""
    yield "claim | judged of | statement"
    yield "--- | --- | ---"
    for claim in CLAIMS:
        said = [claim.statement, *(f"Of a {kind}: {text}" for kind, text in claim.statements.items())]
        judged_of = "all" if len(claim.subjects) == len(get_args(Kind)) else ", ".join(claim.subjects)
        yield f"`{claim.name}` | {judged_of} | {' '.join(said)}"


def clauses_table() -> Iterator[str]:
    """Every clause in Markdown, with the claims that judge it."""
    from andon_contracts.clauses import CLAUSES

    yield "clause | statement | checked | claim"
    yield "--- | --- | --- | ---"
    for clause in CLAUSES.values():
        yield f"`{clause.name}` | {clause.statement} | {clause.schedule} | {_claims_of(clause.name)}"


def _claims_of(clause: str) -> str:
    related: list[tuple[Claim, str, str]] = [
        (claim, each.relation, each.note) for claim in CLAIMS for each in claim.clauses if each.name == clause
    ]
    if not related:
        return f"none: {NO_CLAIM[clause]}"
    names = ", ".join(f"`{claim.name}`" for claim, _, _ in related)
    notes = "; ".join(dict.fromkeys(note for _, _, note in related if note))
    return _RELATIONS[related[0][1]] + names + (f" ({notes})" if notes else "")


if __name__ == "__main__":
    print("\n".join([*claims_table(), "", *clauses_table()]))
