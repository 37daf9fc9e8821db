"""Which claim is the law of which clause: the contracts' registry against the claims' own `clauses`.

The contracts check clauses inside a running loop; claims judge it from outside. If both are the same law, either name
selects the claim (`--claim learning-rate-planned` is `--claim schedule`). `python -m andon_falsify.claims.clauses`
prints docs/claims.md.
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
_PAGE = """\
# Claims and clauses

Everything that Andon checks. `python -m andon_falsify.claims.clauses` prints this page.

- A **claim** is a statement about a trainer that a test run can prove wrong. `andon falsify` runs a trainer and \
judges it from outside. `andon verify` judges the ledger of a finished run. [How a verdict comes about](falsify.md).
- A **clause** is a statement that a running loop checks. `andon train` and `andon.watch` evaluate clauses at each \
step. Messages and ledgers name the clause. `andon explain CLAUSE` explains one of them.

Claims and clauses share no code.

## Claims

A claim is judged of Andon's own trainer, of a loop (`--subject`), of a script (`--script`), or of a ledger \
(`andon verify`).

{claims}

## Clauses

The last column names the claim with the same meaning, or the claim that covers it and more ("part of"). \
`--claim` takes the name of a clause with the same meaning, too. A declared value is an argument of \
[the watch](watch-reference.md).

{clauses}
"""


def page() -> str:
    """The whole of docs/claims.md."""
    return _PAGE.format(claims="\n".join(_claims()), clauses="\n".join(_clauses()))


def _claims() -> Iterator[str]:
    yield "claim | judged of | statement"
    yield "--- | --- | ---"
    for claim in CLAIMS:
        said = [claim.statement, *(f"Of a {kind}: {text}" for kind, text in claim.statements.items())]
        judged_of = "all" if len(claim.subjects) == len(get_args(Kind)) else ", ".join(claim.subjects)
        yield f"`{claim.name}` | {judged_of} | {' '.join(said)}"


def _clauses() -> Iterator[str]:
    from andon_contracts.clauses import CLAUSES

    yield "clause | statement | checked | claim"
    yield "--- | --- | --- | ---"
    for clause in CLAUSES.values():
        yield f"`{clause.name}` | {clause.statement} | {clause.schedule} | {_claims_of(clause.name)}"


def _claims_of(clause: str) -> str:
    """The claims that are related to `clause`, with what is not obvious about the relation."""
    related: list[tuple[Claim, str, str]] = [
        (claim, each.relation, each.note) for claim in CLAIMS for each in claim.clauses if each.name == clause
    ]
    if not related:
        return f"none: {NO_CLAIM[clause]}"
    names = ", ".join(f"`{claim.name}`" for claim, _, _ in related)
    notes = "; ".join(dict.fromkeys(note for _, _, note in related if note))
    return _RELATIONS[related[0][1]] + names + (f" ({notes})" if notes else "")


if __name__ == "__main__":
    print(page(), end="")
