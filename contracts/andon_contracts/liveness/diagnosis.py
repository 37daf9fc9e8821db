"""Concludes from the ranks' clocks and symptoms which are slow, hung or gone, and says so in words.

`RULES` is the one table by which heartbeats, watches and launchers decide.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from andon_contracts.fields import Count, Part, Seconds
from andon_contracts.liveness.process import STOPPED, Process, State, exit_text
from andon_contracts.violation import HALT, Cause, Kind, explain_command, first_line, kind_of, named_ranks, row_lines

UPDATE = "update"  # the phase in which steps are timed, and to which the deadline of a step applies
NOTICED = {"lost": 71, "silent": 72}
"""Exit codes of a rank that ends because another rank is gone ("lost"), or does not answer ("silent")."""
POINTS = ("before its forward pass", "in its forward or backward pass", "at its update")
BEFORE_FORWARD, IN_PASS, AT_UPDATE = POINTS
_INFERRED = "  [inference, not proof]"
COMPILING = "compiling update"
"""The phase of the first update of a process that compiles. It has no deadline and does not count as a usual update."""
_STEPS_KEPT, _GAPS_KEPT = 15, 64
_CPU_SHARE = 0.25
"""A process that used less CPU time than this share of a gap did not run. Native code that holds the GIL uses more."""

Conclusion = Literal["failed", "followed", "left", "died", "stopped", "silent", "behind", "there"]
"""About a peer. failed, followed: it reported that it ends by its own error, or because of another rank. left: it ended
in order. behind: the others wait for it. there: nothing is wrong with it."""


@dataclass(frozen=True)
class Symptoms:
    """What one rank or launcher observed of a peer.

    announced: it reported its own end. exit: its exit code, reported or observed, if known. stopped_s, silent_s: how
    long its process has not run, and it has sent no heartbeat. behind: it is at an earlier point than the observer.
    """

    state: State = "elsewhere"
    announced: bool = False
    exit: int | None = None
    stopped_s: float = 0.0
    silent_s: float = 0.0
    behind: bool = False


@dataclass(frozen=True)
class Patience:
    """After how many seconds a peer counts as stopped, or as silent.

    unseen: only a process that the observer cannot see, as on another machine, may count as silent.
    """

    stopped_s: float = math.inf
    silent_s: float = math.inf
    unseen: bool = False


RULES: tuple[tuple[Conclusion, Callable[[Symptoms, Patience], bool]], ...] = (
    ("followed", lambda p, _: p.announced and p.exit in NOTICED.values()),
    ("left", lambda p, _: (p.announced or p.state == "gone") and p.exit == 0),
    ("failed", lambda p, _: p.announced),
    ("died", lambda p, _: p.state == "gone"),
    ("stopped", lambda p, most: p.state == "stopped" and p.stopped_s >= most.stopped_s),
    ("silent", lambda p, most: p.silent_s >= most.silent_s and not (most.unseen and p.state in ("runs", "stopped"))),
    ("behind", lambda p, _: p.behind),
    ("there", lambda p, _: True),
)
"""The first rule that holds gives the conclusion. A rank's report of its own end comes before observations."""
ENDED_BY_ITSELF: tuple[Conclusion, ...] = ("failed", "died")
UNHEARD: tuple[Conclusion, ...] = ("stopped", "silent")
PRESENT: frozenset[Conclusion] = frozenset({"behind", "there"})


def conclude(symptoms: Symptoms, patience: Patience) -> Conclusion:
    return next(conclusion for conclusion, holds in RULES if holds(symptoms, patience))


def first_conclusion(
    concluded: Mapping[int, Conclusion], order: Iterable[Conclusion]
) -> tuple[Conclusion | None, list[int]]:
    """The first conclusion in `order` that applies to any rank, and its ranks; (None, []) if none applies."""
    for conclusion in order:
        ranks = sorted(rank for rank, each in concluded.items() if each == conclusion)
        if ranks:
            return conclusion, ranks
    return None, []


@dataclass(frozen=True)
class RankStatus(Part):
    """The state of a rank in its heartbeat. Seconds leave out the time in which its process did not run."""

    ticks: Count = 0  # how many times it has entered or left a collective; equal on ranks at the same point
    step: Count = 0
    phase: str = "start"
    waits: bool = False  # in a collective
    since_s: Seconds = 0.0  # since the last change of the fields above
    phase_s: Seconds = 0.0  # since its phase of this step began
    place: str = ""  # the line of code of its main thread, if it has been there for long
    ended: str = ""  # why it ends; empty while it runs
    exit: Count = 0
    paused_s: Seconds = 0.0  # how long its process did not run, since that change

    @property
    def where(self) -> str:
        return f"the {self.phase}" + (f" of step {self.step}" if self.step else "")


