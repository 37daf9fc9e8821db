"""What one rank knows of all, and says of it: who is slow, who hangs, who is gone. Pure: values in, words out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from andon_contracts.fields import Count, Part, Seconds
from andon_contracts.liveness.process import STOPPED, State
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

UPDATE = "update"
"""The phase in which steps are timed, and a deadline of a step holds."""


@dataclass(frozen=True)
class Told(Part):
    """What a rank tells of itself. ticks: the collectives that it has begun or left; all ranks count alike.

    waits: whether it is in one. since_s: for how long nothing has changed with it. phase_s: for how long its phase of
    this step has lasted. place: where its main thread is, if it has been there for long. ended: what it says at its
    own end; exit: its code. paused_s: how long, since something changed, its process did not run; the seconds above
    leave that out.
    """

    ticks: Count = 0
    step: Count = 0
    phase: str = "start"
    waits: bool = False
    since_s: Seconds = 0.0
    phase_s: Seconds = 0.0
    place: str = ""
    ended: str = ""
    exit: Count = 0
    paused_s: Seconds = 0.0

    @property
    def where(self) -> str:
        """The phase and the step, in words."""
        return f"the {self.phase}" + (f" of step {self.step}" if self.step else "")


@dataclass(frozen=True)
class Sign(Told):
    """The last sign of life of a rank, its seconds up to now. silent_s: how long ago it gave it.

    state: of its process, where that can be seen. host: where that is.
    """

    silent_s: float = 0.0
    state: State = "elsewhere"
    host: str = ""


@dataclass(frozen=True)
class View:
    """All ranks as `rank` of `world` sees them, itself included. silence_s: for how long a rank may give no sign.

    deaf: why no signs come any more, for which nobody else is to blame; empty while they do.
    """

    rank: int
    world: int
    signs: Mapping[int, Sign]
    silence_s: float
    deaf: str = ""

    @property
    def mine(self) -> Sign:
        """This rank's own."""
        return self.signs[self.rank]

    def concluded(self, patience: Patience) -> dict[int, Conclusion]:
        """What is concluded of each other rank. A process is known to be stopped for as long as its rank is silent."""
        return {
            rank: conclude(
                Seen(
                    sign.state,
                    said=bool(sign.ended),
                    exit=sign.exit if sign.ended else None,
                    stopped_s=sign.silent_s,
                    silent_s=sign.silent_s,
                    behind=sign.ticks < self.mine.ticks,
                ),
                patience,
            )
            for rank, sign in self.signs.items()
            if rank != self.rank
        }

    def patience(self, stopped_s: float = 0.0, *, unseen: bool = False) -> Patience:
        """For how long others may be stopped, and silent: where nobody can be heard, nobody is to blame for that."""
        return Patience(stopped_s, math.inf if self.deaf else self.silence_s, unseen)

    def fresh(self) -> dict[int, Sign]:
        """Those that give signs of life, this rank among them."""
        found = self.concluded(Patience(self.silence_s, self.silence_s))
        return {rank: sign for rank, sign in self.signs.items() if rank == self.rank or found[rank] in PRESENT}

    def name(self, ranks: Iterable[int]) -> str:
        """`rank 1 of 4`, `ranks 1, 2 of 4`; with their hosts where these are known to differ from this rank's."""
        ranks = sorted(ranks)
        hosts = sorted({self.signs[rank].host for rank in ranks} - {"", self.mine.host})
        text = f"{named(ranks)} of {self.world}"
        return f"{text} (on {', '.join(hosts)})" if hosts else text


def named(ranks: Iterable[int]) -> str:
    """`rank 1`, `ranks 1, 2`: in the order of their numbers."""
    found = sorted(ranks)
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"


def gone(view: View) -> str:
    """Whose end is known: a process that is gone, or one that said its own error. Empty: nobody's."""
    return _explained(view, view.patience(), ENDED_BY_ITSELF)


def whom(view: View) -> str:
    """Why this rank waited in vain: the ranks that are gone, stopped, silent or behind, and what is known of them."""
    found = gone(view)
    if found:
        return found
    if view.mine.paused_s > view.mine.since_s:
        return f"this process did not run for {view.mine.paused_s:.1f} s (it was stopped, or its machine slept)"
    return (
        _explained(view, view.patience(), (*UNHEARD, "followed"))
        or view.deaf
        or _explained(view, view.patience(), ("left", "behind"))
        or f"all ranks give signs of life, and none got through to the others in {view.mine.where}"
    )


def lost(view: View) -> str:
    """Who may have died where this rank cannot see it: nobody whose process is seen to live. Empty: nobody."""
    patience = view.patience(math.inf, unseen=True)
    known = _explained(view, patience, ("silent", "failed", "followed"))
    return known or view.deaf or _explained(view, patience, ["left"])


