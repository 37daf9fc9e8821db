"""What ranks tell each other about halting, over a store that is apart from every group (issue 3 item 4).

Everything here returns at once or after a stated time: only the thread of the link waits for the store.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from andon_contracts.causes import HALT, Cause
from andon_contracts.fields import Count, Part
from andon_contracts.liveness.end_messages import Whereabouts
from andon_contracts.liveness.pending_collectives import Counts
from andon_contracts.liveness.process import Lasting, Process
from andon_contracts.liveness.signed import Signed
from andon_contracts.liveness.store_link import MOST_CHARACTERS, Heartbeats, StoreLink, whole

POLL_S = 0.2
"""How often a rank asks whether somebody pulled the cord."""
_HURRIED_S = 0.02
"""The same until it knows whom to look out for, and once there is something to end."""
_BEAT_S = 1.0
_ANSWER_S = 1.0
_NEAR = 32
"""So many ranks on either side may run on the same machine and are looked at there."""
_PULLED = "pulled"
_WARNED = "unguarded"


@dataclass(frozen=True)
class Progress(Part):
    """What a rank of a watched loop tells of itself every second."""

    at: Whereabouts
    begun: Counts


@dataclass(frozen=True)
class Said(Part):
    """What a rank says to all others that is no reason to halt."""

    rank: Count
    text: str


@dataclass(frozen=True)
class News:
    """What the store says of all ranks: those that left in order, and where each one was a second ago."""

    left: frozenset[int]
    at: Mapping[int, Whereabouts]


class HaltLink:
    """The ranks' line to each other. What it is given is called in the thread of the link.

    learn: with the cause that was first. warn: with what another rank says to all. failed: with an error of the link,
    which ends it; gives why all are to halt then, or what is to be said to all.
    """

    def __init__(
        self,
        board: Signed,
        rank: int,
        world: int,
        learn: Callable[[Cause], None],
        progress: Callable[[], Progress],
        warn: Callable[[str], None],
        failed: Callable[[Exception], Cause | str],
        keeper: int | None = None,
    ) -> None:
        """keeper: the rank in whose process the store lives; None where it outlives the ranks."""
        self.processes: Mapping[int, Process] = {}
        self.ended: frozenset[int] = frozenset()
        """Of the ranks nearby, those that know of the cause and have left their evidence."""
        self.left: frozenset[int] = frozenset()
        """Of the ranks nearby, those that had left in order when the cause came."""
        self.broken = False
        """Whether the store is gone, and its keeper did not say good-bye."""
        self.silent_s = 0.0
        """How long the next rank, on another machine, has given no sign of life."""
        self._board, self._rank, self._world, self.keeper = board, rank, world, keeper
        self.following = (rank + 1) % world
        self._learn, self._progress, self._warn, self._unguarded = learn, progress, warn, failed
        self._told = ""
        """The cause as it stands on the board, once it is known."""
        self._keeper_left = False
        self.checked = board.checked
        self._beats, self._beat_at = Heartbeats(board, rank, Progress, self.checked), 0.0
        self._silence, self._heard_last = Lasting(2 * _BEAT_S), object()
        self._near = sorted({(rank + offset) % world for offset in range(-_NEAR, _NEAR + 1)} - {rank})
        self._met = threading.Event()
        # Before the thread has the store: a rank that dies at once must have said who it was.
        self._beats.tell(progress())
        self._link = StoreLink("andon-halt-link", self._routine, self._failed)

    # what the other threads of this rank ask for

    def meet(self) -> None:
        """Wait until this rank knows whom to look out for; called when all ranks have made their link."""
        self._met.wait(5 * _ANSWER_S)

    def publish(self, cause: Cause) -> None:
        """Tell all ranks to stop for `cause`; the first that is told wins, and all learn that one."""
        self._link.post(lambda: self._pull(cause))

    def warn(self, text: str) -> None:
        """Say this on all other ranks."""
        self._link.post(lambda: self._spread(text))

    def acknowledge(self) -> None:
        """Tell the others that this rank knows, and has left what it has to leave."""
        self._link.post(lambda: self._board.set(f"ended {self._rank}", "1"))

    def ask(self) -> News | None:
        """What the store says now; None where it does not answer in time."""
        found: list[News] = []
        self._link.ask(lambda: found.append(self._news()), _ANSWER_S)
        return found[0] if found else None

    def heard(self) -> Mapping[int, Counts]:
        """What the ranks nearby have begun, as they told last; nothing where the store does not answer in time."""
        found: dict[int, Counts] = {}
        near = self._near
        self._link.ask(
            lambda: found.update({rank: beat.told.begun for rank, beat in self._beats.hear(near).items()}), _ANSWER_S
        )
        return found

    def answers(self) -> bool:
        """Whether the store has answered within the last second."""
        return self._link.answers(_ANSWER_S)

    def leave(self) -> None:
        """Say that this rank is done and will not be missed, and end the thread. Takes at most two seconds."""
        self._link.close(self._say_goodbye, 2 * _ANSWER_S)

    # the thread

    def _routine(self) -> float | None:
        """Hear what there is to hear; seconds until the next time, None once nobody needs this rank any more."""
        if not self._told:
            self._take(self._board.get(_PULLED))
        if self._told:
            if self._board.read(_PULLED, self._form) is None:  # the others have to find it too
                self._board.set(_PULLED, self._told)
            self.ended = frozenset(r for r in self._near if self._board.check([f"ended {r}"]))
            self.left = frozenset(r for r in self._near if self._board.check([f"left {r}"]))
            return _HURRIED_S
        if not self.processes:
            heard = self._beats.hear(self._near)
            if len(heard) == len(self._near):
                self.processes = {rank: beat.process for rank, beat in heard.items()}
                self._met.set()
        if self.keeper is not None and self.keeper != self._rank and self._board.check([f"left {self.keeper}"]):
            self._keeper_left = True
            self._board.set(f"saw {self._rank}", "1")
            return None
        if time.monotonic() - self._beat_at >= _BEAT_S:
            self._tell_progress()
        return POLL_S if self.processes else _HURRIED_S

    def _failed(self, error: Exception) -> None:
        ours = isinstance(error, RecursionError | NotImplementedError)
        if isinstance(error, RuntimeError | OSError) and not ours:
            self.broken = not self._keeper_left  # the store is gone: its keeper ended, in order or not
            return
        told = self._unguarded(error)
        with suppress(Exception):  # what it is of, may be this very store
            self._spread(told) if isinstance(told, str) else self._pull(told)
        if not isinstance(told, str) and not self._told:
            self._learn(told)  # at least this rank acts on it

    def _tell_progress(self) -> None:
        self._beat_at = time.monotonic()
        self._beats.tell(self._progress())
        found = self._board.read(_WARNED, lambda body: whole(Said, body))
        if found is not None and found.rank != self._rank:
            self._warn(found.text)
        following = self.following
        if following in self.processes and self.processes[following].look() == "elsewhere":
            heard = self._beats.hear([following]).get(following)
            silent = [following] if heard is not None and heard is self._heard_last else []
            # Seconds in which this thread ran, so that a pause of the whole job counts for nothing.
            self.silent_s = self._silence.look(silent).get(following, 0.0)
            self._heard_last = heard

    def _pull(self, cause: Cause) -> None:
        """Put the cause on the board where none is yet; learn which one it is."""
        told = self._encoded(cause)
        self._take(self._board.compare_set(_PULLED, "", told))
        if not self._told:  # what stands there is of a rank, and no cause
            self._board.set(_PULLED, told)
            self._take(told.encode())

    def _spread(self, text: str) -> None:
        self._board.set(_WARNED, json.dumps(Said(self._rank, text[:MOST_CHARACTERS]).to_json()))

    def _encoded(self, cause: Cause) -> str:
        """As the others can read it: an error of the loop's own may hold anything."""
        cause = replace(cause, text=cause.text[:MOST_CHARACTERS], seen=cause.seen[:MOST_CHARACTERS])
        try:
            told = json.dumps(cause.to_json())
            self._form(json.loads(told))
        except (TypeError, ValueError):
            kept = replace(cause, step=0, clause=HALT, seen="", tensor="", ranks=(), bundle="", written=False)
            told = json.dumps(kept.to_json())
        return told

    def _take(self, raw: bytes) -> None:
        cause = self.checked.read(_PULLED, raw, self._form) if raw and not self._told else None
        if cause is not None:
            self._told = raw.decode()
            self._learn(cause)

    def _form(self, body: object) -> Cause:
        return whole(Cause, body).among(self._world)

    def _news(self) -> News:
        ranks = range(self._world)
        at = {rank: beat.told.at for rank, beat in self._beats.hear(ranks).items()}
        return News(frozenset(r for r in ranks if self._board.check([f"left {r}"])), at)

    def _say_goodbye(self) -> None:
        self._tell_progress()
        self._board.set(f"left {self._rank}", "1")
        if self.keeper is not None and self.keeper != self._rank:
            self._board.set(f"saw {self._rank}", "1")
        elif self.keeper is not None and not self._told:
            # With this process the store ends: the others must not take that for its death.
            others = [f"saw {rank}" for rank in range(self._world) if rank != self._rank]
            deadline = time.monotonic() + 3 * POLL_S
            while not self._board.check(others) and time.monotonic() < deadline:
                time.sleep(POLL_S / 20)
