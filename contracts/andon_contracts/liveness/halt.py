"""Halt together: when one rank stops, all ranks stop for the same cause, whatever they are doing (issue 3 item 4)."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from andon_contracts.bundle import Evidence, write_cause
from andon_contracts.causes import Cause, consequence, first_line
from andon_contracts.error_file import tell_launcher
from andon_contracts.legible import tell
from andon_contracts.liveness.end_messages import EndMessages, Position
from andon_contracts.liveness.halt_link import LOOK_S, POLL_S, HaltLink, PeerMonitor, Progress
from andon_contracts.liveness.pending_collectives import PendingCollectives
from andon_contracts.liveness.process import run_within
from andon_contracts.liveness.signed import STORE_TIMEOUT_S, SignedStore
from andon_contracts.stacks import doing, line_of
from andon_contracts.violation import Violation

_RAISE_S = 0.4
"""How long a rank that has learned the cause may take to come to a hook, before its main thread is interrupted."""
_UNBLOCK_S = 0.6  # how long it may take then, before `hard_stop` ends it, or its groups are aborted
_SETTLE_S = 2.0  # how long the rank that published the cause waits for the others
_LAST_S = 2.0  # with `hard_stop`: how long a rank may take to end after an error that nobody caught

# A real-time signal: those with names mean something to shells, launchers and libraries.
_SIGNAL = signal.SIGRTMIN + 7
_CAN_ABORT = frozenset({"nccl"})  # Gloo has the method too, but it does nothing
_interruptible: list[Callable[[], None]] = []


class HaltSignal:
    """Stops all ranks for one `cause`: the first that any rank publishes, the same on every rank.

    What happens, in this order, and why:

    1. Publish (`pull`, `failed`, `lost`, or the monitor): one key of a store, whose first writer wins (`HaltLink`).
       Otherwise ranks that find trouble at the same time would raise different errors.
    2. Learn: on each rank the thread of the link polls the key. `learn` sets `cause`, `_known` and `_awake`.
    3. Leave evidence, the part of the bundle and torch's error file, before anything can end the process.
    4. Raise: the loop calls `raise_if_halted` at each hook and while a gather waits. This sets `_raised`, and is done
       only once, so that a loop that catches the error can save what it has.
    5. Interrupt, after `_RAISE_S`: a signal makes the main thread call `raise_if_halted`, or a sleeping rank would
       never stop.
    6. Unblock, after `_UNBLOCK_S`: no Python runs, as in a collective. With `hard_stop` the process ends here, and the
       rank that published kills those of its machine that cannot even do that (SIGSTOP). Without it groups are aborted,
       which NCCL can do and gloo cannot.
    7. End: an error that nobody caught, or `close`, sets `_released`. With `hard_stop` a process that crashed and does
       not end within `_LAST_S`, because of its threads or a device, is ended.

    Three threads: that of the loop; "andon-halt-link", which alone waits for the store; "andon-halt", which looks out
    for trouble and takes steps 3 and 5 to 7, because the loop may be blocked. `_pulling` makes the two act on one cause
    if both find something; `_leaving` makes both wait until the evidence is on the disk.
    """

    def __init__(
        self,
        store: SignedStore,
        rank: int,
        world_size: int,
        pending: PendingCollectives,
        *,
        hard_stop: bool,
        patience_s: float,
        warns: bool,
    ) -> None:
        """pending: what this rank has begun that needs the others. patience_s: after how long a stopped process, or a
        silent one on another machine, counts as hanging. warns: if a guarding thread fails, only warn.
        """
        self.pending = pending
        self.cause: Cause | None = None
        self.evidence = Evidence(rank=rank, world=world_size)
        self._rank, self._world, self._hard_stop, self._warns = rank, world_size, hard_stop, warns
        self._at, self._at_time = Position(point="before the first update"), time.monotonic()
        self._known, self._raised, self._released = threading.Event(), threading.Event(), threading.Event()
        self._over, self._awake = threading.Event(), threading.Event()
        self._pulling, self._leaving = threading.Lock(), threading.Lock()
        self._pulled_here, self._crashed, self._evidence_left, self._warned = False, False, False, ""
        self._owner, self._process = threading.get_ident(), os.getpid()
        self._shared = _shared_store()  # kept alive, since it may live in this process
        self._link = HaltLink(store, rank, world_size, self, _store_host(self._shared))
        self._monitor = PeerMonitor(self._link, rank, patience_s, pending)
        _enlist(self.raise_if_halted)
        self._hook, sys.excepthook = sys.excepthook, self._excepthook
        # Processes of multiprocessing catch what their function raises, and end without the interpreter's last calls.
        self._last_call = multiprocessing.util.Finalize(None, self._at_exit, exitpriority=100)
        self._thread = threading.Thread(target=self._guard, name="andon-halt", daemon=True)
        self._thread.start()

    # For the thread of the loop.

    def at(self, step: int, point: str, last_equal: int | None) -> None:
        self._at, self._at_time = Position(step, point, 0.0, last_equal), time.monotonic()

    def meet(self) -> None:
        """Learn which processes the others are, before any can die; to be called when all have made their signal."""
        self._link.meet()

    def raise_if_halted(self, *, again: bool = False) -> None:
        """Raise `Violation` if there is a cause, the first time only. again: every time, as before an update."""
        if self.cause is not None and (again or not self._raised.is_set()):
            self._raised.set()
            raise self.cause.violation()

    def pull(self, reason: str) -> NoReturn:
        """Tell all ranks to stop for `reason` and raise `Violation`. Waits briefly for the others."""
        raise self._pull(self._messages.pulled(reason)).violation()

    def lost(self, error: BaseException) -> None:
        """A collective raised `error`: raise `Violation` instead if that only says that another rank is gone."""
        if consequence(error) is not None and not self._raised.is_set():
            raise self._pull(self._cause_behind(error)).violation() from error

    def failed(self, error: BaseException) -> None:
        """`error` ends this rank's loop, so the others need not wait for it. Ignored in a forked child."""
        if not self._open:
            return
        if self.cause is not None:
            self._raised.set()
            tell_launcher(self.cause.text, late=self.cause.rank != self._rank)
        elif consequence(error) is not None:
            self._pull(self._cause_behind(error))
        elif isinstance(error, Violation):
            self._pull(Cause.of_violation(error, self._rank))
        else:
            self._pull(self._messages.failed(error, line_of(error)))

    def end_with(self, kind: object, error: BaseException | None, trace: object) -> None:
        """The end of a `with` block: `failed` with the error that leaves it, if any, and `close`."""
        if error is not None:
            self.failed(error)
            print_cause(self.cause, error)  # after `close` the excepthook no longer does
        self.close()

    def close(self) -> None:
        if self._over.is_set():
            return
        if self.cause is not None and os.getpid() == self._process:
            self._leave_evidence(self.cause, with_state=False)  # a loop that raised may be faster than the thread
        for event in (self._over, self._awake, self._raised, self._released):
            event.set()
        _dismiss(self.raise_if_halted)
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._hook
        self._last_call.cancel()
        self._link.leave()
        if self._link.reader.dropped:
            tell(f"andon: {self._link.reader.account(self._rank)}")
        if threading.current_thread() is not self._thread:
            self._thread.join(LOOK_S)

    @property
    def _open(self) -> bool:
        return not self._over.is_set() and os.getpid() == self._process

    @property
    def _messages(self) -> EndMessages:
        at = replace(self._at, since_s=time.monotonic() - self._at_time)
        return EndMessages(self._rank, self._world, at, self.evidence.folder)

    def _cause_behind(self, error: BaseException) -> Cause:
        deadline = time.monotonic() + _SETTLE_S / 2
        while self.cause is None:
            found = self._monitor.missing(self._messages, error)
            if found is not None:
                return found.with_rows(("noticed", f"by rank {self._rank}: {first_line(error)}"))
            if time.monotonic() > deadline:
                return self._messages.unknown(error)
            self._known.wait(POLL_S / 2)
        return self.cause

    def _pull(self, cause: Cause) -> Cause:
        self._pulled_here = True
        self._raised.set()
        first = self._publish(cause)
        self._leave_evidence(first, with_state=True)
        tell_launcher(first.text, late=first.rank != self._rank)
        self._link.acknowledge()
        self._settle()
        return first

    # For the threads of the loop and "andon-halt".

    def _publish(self, cause: Cause) -> Cause:
        with self._pulling:
            if self.cause is None:
                self._link.publish(cause)
                if not self._known.wait(_SETTLE_S / 2):
                    self.learn(cause)  # the store does not answer: at least this rank acts
        assert self.cause is not None
        return self.cause

    def _settle(self) -> None:
        """Wait until all ranks of this machine know or are gone; with `hard_stop` kill those that cannot even know."""
        deadline = time.monotonic() + (_SETTLE_S if self._hard_stop else _SETTLE_S / 2)
        # A stopped process will not learn it, however long this waits.
        while time.monotonic() < deadline and any(
            each.local_state() == "runs" for each in self._monitor.unaware().values()
        ):
            time.sleep(POLL_S / 4)
        for rank, process in self._monitor.unaware().items() if self._hard_stop else ():
            if self.cause is not None and process.error_file:
                tell_launcher(self.cause.text, late=self.cause.rank != rank, path=process.error_file)
            if process.kill():
                tell(f"andon: rank {rank} of {self._world} could not end itself, and rank {self._rank} ended it")

    def _leave_evidence(self, cause: Cause, *, with_state: bool) -> None:
        with self._leaving:
            if self._evidence_left:
                return
            self._evidence_left = True
            at = {**vars(self._messages.at), "doing": doing(self._owner)}
            failed = write_cause(cause, self.evidence, at, state=with_state, account=self._monitor.lowest_live())
            if failed:
                tell(f"andon: rank {self._rank} could not write all of its bundle: {failed}")

    # For the thread of the link, as its `Listener`.

    def learn(self, cause: Cause) -> None:
        self.cause = self.cause or cause
        self._known.set()
        self._awake.set()

    def progress(self) -> Progress:
        return Progress(self._messages.at, self.pending.counts())

    def warn(self, text: str) -> None:
        if text != self._warned:
            self._warned = text
            tell(f"andon: {text}")

    def unguarded(self, thread: str, error: Exception) -> Cause | str:
        failure = self._messages.unguarded(thread, error)
        if not self._warns:
            return failure
        text = failure.text.partition("\n")[0]
        self.warn(text)
        return text

    # The thread "andon-halt".

    def _guard(self) -> None:
        try:
            self._look_out()
        except Exception as error:  # noqa: BLE001 - whatever it is, this rank does not halt in silence
            tell(self._messages.unguarded("andon-halt", error).text)
            _interrupt(self.raise_if_halted)

    def _look_out(self) -> None:
        looks = True
        while not self._over.is_set():
            self._awake.wait(LOOK_S)
            self._awake.clear()
            if self._over.is_set():
                return
            found: Cause | str | None = None
            if looks and not self._known.is_set():
                try:
                    found = self._monitor.trouble(self._messages)
                except Exception as error:  # noqa: BLE001 - this rank must not go on as if it were guarded
                    looks, found = False, self.unguarded("andon-halt", error)
            if isinstance(found, str):
                self._link.warn(found)
            elif found is not None:
                self._publish(found)
            if self.cause is not None:
                self._act(self.cause, settle=isinstance(found, Cause))
                return

    def _act(self, cause: Cause, *, settle: bool) -> None:
        if not self._pulled_here:
            self._leave_evidence(cause, with_state=False)
            tell_launcher(cause.text, late=cause.rank != self._rank)
            self._link.acknowledge()
            if settle:
                self._settle()
            if not self._raised.wait(_RAISE_S):
                _interrupt(self.raise_if_halted)
            if not self._raised.wait(_UNBLOCK_S) and not self._over.is_set():
                self._unblock(cause)
        self._released.wait()
        if self._hard_stop and self._crashed:
            time.sleep(_LAST_S)
            _end_process("")

    def _unblock(self, cause: Cause) -> None:
        place = doing(self._owner)
        if self._hard_stop:
            ended = f"rank {self._rank}, which was blocked {place}: no hook ran (hard_stop)"
            _end_process(f"{cause.text}\n  ended    {ended}")
        aborted = _abort_groups()
        if not aborted or not self._raised.wait(_UNBLOCK_S):
            tell(f"{cause.text}\n  blocked  rank {self._rank} {place}: {_what_ends(place, aborted)}")
        self._raised.wait()

    # The end of the process.

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # After `close`, the hook of a watch that was opened later still calls this one. It then must do nothing else.
        guarded = self._open
        self.failed(error)
        self._hook(kind, error, trace)
        if guarded:
            print_cause(self.cause, error)
            self._crash()

    def _at_exit(self) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            error = error.__context__ if error.code else None  # `sys.exit(1)` in an `except` block ends by its error
        if error is None:
            self.close()
        else:
            self.failed(error)
            self._crash()

    def _crash(self) -> None:
        self._crashed = True
        self._released.set()
        if self._hard_stop:
            _alarm(2 * _LAST_S)  # the interpreter's last calls may wait for threads or a device for ever