def failed(view: View) -> list[int]:
    """The other ranks that said that they end by an error, their own or another's."""
    return [rank for rank, found in view.concluded(view.patience()).items() if found in ("failed", "followed")]


def _explained(view: View, patience: Patience, order: Iterable[Conclusion]) -> str:
    """The first of these conclusions that is come to of any other rank, in words; empty: none is."""
    found, ranks = first(view.concluded(patience), order)
    if not ranks:
        return ""
    who, sign = view.name(ranks), view.signs[ranks[0]]
    match found:
        case "died":
            return f"{who} {_is(ranks)} gone without a word, {_last(sign)}"
        case "stopped":
            return f"{who} {_is(ranks)} {STOPPED}, {_last(sign)}"
        case "silent":
            return f"{who} gave no sign of life for {sign.silent_s:.1f} s, {_last(sign)}"
        case "behind":
            return f"{who} {'hangs' if len(ranks) == 1 else 'hang'} {_doing(sign)}"
    return f"{view.name(ranks[:1])} ended: {sign.ended}"


def behind(signs: Mapping[int, Sign]) -> list[int]:
    """The ranks that have come less far than another; none where all are at one place."""
    furthest = max(sign.ticks for sign in signs.values())
    return sorted(rank for rank, sign in signs.items() if sign.ticks < furthest)


def informed(view: View) -> bool:
    """Whether all that give signs of life gave one in the later half of this phase: an older one tells of before."""
    mine = view.mine
    return all(sign.silent_s < mine.phase_s / 2 for rank, sign in view.fresh().items() if rank != view.rank)


def speaks(view: View) -> bool:
    """Whether this rank is the one to say something: the first of those that give signs of life."""
    return view.rank == min(view.fresh())


def lasts_s(view: View) -> float:
    """How long a rank has waited in one collective, or an update has lasted: the longest, over all that are fresh."""
    waits = [sign.since_s for sign in view.fresh().values() if sign.waits]
    updates = [sign.phase_s for sign in view.fresh().values() if sign.phase == UPDATE]
    return max([*waits, *updates], default=0.0)


def slowness(view: View, usual_s: float) -> str:
    """Who keeps the others waiting now, as one line: who ended by an error or is gone comes before who is slow."""
    usual = f"; a step usually takes {usual_s:.2g} s" if usual_s else ""
    fresh = view.fresh()
    found = gone(view) or _explained(view, view.patience(), ["followed"]) or _unheard(view)
    if found:
        return f"{found}; {len(fresh)} wait{'s' * (len(fresh) == 1)}{usual}"
    if view.deaf:
        return f"{view.deaf}; {view.name([view.rank])} is {_doing(view.mine)}{usual}"
    late = [rank for rank in behind(fresh) if not fresh[rank].waits]
    if late:
        waiting = sum(sign.waits for sign in fresh.values())
        wait = f"{waiting} wait{'s' * (waiting == 1)} for {'it' if len(late) == 1 else 'them'}"
        return f"{view.name(late)} {_is(late)} slow: {_doing(fresh[late[0]])}; {wait}{usual}"
    waits = [sign for sign in fresh.values() if sign.waits]
    if waits and view.world > 1:
        longest = max(waits, key=lambda sign: sign.since_s)
        waited = f"for {longest.since_s:.1f} s, {longest.phase_s:.1f} s after it began"
        exchange = f"exchange{'s' * (len(fresh) == 1)} in {longest.where}"
        return f"{_all_of(view)} {exchange} {waited}: what connects them is slow{usual}"
    return f"{_all_of(view)} {_is(list(fresh))} slow: {_doing(view.mine)}{usual}"


def _unheard(view: View) -> str:
    """Who trains on, as far as is known, and gives no signs of life; empty: nobody."""
    # One that was stopped a moment ago keeps nobody waiting yet.
    found, ranks = first(view.concluded(view.patience(0.0 if view.deaf else view.silence_s)), UNHEARD)
    if not ranks:
        return ""
    sign = view.signs[ranks[0]]
    seen = f"{'has' if len(ranks) == 1 else 'have'} given no sign of life for {sign.silent_s:.1f} s"
    what = f"{_is(ranks)} stopped" if found == "stopped" else seen
    return f"{view.name(ranks)} {what}, {_last(sign)}"


def _all_of(view: View) -> str:
    """Those that give signs of life: `all` only where nobody has ended."""
    fresh = view.fresh()
    if view.world == 1:
        return "rank 0"
    return f"all {view.world} ranks" if len(fresh) == view.world else view.name(fresh)


def _doing(sign: Sign) -> str:
    place = f", {sign.place}" if sign.place else ""
    return f"in {sign.where} for {max(sign.since_s, 0.0 if sign.waits else sign.phase_s):.1f} s{place}"


def _last(sign: Sign) -> str:
    return f"last seen in {sign.where}"


def _is(ranks: list[int]) -> str:
    return "is" if len(ranks) == 1 else "are"
