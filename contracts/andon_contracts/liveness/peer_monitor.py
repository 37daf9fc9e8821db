"""What a watch sees of the other ranks, without a launcher: from that, `rules` say who is gone, stopped or silent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from andon_contracts.causes import Cause, consequence
from andon_contracts.liveness.end_messages import Teller, Whereabouts
from andon_contracts.liveness.halt_link import HaltLink, News
from andon_contracts.liveness.pending_collectives import PendingCollectives, Waiting, stuck
from andon_contracts.liveness.process import Lasting, Process, memory_kills
from andon_contracts.liveness.rules import (
    ENDED_BY_ITSELF,
    PRESENT,
    UNHEARD,
    Conclusion,
    Patience,
    Seen,
    conclude,
    first,
)

LOOK_S = 0.5
"""How often a rank looks out for trouble."""
_HURRIED, _CALM = 16, 4
"""After so many looks at those that this rank waits for, only every so many-th is one."""


class PeerMonitor:
    """What one rank sees of the others: on its own machine their processes, elsewhere the next rank's signs of life."""

    def __init__(self, link: HaltLink, rank: int, patience_s: float, begun: PendingCollectives) -> None:
        """patience_s: how long a process may be stopped, or one on another machine silent."""
        self._link, self._rank, self._patience_s, self._begun = link, rank, patience_s, begun
        self._waiting: Waiting | None = None
        self._looks = 0
        self._kills = memory_kills()
        self._left: set[int] = set()
        self._stopped = Lasting(LOOK_S)

    def trouble(self, teller: Teller) -> Cause | None:
        """A rank that died, has been stopped or silent for too long, or waits for this one as this one waits for it.

        Asked every `LOOK_S`.
        """
        processes = self._link.processes
        lasting = self._stopped.look(rank for rank, process in processes.items() if process.look() == "stopped")
        late = any(seconds >= self._patience_s for seconds in (self._link.silent_s, *lasting.values()))
        seen, news = self._look(ask=late)  # who has left in order is not missed
        seen = {rank: replace(each, stopped_s=lasting.get(rank, 0.0)) for rank, each in seen.items()}
        return self._cause(teller, seen, news, self._patience_s, (*ENDED_BY_ITSELF, *UNHEARD)) or self._stuck(teller)

    def missing(self, teller: Teller, error: BaseException) -> Cause | None:
        """Whom a collective waited for that raised `error`: a rank that died, is stopped, left, or is behind others."""
        waited = consequence(error) == "silent"
        seen, news = self._look(ask=True)
        order: tuple[Conclusion, ...] = (*ENDED_BY_ITSELF, *UNHEARD, "left")
        found = self._cause(teller, seen, news, 0.0, (*order, "behind") if waited else order)
        if found is not None or news is None or not waited:
            return found
        ahead = max(news.at, key=lambda rank: news.at[rank].order, default=self._rank)
        further = ahead != self._rank and news.at[ahead].order > news.at.get(self._rank, teller.at).order
        return teller.ahead(ahead, news.at[ahead]) if further else None

    def _stuck(self, teller: Teller) -> Cause | None:
        """Ranks nearby that wait for this one, which waits for them in a gather; asked again as long as it does."""
        waiting = self._begun.waiting
        self._looks = self._looks + 1 if waiting is self._waiting else 0
        self._waiting = waiting
        if waiting is None or self._looks < 1 or (self._looks > _HURRIED and self._looks % _CALM):
            return None
        told = self._link.heard()
        found = stuck(waiting, told)
        # As long as it is the same gather, nothing that this rank has begun has changed since before the others told.
        if not found or self._begun.waiting is not waiting:
            return None
        return teller.passed(found, sum(each.gathers >= waiting.gather for each in told.values()))

    def unaware(self) -> Mapping[int, Process]:
        """The ranks on this machine that live, have not left, and have not said that they know of the cause."""
        seen = {rank: (process, process.look()) for rank, process in self._link.processes.items()}
        known = self._link.ended | self._link.left | self._left
        # A store that does not answer says nothing about who knows; that a process is stopped needs no store.
        states = ("runs", "stopped") if self._link.answers() else ("stopped",)
        return {rank: process for rank, (process, state) in seen.items() if state in states and rank not in known}

    def lowest_live(self) -> bool:
        """Whether no rank before this one is there to write what one rank has to write."""
        before = {rank: process for rank, process in self._link.processes.items() if rank < self._rank}
        if not self._link.processes:
            return self._rank == 0
        concluded = [conclude(Seen(process.look()), Patience(stopped_s=0.0)) for process in before.values()]
        return len(before) == self._rank and not PRESENT.intersection(concluded)

    def _look(self, *, ask: bool) -> tuple[dict[int, Seen], News | None]:
        """What is seen of the others now; with what the store says, where it was asked: `ask`, or for one that is gone.

        Nothing of one that is gone where the store does not say whether it left in order.
        """
        link = self._link
        states = {rank: process.look() for rank, process in link.processes.items()}
        gone = {rank for rank, state in states.items() if state == "gone"} - self._left
        codes = {rank: link.processes[rank].exit_code() for rank in gone}
        news = link.ask() if ask or gone else None
        told = News(frozenset(), {}) if news is None else news
        self._left |= {rank for rank in gone if codes[rank] == 0 or rank in told.left}
        left, mine = self._left | told.left, told.at.get(self._rank)
        seen: dict[int, Seen] = {}
        for rank in sorted((states.keys() | told.at.keys() | told.left) - {self._rank}):
            keeper_lost = link.broken and rank == link.keeper
            if news is None and rank in gone - left and not keeper_lost:
                continue
            silent_s = math.inf if keeper_lost and rank in states else link.silent_s * (rank == link.following)
            behind = mine is not None and rank in told.at and told.at[rank].order < mine.order
            code = 0 if rank in left else codes.get(rank)
            seen[rank] = Seen(states.get(rank, "elsewhere"), rank in left, code, 0.0, silent_s, behind)
        return seen, news

    def _cause(
        self,
        teller: Teller,
        seen: Mapping[int, Seen],
        news: News | None,
        stopped_s: float,
        order: Iterable[Conclusion],
    ) -> Cause | None:
        """The first of these conclusions that is come to of any rank, as a cause; None: none is."""
        patience = Patience(stopped_s, self._patience_s, unseen=True)
        found, ranks = first({rank: conclude(each, patience) for rank, each in seen.items()}, order)
        if not ranks:
            return None
        if found == "behind" and news is not None:
            last = min(ranks, key=lambda rank: news.at[rank].order)
            return teller.behind(last, news.at[last])
        rank = ranks[0]
        at = _at(teller, rank, news or self._link.ask())
        if found == "left":
            return teller.left(rank, at)
        process = self._link.processes[rank]
        if found == "stopped":
            return teller.stopped(rank, process, at)
        if found == "silent":
            return teller.silent(rank, process, self._link.silent_s, at)
        now = memory_kills()
        kills = 0 if now is None or self._kills is None else now - self._kills
        return teller.died(rank, process, seen[rank].exit, kills, at)


def _at(teller: Teller, rank: int, news: News | None) -> Whereabouts:
    told = None if news is None else news.at.get(rank)
    return (told or Whereabouts()).at_least(teller.at)