def print_cause(cause: Cause | None, error: BaseException) -> None:
    """Print what ends all ranks, unless it is `error`, which ends this one."""
    if cause is not None and cause.text != str(error) and not isinstance(error, KeyboardInterrupt):
        tell(cause.text)


def own_store(name: str) -> Store | None:
    """A connection of our own to the process group's store, with keys under `name`; None without a group."""
    shared: Any = _shared_store()
    if hasattr(shared, "clone"):
        with contextlib.suppress(RuntimeError, NotImplementedError):
            # The loop's own connection answers one request at a time, and may wait for a key for minutes.
            shared = shared.clone()
            shared.set_timeout(datetime.timedelta(seconds=STORE_TIMEOUT_S))
    return None if shared is None else PrefixStore(f"andon/{name}", shared)


def _shared_store() -> Store | None:
    initialized = dist.is_available() and dist.is_initialized()
    return dist.distributed_c10d._get_default_store() if initialized else None


def _store_host(shared: Store | None) -> int | None:
    """The rank in whose process the store lives; None for torch's launcher, which keeps its own, and for a file."""
    while isinstance(shared, PrefixStore):
        shared = shared.underlying_store
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return 0 if isinstance(shared, TCPStore) and not agent else None


def _end_process(text: str) -> NoReturn:
    """Print `text` and end, even if nobody reads what is printed, or the loop holds the lock of standard output."""

    def last_words() -> None:
        if text:
            tell(text)
        sys.stdout.flush()

    run_within(_RAISE_S, last_words)
    # As the interpreter does at its end: a worker of a loader that is blocked would not notice by itself.
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
    os._exit(1)


