"""What one rank knows of all, and says of it: who is slow, who hangs, who is gone. Pure: values in, words out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass

from andon_contracts.fields import Count, Part, Seconds
from andon_contracts.liveness.process import STOPPED, State
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

UPDATE = "update"  # the phase in which steps are timed, and a deadline of a step holds


@dataclass(frozen=True)
class RankStatus(Part):
    """What a heartbeat says of its rank. Seconds leave out the time in which its process did not run."""

    ticks: Count = 0  # the collectives that it has begun or left; all ranks count alike
    step: Count = 0
    phase: str = "start"
    waits: bool = False  # in a collective
    since_s: Seconds = 0.0  # for how long nothing has changed with it
    phase_s: Seconds = 0.0  # for how long it has been in its phase of this step
    place: str = ""  # where its main thread is, if it has been there for long
    ended: str = ""  # what it says at its own end
    exit: Count = 0
    paused_s: Seconds = 0.0  # how long its process did not run, since something changed

    @property
    def where(self) -> str:
        return f"the {self.phase}" + (f" of step {self.step}" if self.step else "")


@dataclass(frozen=True)
class PeerStatus(RankStatus):
    """The last heartbeat of a rank as it is seen here, its seconds counted on up to now. It is not sent."""

    silent_s: float = 0.0  # how old it is
    state: State = "elsewhere"
    host: str = ""

    @property
    def doing(self) -> str:
        seconds = max(self.since_s, 0.0 if self.waits else self.phase_s)
        return f"in {self.where} for {seconds:.1f} s" + (f", {self.place}" if self.place else "")


@dataclass(frozen=True)
class View:
    """All ranks as `rank` of `world` sees them, itself included."""

    rank: int
    world: int
    statuses: Mapping[int, PeerStatus]
    silence_s: float  # for how long a rank may be silent
    link_error: str = ""  # why heartbeats come no more, for which no rank is to blame

    @property
    def mine(self) -> PeerStatus:
        return self.statuses[self.rank]

    def concluded(self, patience: Patience) -> dict[int, Conclusion]:
        """What is concluded of each other rank. A process counts as stopped for as long as its rank is silent."""
        found = {}
        for rank, sign in self.statuses.items():
            if rank != self.rank:
                code, behind = sign.exit if sign.ended else None, sign.ticks < self.mine.ticks
                seen = Symptoms(sign.state, bool(sign.ended), code, sign.silent_s, sign.silent_s, behind)
                found[rank] = conclude(seen, patience)
        return found

    def patience(self, stopped_s: float = 0.0, *, unseen: bool = False) -> Patience:
        """For how long others may be stopped, and silent: without a limit if none can be heard."""
        return Patience(stopped_s, math.inf if self.link_error else self.silence_s, unseen)

    def fresh(self) -> dict[int, PeerStatus]:
        """The ranks that give signs of life, this one among them."""
        found = self.concluded(Patience(self.silence_s, self.silence_s))
        return {rank: sign for rank, sign in self.statuses.items() if rank == self.rank or found[rank] in PRESENT}

    def name(self, ranks: Iterable[int]) -> str:
        """`rank 1 of 4`, `ranks 1, 2 of 4`; with their hosts, if these are known to differ from this rank's."""
        ranks = sorted(ranks)
        hosts = sorted({self.statuses[rank].host for rank in ranks} - {"", self.mine.host})
        text = f"{rank_names(ranks)} of {self.world}"
        return f"{text} (on {', '.join(hosts)})" if hosts else text


def rank_names(ranks: Iterable[int]) -> str:
    """`rank 1`, `ranks 1, 2`: in the order of their numbers."""
    found = sorted(ranks)
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"


def known_end(view: View) -> str:
    """Whose end is known: a process that is gone, or a rank that said its own error. Empty: none."""
    return _explained(view, view.patience(), ENDED_BY_ITSELF)


def why_in_vain(view: View) -> str:
    """Why this rank waited in vain: the ranks that are gone, stopped, silent or behind, and what is known of them."""
    paused = f"this process did not run for {view.mine.paused_s:.1f} s (it was stopped, or its machine slept)"
    return (
        known_end(view)
        or (paused if view.mine.paused_s > view.mine.since_s else "")
        or _explained(view, view.patience(), (*UNHEARD, "followed"))
        or view.link_error
        or _explained(view, view.patience(), ("left", "behind"))
        or f"all ranks give signs of life, and none got through to the others in {view.mine.where}"
    )


