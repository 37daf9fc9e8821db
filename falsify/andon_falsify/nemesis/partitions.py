"""Hosts that are cut off each other, on runs under torchrun: rows 12 to 15 of the catalogue (issue 5, item 5)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import permutations

from andon_falsify.nemesis.between_hosts import ANSWER_S, ENDS, STRIKES, BetweenHosts, ranks_of
from andon_falsify.nemesis.host import Host
from andon_falsify.nemesis.processes import identified
from andon_falsify.nemesis.protocol import Nemesis, NotStruckError, Promise, Struck
from andon_falsify.nemesis.run import TIMEOUT_S, Run

_WITHIN_S = TIMEOUT_S + 2.0
_ARRIVES_S = 5.0
"""How long a datagram may take that is to arrive, on a machine that does much else."""
_GOES_ON = Promise((0,), ("held-out after step",), heal_says=("is finished",))
_COMES_BACK = Promise((0,), ("gave no sign of life for", "held-out after step"), heal_says=("is finished",))


@dataclass(frozen=True, kw_only=True)
class Cut(BetweenHosts):
    """Hosts are cut off each other while ranks train.

    pair: the numbers of two hosts that no longer reach each other, while both reach all others; empty: the last host
    and every other one. way: `link` (the last host's interface goes down), or whose messages are lost: `both`, `to`
    the second one, `from` it.
    """

    way: str = "both"
    pair: tuple[int, ...] = ()
    promise: Promise = field(default_factory=lambda: _named(2))
    guard: str = "run.timeout_s"
    finds: str = "not over"

    def inject(self, run: Run) -> Struck:
        """Cut, and see that no datagram arrives where none shall, and everywhere else one does."""
        run.reach(STRIKES)
        at, step = time.monotonic(), run.steps
        self.cut(run)
        return Struck(at, step + 1, self.proof(run))

    def cut(self, run: Run) -> None:
        """Bring it about."""
        if self.way == "link":
            self.hosts(run)[-1].unplug()
            return
        for one, other in self._lost(run):
            one.drop(other)

    def mend(self, run: Run) -> None:
        """Take it away, all of it or what is left of it."""
        if self.way == "link":
            self.hosts(run)[-1].plug()
            return
        for one, other in self._lost(run):
            one.undrop(other)

    def _lost(self, run: Run) -> list[tuple[Host, Host]]:
        """From whom to whom nothing arrives."""
        hosts = self.hosts(run)
        *rest, last = [hosts[number] for number in self.pair] or hosts
        ways = {"to": [(host, last) for host in rest], "from": [(last, host) for host in rest]}
        return ways.get(self.way) or ways["to"] + ways["from"]

    def proof(self, run: Run) -> str:
        """What arrives between any two hosts, and what does not. Raises `NotStruckError` where that is not as it is to
        be."""
        lost = self._lost(run)
        for pair in permutations(self.hosts(run), 2):
            one, other = pair
            if pair in lost and one.reaches(other):
                raise NotStruckError(f"datagrams from {one.hostname} to {other.hostname} arrive")
            if pair not in lost and not one.reaches(other, _ARRIVES_S):
                raise NotStruckError(f"datagrams from {one.hostname} to {other.hostname} do not arrive either")
        named = ", ".join(f"{one.hostname} to {other.hostname}" for one, other in lost)
        return f"no datagram arrives from {named}; all others do"

    def undo(self, run: Run) -> None:
        """Mend what is still cut."""
        self.mend(run)


@dataclass(frozen=True, kw_only=True)
class Short(Cut):
    """Cut for less than `run.timeout_s`: nothing is seen but a line, and the run goes on."""

    seconds: float
    promise: Promise = _GOES_ON
    guard: str = ""
    no_guard: str = "nothing ends the run; longer partitions show that the bound is looked at"

    def inject(self, run: Run) -> Struck:
        """Cut, and mend after some seconds; no update is made meanwhile."""
        run.reach(STRIKES)
        at = time.monotonic()
        self.cut(run)
        proof, step = self.proof(run), run.steps
        time.sleep(max(0.0, self.seconds - (time.monotonic() - at)))
        if run.over() or run.steps != step:
            raise NotStruckError(f"updates {step} to {run.steps} were made while the hosts were apart")
        self.mend(run)
        return Struck(at, step, f"{proof}; after {self.seconds:g} s they do again, no update was made meanwhile")


@dataclass(frozen=True, kw_only=True)
class Restarted(Cut):
    """Cut until the ranks have ended; then torchrun starts them again, from the last checkpoint, by itself."""

    keeps_agents: bool = True
    arguments: tuple[str, ...] = ("--max-restarts", "3")
    promise: Promise = _COMES_BACK
    guard: str = ""
    no_guard: str = "the same partition without a restart has one"

    def inject(self, run: Run) -> Struck:
        """Cut, wait for the end of the ranks, mend."""
        run.reach(STRIKES)
        before = identified(ranks_of(run))
        if len(before) != self.size:
            raise NotStruckError(f"{len(before)} ranks are there instead of {self.size}")
        at, step = time.monotonic(), run.steps
        self.cut(run)
        proof = self.proof(run)
        while any(rank.alive() for rank in before):
            if time.monotonic() - at > ANSWER_S:
                raise NotStruckError(f"ranks live on {ANSWER_S:g} s after the cut")
            time.sleep(0.01)
        ended = time.monotonic() - at
        self.mend(run)
        return Struck(at, step + 1, f"{proof}; all ranks had ended after {ended:.1f} s, then it was mended")


def _named(size: int) -> Promise:
    """Each rank ends in time, with a line that names those on the other side."""
    last = size - 1
    rest = "rank 0" if size == 2 else f"ranks {', '.join(map(str, range(last)))}"
    here = f"{rest} of {size} (on {', '.join(f'host{number}' for number in range(last))}) gave no sign of life"
    there = f"rank {last} of {size} (on host{last}) gave no sign of life"
    return Promise(codes=ENDS, says=(here, there), within_s=_WITHIN_S, at_once=True)


_BETWEEN = "all ranks give signs of life, and none got through to the others in the update of step"
"""What ranks say that all see the store, and do not all see each other."""
_ADDRESSES = "wrong address of the network card, "

NEMESES: tuple[Nemesis, ...] = (
    Cut(name="link cut", numbers=(12,), how="the interface of one of two hosts goes down", way="link"),
    Cut(name="silent drop, both ways", numbers=(13,), how=f"{_ADDRESSES}on both hosts"),
    Cut(name="silent drop, one way", numbers=(13,), how=f"{_ADDRESSES}on the first host", way="to"),
    Cut(name="silent drop, the other way", numbers=(13,), how=f"{_ADDRESSES}on the last host", way="from"),
    Cut(name="one of three hosts cut off", numbers=(13,), how=f"{_ADDRESSES}both ways", size=3, promise=_named(3)),
    Cut(
        name="two of three hosts cut off each other",
        numbers=(13,),
        how=f"{_ADDRESSES}on both; the first one, with the store, reaches both",
        size=3,
        pair=(1, 2),
        promise=Promise(ENDS, (_BETWEEN,), _WITHIN_S, at_once=True),
    ),
    Cut(
        name="two of three hosts cut off each other, one with the store",
        numbers=(13,),
        how=f"{_ADDRESSES}on both; the last one reaches both",
        size=3,
        pair=(0, 1),
        promise=Promise(
            ENDS,
            (
                "rank 1 of 3 (on host1) gave no sign of life",
                "ranks 0, 2 of 3 (on host0, host2) gave no sign of life",
            ),
            _WITHIN_S,
            at_once=True,
        ),
    ),
    Short(name="short partition", numbers=(14,), how="silent drop for 3 s", seconds=3.0),
    Restarted(name="long partition, restarted", numbers=(15,), how="silent drop until all ranks have ended"),
    Short(
        name="short partition of two of three hosts",
        numbers=(14,),
        how="silent drop between two for 3 s; the first one reaches both",
        size=3,
        pair=(1, 2),
        seconds=3.0,
    ),
    Restarted(
        name="long partition of two of three hosts, restarted",
        numbers=(15,),
        how="silent drop between two until all ranks have ended; the first one reaches both",
        size=3,
        pair=(1, 2),
        promise=Promise((0,), (_BETWEEN, "held-out after step"), heal_says=("is finished",)),
    ),
)