# How to reach a main thread that comes to no hook. A blocking call of Python (a sleep, a read, a queue) returns when a
# signal handler raises. Native code goes on, and the handler runs only when Python runs again.


def _handle(number: int, frame: FrameType | None) -> None:
    for raise_if_halted in list(_interruptible):
        raise_if_halted()


def _enlist(raise_if_halted: Callable[[], None]) -> None:
    """Let `_interrupt` call `raise_if_halted`, unless this is not the main thread, or somebody else uses the signal."""
    free = signal.getsignal(_SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN, _handle)
    if free and threading.current_thread() is threading.main_thread():
        signal.signal(_SIGNAL, _handle)
        _interruptible.append(raise_if_halted)


def _dismiss(raise_if_halted: Callable[[], None]) -> None:
    if raise_if_halted in _interruptible:
        _interruptible.remove(raise_if_halted)
        if not _interruptible and signal.getsignal(_SIGNAL) is _handle:
            with contextlib.suppress(ValueError):  # only the main thread may; else the handler stays, and calls nothing
                signal.signal(_SIGNAL, signal.SIG_IGN)  # not the default: a signal may still be on its way


def _interrupt(raise_if_halted: Callable[[], None]) -> None:
    """If `raise_if_halted` is enlisted: make the main thread call all that are, as soon as it runs Python."""
    main = threading.main_thread()
    if raise_if_halted in _interruptible and main.ident is not None and main.is_alive():
        signal.pthread_kill(main.ident, _SIGNAL)


