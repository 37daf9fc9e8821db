"""Which claim is the law of which clause: the contracts' registry against the claims' own `clauses`.

The contracts check clauses inside a running loop; claims judge it from outside. If both are the same law, either name
selects the claim (`--claim learning-rate-planned` is `--claim schedule`). `python -m andon_falsify.claims.clauses`
prints the table of docs/clauses-and-claims.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from andon_falsify.claims import CLAIMS

NO_CLAIM: Mapping[str, str] = {
    "audit": "what is computed again inside is computed in float64 by `gradient-law`",
    "cpu-fallback": "a table of calls in `falsify/power` tests the choice",
    "copies-agree": "a trainer under trial shows its model alone",
    "collectives-agree": "seen from outside only in what comes of it",
    "scaler-agrees": "no case scales its loss",
    "trees-agree": "what is compared is the user's to say",
}
"""Clauses of which no claim judges a part, and why."""
ALIASES: Mapping[str, str] = {
    clause.name: claim.name
    for claim in CLAIMS
    for clause in claim.clauses
    if clause.relation == "same" and clause.name != claim.name
}
"""The claim that is the same law as a clause of another name."""
_WORDS = {"same": "the same law", "part": "of more, this among it", "other": "**another law**"}


def table() -> Iterator[str]:
    """The clauses with their claims in Markdown, line by line, in the order of the contracts' registry."""
    from andon_contracts.clauses import CLAUSES

    yield "| clause | claim | the claim is | |"
    yield "| --- | --- | --- | --- |"
    for name in CLAUSES:
        kin = [(claim.name, clause) for claim in CLAIMS for clause in claim.clauses if clause.name == name]
        if kin:
            claims = ", ".join(f"`{claim}`" for claim, _ in kin)
            notes = "; ".join(dict.fromkeys(clause.note for _, clause in kin if clause.note))
            yield f"| `{name}` | {claims} | {_WORDS[kin[0][1].relation]} | {notes} |"
        elif name in NO_CLAIM:
            yield f"| `{name}` |  | none | {NO_CLAIM[name]} |"
    yield ""
    yield "| claim without a clause | since it |"
    yield "| --- | --- |"
    yield from (f"| `{claim.name}` | {claim.unwatched} |" for claim in CLAIMS if claim.unwatched)


if __name__ == "__main__":
    print("\n".join(table()))
