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
    subjects=("trainer", "loop", "ledger"),
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
    """Compare each layout (label -> tensors in order) with the first and name the first tensor that differs.

    Not applicable to a single layout, unknown for none and where the first is empty.
    """
    if not layouts:
        return unknown(CLAIM, "no layout was recorded")
    if len(layouts) == 1:
        return not_applicable(CLAIM, "one layout has nothing to equal")
    (label, first), *others = layouts.items()
    found = [
        difference for name, layout in others if (difference := _difference(label, first, name, layout)) is not None
    ]
    return conclude(CLAIM, len(others) * len(first), found, "" if first else f"the layout of {label} is empty")


def _difference(label: str, first: Sequence[Tensor], name: str, layout: Sequence[Tensor]) -> Counterexample | None:
    for index, (expected, seen) in enumerate(zip_longest(first, layout)):
        if expected != seen:
            where = f"tensor {index}, {name} against {label}"
            return Counterexample("the layout differs", where, _shown(expected), _shown(seen), quantity="layout")
    return None


def _shown(tensor: Tensor | None) -> str:
    return "no tensor" if tensor is None else f"{tensor[0]} {list(tensor[1])} {tensor[2]}"
