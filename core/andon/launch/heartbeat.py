"""The heartbeat of a rank: publishes its position, and distinguishes slow, hung and dead ranks.

Two threads. The first exchanges beats through the ranks' store twice a second; an unresponsive store blocks only this
thread. The second checks the received beats, logs which rank delays the others, and ends this rank if its main thread
cannot: because it hangs after another rank has failed, or because a step exceeds its deadline.
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

from andon.console.messages import Exit, say
from andon.launch.report import Report, watchdog_failed
from andon_contracts.act import current_activity
from andon_contracts.liveness import diagnosis
from andon_contracts.liveness.diagnosis import UPDATE, PeerStatus, RankStatus, StepClock, View
from andon_contracts.liveness.process import Process
from andon_contracts.liveness.store_link import MOST_CHARACTERS, Beat, Heartbeats, SignedStore, StoreLink

_SLOW_TIMES = 10  # a step is slow if it takes this many times the usual
_EVIDENCE_S = 0.7
"""How long an ending rank waits to learn which others have ended. Ranks have 1.5 s to end."""
_FAREWELL_S = 0.6
_PLACE_S = 1.0  # report where the main thread is after this time


@dataclass(frozen=True)
class Timeouts:
    """Timeouts in seconds. A small `timeout_s` also shortens the other waits of this module.

    timeout_s: how long others wait for a rank before it counts as lost. step_s: an update that takes longer ends the
    run; None: no limit. silence_s: how long a live rank may send no beat; None: derived from `timeout_s`.
    """

    timeout_s: float
    step_s: float | None = None
    silence_s: float | None = None


class Heartbeat:
    """The heartbeat of one rank. `ended`: called in its thread with a report if the main thread cannot end the rank."""

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
        """store: of this world alone. Must be called by the training thread."""
        self.clock = clock
        self._rank, self._world, self._timeouts = rank, world, timeouts
        self._ended, self._speak = ended, speak
        self._owner, self._host = threading.get_ident(), Process.here().host
        now = time.monotonic()
        self._heard: dict[int, tuple[float, Beat[RankStatus] | None]] = dict.fromkeys(range(world), (now, None))
        """Of each rank: when its last beat arrived (`time.monotonic`), and the beat."""
        self._over, self._last, self._accounted = threading.Event(), "", False
        self._exit, self._rounds, self._deaf = 0, 0, ""
        bound = timeouts.timeout_s
        self._beat_s, self._look_s = min(0.5, bound / 10), min(0.2, bound / 10)  # seconds between beats and checks
        self._silent_s = min(2.0, bound / 3) if timeouts.silence_s is None else timeouts.silence_s
        self._slow_s = self._slow_from = min(10.0, bound / 2)
        self._words_by: tuple[float, int] | None = None
        # A longer gap in which this process did not run is a pause, which is excluded from all times.
        clock.pauses.start(min(1.0, bound / 4))
        self._reader = store.reader
        self._beats = Heartbeats(store, rank, RankStatus, self._reader)
        self._link: StoreLink | None = None  # its thread starts before the constructor returns
        if world > 1:
            self._link = StoreLink("andon-beat", self._beat, self._fall_silent)
        threading.Thread(target=self._look, name="andon-look", daemon=True).start()

    # called by the rank

    def explain(self, code: Exit) -> str:
        """The other rank that caused an end with this code, as text for this rank's line; "" if none did."""
        if code == Exit.RANK_SILENT:
            return diagnosis.explain_timeout(self.view())
        if code != Exit.RANK_LOST:
            return ""
        # A rank that ended by itself wrote to the store first: after a full round of reads, any other has died.
        deadline, wanted = time.monotonic() + _EVIDENCE_S, self._rounds + 2
        cause = ""
        while (self._rounds < wanted or not cause) and time.monotonic() < deadline and self._link is not None:
            self._link.wake()
            time.sleep(self._look_s / 10)
            cause = diagnosis.known_end(self.view())
        # Processes of other machines are not visible. A live rank has sent a beat meanwhile.
        return cause or diagnosis.possible_loss(replace(self.view(), silence_s=_EVIDENCE_S))

    def leave(self, code: int, cause: str) -> None:
        """Publish that this rank ends, and stop the checks. Takes at most `_FAREWELL_S`."""
        self._exit, self._last = code, cause or "finished"
        self._say_farewell()

    @property
    def dropped(self) -> int:
        """How many values of the store were ignored so far because no rank wrote them."""
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
        silent = self.clock.pauses.ran_s(at)[0]
        if beat is None:
            return PeerStatus(silent_s=silent)
        status = replace(beat.status, since_s=beat.status.since_s + silent, phase_s=beat.status.phase_s + silent)
        state = "elsewhere" if status.ended else beat.process.local_state()
        return PeerStatus(**vars(status), silent_s=silent, state=state, host=beat.process.host)

    # the thread that exchanges beats

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
        if isinstance(error, DistStoreError):  # the store does not answer: its host or the network is down
            return
        if isinstance(error, RuntimeError | OSError):  # no rank receives beats any more
            self._deaf = f"the ranks' store is gone ({str(error).strip().partition(chr(10))[0]})"
            return
        self._end_by(error, self._tell)

    # the thread that checks beats

    def _look(self) -> None:
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
        except Exception as error:  # noqa: BLE001 - any error: this rank must not run without its watchdog
            self._end_by(error)

    def _expects_last_words(self, view: View) -> bool:
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
        report = watchdog_failed(error, self._rank)
        self._exit, self._last = report.exit, report.cause
        with suppress(Exception):  # this store may be what failed
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
        elif lasts >= self._slow_from and view.rank == min(view.fresh()):  # one rank logs for all
            self._slow_from = 2 * lasts
            self._speak(diagnosis.slowness(view, self.clock.usual_s()))

    def _own_end(self, view: View) -> Report | None:
        mine, timeouts = view.mine, self._timeouts
        failed = [rank for rank, end in view.concluded(view.patience()).items() if end in ("failed", "followed")]
        code, step_s = Exit.RANK_SILENT, timeouts.step_s
        if step_s is not None and mine.phase == UPDATE and mine.phase_s >= step_s and diagnosis.all_reported(view):
            text = f"{mine.where} took longer than run.step_deadline_s, {step_s:g} s: "
            # The first rank to end at this deadline saw all others; the slow rank itself may have ended by now.
            reported = [view.statuses[rank].ended for rank in failed if view.statuses[rank].ended.startswith(text)]
            cause = reported[0] if reported else text + diagnosis.slowness(view, self.clock.usual_s())
        elif not failed or mine.since_s < timeouts.timeout_s:
            return None
        else:
            other = f"{view.name(failed[:1])} ended: {view.statuses[failed[0]].ended}"
            hangs = f"hangs in {mine.where} for {mine.since_s:.1f} s, {mine.place or 'outside Python code'}"
            cause = f"rank {self._rank} of {self._world} {hangs}; {other}"
            if mine.waits:
                code, cause = Exit.RANK_LOST, f"still in a collective of {mine.where}, but {other}"
        frame = sys._current_frames().get(self._owner)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        self._exit, self._last = code, cause
        message = f"{cause}\nThe main thread is at:\n{stack}"
        return Report(self._rank, code, cause, time.time(), step=mine.step, message=message)
