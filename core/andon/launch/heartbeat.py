"""The heartbeat of a rank: it tells the others where it is, and tells slow from hung from dead (issue 5, item 1).

Two threads. One speaks with the ranks' store, twice a second, and is the only one that a store which does not answer
can block. The other looks at what is known, says who keeps the others waiting, and ends this rank where its main thread
cannot: because it hangs while another has given it up, or because a step takes longer than it may.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from torch.distributed import DistStoreError

from andon.console.exits import Exit
from andon.console.messages import say
from andon.launch.rank import Report, watchdog_failed
from andon_contracts.act import current_activity
from andon_contracts.liveness import diagnosis
from andon_contracts.liveness.diagnosis import UPDATE, PeerStatus, RankStatus, StepClock, View
from andon_contracts.liveness.process import Process
from andon_contracts.liveness.store_link import MOST_CHARACTERS, Beat, Heartbeats, SignedStore, StoreLink

_SLOW_TIMES = 10  # how many times the usual a step may take before it is slow
_EVIDENCE_S = 0.7
"""How long an end waits to learn who else has ended. Ranks have 1.5 s for theirs."""
_FAREWELL_S = 0.6
_PLACE_S = 1.0  # since when it matters where the main thread is


@dataclass(frozen=True)
class Timeouts:
    """How many seconds each wait takes; shorter if a user's own bound is short.

    timeout_s: a rank that others have waited for so long is given up. step_s: an update that takes longer ends the
    run; None: none does. silence_s: for how long a rank that lives may give no sign of it; None: by the timeout.
    """

    timeout_s: float
    step_s: float | None = None
    silence_s: float | None = None


class Heartbeat:
    """One rank's. `ended`: called, in a thread of this, with the report of an end that the main thread cannot make."""

    def __init__(
        self,
        store: SignedStore,
        rank: int,
        world: int,
        clock: StepClock,
        timeouts: Timeouts,
        ended: Callable[[Report], None],
        speak: Callable[[str], None] = say,
    ) -> None:
        """store: of this world alone. To be made by the thread that trains."""
        self.clock = clock
        self._rank, self._world, self._timeouts = rank, world, timeouts
        self._ended, self._speak = ended, speak
        self._owner, self._host = threading.get_ident(), Process.here().host
        now = time.monotonic()
        self._heard: dict[int, tuple[float, Beat[RankStatus] | None]] = dict.fromkeys(range(world), (now, None))
        """The last beat of each rank, and when it came (`time.monotonic`)."""
        self._over, self._last, self._accounted = threading.Event(), "", False
        self._exit, self._rounds, self._deaf = 0, 0, ""
        bound = timeouts.timeout_s
        self._beat_s, self._look_s = min(0.5, bound / 10), min(0.2, bound / 10)  # between two beats, and two looks
        self._silent_s = min(2.0, bound / 3) if timeouts.silence_s is None else timeouts.silence_s
        self._slow_s = self._slow_from = min(10.0, bound / 2)
        self._words_by: tuple[float, int] | None = None
        # A longer time in which this process did not run is a pause, which counts for nothing.
        clock.pauses.start(min(1.0, bound / 4))
        self._reader = store.reader
        self._beats = Heartbeats(store, rank, RankStatus, self._reader)
        self._link: StoreLink | None = None  # its thread begins before the constructor returns
        if world > 1:
            self._link = StoreLink("andon-beat", self._beat, self._fall_silent)
        threading.Thread(target=self._look, name="andon-look", daemon=True).start()

    # what the rank asks for

    def explain(self, code: Exit) -> str:
        """Which other rank is the cause of an end with this code, for this rank's line; "" if none is."""
        if code == Exit.RANK_SILENT:
            return diagnosis.explain_timeout(self.view())
        if code != Exit.RANK_LOST:
            return ""
        # A rank that ended by itself has told the store before: a whole round of reading tells it from one that died.
        deadline, wanted = time.monotonic() + _EVIDENCE_S, self._rounds + 2
        found = ""
        while (self._rounds < wanted or not found) and time.monotonic() < deadline and self._link is not None:
            self._link.wake()
            time.sleep(self._look_s / 10)
            found = diagnosis.known_end(self.view())
        # A process on another machine cannot be seen: a live rank has given a sign meanwhile.
        return found or diagnosis.possible_loss(replace(self.view(), silence_s=_EVIDENCE_S))

    def leave(self, code: int, cause: str) -> None:
        """Tell the others that this rank ends, and stop looking. Takes a moment, at most `_FAREWELL_S`."""
        self._exit, self._last = code, cause or "finished"
        self._say_farewell()

    @property
    def dropped(self) -> int:
        """How many values of the store were dropped so far because no rank wrote them."""
        return self._reader.dropped

    def view(self) -> View:
        mine = PeerStatus(**vars(self._status()), state="runs", host=self._host)
        others = {rank: self._sign(*heard) for rank, heard in self._heard.items()}
        return View(self._rank, self._world, others | {self._rank: mine}, self._silent_s, self._deaf)

    def _status(self) -> RankStatus:
        now = self.clock.read()
        late = now.since_s >= min(_PLACE_S, self._timeouts.timeout_s / 4)
        return replace(now, place=current_activity(self._owner) if late else "")

    def _sign(self, at: float, beat: Beat[RankStatus] | None) -> PeerStatus:
        """What a beat says now: its seconds are counted on, without those in which this process did not run."""
        silent = self.clock.pauses.ran_s(at)[0]
        if beat is None:
            return PeerStatus(silent_s=silent)
        told = replace(beat.status, since_s=beat.status.since_s + silent, phase_s=beat.status.phase_s + silent)
        state = "elsewhere" if told.ended else beat.process.local_state()
        return PeerStatus(**vars(told), silent_s=silent, state=state, host=beat.process.host)

    # the thread that speaks with the store

    def _beat(self) -> float:
        self._tell()
        for rank, beat in self._beats.read(each for each in range(self._world) if each != self._rank).items():
            if beat is not self._heard[rank][1]:
                self._heard[rank] = time.monotonic(), beat
        self._rounds += 1
        return self._beat_s

    def _tell(self) -> None:
        self._beats.send(replace(self._status(), ended=self._last[:MOST_CHARACTERS], exit=self._exit))

    def _fall_silent(self, error: Exception) -> None:
        if isinstance(error, DistStoreError):  # it is there and gives no answer: the way to it, or its host, is down
            return
        if isinstance(error, RuntimeError | OSError):  # from now on nobody gives signs of life
            self._deaf = f"the ranks' store is gone ({str(error).strip().partition(chr(10))[0]})"
            return
        self._end_by(error, self._tell)

    # the thread that looks

    def _look(self) -> None:
        """Look until this rank ends by itself, or has to be ended."""
        try:
            while not self._over.wait(self._look_s):
                view = self.view()
                if self._expects_last_words(view):
                    continue
                report = self._own_end(view)
                if report is not None:
                    self._say_farewell()
                    self._ended(report)
                    return
                self._say_slow(view)
        except Exception as error:  # noqa: BLE001 - whatever it is, this rank must not go on without its watch
            self._end_by(error)

    def _expects_last_words(self, view: View) -> bool:
        """Whether a rank is seen to be gone, and the reason that it gave before may still arrive."""
        if view.link_error or self._link is None or "died" not in view.concluded(view.patience()).values():
            self._words_by = None
            return False
        if self._words_by is None:
            self._words_by = time.monotonic() + _EVIDENCE_S, self._rounds + 2
        deadline, wanted = self._words_by
        if self._rounds >= wanted or time.monotonic() >= deadline:
            return False
        self._link.wake()
        return True

    def _end_by(self, error: Exception, tell: Callable[[], None] = lambda: None) -> None:
        """The watch itself failed: this rank must not go on without it."""
        report = watchdog_failed(error, self._rank)
        self._exit, self._last = report.exit, report.cause
        with suppress(Exception):  # this very store may be what failed
            tell()
        self._say_farewell()
        self._ended(report)

    def _say_farewell(self) -> None:
        self._over.set()
        if self._link is not None:
            self._link.close(self._tell, _FAREWELL_S)
        if self._reader.dropped and not self._accounted:
            self._accounted = True
            self._speak(self._reader.account(self._rank))

    def _say_slow(self, view: View) -> None:
        lasts, least = diagnosis.longest_s(view), max(self._slow_s, _SLOW_TIMES * self.clock.usual_s())
        if lasts < least:
            self._slow_from = least
        elif lasts >= self._slow_from and view.rank == min(view.fresh()):  # one rank speaks for all
            self._slow_from = 2 * lasts
            self._speak(diagnosis.slowness(view, self.clock.usual_s()))

    def _own_end(self, view: View) -> Report | None:
        mine, timeouts = view.mine, self._timeouts
        failed = [rank for rank, end in view.concluded(view.patience()).items() if end in ("failed", "followed")]
        code, step_s = Exit.RANK_SILENT, timeouts.step_s
        if step_s is not None and mine.phase == UPDATE and mine.phase_s >= step_s and diagnosis.all_reported(view):
            text = f"{mine.where} took longer than run.step_deadline_s, {step_s:g} s: "
            # The rank that saw it first saw all of it: by now the slow rank itself may have ended by this deadline.
            told = [view.statuses[rank].ended for rank in failed if view.statuses[rank].ended.startswith(text)]
            cause = told[0] if told else text + diagnosis.slowness(view, self.clock.usual_s())
        elif not failed or mine.since_s < timeouts.timeout_s:
            return None
        else:
            other = f"{view.name(failed[:1])} ended: {view.statuses[failed[0]].ended}"
            hangs = f"hangs in {mine.where} for {mine.since_s:.1f} s, {mine.place or 'where no Python runs'}"
            cause = f"rank {self._rank} of {self._world} {hangs}; {other}"
            if mine.waits:
                code, cause = Exit.RANK_LOST, f"still in a collective of {mine.where}, but {other}"
        frame = sys._current_frames().get(self._owner)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        self._exit, self._last = code, cause
        message = f"{cause}\nThe main thread is at:\n{stack}"
        return Report(self._rank, code, cause, time.time(), step=mine.step, message=message)