@dataclass(frozen=True)
class PeerStatus(RankStatus):
    """The last heartbeat that this rank received from another, its seconds counted on to now."""

    silent_s: float = 0.0  # the age of the heartbeat
    state: State = "elsewhere"
    host: str = ""

    @property
    def doing(self) -> str:
        seconds = max(self.since_s, 0.0 if self.waits else self.phase_s)
        return f"in {self.where} for {seconds:.1f} s" + (f", {self.place}" if self.place else "")


@dataclass(frozen=True)
class View:
    """The status of all ranks, itself included, as `rank` of `world` knows it."""

    rank: int
    world: int
    statuses: Mapping[int, PeerStatus]
    silence_s: float  # how long a live rank may send no heartbeat
    link_error: str = ""  # why no heartbeats arrive, if no rank is to blame

    @property
    def mine(self) -> PeerStatus:
        return self.statuses[self.rank]

    def concluded(self, patience: Patience) -> dict[int, Conclusion]:
        """The conclusion about each other rank. A process counts as stopped for as long as its rank is silent."""
        conclusions = {}
        for rank, peer in self.statuses.items():
            if rank != self.rank:
                code, behind = peer.exit if peer.ended else None, peer.ticks < self.mine.ticks
                symptoms = Symptoms(peer.state, bool(peer.ended), code, peer.silent_s, peer.silent_s, behind)
                conclusions[rank] = conclude(symptoms, patience)
        return conclusions

    def patience(self, stopped_s: float = 0.0, *, unseen: bool = False) -> Patience:
        """The limits for other ranks; without a limit for silence if `link_error` says why no heartbeats arrive."""
        return Patience(stopped_s, math.inf if self.link_error else self.silence_s, unseen)

    def fresh(self) -> dict[int, PeerStatus]:
        """The live ranks, including this one."""
        conclusions = self.concluded(Patience(self.silence_s, self.silence_s))
        return {rank: s for rank, s in self.statuses.items() if rank == self.rank or conclusions[rank] in PRESENT}

    def name(self, ranks: Iterable[int]) -> str:
        """`rank 1 of 4`, `ranks 1, 2 of 4`; with their hosts, if these differ from this rank's."""
        ranks = sorted(ranks)
        hosts = sorted({self.statuses[rank].host for rank in ranks} - {"", self.mine.host})
        text = f"{named_ranks(ranks)} of {self.world}"
        return f"{text} (on {', '.join(hosts)})" if hosts else text


def known_end(view: View) -> str:
    """Names the ranks whose process is gone, or that reported their own error, in words; "" if there are none."""
    return _explained(view, view.patience(), ENDED_BY_ITSELF)


def explain_timeout(view: View) -> str:
    """Explains why a wait of this rank timed out: names the ranks that are gone, stopped, silent or behind."""
    paused = f"this process did not run for {view.mine.paused_s:.1f} s (it was stopped, or its machine slept)"
    return (
        known_end(view)
        or (paused if view.mine.paused_s > view.mine.since_s else "")
        or _explained(view, view.patience(), (*UNHEARD, "followed"))
        or view.link_error
        or _explained(view, view.patience(), ("left", "behind"))
        or f"all ranks give signs of life, but no message got through in {view.mine.where}"
    )


def possible_loss(view: View) -> str:
    """Names the ranks that may have died on another machine, or reported their end; "" if there are none."""
    patience = view.patience(math.inf, unseen=True)
    known = _explained(view, patience, ("silent", "failed", "followed"))
    return known or view.link_error or _explained(view, patience, ["left"])


def _explained(view: View, patience: Patience, order: Iterable[Conclusion]) -> str:
    found, ranks = first_conclusion(view.concluded(patience), order)
    if not ranks:
        return ""
    names, peer = view.name(ranks), view.statuses[ranks[0]]
    last = f"last seen in {peer.where}"
    match found:
        case "died":
            return f"{names} {_is(ranks)} gone without a word, {last}"
        case "stopped":
            return f"{names} {_is(ranks)} {STOPPED}, {last}"
        case "silent":
            return f"{names} gave no sign of life for {peer.silent_s:.1f} s, {last}"
        case "behind":
            return f"{names} {'hangs' if len(ranks) == 1 else 'hang'} {peer.doing}"
    return f"{view.name(ranks[:1])} ended: {peer.ended}"


