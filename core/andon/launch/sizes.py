"""How many workers a run may have, and what becomes of their number when one dies, an agent is lost or others are asked
for (issue 5, item 3). Pure: processes are in `worker_agents`, the loop is in `elastic`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from andon.console.exits import Exit
from andon.console.problems import InputError, Problem

MAX_RESTARTS = 3
"""Restarts at one size without a new checkpoint in between, where nothing else is said."""

_AGAIN = frozenset({Exit.RANK_LOST, Exit.RANK_SILENT, Exit.CRASHED})
"""Ends of a worker after which it is worth starting again; a mistake or a broken contract would only come again."""


@dataclass(frozen=True)
class Bounds:
    """From `least` to `most` workers, both at least 1."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"


def parse_workers(text: str) -> int | Bounds:
    """`4`, or `2:4` for a number that may change. Raises `InputError` for anything else."""
    least, colon, most = text.partition(":")
    try:
        found = [int(least), int(most)] if colon else [int(least)]
    except ValueError:
        raise InputError([Problem("--workers", f"must be a number, or MIN:MAX as in 2:4 ({text!r})")]) from None
    if not colon:
        return found[0]
    if found[0] < 1 or found[1] < found[0]:
        raise InputError([Problem("--workers", f"MIN:MAX needs 1 <= MIN <= MAX ({text!r})")])
    return Bounds(found[0], found[1])


def sized(workers: str | None, max_restarts: int | None) -> tuple[int | None, Sizing | None]:
    """What `--workers` and `--max-restarts` say: the (largest) number, and how it may change where it may.

    Raises `InputError` for what is no number of workers, and for restarts where the number is fixed.
    """
    found = None if workers is None else parse_workers(workers)
    if isinstance(found, Bounds):
        return found.most, Sizing(found, MAX_RESTARTS if max_restarts is None else max_restarts)
    if max_restarts is not None:
        raise InputError([Problem("--max-restarts", "needs --workers MIN:MAX; 4:4 restarts four at the same size")])
    return found, None


@dataclass(frozen=True)
class Ended:
    """How a generation of workers ended.

    `agents`: those that are left for the next one. `lost`, `leaving`: how many agents went, by death or by a signal
    that asked them to. `wanted`: the number that was asked for meanwhile, if one was. `stopped`: a signal ended the
    run. `checkpoint`: the name of the newest one.
    """

    exit: Exit
    agents: int
    lost: int = 0
    leaving: int = 0
    wanted: int | None = None
    stopped: bool = False
    checkpoint: str = ""


@dataclass(frozen=True)
class Next:
    """What follows: `workers` go on (0: nothing does), because of `why`; `exit` where nothing goes on."""

    workers: int
    why: str
    exit: Exit = Exit.OK


@dataclass
class Sizing:
    """Decides what follows each generation of one launch."""

    bounds: Bounds
    max_restarts: int = MAX_RESTARTS
    _restarts: int = field(default=0, init=False)
    _checkpoint: str = field(default="", init=False)

    def after(self, ended: Ended) -> Next:
        """What follows this end; the run is over where `workers` is 0, and `why` is empty where it ended of itself."""
        if ended.stopped or not (ended.exit in _AGAIN or ended.exit is Exit.PREEMPTED):
            return Next(0, "", ended.exit)
        if ended.wanted is not None:
            return self._sized(ended.wanted, f"{ended.wanted} workers were asked for")
        if ended.lost or ended.leaving:
            return self._sized(ended.agents, _gone(ended))
        if ended.exit is Exit.PREEMPTED:
            return Next(0, "", ended.exit)
        return self._restarted(ended)

    def _sized(self, workers: int, why: str) -> Next:
        self._restarts = 0
        if workers < self.bounds.least:
            missing = f"{why}; {workers} left, fewer than the {self.bounds.least} of --workers {self.bounds}"
            return Next(0, missing, Exit.RANK_LOST)
        return Next(min(workers, self.bounds.most), why)

    def _restarted(self, ended: Ended) -> Next:
        if ended.checkpoint != self._checkpoint:
            self._checkpoint, self._restarts = ended.checkpoint, 0
        if self._restarts < self.max_restarts:
            self._restarts += 1
            return Next(ended.agents, f"restart {self._restarts} of {self.max_restarts} at the same size")
        why = f"{self._restarts} restarts came to no new checkpoint"
        if ended.exit is Exit.CRASHED:  # an error of the program's own comes again on fewer workers
            return Next(0, why, ended.exit)
        fewer = self._sized(ended.agents - 1, f"{why}: one worker is given up")
        return fewer if fewer.workers else Next(0, fewer.why, ended.exit)


def _gone(ended: Ended) -> str:
    parts = [(ended.lost, "lost"), (ended.leaving, "asked to leave")]
    return " and ".join(f"{count} agent{'s' if count > 1 else ''} {word}" for count, word in parts if count)
