"""Looking out for ranks that ended without a word, are stopped, or keep the others waiting."""

from __future__ import annotations

from collections.abc import Mapping

from andon_contracts.causes import Cause, consequence
from andon_contracts.liveness.end_messages import Teller, Whereabouts
from andon_contracts.liveness.halt_link import HaltLink, News
from andon_contracts.liveness.pending_collectives import PendingCollectives, Waiting, stuck
from andon_contracts.liveness.process import Lasting, Process, memory_kills

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
        found = self.gone(teller)
        if found is not None:
            return found
        processes = self._link.processes
        stopped = self._stopped.look(rank for rank, process in processes.items() if process.look() == "stopped")
        late = [rank for rank, seconds in stopped.items() if seconds >= self._patience_s]
        if late:
            return teller.stopped(late[0], processes[late[0]], _at(teller, late[0], self._link.ask()))
        return self._silent(teller) or self._stuck(teller)

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

    def gone(self, teller: Teller) -> Cause | None:
        """A rank whose process is gone without having left in order."""
        for rank, process in self._link.processes.items():
            if rank in self._left or process.look() != "gone":
                continue
            code, news = process.exit_code(), self._link.ask()
            if code == 0 or (news is not None and rank in news.left):
                self._left.add(rank)
                continue
            if news is None and not (self._link.broken and rank == self._link.keeper):
                continue  # the store does not say whether it left in order
            now = memory_kills()
            kills = 0 if now is None or self._kills is None else now - self._kills
            return teller.died(rank, process, code, kills, _at(teller, rank, news))
        return None

    def missing(self, teller: Teller, error: BaseException) -> Cause | None:
        """Whom a collective waited for that raised `error`: one that is stopped, left, or is behind all others."""
        for rank, process in self._link.processes.items():
            if process.look() == "stopped":
                return teller.stopped(rank, process, _at(teller, rank, self._link.ask()))
        news = self._link.ask()
        if news is None:
            return None
        left = sorted(news.left - {self._rank})
        if left:
            return teller.left(left[0], _at(teller, left[0], news))
        if consequence(error) != "silent":
            return None
        at = news.at
        last = min(at, key=lambda rank: at[rank].order, default=self._rank)
        first = max(at, key=lambda rank: at[rank].order, default=self._rank)
        if not at or at[last].order == at[first].order:
            return None
        return teller.ahead(first, at[first]) if last == self._rank else teller.behind(last, at[last])

    def unaware(self) -> Mapping[int, Process]:
        """The ranks on this machine that live, have not left, and have not said that they know of the cause."""
        seen = {rank: (process, process.look()) for rank, process in self._link.processes.items()}
        known = self._link.ended | self._link.left | self._left
        # A store that does not answer says nothing about who knows; that a process is stopped needs no store.
        states = ("runs", "stopped") if self._link.answers() else ("stopped",)
        return {rank: process for rank, (process, state) in seen.items() if state in states and rank not in known}

    def lowest_live(self) -> bool:
        """Whether no rank before this one is there to write what one rank has to write."""
        before = [process for rank, process in self._link.processes.items() if rank < self._rank]
        if not self._link.processes:
            return self._rank == 0
        return len(before) == self._rank and all(process.look() in ("gone", "stopped") for process in before)

    def _silent(self, teller: Teller) -> Cause | None:
        rank, seconds = self._link.following, self._link.silent_s
        if seconds < self._patience_s and not self._keeper_lost():
            return None
        rank = self._link.keeper if self._keeper_lost() and self._link.keeper is not None else rank
        return teller.silent(rank, self._link.processes[rank], seconds, _at(teller, rank, self._link.ask()))

    def _keeper_lost(self) -> bool:
        keeper = self._link.keeper
        there = self._link.broken and keeper is not None and keeper in self._link.processes
        return there and keeper is not None and self._link.processes[keeper].look() == "elsewhere"


def _at(teller: Teller, rank: int, news: News | None) -> Whereabouts:
    told = None if news is None else news.at.get(rank)
    return (told or Whereabouts()).at_least(teller.at)
