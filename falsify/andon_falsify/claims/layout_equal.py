"""All ranks and backends have the same layout of trainable tensors: names, shapes, types, order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from andon_falsify.claims.evidence import Evidence, tensors
from andon_falsify.verdict import Claim, Clause, Counterexample, Verdict, conclude, not_applicable, unknown

CLAIM = Claim(
    "layout-equal",
    1,
    "The gradient has the same names, shapes, dtypes and order on every rank and backend.",
    order=120,
    subjects=("trainer", "loop"),
    needs=(tensors("layout of tensors"),),
    clauses=(Clause("layout-equal", "same"),),
)
Tensor = tuple[str, tuple[int, ...], str]
"""Name, shape and element type of one tensor."""


def check(evidence: Evidence) -> Verdict:
    """Every rank's trained tensors, in the order of their addresses."""
    held = sorted(evidence.observed.gathered("layouts").items())
    return check_layouts({f"rank {rank}": layout for rank, layout in held})


def check_layouts(layouts: Mapping[str, Sequence[Tensor]]) -> Verdict:
    """Compare each layout (label -> tensors in order) with the first and name the first tensor that differs."""
    if not layouts:
        return unknown(CLAIM, "no layout was recorded")
    if len(layouts) == 1:
        return not_applicable(CLAIM, "one layout has nothing to equal")
    (label, first), *others = layouts.items()
    found = []
    for name, layout in others:
        for index, (expected, seen) in enumerate(zip_longest(first, layout)):
            if expected != seen:
                sides = (f"{each[0]} {list(each[1])} {each[2]}" if each else "no tensor" for each in (expected, seen))
                where, (wanted, held) = f"tensor {index}, {name} against {label}", sides
                found.append(Counterexample("the layout differs", where, wanted, held, quantity="layout"))
                break
    return conclude(CLAIM, len(others) * len(first), found, "" if first else f"the layout of {label} is empty")
