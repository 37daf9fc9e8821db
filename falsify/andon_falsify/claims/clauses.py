"""Which claim is the law of which clause: the contracts' registry against the falsifier's, clause by clause.

A clause is what a running loop is held to from inside, a claim what is judged of it from outside. Where both are the
same law, either name selects the claim (`--claim learning-rate-planned` is `--claim schedule`); reports keep the name
that they always had. `python -m andon_falsify.claims.clauses` prints the table as docs/clauses-and-claims.md has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Relation = Literal["same", "part", "other", "none"]
"""same: one law. part: the claims judge more than the clause, it among that. other: one name or word for two laws."""


@dataclass(frozen=True)
class Kinship:
    """A clause and the claims that judge it from outside; the note says what is not obvious."""

    clause: str
    relation: Relation
    claims: tuple[str, ...] = ()
    note: str = ""


MAP: tuple[Kinship, ...] = (
    Kinship("replicas-agree", "same", ("replicas-agree",), "the claim holds the two clauses below as well"),
    Kinship("optimizers-agree", "part", ("replicas-agree",)),
    Kinship("gradients-agree", "part", ("replicas-agree",)),
    Kinship(
        "finite",
        "other",
        ("loss-finite", "halt-together"),
        "the clause is of every micro-batch, before the update; `loss-finite` is of the losses and norms that are told "
        "afterwards, and what a NaN must do is `halt-together`",
    ),
    Kinship(
        "halt-together",
        "other",
        ("halt-together",),
        "the clause: all ranks are at the same step and point, and stop there together or not at all; the claim: what "
        "is not finite stops them all before its update, which the clause `finite` calls for",
    ),
    Kinship("samples-once", "same", ("samples-once",), "the claim looks at epochs as well, the clause at each batch"),
    Kinship("content-planned", "part", ("samples-once",), "of a loop, whose rows are recognised by their content"),
    Kinship("gradient-average", "part", ("gradient-law",)),
    Kinship("clip-once", "part", ("update-law", "norm-law")),
    Kinship("learning-rate-planned", "same", ("schedule",)),
    Kinship("one-update", "part", ("update-law",)),
    Kinship("updates-planned", "part", ("plan-followed", "samples-once")),
    Kinship("base-frozen", "same", ("base-frozen",)),
    Kinship("layout-equal", "same", ("layout-equal",)),
    Kinship("start-agrees", "part", ("replicas-agree",), "of a loop, the initial weights"),
    Kinship("audit", "none", (), "what is computed again inside is computed in float64 by `gradient-law`"),
    Kinship("loss-equivalent", "same", ("losses-close",)),
    Kinship("memory-budget", "same", ("memory-budget",)),
    Kinship("cpu-fallback", "none", (), "a table of calls in `falsify/power` tests the choice"),
    Kinship("checkpoint-whole", "part", ("resume-equal",), "what was not saved whole shows where a run goes on"),
    Kinship("resume-exact", "same", ("resume-equal",)),
    Kinship("hyperparameters-agree", "part", ("schedule", "update-law")),
    Kinship("groups-planned", "part", ("update-law",)),
    Kinship("modes-agree", "part", ("randomness-apart",)),
    Kinship("order-renewed", "part", ("samples-once",), "of our trainer, whose plan has an order for each epoch"),
    Kinship("training-mode", "part", ("randomness-apart",)),
    Kinship("clip-placed", "part", ("update-law", "gradient-law")),
    Kinship("copies-agree", "none", (), "a trainer under trial shows its model alone"),
    Kinship("ranks-joined", "part", ("replicas-agree",), "of ranks that train apart"),
    Kinship("buffers-agree", "part", ("replicas-agree",), "of a loop, its running statistics"),
    Kinship("parameters-kept", "part", ("update-law", "base-frozen", "gradient-law")),
    Kinship("gradient-present", "part", ("gradient-law",)),
    Kinship("gradient-fresh", "part", ("gradient-law",)),
    Kinship("update-applied", "part", ("update-law",)),
    Kinship("precision-sufficient", "part", ("update-law",)),
    Kinship("collectives-agree", "none", (), "seen from outside only in what comes of it"),
    Kinship("gradient-law", "same", ("gradient-law",)),
    Kinship("gradient-scale", "part", ("gradient-law",)),
    Kinship("loss-reported", "part", ("losses-close",)),
    Kinship("scaler-agrees", "none", (), "no case scales its loss"),
    Kinship("randomness-declared", "part", ("randomness-apart",), "that streams differ which must"),
    Kinship("evaluation-once", "same", ("evaluation-law",)),
    Kinship("trees-agree", "none", (), "what is compared is the user's to say"),
)
"""In the order of the contracts' registry."""
ALONE: Mapping[str, str] = {
    "same-everywhere": "needs another run",
    "chain-intact": "is of the record, which a run cannot judge of itself",
    "heads-quoted": "is of the record and the files beside it",
}
"""Claims that no clause has a part of, and why."""
ALIASES: Mapping[str, str] = {
    each.clause: each.claims[0] for each in MAP if each.relation == "same" and each.clause != each.claims[0]
}
"""The claim that is the same law as a clause of another name."""


def table() -> Iterator[str]:
    """The map in Markdown, line by line."""
    words = {"same": "the same law", "part": "of more, this among it", "other": "**another law**", "none": "none"}
    yield "| clause | claim | the claim is | |"
    yield "| --- | --- | --- | --- |"
    for each in MAP:
        claims = ", ".join(f"`{name}`" for name in each.claims)
        yield f"| `{each.clause}` | {claims} | {words[each.relation]} | {each.note} |"
    yield ""
    yield "| claim without a clause | since it |"
    yield "| --- | --- |"
    yield from (f"| `{name}` | {why} |" for name, why in ALONE.items())


if __name__ == "__main__":
    print("\n".join(table()))
