"""What must hold during training, and how it is checked: clauses, digests, the pipe, the record."""

from __future__ import annotations

from andon_contracts.clauses import CLAUSES, Clause, clauses_table
from andon_contracts.violation import Finding, Violation

__all__ = ["CLAUSES", "Clause", "Finding", "Violation", "clauses_table"]
