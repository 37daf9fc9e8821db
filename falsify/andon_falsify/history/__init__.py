"""What a subject left behind: its events in order, read from a ledger or written by a test, and nothing else.

A checker sees only this (Elle's rule: the one input is a history, never the system). Reading is tolerant and bounded:
a line that does not parse is reported in `History.unread` and the rest is read; only a missing file raises.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from andon_falsify.history.events import Event, Number, Plan, RankStep, RowId, StartEvent, StepEvent, Unread
from andon_falsify.history.parse import LineError, parse_line

__all__ = [
    "Event",
    "History",
    "Number",
    "Plan",
    "RankStep",
    "RowId",
    "Run",
    "StartEvent",
    "StepEvent",
    "Unread",
    "chain_digest",
    "read_history",
    "read_lines",
]

MAX_LINE_BYTES = 16 * 2**20
MAX_LINES = 1_000_000
_EXCERPT = 80
_MOST_PIECES = 16
_EARLY = "early-stopping"
_COMPLETE = ("finished", _EARLY)


@dataclass(frozen=True)
class Run:
    """A stretch of a history by one process group: from a start or a resume to the next of these."""

    events: tuple[Event, ...]

    @property
    def resumed(self) -> bool:
        """Whether it took up an earlier run."""
        return bool(self.events) and self.events[0].kind == "resume"

    @property
    def steps(self) -> tuple[StepEvent, ...]:
        """Its updates in the order in which they were written."""
        return tuple(event for event in self.events if isinstance(event, StepEvent))

    @property
    def finished(self) -> bool:
        """Whether its last word is that it did all it meant to do: nothing was cut off, broken or preempted."""
        last = self.events[-1] if self.events else None
        return last is not None and last.kind == "end" and last.fields.get("reason", "finished") in _COMPLETE

    @property
    def stopped_early(self) -> bool:
        """Whether its last word is that it stopped by a rule of its own, with planned updates left."""
        return self.finished and self.events[-1].fields.get("reason") == _EARLY


@dataclass(frozen=True)
class History:
    """Events and unreadable lines of one subject, in the order of the file. `name` is what messages call it."""

    name: str
    events: tuple[Event, ...]
    unread: tuple[Unread, ...] = ()

    @cached_property
    def start(self) -> StartEvent | None:
        """The first start line."""
        return next((event for event in self.events if isinstance(event, StartEvent)), None)

    @property
    def plan(self) -> Plan:
        """What was planned; an empty plan where no start line says."""
        return self.start.plan if self.start is not None else Plan()

    @cached_property
    def steps(self) -> tuple[StepEvent, ...]:
        """Every update as written: one that a resumed run did again appears again."""
        return tuple(event for event in self.events if isinstance(event, StepEvent))

    @cached_property
    def retracted(self) -> frozenset[int]:
        """The lines of updates that a later line takes back: all before it with a number above the one it names."""
        if not self.of_kind("retraction"):
            return frozenset()
        found: set[int] = set()
        standing: list[tuple[int, int]] = []  # a heap, the highest number first
        for event in self.events:
            if isinstance(event, StepEvent):
                heapq.heappush(standing, (-event.number, event.line))
            elif event.kind == "retraction":
                while standing and -standing[0][0] > (event.step or 0):
                    found.add(heapq.heappop(standing)[1])
        return frozenset(found)

    @cached_property
    def trajectory(self) -> Mapping[int, StepEvent]:
        """The updates that count: the last occurrence of each that was not taken back, by rising number."""
        last = {event.number: event for event in self.steps if event.line not in self.retracted}
        return {number: last[number] for number in sorted(last)}

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The history cut before every start and every resume; what precedes the first of them is a run as well."""
        parts: list[list[Event]] = []
        for event in self.events:
            if event.kind in ("start", "resume") or not parts:
                parts.append([])
            parts[-1].append(event)
        return tuple(Run(tuple(part)) for part in parts)

    @property
    def torn(self) -> bool:
        """Whether the last line was cut short."""
        lines = self.lines()
        return bool(lines) and isinstance(lines[-1], Unread) and lines[-1].torn

    def of_kind(self, kind: str) -> tuple[Event, ...]:
        """The events of one kind."""
        return tuple(event for event in self.events if event.kind == kind)

    def lines(self) -> tuple[Event | Unread, ...]:
        """All lines, readable or not, by number."""
        return tuple(sorted((*self.events, *self.unread), key=lambda line: line.line))


def read_history(path: Path | str, *, max_lines: int = MAX_LINES, max_line_bytes: int = MAX_LINE_BYTES) -> History:
    """Read the ledger at `path`.

    At most `max_lines` lines are read and at most `max_line_bytes` of each are kept; what lies beyond is one `Unread`.
    Raises `OSError` where the file cannot be opened or read, and nothing else.
    """
    with Path(path).open("rb") as file:
        return read_lines(_bounded(iter(lambda: file.readline(max_line_bytes + 1), b"")), str(path), max_lines)


def read_lines(lines: Iterable[bytes], name: str, max_lines: int = MAX_LINES) -> History:
    """The history of `lines`, each with its newline (one without is torn when last, reported in any case)."""
    events: list[Event] = []
    unread: list[Unread] = []
    before = ""
    for number, raw in enumerate(lines, start=1):
        if number > max_lines:
            unread.append(Unread(number, f"more than {max_lines} lines; the rest was not read", "", ""))
            break
        read = _read(raw, number, before)
        before = read.digest
        if isinstance(read, Unread):
            unread.append(read)
        else:
            events.append(read)
    return History(name, tuple(events), tuple(unread))


def chain_digest(line: bytes) -> str:
    """What the next line's `prev` must be: 16 hex digits of the SHA-256 of this line's bytes without the newline."""
    return hashlib.sha256(line).hexdigest()[:16]


def _bounded(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Pieces of a file to lines: an overlong line is passed on once, cut and without its newline.

    One without end, as of a file with holes, is the last: whatever came after it would be linked to nothing.
    """
    within = 0
    for piece in pieces:
        if not within:
            yield piece
        within = 0 if piece.endswith(b"\n") else within + 1
        if within > _MOST_PIECES:
            return


def _read(raw: bytes, number: int, before: str) -> Event | Unread:
    text = raw.removesuffix(b"\n")
    digest = chain_digest(text)
    excerpt = text[:_EXCERPT].decode("utf-8", "backslashreplace")
    if text == raw:
        return Unread(number, "no newline: cut short in writing, or longer than is read", excerpt, digest, torn=True)
    try:
        return parse_line(text.decode("utf-8"), number, digest, before)
    except UnicodeDecodeError as error:
        return Unread(number, f"not UTF-8: {error.reason} at byte {error.start}", excerpt, digest)
    except LineError as error:
        return Unread(number, str(error), excerpt, digest)
