"""The contracts of a training step and their checks: clauses, laws, digests, gathers, the ledger, and the watch."""

from __future__ import annotations

from andon_contracts.clauses import CLAUSES, Clause
from andon_contracts.violation import Finding, Violation

__all__ = ["CLAUSES", "Clause", "Finding", "Violation"]