def _alarm(seconds: float) -> None:
    """Let the kernel end this process by SIGALRM after that time, even if no thread can run and no lock is free."""
    if threading.current_thread() is threading.main_thread():
        # The default action ends the process; a handler of Python would need the interpreter.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _abort_groups() -> tuple[str, ...]:
    groups = list(dist.distributed_c10d._world.pg_map) if dist.is_available() and dist.is_initialized() else []
    backends = [each for group in groups for each in _backends_of(group) if each.name() in _CAN_ABORT]
    for each in backends:
        each.abort()
    return tuple(sorted({str(each.name()) for each in backends}))


def _what_ends(place: str, aborted: tuple[str, ...]) -> str:
    if aborted:
        return f"its {', '.join(aborted)} groups were aborted; it raises when the aborted call returns"
    if "in a collective" not in place:
        return "it raises when Python runs again; hard_stop=True ends it at once"
    backends = _backends_of(dist.distributed_c10d._get_default_group()) if dist.is_initialized() else ()
    waits = sorted({f"{each.name()}: {each.options._timeout}" for each in backends})
    return (
        "its group cannot be aborted; it ends with the rank that it waits for, or by the group's own timeout "
        f"({', '.join(waits)}); hard_stop=True ends it at once"
    )


def _backends_of(group: dist.ProcessGroup) -> Iterator[Any]:
    for device in ("cuda", "cpu"):
        with contextlib.suppress(RuntimeError):  # the group has no backend for that device
            yield group._get_backend(torch.device(device))
