"""A training loop of anyone's as a subject of the suite."""

from __future__ import annotations

import os
import sys

from andon_falsify.loops.content import Recogniser
from andon_falsify.loops.protocol import Make
from andon_falsify.loops.record import trace_of
from andon_falsify.loops.sightings import LoopSightings
from andon_falsify.loops.task import distinct
from andon_falsify.loops.worker import Job
from andon_falsify.ranks.pool import RankPools
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.trace import Trace


class LoopSubject:
    """Runs cases on the ranks of `pools` with the loop that `make` gives on each of them.

    make: `package.module:function`, or the function itself where its module can be imported. name: what reports call
    it; by default the module and function. Raises `ValueError` for what cannot be found again by a rank.
    """

    def __init__(self, make: str | Make, name: str = "", pools: RankPools | None = None) -> None:
        self.make = make if isinstance(make, str) else _importable(make)
        if not all(self.make.partition(":")):
            msg = f"{self.make!r} names no loop: write package.module:make"
            raise ValueError(msg)
        self.name = name or self.make
        self._pools = RankPools() if pools is None else pools

    def run(self, case: Case) -> Trace:
        """See `Subject.run`. Rows that are equal are made distinct first (`Trace.case` has them as they were used).

        Errors of a loop, of its import, and a rank that died or did not answer are in `Trace.errors` by rank.
        Raises `ValueError` for a case that no loop can be judged on: rows that cannot be told apart.
        """
        case = case.but(rows=distinct(case.rows, case.longest), backend="gloo")
        Recogniser(case.rows)
        search = tuple(os.path.abspath(folder) for folder in (*sys.path, os.getcwd()))
        answers = self._pools.of(case.world).run(
            "andon_falsify.loops.worker:train", Job(self.make, case, tuple(dict.fromkeys(search)))
        )
        parts = [answer.value for answer in answers if isinstance(answer.value, LoopSightings)]
        errors = {rank: answer.error for rank, answer in enumerate(answers) if answer.error}
        return trace_of(case, [] if errors else parts, errors, self.name)


def _importable(make: Make) -> str:
    module, name = make.__module__, make.__qualname__
    if module == "__main__" or not name.isidentifier():
        msg = f"{module}.{name} cannot be imported by a rank: give `package.module:function`"
        raise ValueError(msg)
    return f"{module}:{name}"
