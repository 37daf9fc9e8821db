"""Halt together: what one rank found reaches all others, whatever they are doing (issue 3 item 4).

The cord is a key in a store (`halt_link`). A rank that learns that it was pulled writes its part of the bundle, and
raises: at its next hook; where it sleeps or reads, by a signal to its main thread (`blocked`). A rank that is blocked
where no Python runs, as in a collective, is ended by its own thread with `hard_stop`, and one that cannot even do that
by who pulled, if it runs on the same machine. Without `hard_stop` its groups are aborted where the backend can;
otherwise its own timeout ends it, or the end of the rank that it waits for, and the message says which.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from andon_contracts.bundle import Evidence, write_cause
from andon_contracts.causes import Cause, consequence, first_line
from andon_contracts.error_file import tell_launcher
from andon_contracts.legible import tell
from andon_contracts.liveness import blocked
from andon_contracts.liveness.end_messages import Teller, Whereabouts
from andon_contracts.liveness.halt_link import POLL_S, HaltLink, Progress
from andon_contracts.liveness.last_words import within
from andon_contracts.liveness.peer_monitor import LOOK_S, PeerMonitor
from andon_contracts.liveness.pending_collectives import PendingCollectives
from andon_contracts.liveness.signed import TAKEN_AWAY_S, Signed
from andon_contracts.stacks import doing, line_of
from andon_contracts.violation import Violation

_RAISE_S = 0.4
"""How long a rank has to come to a hook of ours, before its main thread is interrupted."""
_UNBLOCK_S = 0.6
"""How long it has then, before `hard_stop` ends it, or its groups are aborted."""
_SETTLE_S = 2.0
"""How long who pulled waits for the others."""
_LAST_S = 2.0
"""With `hard_stop`: how long a rank that raised, and that nobody caught, has to end."""


class HaltSignal:
    """What any rank may pull, once. `cause` is why, on every rank; `evidence` what this rank has for a bundle."""

    def __init__(
        self,
        board: Signed,
        rank: int,
        world_size: int,
        begun: PendingCollectives,
        *,
        hard_stop: bool,
        patience_s: float,
        warns: bool,
    ) -> None:
        """begun: what this rank has begun that needs the others.

        patience_s: how long a process may be stopped, or one on another machine silent, before it hangs. warns: a
        thread of this that ends by an error of its own halts nobody, and all ranks say so.
        """
        self.begun = begun
        self.cause: Cause | None = None
        self.evidence = Evidence(rank=rank, world=world_size)
        self._rank, self._world, self._hard_stop = rank, world_size, hard_stop
        self._at = Whereabouts(point="before the first update")
        self._at_time = time.monotonic()
        self._known, self._raised, self._released = threading.Event(), threading.Event(), threading.Event()
        self._over, self._awake = threading.Event(), threading.Event()
        self._pulled_here, self._crashed = False, False
        self._leaving, self._evidence_left = threading.Lock(), False
        self._pulling = threading.Lock()
        self._owner, self._process = threading.get_ident(), os.getpid()
        self._kept = _shared_store()
        self._warns, self._warned = warns, ""
        self._link = HaltLink(
            board, rank, world_size, self._learn, self._progress, self._warn, self._deafened, _keeper(self._kept)
        )
        self._monitor = PeerMonitor(self._link, rank, patience_s, begun)
        self._interruptible = blocked.enlist(self.heed)
        self._hook: Callable[..., object] = sys.excepthook
        self._mine = self._excepthook
        sys.excepthook = self._mine
        # A process of multiprocessing catches what its function raises, and ends without the interpreter's last calls.
        self._last_call = multiprocessing.util.Finalize(None, self._at_exit, exitpriority=100)
        self._thread = threading.Thread(target=self._watch, name="andon-cord", daemon=True)
        self._thread.start()

    # what a rank does

    def at(self, step: int, point: str, last_equal: int | None) -> None:
        """This rank works at update `step` and has come to `point`."""
        self._at, self._at_time = Whereabouts(step, point, 0.0, last_equal), time.monotonic()

    def meet(self) -> None:
        """All ranks have made their cord: know who they are, before any of them can die. Takes a moment."""
        self._link.meet()

    def heed(self, *, again: bool = False) -> None:
        """Raise `Violation` if any rank pulled the cord.

        Once, so that a loop that caught it can save what it has; `again` before an update, which nothing excuses.
        """
        if self.cause is not None and (again or not self._raised.is_set()):
            self._raised.set()
            raise self.cause.violation()

    def pull(self, reason: str) -> NoReturn:
        """Tell all ranks to stop for `reason` and raise `Violation`. Waits briefly for the others."""
        raise self._pull(self._teller.pulled(reason)).violation()

    def lost(self, error: BaseException) -> None:
        """A collective raised `error`: raise `Violation` from it where it only says that another rank is gone."""
        if consequence(error) is not None and not self._raised.is_set():
            raise self._pull(self._cause_behind(error)).violation() from error

    def failed(self, error: BaseException) -> None:
        """`error` ends this rank's loop: the others need not wait for it. That of a forked child is its own affair."""
        if self._over.is_set() or os.getpid() != self._process:
            return
        if self.cause is not None:
            self._raised.set()
            self._tell_launcher(self.cause)
        elif consequence(error) is not None:
            self._pull(self._cause_behind(error))
        elif isinstance(error, Violation):
            self._pull(Cause.of_violation(error, self._rank))
        else:
            self._pull(self._teller.failed(error, line_of(error)))

    def end_with(self, kind: object, error: BaseException | None, trace: object) -> None:
        """As the end of a `with` block: `failed` with the error that leaves it, if one does, and `close`."""
        if error is not None:
            self.failed(error)
            say_cause(self.cause, error)  # the interpreter asks nobody of ours any more, once this is closed
        self.close()

    def close(self) -> None:
        """This rank is done: say so, and stop looking."""
        if self._over.is_set():
            return
        if self.cause is not None and os.getpid() == self._process:
            self._leave_evidence(self.cause, with_state=False)  # a loop that raised at once is faster than the thread
        self._over.set()
        for event in (self._awake, self._raised, self._released):
            event.set()
        blocked.dismiss(self.heed)
        if sys.excepthook is self._mine:
            sys.excepthook = self._hook
        self._last_call.cancel()
        self._link.leave()
        if self._link.checked.dropped:
            tell(f"andon: {self._link.checked.account(self._rank)}")
        if threading.current_thread() is not self._thread:
            self._thread.join(LOOK_S)

    # how it comes about

    @property
    def _teller(self) -> Teller:
        return Teller(self._rank, self._world, self._whereabouts(), self.evidence.folder)

    def _whereabouts(self) -> Whereabouts:
        return replace(self._at, since_s=time.monotonic() - self._at_time)

    def _progress(self) -> Progress:
        return Progress(self._whereabouts(), self.begun.told())

    def _learn(self, cause: Cause) -> None:
        if self.cause is None:
            self.cause = cause
        self._known.set()
        self._awake.set()

    def _pull(self, cause: Cause) -> Cause:
        """Publish `cause` from the thread of the loop, leave what there is to leave, and wait for the others."""
        self._pulled_here = True
        self._raised.set()
        first = self._publish(cause)
        self._leave_evidence(first, with_state=True)
        self._tell_launcher(first)
        self._link.acknowledge()
        self._settle()
        return first

    def _publish(self, cause: Cause) -> Cause:
        with self._pulling:  # the loop and our thread may find something at once, and are to act on one cause
            if self.cause is None:
                self._link.publish(cause)
                if not self._known.wait(_SETTLE_S / 2):
                    self._learn(cause)  # the store does not answer: at least this rank acts on what it knows
        assert self.cause is not None
        return self.cause

    def _cause_behind(self, error: BaseException) -> Cause:
        """Who is gone, or whom the others wait for, where `error` says that somebody is."""
        deadline = time.monotonic() + _SETTLE_S / 2
        while self.cause is None:
            found = self._monitor.missing(self._teller, error)
            if found is not None:
                return found.with_rows(("noticed", f"by rank {self._rank}: {first_line(error)}"))
            if time.monotonic() > deadline:
                return self._teller.unknown(error)
            self._known.wait(POLL_S / 2)
        return self.cause

    def _settle(self) -> None:
        """Wait until all on this machine know or are gone; with `hard_stop` end those that cannot even know."""
        deadline = time.monotonic() + (_SETTLE_S if self._hard_stop else _SETTLE_S / 2)
        # One that is stopped will not learn of it however long one waits.
        while time.monotonic() < deadline and any(each.look() == "runs" for each in self._monitor.unaware().values()):
            time.sleep(POLL_S / 4)
        if self._hard_stop:
            for rank, process in self._monitor.unaware().items():
                if self.cause is not None and process.error_file:
                    tell_launcher(self.cause.text, late=self.cause.rank != rank, path=process.error_file)
                if process.kill():
                    tell(f"andon: rank {rank} of {self._world} could not end itself, and rank {self._rank} ended it")

    # the thread that looks out, and acts where the loop cannot

    def _watch(self) -> None:
        trouble: Callable[[Teller], Cause | None] = self._monitor.trouble
        # Once more after an error of its own: to tell the other ranks of it, or to halt where they do.
        for _ in range(2):
            try:
                self._look_out(trouble)
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, this rank must not go on as if it were guarded
                cause = self._teller.unguarded(self._thread.name, error)
            if self.cause is not None:  # it halts already, and this was to see to it
                break
            if self._warns:
                self._warn(_headline(cause))
                self._link.warn(_headline(cause))
            trouble = _always(None if self._warns else cause)
        tell(cause.text)
        if self._interruptible:
            blocked.interrupt()

    def _deafened(self, error: Exception) -> Cause | str:
        """The link of this rank ended: what is to become of it."""
        cause = self._teller.unguarded("andon-halt-link", error)
        if not self._warns:
            return cause
        self._warn(_headline(cause))
        return _headline(cause)

    def _warn(self, text: str) -> None:
        """Say, once, that a rank trains on unguarded."""
        if text != self._warned:
            self._warned = text
            tell(f"andon: {text}")

    def _look_out(self, trouble: Callable[[Teller], Cause | None]) -> None:
        while not self._over.is_set():
            self._awake.wait(LOOK_S)
            self._awake.clear()
            if self._over.is_set():
                return
            found = None if self._known.is_set() else trouble(self._teller)
            if found is not None:
                self._publish(found)
            if self.cause is not None:
                self._act(settle=found is not None)
                return

    def _act(self, *, settle: bool) -> None:
        assert self.cause is not None
        cause = self.cause
        if self._pulled_here:
            self._see_out()
            return
        self._leave_evidence(cause, with_state=False)
        self._tell_launcher(cause)
        self._link.acknowledge()
        if settle:
            self._settle()
        if not self._raised.wait(_RAISE_S) and self._interruptible:
            blocked.interrupt()
        if self._raised.wait(_UNBLOCK_S):
            self._see_out()
        elif not self._over.is_set():
            self._unblock(cause)

    def _unblock(self, cause: Cause) -> None:
        place = doing(self._owner)
        if self._hard_stop:
            _end_process(
                f"{cause.text}\n  ended    rank {self._rank}, which was blocked {place}: no hook ran (hard_stop)"
            )
        aborted = blocked.abort_groups()
        if not aborted or not self._raised.wait(_UNBLOCK_S):
            tell(f"{cause.text}\n  blocked  rank {self._rank} {place}: {blocked.what_ends(place, aborted)}")
        self._raised.wait()
        self._see_out()

    def _see_out(self) -> None:
        """With `hard_stop`: a rank whose error nobody caught ends, whatever holds its process up."""
        self._released.wait()
        if self._hard_stop and self._crashed:
            time.sleep(_LAST_S)
            _end_process("")

    def _leave_evidence(self, cause: Cause, *, with_state: bool) -> None:
        """Once, by the thread of the loop or by that of the cord; the other one waits until it is on the disk."""
        with self._leaving:
            if self._evidence_left:
                return
            self._evidence_left = True
            at = {**vars(self._whereabouts()), "doing": doing(self._owner)}
            failed = write_cause(cause, self.evidence, at, state=with_state, account=self._monitor.lowest_live())
            if failed:
                tell(f"andon: rank {self._rank} could not write all of its bundle: {failed}")

    def _tell_launcher(self, cause: Cause) -> None:
        tell_launcher(cause.text, late=cause.rank != self._rank)

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: object) -> None:
        self.failed(error)
        self._hook(kind, error, trace)
        say_cause(self.cause, error)
        self._crash()

    def _crash(self) -> None:
        """Nobody caught the error: the process is to end now."""
        self._crashed = True
        self._released.set()
        if self._hard_stop:
            blocked.alarm(2 * _LAST_S)  # the interpreter's last calls may wait for good, for threads or a device

    def _at_exit(self) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            error = error.__context__ if error.code else None  # `sys.exit(1)` while it is handled ends by it
        if error is None:
            self.close()
        else:
            self.failed(error)
            self._crash()


