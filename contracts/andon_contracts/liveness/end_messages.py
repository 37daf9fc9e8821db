"""The messages of ends: which rank, what happened, in which step, and what else is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from andon_contracts.act import explain_command
from andon_contracts.fields import Count, Part, Seconds
from andon_contracts.liveness.process import STOPPED, Process, exit_text
from andon_contracts.violation import HALT, Cause, Kind, first_line, kind_of, named_ranks, row_lines

POINTS = ("before its forward pass", "in its forward or backward pass", "at its update")
_INFERRED = "  [inference, not proof]"


@dataclass(frozen=True)
class Position(Part):
    """The progress of a rank: its update (1 is the first), one of the `POINTS` within it, and for how long.

    last_equal: the last update after which all weights were equal.
    """

    step: Count = 0
    point: str = ""
    since_s: Seconds = 0.0
    last_equal: Count | None = None

    @property
    def order(self) -> tuple[int, int]:
        return self.step, POINTS.index(self.point) if self.point in POINTS else 0

    def at_least(self, other: Position) -> Position:
        """The position of a rank that was here before another came to `other`: all pass an update together."""
        return self if self.step >= other.step else replace(other, point="", since_s=0.0)

    def __str__(self) -> str:
        return f"step {self.step}, {self.point}" if self.point else f"step {self.step}"


@dataclass(frozen=True)
class EndMessages:
    """Builds causes on `rank` of `world`, which is at the position `at`. folder: for bundles, if any."""

    rank: int
    world: int
    at: Position
    folder: Path | None = None

    def failed(self, error: BaseException, line: str) -> Cause:
        kind = kind_of(error)
        verb = "ran out of memory" if kind == "out of memory" else "failed"
        return self._end(kind, self.rank, first_line(error), self.at, ("where", line), verb=verb)

    def died(self, rank: int, process: Process, code: int | None, kills: int, at: Position) -> Cause:
        """The process of `rank` is gone. kills: how many the kernel ended for memory since the watch began."""
        likely = f"memory ran out: the system ended {kills} process{'es' * (kills != 1)} for that since the watch began"
        row = ("likely", likely + _INFERRED if kills > 0 and code in (None, -9) else "")
        return self._end("died", rank, f"its process {process.pid} on {process.host} {exit_text(code)}", at, row)

    def stopped(self, rank: int, process: Process, at: Position) -> Cause:
        return self._end("hangs", rank, f"its process {process.pid} on {process.host} is {STOPPED}", at)

    def silent(self, rank: int, process: Process, seconds: float, at: Position) -> Cause:
        seen = f"its process {process.pid} on {process.host} has given no sign of life for {seconds:.0f} s"
        return self._end("hangs", rank, f"{seen}: it died, is stopped, or cannot be reached", at)

    def behind(self, rank: int, at: Position) -> Cause:
        seen = "its process runs, but the others waited for it until their timeout"
        return self._end("hangs", rank, f"{seen}; it passed no hook for {at.since_s:.0f} s", at)

    def ahead(self, rank: int, at: Position) -> Cause:
        seen = (
            f"it waited in a collective until its timeout, while rank {rank} has been at {at} for {at.since_s:.0f} s: "
            "one of them left out an update or a collective that the other one made"
        )
        return self._end("hangs", None, seen, self.at, verb="waited in vain")

    def passed(self, others: Mapping[int, str], waiting: int) -> Cause:
        """This rank and `waiting` others wait in a gather for `others`, which wait for them in the calls it maps to."""
        update = self.at.point == POINTS[2]
        place = f"update {self.at.step}" if update else f"a line of the watch at {self.at}"
        several, names = len(others) > 1, named_ranks(others)
        seen = (
            f"{'they are' if several else 'it is'} in {' and '.join(dict.fromkeys(others.values()))}, which rank "
            f"{self.rank} would have to join, so that none of them can go on"
        )
        head = f"{names} of {self.world} went past {place}, at which rank {self.rank} waits: {seen}"
        # One rank against several is wrong. With two ranks, either may be.
        alone = not waiting and several
        too_much = f"rank {self.rank} makes {'an update' if update else 'a call'} that the others do not make"
        likely = too_much if alone else f"{names} left it out, by a decision that was not one on all ranks"
        ranks = (self.rank,) if alone else tuple(others)
        cause = self._cause("violation", ranks[0], head, seen, self.at, ("likely", likely + _INFERRED))
        return replace(cause, ranks=ranks)

    def left(self, rank: int, at: Position) -> Cause:
        return self._end("left", rank, "it closed its watch, or ended, while the others went on", at)

    def unknown(self, error: BaseException) -> Cause:
        seen = f"another rank died, hangs or cannot be reached; which one is not known ({first_line(error)})"
        return self._end("died", None, seen, self.at, verb="lost another rank")

    def unguarded(self, guard: str, error: BaseException) -> Cause:
        """The thread `guard` ended by `error`. This rank would no longer notice the end of another."""
        seen = f"its thread {guard}, which guards it, ended by an error of its own ({first_line(error)})"
        return self._end("failed", self.rank, seen, self.at, verb="is unguarded")

    def pulled(self, reason: str) -> Cause:
        head = f"rank {self.rank} of {self.world} pulled the cord at {self.at}: {reason}"
        return self._cause("violation", self.rank, head, reason, self.at)

    def _end(
        self, kind: Kind, rank: int | None, seen: str, at: Position, *rows: tuple[str, str], verb: str = ""
    ) -> Cause:
        names = self.rank if rank is None else rank
        head = f"rank {names} of {self.world} {verb or kind} at {at}, which is no violation: {seen}"
        return self._cause(kind, rank, head, seen, at, *rows)

    def _cause(self, kind: Kind, rank: int | None, head: str, seen: str, at: Position, *rows: tuple[str, str]) -> Cause:
        place = None if self.folder is None else self.folder / str(at.step)
        rows += (
            ("state", "" if at.last_equal is None else f"last state known equal: step {at.last_equal}"),
            ("bundle", "" if place is None else f"{place}  explain: {explain_command(place)}"),
        )
        text = "\n".join([head if head.endswith(".") else f"{head}.", *row_lines(rows)])
        ranks = () if rank is None else (rank,)
        return Cause(kind, text, rank, at.step, HALT, seen, "", ranks, "" if place is None else str(place))
