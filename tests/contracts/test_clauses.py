"""The registry: every promise has a name in words, a source and a place where it is checked."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from andon_contracts.clauses import CLAUSES, Clause, Kind, clauses_table


@pytest.mark.parametrize("clause", CLAUSES.values(), ids=CLAUSES.keys())
def test_a_clause_says_all_that_it_must(clause: Clause) -> None:
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", clause.name)
    assert len(set(clause.aliases)) == len(clause.aliases)
    assert clause.kind in get_args(Kind)
    assert clause.statement.endswith(".")
    assert clause.source
    assert clause.cost
    assert clause.schedule


def test_the_seeds_contracts_have_a_clause() -> None:
    """C-DP-001, C-DP-002, F-DP-001 to 006, F-HET-001 and F-HET-002 each lead to a clause of the registry."""
    known = {alias for clause in CLAUSES.values() for alias in clause.aliases}
    asked = {"C-DP-001", "C-DP-002", "F-HET-001", "F-HET-002"} | {f"F-DP-00{number}" for number in range(1, 7)}
    assert asked <= known


def test_the_table_has_a_row_for_each_clause() -> None:
    head, rule, *rows = clauses_table().splitlines()
    assert head.count("|") == rule.count("|") == 6
    assert len(rows) == len(CLAUSES)
    for row, clause in zip(rows, CLAUSES.values(), strict=True):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells == [f"`{clause.name}`", clause.kind, clause.statement, ", ".join(clause.aliases), clause.schedule]


def test_the_registry_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        CLAUSES["finite"] = CLAUSES["samples-once"]  # type: ignore[index]