def say_cause(cause: Cause | None, error: BaseException) -> None:
    """Say what ends all ranks, where `error`, which ends this one, does not."""
    if cause is not None and cause.text != str(error) and not isinstance(error, KeyboardInterrupt):
        tell(cause.text)


def own_store(name: str) -> Store | None:
    """A connection of our own to the process group's store, with keys under `name`; None without a group."""
    shared = _shared_store()
    if shared is None:
        return None
    clone = getattr(shared, "clone", None)
    if clone is not None:
        with contextlib.suppress(RuntimeError, NotImplementedError):
            # The loop's own connection answers one question at a time, and may wait for a key for minutes.
            shared = clone()
            shared.set_timeout(datetime.timedelta(seconds=TAKEN_AWAY_S))
    return PrefixStore(f"andon/{name}", shared)


def _shared_store() -> Store | None:
    if not dist.is_available() or not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()


def _keeper(shared: Store | None) -> int | None:
    """The rank in whose process the store lives: torch's launcher keeps its own, a file needs no process."""
    while isinstance(shared, PrefixStore):
        shared = shared.underlying_store
    if not isinstance(shared, TCPStore) or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    return 0


def _headline(cause: Cause) -> str:
    return cause.text.partition("\n")[0]


def _always(cause: Cause | None) -> Callable[[Teller], Cause | None]:
    return lambda teller: cause


def _end_process(text: str) -> NoReturn:
    """Print `text` and end, even where nobody reads what is printed, or the loop holds the lock of standard output."""

    def last_words() -> None:
        if text:
            tell(text)
        sys.stdout.flush()

    within(_RAISE_S, last_words)
    # As the interpreter does when it ends: a loader's process that is blocked would not notice by itself.
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
    os._exit(1)