def all_reported(view: View) -> bool:
    """True if every live rank has sent a heartbeat in the second half of this phase. Older ones describe the first."""
    return all(peer.silent_s < view.mine.phase_s / 2 for rank, peer in view.fresh().items() if rank != view.rank)


def longest_s(view: View) -> float:
    """The longest time for which a live rank has waited in one collective, or been in one update."""
    fresh = view.fresh().values()
    return max([s.since_s for s in fresh if s.waits] + [s.phase_s for s in fresh if s.phase == UPDATE], default=0.0)


def slowness(view: View, usual_s: float) -> str:
    """Which ranks the others wait for now, as one line. A rank that failed or is gone comes before a slow one."""
    usual = f"; a step usually takes {usual_s:.2g} s" if usual_s else ""
    fresh = view.fresh()
    # A rank that was stopped a moment ago delays no other rank yet.
    unheard = view.patience(0.0 if view.link_error else view.silence_s)
    found = known_end(view) or _explained(view, view.patience(), ["followed"]) or _explained(view, unheard, UNHEARD)
    if found:
        return f"{found}; {len(fresh)} wait{'s' * (len(fresh) == 1)}{usual}"
    if view.link_error:
        return f"{view.link_error}; {view.name([view.rank])} is {view.mine.doing}{usual}"
    furthest = max(peer.ticks for peer in fresh.values())
    late = sorted(rank for rank, peer in fresh.items() if peer.ticks < furthest and not peer.waits)
    waits = [peer for peer in fresh.values() if peer.waits]
    if late:
        wait = f"{len(waits)} wait{'s' * (len(waits) == 1)} for {'it' if len(late) == 1 else 'them'}"
        return f"{view.name(late)} {_is(late)} slow: {fresh[late[0]].doing}; {wait}{usual}"
    everyone = f"all {view.world} ranks" if len(fresh) == view.world else view.name(fresh)
    if view.world == 1:
        everyone = "rank 0"
    elif waits:
        longest = max(waits, key=lambda peer: peer.since_s)
        waited = f"for {longest.since_s:.1f} s, {longest.phase_s:.1f} s after it began"
        exchange = f"exchange{'s' * (len(fresh) == 1)} data in {longest.where}"
        return f"{everyone} {exchange} {waited}: their connection is slow{usual}"
    return f"{everyone} {_is(fresh)} slow: {view.mine.doing}{usual}"


def _is(ranks: Sized) -> str:
    return "is" if len(ranks) == 1 else "are"