def possible_loss(view: View) -> str:
    """Who may have died where this rank cannot see it; no rank whose process is seen to live. Empty: none."""
    patience = view.patience(math.inf, unseen=True)
    known = _explained(view, patience, ("silent", "failed", "followed"))
    return known or view.link_error or _explained(view, patience, ["left"])


def failed_ranks(view: View) -> list[int]:
    """The other ranks that said that they end by an error, their own or another's."""
    return [rank for rank, found in view.concluded(view.patience()).items() if found in ("failed", "followed")]


def _explained(view: View, patience: Patience, order: Iterable[Conclusion]) -> str:
    found, ranks = first_conclusion(view.concluded(patience), order)
    if not ranks:
        return ""
    who, sign = view.name(ranks), view.statuses[ranks[0]]
    last = f"last seen in {sign.where}"
    match found:
        case "died":
            return f"{who} {_is(ranks)} gone without a word, {last}"
        case "stopped":
            return f"{who} {_is(ranks)} {STOPPED}, {last}"
        case "silent":
            return f"{who} gave no sign of life for {sign.silent_s:.1f} s, {last}"
        case "behind":
            return f"{who} {'hangs' if len(ranks) == 1 else 'hang'} {sign.doing}"
    return f"{view.name(ranks[:1])} ended: {sign.ended}"


def all_reported(view: View) -> bool:
    """Whether every live rank has sent a heartbeat in the later half of this phase: an older one says nothing of it."""
    mine = view.mine
    return all(sign.silent_s < mine.phase_s / 2 for rank, sign in view.fresh().items() if rank != view.rank)


def is_reporter(view: View) -> bool:
    """Whether this rank speaks for all: it is the lowest of those that give signs of life."""
    return view.rank == min(view.fresh())


def longest_s(view: View) -> float:
    """How long a live rank has waited in one collective, or its update has lasted: the longest of all."""
    waits = [sign.since_s for sign in view.fresh().values() if sign.waits]
    updates = [sign.phase_s for sign in view.fresh().values() if sign.phase == UPDATE]
    return max([*waits, *updates], default=0.0)


def slowness(view: View, usual_s: float) -> str:
    """Who keeps the others waiting now, as one line. A rank that failed or is gone comes before a slow one."""
    usual = f"; a step usually takes {usual_s:.2g} s" if usual_s else ""
    fresh = view.fresh()
    found = known_end(view) or _explained(view, view.patience(), ["followed"]) or _unheard(view)
    if found:
        return f"{found}; {len(fresh)} wait{'s' * (len(fresh) == 1)}{usual}"
    if view.link_error:
        return f"{view.link_error}; {view.name([view.rank])} is {view.mine.doing}{usual}"
    furthest = max(sign.ticks for sign in fresh.values())
    late = sorted(rank for rank, sign in fresh.items() if sign.ticks < furthest and not sign.waits)
    waits = [sign for sign in fresh.values() if sign.waits]
    if late:
        wait = f"{len(waits)} wait{'s' * (len(waits) == 1)} for {'it' if len(late) == 1 else 'them'}"
        return f"{view.name(late)} {_is(late)} slow: {fresh[late[0]].doing}; {wait}{usual}"
    everyone = f"all {view.world} ranks" if len(fresh) == view.world else view.name(fresh)
    if view.world == 1:
        everyone = "rank 0"
    elif waits:
        longest = max(waits, key=lambda sign: sign.since_s)
        waited = f"for {longest.since_s:.1f} s, {longest.phase_s:.1f} s after it began"
        exchange = f"exchange{'s' * (len(fresh) == 1)} in {longest.where}"
        return f"{everyone} {exchange} {waited}: what connects them is slow{usual}"
    return f"{everyone} {_is(fresh)} slow: {view.mine.doing}{usual}"


def _unheard(view: View) -> str:
    # A rank that was stopped a moment ago keeps none waiting yet.
    found, ranks = first_conclusion(view.concluded(view.patience(0.0 if view.link_error else view.silence_s)), UNHEARD)
    if not ranks:
        return ""
    sign = view.statuses[ranks[0]]
    silent = f"{'has' if len(ranks) == 1 else 'have'} given no sign of life for {sign.silent_s:.1f} s"
    what = f"{_is(ranks)} stopped" if found == "stopped" else silent
    return f"{view.name(ranks)} {what}, last seen in {sign.where}"


def _is(ranks: Sized) -> str:
    return "is" if len(ranks) == 1 else "are"
