"""What ranks tell each other about halting, over a store that is apart from every group (issue 3 item 4).

One thread speaks with the store and nobody else does, so that a store that does not answer blocks nobody: everything
here returns at once or after a stated time.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch._C._distributed_c10d import Store

from andon_contracts.causes import Cause
from andon_contracts.peers import Process

POLL_S = 0.2
"""How often a rank asks whether somebody pulled the cord."""
_BEAT_S = 1.0
_ANSWER_S = 1.0
_NEAR = 32
"""So many ranks on either side may run on the same machine and are looked at there."""
_PULLED = "pulled"


@dataclass(frozen=True)
class News:
    """What the store says of all ranks: those that left in order, and where each one was a second ago."""

    left: frozenset[int]
    progress: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)


class Wire:
    """The ranks' line to each other. `learn` is called, in the thread of the wire, with the cause that was first."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        learn: Callable[[Cause], None],
        progress: Callable[[], Mapping[str, object]],
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
        self._store, self._rank, self._world, self.keeper = store, rank, world, keeper
        self.following = (rank + 1) % world
        self._learn, self._progress = learn, progress
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._known = False
        self._keeper_left = False
        self._beat, self._beat_at = 0, 0.0
        self._answered = time.monotonic()
        self._last_heard: bytes = b""
        self._near = sorted({(rank + offset) % world for offset in range(-_NEAR, _NEAR + 1)} - {rank})
        self._thread = threading.Thread(target=self._run, name="andon-wire", daemon=True)
        self._met = threading.Event()
        # Before the thread has the store: a rank that dies at once must have said who it was.
        self._store.set(f"who {rank}", json.dumps(asdict(Process.here())))
        self._thread.start()

    # what the other threads of this rank ask for

    def meet(self) -> None:
        """Wait until this rank knows whom to look out for; called when all ranks have made their wire."""
        self._met.wait(5 * _ANSWER_S)

    def publish(self, cause: Cause) -> None:
        """Tell all ranks to stop for `cause`; the first that is told wins, and all learn that one."""
        self._requests.put(lambda: self._pull(cause))

    def acknowledge(self) -> None:
        """Tell the others that this rank knows, and has left what it has to leave."""
        self._requests.put(lambda: self._store.set(f"ended {self._rank}", "1"))

    def ask(self) -> News | None:
        """What the store says now; None where it does not answer in time."""
        found: list[News] = []
        self._wait_for(lambda: found.append(self._news()))
        return found[0] if found else None

    def heard(self) -> Mapping[int, Mapping[str, Any]]:
        """What the ranks nearby told of themselves last; nothing where the store does not answer in time."""
        found: dict[int, Mapping[str, Any]] = {}
        self._wait_for(lambda: found.update(self._beats()))
        return found

    def answers(self) -> bool:
        """Whether the store has answered within the last second."""
        return self._thread.is_alive() and time.monotonic() - self._answered < _ANSWER_S

    def leave(self) -> None:
        """Say that this rank is done and will not be missed, and end the thread. Takes a moment, at most a second."""
        if self._thread is threading.current_thread() or not self._thread.is_alive():
            return
        self._wait_for(self._say_goodbye)
        self._requests.put(None)
        self._thread.join(_ANSWER_S)

    def _wait_for(self, request: Callable[[], object]) -> None:
        done = threading.Event()

        def run() -> None:
            try:
                request()
            except RuntimeError:
                self.broken = not self._keeper_left  # before who asked goes on
                raise
            finally:
                done.set()

        if self._thread.is_alive():
            self._requests.put(run)
            done.wait(_ANSWER_S)

    # the thread

    def _run(self) -> None:
        while True:
            try:
                # In a hurry until it knows whom to look out for, and once there is something to end.
                hurried = self._known or not self.processes
                request = self._requests.get(timeout=POLL_S / 10 if hurried else POLL_S)
            except queue.Empty:
                request = self._routine
            if request is None:
                return
            try:
                request()
                self._answered = time.monotonic()
            except RuntimeError:  # the store is gone: its keeper ended, in order or not
                self.broken = not self._keeper_left
                return
            if self._keeper_left and not self._known:
                return

    def _routine(self) -> None:
        if not self._known and self._store.check([_PULLED]):
            self._take(self._store.get(_PULLED))
        if self._known:
            self.ended = frozenset(r for r in self._near if self._store.check([f"ended {r}"]))
            self.left = frozenset(r for r in self._near if self._store.check([f"left {r}"]))
            return
        if not self.processes and self._store.check([f"who {r}" for r in self._near]):
            self.processes = {r: Process(**json.loads(self._store.get(f"who {r}"))) for r in self._near}
            self._met.set()
        if self.keeper is not None and self.keeper != self._rank and self._store.check([f"left {self.keeper}"]):
            self._keeper_left = True
            self._store.add("saw", 1)
        elif time.monotonic() - self._beat_at >= _BEAT_S:
            self._tell_progress()

    def _tell_progress(self) -> None:
        now = time.monotonic()
        passed, self._beat_at, self._beat = min(now - self._beat_at, 2 * _BEAT_S), now, self._beat + 1
        self._store.set(f"beat {self._rank}", json.dumps({**self._progress(), "beat": self._beat}))
        if self.following in self.processes and self.processes[self.following].look() == "elsewhere":
            beat = f"beat {self.following}"
            heard = self._store.get(beat) if self._store.check([beat]) else b""
            # Seconds in which this thread ran, so that a pause of the whole job counts for nothing.
            self.silent_s = 0.0 if heard != self._last_heard or not heard else self.silent_s + passed
            self._last_heard = heard

    def _pull(self, cause: Cause) -> None:
        self._take(self._store.compare_set(_PULLED, "", cause.to_json()))

    def _take(self, text: bytes) -> None:
        if not self._known:
            self._known = True
            self._learn(Cause.from_json(text.decode("utf-8", "replace")))

    def _beats(self) -> Mapping[int, Mapping[str, Any]]:
        keys = [f"beat {rank}" for rank in self._near]
        if not self._store.check(keys):
            return {}
        return {rank: json.loads(text) for rank, text in zip(self._near, self._store.multi_get(keys), strict=True)}

    def _news(self) -> News:
        ranks = range(self._world)
        beats = {r: self._store.get(f"beat {r}") for r in ranks if self._store.check([f"beat {r}"])}
        return News(
            frozenset(r for r in ranks if self._store.check([f"left {r}"])),
            {rank: json.loads(text) for rank, text in beats.items()},
        )

    def _say_goodbye(self) -> None:
        self._tell_progress()
        self._store.set(f"left {self._rank}", "1")
        saw = self._store.add("saw", 0 if self._keeper_left or self.keeper == self._rank else 1)
        deadline = time.monotonic() + 3 * POLL_S
        if self.keeper == self._rank and not self._known:
            # With this process the store ends: the others must not take that for its death.
            while saw < self._world - 1 and time.monotonic() < deadline:
                time.sleep(POLL_S / 20)
                with contextlib.suppress(RuntimeError):
                    saw = self._store.add("saw", 0)
