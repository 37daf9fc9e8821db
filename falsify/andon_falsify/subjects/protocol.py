"""What the suite asks of a trainer."""

from __future__ import annotations

from typing import Protocol

from andon_falsify.subjects.case import Case
from andon_falsify.subjects.trace import Trace


class Subject(Protocol):
    """A trainer that can run a case and be watched while it does."""

    name: str

    def run(self, case: Case) -> Trace:
        """Run `case` to its end, a violation, or the point where it is cut off. Errors are in the trace, not raised."""
        ...


class Remembering:
    """A subject that does not run a case again that it has run: results are a function of the case.

    Runs that keep files are not remembered. At most `most` traces are held, the oldest goes first.
    """

    def __init__(self, subject: Subject, most: int = 64) -> None:
        self.name = subject.name
        self._subject = subject
        self._most = most
        self._held: dict[Case, Trace] = {}
        self.runs = 0

    def run(self, case: Case) -> Trace:
        """See `Subject.run`."""
        if case.folder is not None:
            self.runs += 1
            return self._subject.run(case)
        if case not in self._held:
            self.runs += 1
            self._held[case] = self._subject.run(case)
            if len(self._held) > self._most:
                del self._held[next(iter(self._held))]
        return self._held[case]
