"""What the suite asks of a trainer."""

from __future__ import annotations

from typing import Protocol

from andon_falsify.subjects.case import Case
from andon_falsify.subjects.trace import Trace


class Subject(Protocol):
    """A trainer that can run a case and be watched while it does."""

    name: str

    def run(self, case: Case) -> Trace:
        """Run `case` to its end, a violation, or the point where it is cut off. An error is in the trace, not raised."""
        ...
