"""What the ranks of a watched loop know of each other without a launcher, and tell each other to halt (issue 3 item 4).

`HaltLink` carries it, over a store that is independent of every process group. `PeerMonitor` looks at it, and at the
processes of this machine; from that, `rules` conclude who is gone, stopped or silent.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from andon_contracts.causes import Cause, consequence
from andon_contracts.fields import Count, Part
from andon_contracts.liveness.end_messages import EndMessages, Position
from andon_contracts.liveness.pending_collectives import Counts, PendingCollectives, Waiting, deadlocked
from andon_contracts.liveness.process import ConditionTimer, Process, memory_kills
from andon_contracts.liveness.rules import (
    ENDED_BY_ITSELF,
    PRESENT,
    UNHEARD,
    Conclusion,
    Patience,
    Symptoms,
    conclude,
    first_conclusion,
)
from andon_contracts.liveness.signed import SignedStore
from andon_contracts.liveness.store_link import MOST_CHARACTERS, Heartbeats, StoreLink, parse_strict

LOOK_S = 0.5  # how often a rank looks out for trouble
_EVERY_LOOK, _CALM = 16, 4  # after so many looks at the ranks that wait for this one, only every fourth asks them
POLL_S = 0.2  # how often a rank reads whether there is a cause to halt
_HURRIED_S = 0.02  # the same until it has heard of all ranks nearby, and once there is a cause
_BEAT_S = 1.0
_ANSWER_S = 1.0
_NEAR = 32  # so many ranks on either side may run on the same machine, where their processes can be looked at
_PULLED = "pulled"
_WARNED = "unguarded"


@dataclass(frozen=True)
class Progress(Part):
    """The heartbeat of a rank of a watched loop, sent every second."""

    at: Position
    pending: Counts


@dataclass(frozen=True)
class RankWarning(Part):
    """A warning of one rank to all others, for which nobody halts."""

    rank: Count
    text: str


@dataclass(frozen=True)
class StoreReport:
    left: frozenset[int]  # all ranks that have left in order
    at: Mapping[int, Position]  # where each rank was a second ago


class Listener(Protocol):
    """What a link calls, in its own thread: for the cause, its heartbeat, a warning of another rank, and its own end.

    `unguarded` returns the cause for which all halt, or the text with which the others are warned.
    """

    def learn(self, cause: Cause) -> None: ...
    def progress(self) -> Progress: ...
    def warn(self, text: str) -> None: ...
    def unguarded(self, thread: str, error: Exception) -> Cause | str: ...


class HaltLink:
    """The line between the ranks. Only its thread waits for the store; all methods return after a bounded time.

    The first cause that any rank puts under the key "pulled" is the cause of all. Each rank puts it back if somebody
    deletes it. store_host: the rank in whose process the store lives; None if it outlives the ranks.
    """

    def __init__(
        self, store: SignedStore, rank: int, world: int, listener: Listener, store_host: int | None = None
    ) -> None:
        self.processes: Mapping[int, Process] = {}
        self.ended: frozenset[int] = frozenset()  # the ranks nearby that know the cause and have left their evidence
        self.left: frozenset[int] = frozenset()  # the ranks nearby that had left in order when the cause came
        self.broken = False  # the store is gone, and its store_host did not say good-bye
        self.silent_s = 0.0  # how long the next rank, on another machine, has sent no heartbeat
        self._store, self._rank, self._world, self._listener = store, rank, world, listener
        self.store_host, self.following, self.reader = store_host, (rank + 1) % world, store.reader
        self._told = ""  # the cause as it is on the store, once it is known
        self._store_host_left = False
        self._beats, self._beat_at = Heartbeats(store, rank, Progress, self.reader), 0.0
        self._silence, self._heard_last = ConditionTimer(2 * _BEAT_S), object()
        self._near = sorted({(rank + offset) % world for offset in range(-_NEAR, _NEAR + 1)} - {rank})
        self._met = threading.Event()
        # Before the thread has the store, so that a rank that dies at once has said which process it was.
        self._beats.send(listener.progress())
        self._link = StoreLink("andon-halt-link", self._routine, self._failed)

    # For the other threads of this rank.

    def meet(self) -> None:
        """Wait until this rank knows the processes nearby; to be called after all ranks have made their link."""
        self._met.wait(5 * _ANSWER_S)

    def publish(self, cause: Cause) -> None:
        self._link.post(lambda: self._pull(cause))

    def warn(self, text: str) -> None:
        self._link.post(lambda: self._spread(text))

    def acknowledge(self) -> None:
        """Tell the others that this rank knows the cause and has left its evidence."""
        self._link.post(lambda: self._store.set(f"ended {self._rank}", "1"))

    def ask(self) -> StoreReport | None:
        return self._link.ask(self._news, _ANSWER_S)

    def heard(self) -> Mapping[int, Counts]:
        """What the ranks nearby have begun, by their last heartbeats; empty if the store does not answer in time."""
        beats = self._link.ask(lambda: self._beats.read(self._near), _ANSWER_S) or {}
        return {rank: beat.status.pending for rank, beat in beats.items()}

    def answers(self) -> bool:
        return self._link.answers(_ANSWER_S)

    def leave(self) -> None:
        """Say that this rank is done and will not be missed, and end the thread. Takes at most two seconds."""
        self._link.close(self._say_goodbye, 2 * _ANSWER_S)

    # The thread.

    def _routine(self) -> float | None:
        """One look at the store. Returns the seconds until the next, or None once no rank needs this one any more."""
        if not self._told:
            self._take(self._store.get(_PULLED))
        if self._told:
            if self._store.read(_PULLED, self._form) is None:  # the others have to find it too
                self._store.set(_PULLED, self._told)
            self.ended, self.left = self._marked("ended", self._near), self._marked("left", self._near)
            return _HURRIED_S
        if not self.processes:
            heard = self._beats.read(self._near)
            if len(heard) == len(self._near):
                self.processes = {rank: beat.process for rank, beat in heard.items()}
                self._met.set()
        if (
            self.store_host is not None
            and self.store_host != self._rank
            and self._store.check([f"left {self.store_host}"])
        ):
            self._store_host_left = True
            self._store.set(f"saw {self._rank}", "1")
            return None
        if time.monotonic() - self._beat_at >= _BEAT_S:
            self._beat()
        return POLL_S if self.processes else _HURRIED_S

    def _failed(self, error: Exception) -> None:
        ours = isinstance(error, RecursionError | NotImplementedError)
        if isinstance(error, RuntimeError | OSError) and not ours:
            self.broken = not self._store_host_left  # the store is gone: its store_host ended, in order or not
            return
        told = self._listener.unguarded("andon-halt-link", error)
        with suppress(Exception):  # the error may come from this very store
            self._spread(told) if isinstance(told, str) else self._pull(told)
        if not isinstance(told, str) and not self._told:
            self._listener.learn(told)  # at least this rank acts on it

    def _beat(self) -> None:
        self._beat_at = time.monotonic()
        self._beats.send(self._listener.progress())
        said = self._store.read(_WARNED, lambda body: parse_strict(RankWarning, body))
        if said is not None and said.rank != self._rank:
            self._listener.warn(said.text)
        rank = self.following
        if rank in self.processes and self.processes[rank].local_state() == "elsewhere":
            heard = self._beats.read([rank]).get(rank)
            silent = [rank] if heard is not None and heard is self._heard_last else []
            # Counts only the seconds in which this thread ran, so that a pause of the whole job accuses nobody.
            self.silent_s, self._heard_last = self._silence.update(silent).get(rank, 0.0), heard

    def _pull(self, cause: Cause) -> None:
        told = self._encoded(cause)
        self._take(self._store.compare_set(_PULLED, "", told))
        if not self._told:  # a rank signed what is there, but it is not a cause
            self._store.set(_PULLED, told)
            self._take(told.encode())

    def _spread(self, text: str) -> None:
        self._store.set(_WARNED, json.dumps(RankWarning(self._rank, text[:MOST_CHARACTERS]).to_json()))

    def _encoded(self, cause: Cause) -> str:
        """The cause as the others can read it: an error that the loop raised may contain anything."""
        cause = replace(cause, text=cause.text[:MOST_CHARACTERS], seen=cause.seen[:MOST_CHARACTERS])
        try:
            told = json.dumps(cause.to_json())
            self._form(json.loads(told))
            return told
        except (TypeError, ValueError):
            return json.dumps(Cause(cause.kind, cause.text, cause.rank).to_json())

    def _take(self, raw: bytes) -> None:
        cause = self.reader.read(_PULLED, raw, self._form) if raw and not self._told else None
        if cause is not None:
            self._told = raw.decode()
            self._listener.learn(cause)

    def _form(self, body: object) -> Cause:
        return parse_strict(Cause, body).checked(self._world)

    def _marked(self, mark: str, ranks: Iterable[int]) -> frozenset[int]:
        return frozenset(rank for rank in ranks if self._store.check([f"{mark} {rank}"]))

    def _news(self) -> StoreReport:
        beats = self._beats.read(range(self._world))
        return StoreReport(
            self._marked("left", range(self._world)), {rank: beat.status.at for rank, beat in beats.items()}
        )

    def _say_goodbye(self) -> None:
        self._beat()
        self._store.set(f"left {self._rank}", "1")
        if self.store_host is not None and self.store_host != self._rank:
            self._store.set(f"saw {self._rank}", "1")
        elif self.store_host is not None and not self._told:
            # The store ends with this process. The others must not take that for its death.
            others = [f"saw {rank}" for rank in range(self._world) if rank != self._rank]
            deadline = time.monotonic() + 3 * POLL_S
            while not self._store.check(others) and time.monotonic() < deadline:
                time.sleep(POLL_S / 20)


class PeerMonitor:
    """What one rank sees of the others: the processes of its machine, and the heartbeats of the next rank elsewhere."""

    def __init__(self, link: HaltLink, rank: int, patience_s: float, pending: PendingCollectives) -> None:
        self._link, self._rank, self._patience_s, self._pending = link, rank, patience_s, pending
        self._waiting: Waiting | None = None
        self._left: set[int] = set()
        self._looks, self._kills, self._stopped = 0, memory_kills() or 0, ConditionTimer(LOOK_S)

    def trouble(self, messages: EndMessages) -> Cause | None:
        """Every `LOOK_S`: a rank that died, is stopped or silent for too long, or in a deadlock with this one."""
        processes = self._link.processes
        lasting = self._stopped.update(
            rank for rank, process in processes.items() if process.local_state() == "stopped"
        )
        late = any(seconds >= self._patience_s for seconds in (self._link.silent_s, *lasting.values()))
        seen, news = self._look(ask=late)  # a rank that has left in order is not missed
        seen = {rank: replace(each, stopped_s=lasting.get(rank, 0.0)) for rank, each in seen.items()}
        return self._cause(messages, seen, news, self._patience_s, (*ENDED_BY_ITSELF, *UNHEARD)) or self._deadlock(
            messages
        )

    def missing(self, messages: EndMessages, error: BaseException) -> Cause | None:
        """The rank for which the collective that raised `error` waited: dead, stopped, gone in order, or behind."""
        waited = consequence(error) == "silent"
        seen, news = self._look(ask=True)
        order: tuple[Conclusion, ...] = (*ENDED_BY_ITSELF, *UNHEARD, "left")
        found = self._cause(messages, seen, news, 0.0, (*order, "behind") if waited else order)
        if found is not None or news is None or not waited:
            return found
        ahead = max(news.at, key=lambda rank: news.at[rank].order, default=self._rank)
        further = ahead != self._rank and news.at[ahead].order > news.at.get(self._rank, messages.at).order
        return messages.ahead(ahead, news.at[ahead]) if further else None

    def unaware(self) -> Mapping[int, Process]:
        """The ranks of this machine that live, have not left, and have not said that they know the cause."""
        known = self._link.ended | self._link.left | self._left
        # A store that does not answer says nothing of who knows. That a process is stopped, no store has to say.
        states = ("runs", "stopped") if self._link.answers() else ("stopped",)
        processes = self._link.processes.items()
        return {rank: process for rank, process in processes if process.local_state() in states and rank not in known}

    def lowest_live(self) -> bool:
        """Whether this rank is the lowest that lives, and so writes what one rank has to write."""
        processes = self._link.processes
        if not processes:
            return self._rank == 0
        states = [processes[rank].local_state() for rank in processes if rank < self._rank]
        before = {conclude(Symptoms(state), Patience(stopped_s=0.0)) for state in states}
        return len(states) == self._rank and not PRESENT & before

    def _deadlock(self, messages: EndMessages) -> Cause | None:
        """Ranks nearby that wait for this one, while it waits for them in a gather."""
        waiting = self._pending.waiting
        self._looks = self._looks + 1 if waiting is self._waiting else 0
        self._waiting = waiting
        if waiting is None or self._looks < 1 or (self._looks > _EVERY_LOOK and self._looks % _CALM):
            return None
        told = self._link.heard()
        found = deadlocked(waiting, told)
        # If it still is the same gather, this rank has begun nothing since before the others told.
        if not found or self._pending.waiting is not waiting:
            return None
        return messages.passed(found, sum(each.gathers >= waiting.gather for each in told.values()))

    def _look(self, *, ask: bool) -> tuple[dict[int, Symptoms], StoreReport | None]:
        """What is seen of the others, and what the store says, if it is asked: with `ask`, or if a process is gone."""
        link = self._link
        states = {rank: process.local_state() for rank, process in link.processes.items()}
        gone = {rank for rank, state in states.items() if state == "gone"} - self._left
        codes = {rank: link.processes[rank].exit_code() for rank in gone}
        news = link.ask() if ask or gone else None
        told = news or StoreReport(frozenset(), {})
        self._left |= {rank for rank in gone if codes[rank] == 0 or rank in told.left}
        left, mine = self._left | told.left, told.at.get(self._rank)
        seen: dict[int, Symptoms] = {}
        for rank in sorted((states.keys() | told.at.keys() | told.left) - {self._rank}):
            store_host_lost = link.broken and rank == link.store_host
            if news is None and rank in gone - left and not store_host_lost:
                continue  # the store has yet to say whether it left in order
            silent_s = math.inf if store_host_lost and rank in states else link.silent_s * (rank == link.following)
            behind = mine is not None and rank in told.at and told.at[rank].order < mine.order
            code = 0 if rank in left else codes.get(rank)
            seen[rank] = Symptoms(states.get(rank, "elsewhere"), rank in left, code, 0.0, silent_s, behind)
        return seen, news

    def _cause(
        self,
        messages: EndMessages,
        seen: Mapping[int, Symptoms],
        news: StoreReport | None,
        stopped_s: float,
        order: Iterable[Conclusion],
    ) -> Cause | None:
        patience = Patience(stopped_s, self._patience_s, unseen=True)
        found, ranks = first_conclusion({rank: conclude(each, patience) for rank, each in seen.items()}, order)
        if not ranks:
            return None
        told = {} if news is None else news.at
        if found == "behind" and told:
            last = min(ranks, key=lambda rank: told[rank].order)
            return messages.behind(last, told[last])
        rank, news = ranks[0], news or self._link.ask()
        at = (Position() if news is None else news.at.get(rank, Position())).at_least(messages.at)
        if found == "left":
            return messages.left(rank, at)
        process = self._link.processes[rank]
        if found == "stopped":
            return messages.stopped(rank, process, at)
        if found == "silent":
            return messages.silent(rank, process, self._link.silent_s, at)
        kills = (memory_kills() or 0) - self._kills  # 0 if the system does not count them
        return messages.died(rank, process, seen[rank].exit, kills, at)
