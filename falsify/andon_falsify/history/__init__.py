"""A history: the events of one run in order, read from a ledger or written by a test.

A check sees the history alone, never the system under test (the rule of Elle). Reading is tolerant and bounded: a line
that cannot be parsed is listed in `History.unread` and the rest is read. Only a missing or unreadable file raises.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from andon_falsify.history.events import Event as Event
from andon_falsify.history.events import LineError, Plan, StartEvent, parse_line
from andon_falsify.history.events import Number as Number
from andon_falsify.history.events import RowId as RowId
from andon_falsify.history.events import RowSet as RowSet
from andon_falsify.history.events import StepEvent as StepEvent
from andon_falsify.history.events import Unread as Unread

MAX_LINE_BYTES = 16 * 2**20
MAX_LINES = 1_000_000
_EARLY = "early-stopping"
FP32_BITS = 24


@dataclass(frozen=True)
class Run:
    """The events of one process group: from a start or a resume to the next of these."""

    events: tuple[Event, ...]

    @property
    def resumed(self) -> bool:
        return bool(self.events) and self.events[0].kind == "resume"

    @property
    def steps(self) -> tuple[StepEvent, ...]:
        return tuple(event for event in self.events if isinstance(event, StepEvent))

    @property
    def finished(self) -> bool:
        """Whether its last event says that it completed: it was not cut off, halted or preempted."""
        return self._end in ("finished", _EARLY)

    @property
    def stopped_early(self) -> bool:
        """Whether a stopping rule ended it before the last planned update."""
        return self._end == _EARLY

    @property
    def _end(self) -> object:
        last = self.events[-1] if self.events else None
        return None if last is None or last.kind != "end" else last.fields.get("reason", "finished")


@dataclass(frozen=True)
class History:
    """Events and unreadable lines of one run, in the order of the file. Messages call it by its `name`.

    sketch: of a script's first gradient, () if unknown. bits: of the coarsest significand that it computes with.
    """

    name: str
    events: tuple[Event, ...]
    unread: tuple[Unread, ...] = ()
    sketch: tuple[float, ...] = ()
    bits: int = FP32_BITS

    @cached_property
    def start(self) -> StartEvent | None:
        return next((event for event in self.events if isinstance(event, StartEvent)), None)

    @property
    def plan(self) -> Plan:
        """The plan of the start line; an empty plan if there is no such line."""
        return self.start.plan if self.start is not None else Plan()

    @cached_property
    def steps(self) -> tuple[StepEvent, ...]:
        """Every update in the order of the file: an update that a resumed run repeats is there twice."""
        return tuple(event for event in self.events if isinstance(event, StepEvent))

    @cached_property
    def retracted(self) -> frozenset[int]:
        """The lines of retracted updates: a retraction takes back all updates above the number that it keeps."""
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
        """The updates that count, by number: the last occurrence of each that was not retracted."""
        last = {event.number: event for event in self.steps if event.line not in self.retracted}
        return {number: last[number] for number in sorted(last)}

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The history, cut before every start and every resume."""
        parts: list[list[Event]] = []
        for event in self.events:
            if event.kind in ("start", "resume") or not parts:
                parts.append([])
            parts[-1].append(event)
        return tuple(Run(tuple(part)) for part in parts)

    @property
    def torn(self) -> bool:
        """Whether the last line was cut short."""
        last = max((event.line for event in self.events[-1:]), default=0)
        return any(line.torn and line.line > last for line in self.unread[-1:])

    def of_kind(self, kind: str) -> tuple[Event, ...]:
        return tuple(event for event in self.events if event.kind == kind)

    def lines(self) -> tuple[Event | Unread, ...]:
        """All lines, readable or not, by number."""
        return tuple(sorted((*self.events, *self.unread), key=lambda line: line.line))


def read_history(path: Path | str, *, max_lines: int = MAX_LINES, max_line_bytes: int = MAX_LINE_BYTES) -> History:
    """Read the ledger at `path`: at most `max_lines` lines, and at most `max_line_bytes` of each.

    The rest is one `Unread`. Raises `OSError` if the file cannot be opened or read, and nothing else.
    """
    with Path(path).open("rb") as file:
        return read_lines(_bounded(iter(lambda: file.readline(max_line_bytes + 1), b"")), str(path), max_lines)


def read_lines(lines: Iterable[bytes], name: str, max_lines: int = MAX_LINES) -> History:
    """The history of `lines`, each with its newline. A line without its newline is unread, and torn if it is last."""
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
    """The `prev` that the next line must have: 16 hex digits of the SHA-256 of this line without its newline."""
    return hashlib.sha256(line).hexdigest()[:16]


def _bounded(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Pieces of a file to lines: of an overlong line the first piece, without a newline.

    Reading stops at an endless line, as of a file with holes: lines after it could not be linked to the chain.
    """
    within = 0
    for piece in pieces:
        if not within:
            yield piece
        within = 0 if piece.endswith(b"\n") else within + 1
        if within > 16:
            return


def _read(raw: bytes, number: int, before: str) -> Event | Unread:
    text = raw.removesuffix(b"\n")
    digest, excerpt = chain_digest(text), text[:80].decode("utf-8", "backslashreplace")
    if text == raw:
        return Unread(number, "no newline: cut short in writing, or longer than is read", excerpt, digest, torn=True)
    try:
        return parse_line(text.decode("utf-8"), number, digest, before)
    except UnicodeDecodeError as error:
        return Unread(number, f"not UTF-8: {error.reason} at byte {error.start}", excerpt, digest)
    except LineError as error:
        return Unread(number, str(error), excerpt, digest)
