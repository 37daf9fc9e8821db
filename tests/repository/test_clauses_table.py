"""The table of clauses in the docs is that of the code."""

from __future__ import annotations

import re

from andon_contracts.clauses import CLAUSES, clauses_table
from tests.repository.sources import ROOT

TABLE = (ROOT / "docs" / "clauses.md").read_text(encoding="utf-8")


def test_the_table_of_clauses_is_the_registry() -> None:
    """The table in docs is generated (`clauses_table`): a clause that was added, renamed or reworded is in it."""
    assert clauses_table() in TABLE


def test_every_clause_in_a_message_is_registered() -> None:
    """A name in the table's first column is a name that a message can have."""
    assert re.findall(r"^\| `([a-z-]+)` \|", TABLE, re.MULTILINE) == list(CLAUSES)