class Pauses:
    """Records when this process did not run since `start`: as long gaps between two samples of the clock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gaps: deque[tuple[float, float]] = deque(maxlen=_GAPS_KEPT)
        self._least_s = 0.0
        self._sampled: tuple[float, float] | None = None

    def start(self, least_s: float) -> None:
        """Count gaps of `least_s` or longer from now on. Call `sample` several times in `least_s`, from any thread."""
        with self._lock:
            self._least_s, self._sampled = least_s, (time.monotonic(), time.process_time())

    def sample(self) -> None:
        with self._lock:
            if self._sampled is None:
                return
            last, used = self._sampled
            self._sampled = now, used_now = time.monotonic(), time.process_time()
            # If the process used its CPU in the gap, it ran, and only the threads that sample waited.
            if now - last >= self._least_s and used_now - used < _CPU_SHARE * (now - last):
                self._gaps.append((last, now))

    def ran_s(self, since: float) -> tuple[float, float]:
        """The seconds after `since` (`time.monotonic`) in which this process ran, and those in which it did not."""
        now = time.monotonic()
        self.sample()
        with self._lock:
            paused = sum((max(min(end, now) - max(begin, since), 0.0) for begin, end in self._gaps), 0.0)
        return max(now - since - paused, 0.0), paused


class StepClock:
    """The clock of one rank. The training thread alone calls `at`, and `wait` and `work` before and after a collective.

    compiles: the first update compiles the passes. pauses: the heartbeat of the rank starts and samples it.
    """

    def __init__(self, *, compiles: bool = False) -> None:
        self._compiles_at: int | None = None
        self._compiled = not compiles
        self.pauses = Pauses()
        now = time.monotonic()
        self._state = (0, 0, "start", False, now, now)  # ticks, step, phase, waits, since, start of the phase
        self._durations: deque[float] = deque(maxlen=_STEPS_KEPT)

    def at(self, step: int, phase: str) -> None:
        """This rank begins `phase` of `step` (1 is the first)."""
        ticks, last, before, _, _, began = self._state
        now = time.monotonic()
        if phase == UPDATE:
            if not self._compiled:
                self._compiled, self._compiles_at = True, step
            if step == self._compiles_at:
                phase = COMPILING
        if phase == before == UPDATE and step > last:
            self._durations.append(now - began)
        # One assignment, so that other threads never read a mixture of two states.
        self._state = (ticks, step, phase, False, now, now if step != last or phase != before else began)

    def wait(self) -> None:
        self._tick(waits=True)

    def work(self) -> None:
        self._tick(waits=False)

    def _tick(self, *, waits: bool) -> None:
        ticks, step, phase, _, _, began = self._state
        self._state = (ticks + 1, step, phase, waits, time.monotonic(), began)

    def read(self) -> RankStatus:
        ticks, step, phase, waits, since, began = self._state
        since_s, paused_s = self.pauses.ran_s(since)
        return RankStatus(ticks, step, phase, waits, since_s, self.pauses.ran_s(began)[0], paused_s=paused_s)

    def usual_s(self) -> float:
        """The median duration of the last updates, in seconds; 0 before the second update."""
        durations = list(self._durations)
        return statistics.median(durations) if durations else 0.0


@dataclass(frozen=True)
class Position(Part):
    """The progress of a rank: its update (1 is the first), a point of `POINTS` in it, and how long it is there.

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
        """The least position of a rank last seen at `self` when another is at `other`: all pass an update together."""
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
        """The process of `rank` is gone. kills: how many processes the kernel killed for memory since the start."""
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
        return self._end("hangs", rank, f"{seen}; it called no hook for {at.since_s:.0f} s", at)

    def ahead(self, rank: int, at: Position) -> Cause:
        seen = (
            f"it waited in a collective until its timeout, while rank {rank} has been at {at} for {at.since_s:.0f} s: "
            "one of them left out an update or a collective that the other one made"
        )
        return self._end("hangs", None, seen, self.at, verb="timed out")

    def passed(self, others: Mapping[int, str], waiting: int) -> Cause:
        """This rank and `waiting` others wait in a gather for `others`, which maps ranks to the calls they wait in."""
        update = self.at.point == AT_UPDATE
        place = f"update {self.at.step}" if update else f"a line of the watch at {self.at}"
        several, names = len(others) > 1, named_ranks(others)
        seen = (
            f"{'they are' if several else 'it is'} in {' and '.join(dict.fromkeys(others.values()))}, which rank "
            f"{self.rank} must join, so no rank can go on"
        )
        head = f"{names} of {self.world} went past {place}, at which rank {self.rank} waits: {seen}"
        # One rank against several is wrong. With two ranks, either may be.
        alone = not waiting and several
        too_much = f"rank {self.rank} makes {'an update' if update else 'a call'} that the others do not make"
        likely = too_much if alone else f"{names} skipped it by a decision that differed between ranks"
        ranks = (self.rank,) if alone else tuple(others)
        cause = self._cause("violation", ranks[0], head, seen, self.at, ("likely", likely + _INFERRED))
        return replace(cause, ranks=ranks)

    def left(self, rank: int, at: Position) -> Cause:
        return self._end("left", rank, "it closed its watch, or ended, while the others went on", at)

    def unknown(self, error: BaseException) -> Cause:
        seen = f"another rank died, hangs or cannot be reached; which one is not known ({first_line(error)})"
        return self._end("died", None, seen, self.at, verb="lost another rank")

    def unguarded(self, guard: str, error: BaseException) -> Cause:
        """The thread `guard` ended with `error`. This rank would no longer notice the end of another rank."""
        seen = f"its thread {guard}, which guards it, failed ({first_line(error)})"
        return self._end("failed", self.rank, seen, self.at, verb="is unguarded")

    def pulled(self, reason: str) -> Cause:
        head = f"rank {self.rank} of {self.world} halted the run at {self.at}: {reason}"
        return self._cause("violation", self.rank, head, reason, self.at)

    def _end(
        self, kind: Kind, rank: int | None, seen: str, at: Position, *rows: tuple[str, str], verb: str = ""
    ) -> Cause:
        names = self.rank if rank is None else rank
        head = f"rank {names} of {self.world} {verb or kind} at {at} (not a contract violation): {seen}"
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
