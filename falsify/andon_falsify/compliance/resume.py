"""A run that is cut off and resumed, as one history."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

from andon_falsify.checkers import resume_equal
from andon_falsify.history import History
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.protocol import Subject
from andon_falsify.subjects.trace import Trace
from andon_falsify.verdict import Verdict, merge, not_applicable


@dataclass(frozen=True)
class Resumed:
    """The uninterrupted run, the one that was cut off, and the one that took it up."""

    whole: Trace
    cut: Trace
    taken_up: Trace

    @property
    def seen(self) -> History:
        """What was seen of both parts, in order."""
        return History("resumed", self.cut.seen.events + self.taken_up.seen.events)

    @property
    def verdict(self) -> Verdict:
        """Whether the resumed run is the uninterrupted one: as seen from outside, and by its own ledger.

        Not applicable where some micro-batches were computed on another kind of device than before.
        """
        if self.whole.place and self.taken_up.place not in ("", self.whole.place):
            why = f"its ranks went on on {self.taken_up.place} after {self.whole.place}, and these round otherwise"
            return not_applicable(resume_equal.CLAIM, why)
        found = [resume_equal.check(self.seen, self.whole.seen)]
        if self.taken_up.ledger is not None and self.whole.ledger is not None and self.whole.case.contracts:
            found.append(resume_equal.check(self.taken_up.ledger, self.whole.ledger))
        return merge(found)


def cut_and_resume(subject: Subject, case: Case, *, after: int, every: int, world: int, fault: str | None) -> Resumed:
    """Run `case` whole; cut another off after update `after`, with checkpoints every `every` updates; resume it.

    `world` and `fault` are those of the run that takes up. No checkpoint is written at the cut itself, as none is by a
    kill: updates after the last one are done again.
    """
    whole = subject.run(case)
    with tempfile.TemporaryDirectory(prefix="andon-resume-") as folder:
        kept = case.but(folder=folder, checkpoint_every=every)
        cut = subject.run(kept.but(stop_after=after))
        taken_up = subject.run(kept.but(world=world, fault=fault))
    return Resumed(whole, cut, taken_up)
