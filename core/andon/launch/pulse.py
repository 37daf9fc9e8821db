"""The pulse of a rank: it tells the others where it is, and tells slow from hung from dead (issue 5, item 1).

Two threads. One speaks with the ranks' store, twice a second, and is the only one that a store which does not answer
can block. The other looks at what is known, says who keeps the others waiting, and ends this rank where its main thread
cannot: because it hangs while another has given it up, or because a step takes longer than it may.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from andon.exits import Exit
from andon.launch import signs
from andon.launch.clock import UPDATE, StepClock
from andon.launch.ending import describe
from andon.launch.patience import Bounds
from andon.launch.report import Report
from andon.launch.signs import Sign, View
from andon.messages import say
from andon_contracts.peers import Process
from andon_contracts.stacks import doing

_SLOW_TIMES = 10
"""How many times the usual a step may take before it is slow."""
_EVIDENCE_S = 0.7
"""How long an end waits to learn who else has ended. Ranks have 1.5 s for theirs."""
_FAREWELL_S = 0.6
_PLACE_S = 1.0
"""Since when it matters where the main thread is."""


@dataclass
class _Heard:
    """The last beat of another rank: as it came, and when it came (`time.monotonic`)."""

    at: float
    raw: bytes = b""
    told: Mapping[str, Any] = field(default_factory=dict)
    process: Process | None = None


class Pulse:
    """One rank's. `ended`: called, in a thread of this, with the report of an end that the main thread cannot make."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        clock: StepClock,
        bounds: Bounds,
        ended: Callable[[Report], None],
        speak: Callable[[str], None] = say,
    ) -> None:
        """store: of this world alone, which no other thread uses. To be made by the thread that trains."""
        self.clock = clock
        self._store, self._rank, self._world, self._bounds = store, rank, world, bounds
        self._ended, self._speak = ended, speak
        self._owner = threading.get_ident()
        self._here = Process.here()
        now = time.monotonic()
        self._heard = {other: _Heard(now) for other in range(world) if other != rank}
        self._over, self._last, self._left = threading.Event(), "", threading.Event()
        self._exit, self._beats, self._rounds, self._deaf = 0, 0, 0, ""
        self._awake = threading.Event()
        self._slow_from = bounds.slow_s
        self._words_by: tuple[float, int] | None = None
        clock.pauses.begin(bounds.pause_s)
        self._threads = [threading.Thread(target=self._beat, name="andon-beat", daemon=True)] * (world > 1)
        self._threads.append(threading.Thread(target=self._look, name="andon-look", daemon=True))
        for thread in self._threads:
            thread.start()

    # what the rank asks for

    def explain(self, code: Exit) -> str:
        """Who is behind an end with this code, for the end of this rank's line; empty where nobody else is."""
        if code == Exit.RANK_SILENT:
            return signs.whom(self.view())
        if code != Exit.RANK_LOST:
            return ""
        # Who ended by itself has told the store before: a whole round of hearing tells it from one who died.
        deadline, wanted = time.monotonic() + _EVIDENCE_S, self._rounds + 2
        found = ""
        while (self._rounds < wanted or not found) and time.monotonic() < deadline and self._world > 1:
            self._awake.set()
            time.sleep(self._bounds.look_s / 10)
            found = signs.gone(self.view())
        # On another machine a process cannot be seen: who lives has given a sign meanwhile.
        return found or signs.lost(replace(self.view(), silence_s=_EVIDENCE_S))

    def leave(self, code: int, cause: str) -> None:
        """Tell the others that this rank ends, and stop looking. Takes a moment, at most `_FAREWELL_S`."""
        self._exit, self._last = code, cause or "finished"
        self._over.set()
        self._awake.set()
        if self._world > 1:
            self._left.wait(_FAREWELL_S)

    def view(self) -> View:
        """What is known now."""
        found = {self._rank: self._own()}
        # What this process could not hear because it did not run, nobody failed to tell.
        found |= {rank: _sign(heard, self.clock.pauses.ran_s(heard.at)[0]) for rank, heard in self._heard.items()}
        return View(self._rank, self._world, dict(sorted(found.items())), self._bounds.silent_s, self._deaf)

    # the thread that speaks with the store

    def _beat(self) -> None:
        try:
            while not self._over.is_set():
                self._tell()
                self._hear()
                self._rounds += 1
                self._awake.wait(self._bounds.beat_s)
                self._awake.clear()
            self._tell()
        except DistStoreError:  # it is there and gives no answer: the way to it, or its host, is down
            return
        except (RuntimeError, OSError) as error:  # from now on nobody gives signs of life
            self._deaf = f"the ranks' store is gone ({str(error).strip().partition(chr(10))[0]})"
        except Exception as error:  # noqa: BLE001 - whatever it is, this rank must not go on without its watch
            report = self._failure(error)
            with contextlib.suppress(Exception):  # what it is of, may be this very store
                self._tell()
            self._left.set()
            self._end(report)
        finally:
            self._left.set()

    def _tell(self) -> None:
        self._beats += 1
        told = {
            **asdict(self._own()),
            "beat": self._beats,
            "process": asdict(self._here),
            "ended": self._last,
            "exit": self._exit,
        }
        self._store.set(f"beat {self._rank}", json.dumps(told))

    def _hear(self) -> None:
        """One question for all that were heard before; only of the others it must be asked whether they came."""
        known = [rank for rank, heard in self._heard.items() if heard.raw or self._store.check([f"beat {rank}"])]
        beats = self._store.multi_get([f"beat {rank}" for rank in known]) if known else []
        for rank, raw in zip(known, beats, strict=True):
            if raw != self._heard[rank].raw:
                told = json.loads(raw)
                self._heard[rank] = _Heard(time.monotonic(), raw, told, Process(**told["process"]))

    # the thread that looks

    def _look(self) -> None:
        try:
            report = self._watch()
        except Exception as error:  # noqa: BLE001 - whatever it is, this rank must not go on without its watch
            report = self._failure(error)
        if report is not None:
            self._end(report)

    def _watch(self) -> Report | None:
        """Look until this rank ends by itself, or has to be ended, with this report."""
        while not self._over.wait(self._bounds.look_s):
            view = self.view()
            if self._expects_last_words(view):
                continue
            report = self._own_end(view)
            if report is not None:
                return report
            self._say_slow(view)
        return None

    def _expects_last_words(self, view: View) -> bool:
        """Whether a rank is seen to be gone, and what it told the store before it went may still be to be heard."""
        if view.deaf or not any(sign.state == "gone" and not sign.ended for sign in view.signs.values()):
            self._words_by = None
            return False
        if self._words_by is None:
            self._words_by = time.monotonic() + _EVIDENCE_S, self._rounds + 2
        deadline, wanted = self._words_by
        if self._rounds >= wanted or time.monotonic() >= deadline:
            return False
        self._awake.set()
        return True

    def _failure(self, error: Exception) -> Report:
        """The end of a rank of which a thread of this failed: nobody would see a deadline pass any more."""
        found = describe(error, self._rank)
        self._exit, self._last = Exit.CRASHED, f"the watch over this rank failed: {found.cause}"
        return replace(found, exit=self._exit, cause=self._last)

    def _end(self, report: Report) -> None:
        self._over.set()
        self._awake.set()
        if self._world > 1:
            self._left.wait(_FAREWELL_S)
        self._ended(report)

    def _say_slow(self, view: View) -> None:
        lasts, least = signs.lasts_s(view), max(self._bounds.slow_s, _SLOW_TIMES * self.clock.usual_s())
        if lasts < least:
            self._slow_from = least
        elif lasts >= self._slow_from and signs.speaks(view):
            self._slow_from = 2 * lasts
            self._speak(signs.slowness(view, self.clock.usual_s()))

    def _own_end(self, view: View) -> Report | None:
        """The end of this rank, where it is for this thread to make."""
        mine, bounds, failed = view.mine, self._bounds, signs.failed(view)
        step_s = bounds.step_s
        if step_s is not None and mine.phase == UPDATE and mine.phase_s >= step_s and signs.informed(view):
            text = f"{mine.where} took longer than run.step_deadline_s, {step_s:g} s: "
            # Who saw it first saw all of it: by now the slow rank itself may have ended by this deadline.
            told = [view.signs[rank].ended for rank in failed if view.signs[rank].ended.startswith(text)]
            cause = told[0] if told else text + signs.slowness(view, self.clock.usual_s())
            return self._report(Exit.RANK_SILENT, cause, mine)
        if not failed or mine.since_s < bounds.timeout_s:
            return None
        other = f"{view.name(failed[:1])} ended: {view.signs[failed[0]].ended}"
        if mine.waits:
            return self._report(Exit.RANK_LOST, f"still in a collective of {mine.where}, but {other}", mine)
        hangs = f"hangs in {mine.where} for {mine.since_s:.1f} s, {mine.place or 'where no Python runs'}"
        return self._report(Exit.RANK_SILENT, f"rank {self._rank} of {self._world} {hangs}; {other}", mine)

    def _report(self, code: Exit, cause: str, mine: Sign) -> Report:
        frame = sys._current_frames().get(self._owner)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        self._exit, self._last = code, cause
        return Report(
            self._rank, code, cause, time.time(), step=mine.step, message=f"{cause}\nThe main thread is at:\n{stack}"
        )

    def _own(self) -> Sign:
        now = self.clock.read()
        place = doing(self._owner) if now.since_s >= min(_PLACE_S, self._bounds.timeout_s / 4) else ""
        return Sign(
            now.ticks,
            now.step,
            now.phase,
            now.waits,
            now.since_s,
            now.phase_s,
            place,
            state="runs",
            host=self._here.host,
            paused_s=now.paused_s,
        )


def _sign(heard: _Heard, silent: float) -> Sign:
    """What a beat says `silent` seconds later: what had not changed then, is taken not to have changed since."""
    if heard.process is None:
        return Sign(silent_s=silent)
    names = ("ticks", "step", "phase", "waits", "since_s", "phase_s", "place", "ended", "exit", "host")
    told = Sign(**{name: heard.told[name] for name in names})
    since, phase = told.since_s + silent, told.phase_s + silent
    state = "elsewhere" if told.ended else heard.process.look()
    return replace(told, since_s=since, phase_s=phase, silent_s=silent, state=state)
