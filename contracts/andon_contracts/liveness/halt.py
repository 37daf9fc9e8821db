"""Halt together: when one rank stops, all ranks stop for the same cause, whatever they are doing.

`HaltLink` connects the ranks through a store that is independent of every process group. `PendingCollectives` counts
the collectives that a rank begins. `PeerMonitor` finds ranks that are gone, stopped, silent or in a deadlock.
`HaltSignal` makes this rank act on a cause.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.nn.parallel import DistributedDataParallel

from andon_contracts.act import Evidence, current_activity, error_line, write_cause
from andon_contracts.agree import RankSet
from andon_contracts.fields import Count, Part
from andon_contracts.legible import log, report_to_launcher
from andon_contracts.liveness import diagnosis, store_link
from andon_contracts.liveness.diagnosis import Conclusion, EndMessages, Patience, Position, Symptoms
from andon_contracts.liveness.process import ConditionTimer, Process, memory_kills, run_within
from andon_contracts.liveness.store_link import Heartbeats, SignedStore, StoreLink, parse_strict
from andon_contracts.violation import Cause, Violation, consequence, first_line, row_lines

_LOOK_S = 0.5  # how often a rank looks for trouble
_EVERY_LOOK, _CALM = 16, 4  # a rank that waits asks its peers at the first 16 looks, then at every fourth
_POLL_S = 0.2  # how often a rank reads the key of the cause
_HURRIED_S = 0.02  # the same until it has heard from all ranks nearby, and once there is a cause
_BEAT_S = 1.0
_ANSWER_S = 1.0
_NEAR = 32  # ranks at most this far away may run on the same machine, where their processes can be observed
_CAUSE, _WARNING = "pulled", "unguarded"

_RAISE_S = 0.4  # how long the main thread may take to reach a hook after the cause is known, before it is interrupted
_UNBLOCK_S = 0.6  # how long it may take after that, before `hard_stop` ends the process, or its groups are aborted
_SETTLE_S = 2.0  # how long the rank that published the cause waits for the others
_LAST_S = 2.0  # with `hard_stop`: how long a rank may take to end after an uncaught error
_SIGNAL = signal.SIGRTMIN + 7  # shells, launchers and libraries use the signals that have names
_CAN_ABORT = frozenset({"nccl"})  # gloo has the method too, but it does nothing
BACKWARD = "a backward pass that reduces its gradients over all ranks"
REDUCTION = "a reduction over all ranks"
_interruptible: list[Callable[[], None]] = []


@dataclass(frozen=True)
class Counts(Part):
    """The counts of a rank in its heartbeat. The rank is in the `number`-th reduction of `group`; 0: in none."""

    gathers: Count
    backwards: Count
    group: str = ""
    number: Count = 0


@dataclass(frozen=True)
class Waiting:
    """A rank waits in its `gather`-th gather; `backwards` and `reductions` (by group) are its counts before it."""

    gather: int
    backwards: int
    reductions: Mapping[str, int]


class PendingCollectives:
    """Counts the collectives that one rank begins, to detect two ranks that wait for each other.

    A rank that skips an update continues to the next backward pass of DDP, or to the next reduction, and waits there
    for the others, while they wait for it in a gather of the watch. So each rank counts the gathers, the backward
    passes that reduce, and the reductions of its loop by group. Suppose rank A waits in its n-th gather, and rank B,
    which has not reached that gather, has begun one more backward pass or reduction than A. Then B waits for A in that
    call and A for B in the gather: a deadlock. Nothing here waits, reads a tensor or communicates.

    Only the training thread writes the counts; any thread may read them. ranks: those of the watched group.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.armed = False  # a forward pass of DDP has announced a backward pass that reduces
        self.waiting: Waiting | None = None  # the gather that this rank is in; one object as long as it lasts
        self._ranks = RankSet(ranks)
        self.parameters: frozenset[int] = frozenset()  # by id, the parameters whose gradients a wrapper reduces
        self._gathers, self._backwards = 0, 0
        self._reductions: Counter[str] = Counter()
        self._inside: tuple[str, int] | None = None
        self._owner = threading.get_ident()

    def follow(self, model: nn.Module) -> list[DistributedDataParallel]:
        """The modules in `model` whose backward passes reduce over all ranks. Their forward passes call `forward`."""
        modules = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        modules = [each for each in modules if self._ranks.all_in(each.process_group)]
        self.parameters = frozenset(id(p) for each in modules for p in each.parameters())
        return modules

    def forward(self, module: DistributedDataParallel) -> None:
        # A communication hook may send the gradients to any ranks.
        if torch.is_grad_enabled() and module.require_backward_grad_sync and not getattr(module, "_comm_hooks", ()):
            self.armed = True

    def backward(self, parameter: nn.Parameter) -> None:
        if id(parameter) in self.parameters:
            self.armed = False
            self._backwards += 1

    def reducing(self, group: Any, *, waits: bool) -> None:
        """The loop begins a reduction over `group` (None: all ranks). waits: it blocks until `resumed`."""
        if threading.get_ident() == self._owner and self._ranks.all_in(group):
            name = getattr(group or dist.group.WORLD, "group_name", "")
            self._reductions[name] += 1
            self._inside = (name, self._reductions[name]) if waits else None

    def resumed(self) -> None:
        if threading.get_ident() == self._owner:
            self._inside = None

    def gathering(self) -> None:
        self._gathers += 1
        # After a forward pass, the backward pass may still come.
        self.waiting = Waiting(self._gathers, self._backwards + self.armed, self._reductions)

    def gathered(self) -> None:
        self.waiting = None

    def counts(self) -> Counts:
        """The counts for the heartbeat; any thread may call it. It reads gathers last, so no other count is newer."""
        backwards, inside = self._backwards, self._inside or ("", 0)
        return Counts(self._gathers, backwards, *inside)


def deadlocked(waiting: Waiting, counts: Mapping[int, Counts]) -> dict[int, str]:
    """The ranks that need the rank of `waiting` to join their call, with the name of that call."""
    blocked = {}
    for rank, each in counts.items():
        if each.gathers < waiting.gather and each.backwards > waiting.backwards:
            blocked[rank] = BACKWARD
        elif each.gathers < waiting.gather and each.number > waiting.reductions.get(each.group, 0):
            blocked[rank] = REDUCTION
    return blocked


@dataclass(frozen=True)
class Progress(Part):
    """The heartbeat of a rank of a watched loop, sent every second."""

    at: Position
    pending: Counts


@dataclass(frozen=True)
class RankWarning(Part):
    """A warning of one rank to all others. No rank halts for it."""

    rank: Count
    text: str


@dataclass(frozen=True)
class StoreReport:
    left: frozenset[int]  # all ranks that have left in order
    at: Mapping[int, Position]  # the position of each rank in its last heartbeat


_Observed = tuple[Mapping[int, Symptoms], "StoreReport | None"]  # of the other ranks, and the answer of the store


class HaltLink(StoreLink):
    """The connection between the ranks. Only its thread waits for the store; all methods return after a bounded time.

    The first cause that any rank stores under the key "pulled" is the cause of all. Every rank stores it again if a
    client deletes it. host: the rank in whose process the store lives; None if it outlives the ranks. halt: the
    thread calls its `learn`, `progress`, `warn` and `unguarded`.
    """

    def __init__(self, store: SignedStore, rank: int, world: int, halt: HaltSignal, host: int | None = None) -> None:
        self.processes: Mapping[int, Process] = {}
        self.acknowledged: frozenset[int] = frozenset()  # ranks nearby that know the cause and have left their evidence
        self.left: frozenset[int] = frozenset()  # ranks nearby that had left in order when the cause came
        self.store_lost = False  # the store is gone, and its host had not left in order
        self.silent_s = 0.0  # how long the next rank, on another machine, has sent no heartbeat
        self.store_host, self.following, self.reader = host, (rank + 1) % world, store.reader
        self.met = threading.Event()  # `processes` holds all ranks nearby
        self._store, self._rank, self._world, self._halt = store, rank, world, halt
        self._cause = ""  # the JSON in the store, once it is known
        self._host_left = False
        self._beats, self._beat_at = Heartbeats(store, rank, Progress, self.reader), 0.0
        self._silence, self._last_beat = ConditionTimer(2 * _BEAT_S), object()
        self._near = sorted({(rank + offset) % world for offset in range(-_NEAR, _NEAR + 1)} - {rank})
        # Before the thread has the store, so that a rank that dies at once has announced its process.
        self._beats.send(halt.progress())
        super().__init__("andon-halt-link", self._read_store, self._thread_failed)

    def publish(self, cause: Cause) -> None:
        self.post(lambda: self._publish(cause))

    def warn(self, text: str) -> None:
        self.post(lambda: self._write_warning(text))

    def acknowledge(self) -> None:
        """Tell the others that this rank knows the cause and has left its evidence."""
        self.post(lambda: self._store.set(f"ended {self._rank}", "1"))

    def report(self) -> StoreReport | None:
        def read() -> StoreReport:
            ranks = range(self._world)
            at = {rank: beat.status.at for rank, beat in self._beats.read(ranks).items()}
            return StoreReport(self._marked("left", ranks), at)

        return self.ask(read, _ANSWER_S)

    def pending(self) -> Mapping[int, Counts]:
        """The counts of the ranks nearby in their last heartbeats; empty if the store does not answer in time."""
        beats = self.ask(lambda: self._beats.read(self._near), _ANSWER_S) or {}
        return {rank: beat.status.pending for rank, beat in beats.items()}

    def leave(self) -> None:
        """Tell the others that this rank is done, and end the thread. Takes at most two seconds."""
        self.close(self._say_goodbye, 2 * _ANSWER_S)

    def _read_store(self) -> float | None:
        """Read the store once. Returns the seconds until the next time; None if the rank that hosts the store left."""
        if not self._cause:
            self._accept(self._store.get(_CAUSE))
        if self._cause:
            if self._store.read(_CAUSE, self._parse) is None:  # a client deleted it; other ranks have yet to read it
                self._store.set(_CAUSE, self._cause)
            self.acknowledged, self.left = self._marked("ended", self._near), self._marked("left", self._near)
            return _HURRIED_S
        if not self.processes:
            beats = self._beats.read(self._near)
            if len(beats) == len(self._near):
                self.processes = {rank: beat.process for rank, beat in beats.items()}
                self.met.set()
        host = self.store_host
        if host is not None and host != self._rank and self._marked("left", [host]):
            self._host_left = True
            self._store.set(f"saw {self._rank}", "1")
            return None
        if time.monotonic() - self._beat_at >= _BEAT_S:
            self._beat()
        return _POLL_S if self.processes else _HURRIED_S

    def _thread_failed(self, error: Exception) -> None:
        if isinstance(error, RuntimeError | OSError) and not isinstance(error, RecursionError | NotImplementedError):
            self.store_lost = not self._host_left
            return
        failure = self._halt.unguarded("andon-halt-link", error)
        with contextlib.suppress(Exception):  # the error may come from this very store
            self._write_warning(failure) if isinstance(failure, str) else self._publish(failure)
        if not isinstance(failure, str) and not self._cause:
            self._halt.learn(failure)  # at least this rank acts on it

    def _beat(self) -> None:
        self._beat_at = time.monotonic()
        self._beats.send(self._halt.progress())
        warning = self._store.read(_WARNING, lambda body: parse_strict(RankWarning, body))
        if warning is not None and warning.rank != self._rank:
            self._halt.warn(warning.text)
        rank = self.following
        if rank in self.processes and self.processes[rank].local_state() == "elsewhere":
            beat = self._beats.read([rank]).get(rank)
            silent = [rank] if beat is not None and beat is self._last_beat else []
            # Counts only the seconds in which this thread ran, so that a pause of the whole job accuses no rank.
            self.silent_s, self._last_beat = self._silence.update(silent).get(rank, 0.0), beat

    def _publish(self, cause: Cause) -> None:
        most = store_link.MOST_CHARACTERS
        cause = replace(cause, text=cause.text[:most], seen=cause.seen[:most])
        try:
            body = json.dumps(cause.to_json())
            self._parse(json.loads(body))
        except (TypeError, ValueError):  # an error that the loop raised may contain anything
            body = json.dumps(Cause(cause.kind, cause.text, cause.rank).to_json())
        self._accept(self._store.compare_set(_CAUSE, "", body))
        if not self._cause:  # a rank signed the value in the store, but it is not a cause
            self._store.set(_CAUSE, body)
            self._accept(body.encode())

    def _write_warning(self, text: str) -> None:
        self._store.set(_WARNING, json.dumps(RankWarning(self._rank, text[: store_link.MOST_CHARACTERS]).to_json()))

    def _accept(self, raw: bytes) -> None:
        cause = self.reader.read(_CAUSE, raw, self._parse) if raw and not self._cause else None
        if cause is not None:
            self._cause = raw.decode()
            self._halt.learn(cause)

    def _parse(self, body: object) -> Cause:
        return parse_strict(Cause, body).checked(self._world)

    def _marked(self, mark: str, ranks: Iterable[int]) -> frozenset[int]:
        return frozenset(rank for rank in ranks if self._store.check([f"{mark} {rank}"]))

    def _say_goodbye(self) -> None:
        self._beat()
        self._store.set(f"left {self._rank}", "1")
        if self.store_host not in (None, self._rank):
            self._store.set(f"saw {self._rank}", "1")
        elif self.store_host is not None and not self._cause:
            # The store ends with this process. The others must not mistake that for its death.
            others = [f"saw {rank}" for rank in range(self._world) if rank != self._rank]
            deadline = time.monotonic() + 3 * _POLL_S
            while not self._store.check(others) and time.monotonic() < deadline:
                time.sleep(_POLL_S / 20)


class PeerMonitor:
    """Observes the other ranks: the processes of this machine, and the heartbeats of the next rank on another."""

    def __init__(self, link: HaltLink, rank: int, patience_s: float, pending: PendingCollectives) -> None:
        self._link, self._rank, self._patience_s, self._pending = link, rank, patience_s, pending
        self._waiting: Waiting | None = None
        self._left: set[int] = set()
        self._looks, self._kills, self._stopped = 0, memory_kills() or 0, ConditionTimer(_LOOK_S)

    def trouble(self, messages: EndMessages) -> Cause | None:
        """The cause if a rank died, is stopped or silent for too long, or deadlocks with this one. Call regularly."""
        processes = self._link.processes.items()
        stopped = self._stopped.update(rank for rank, process in processes if process.local_state() == "stopped")
        late = any(seconds >= self._patience_s for seconds in (self._link.silent_s, *stopped.values()))
        observed, order = self._observe(ask=late, stopped=stopped), (*diagnosis.ENDED_BY_ITSELF, *diagnosis.UNHEARD)
        return self._cause(messages, observed, self._patience_s, order) or self._deadlock(messages)

    def missing(self, messages: EndMessages, error: BaseException) -> Cause | None:
        """The cause if the collective that raised `error` waited for a rank that is dead, stopped, gone or behind."""
        timed_out = consequence(error) == "silent"
        _, report = observed = self._observe(ask=True, stopped={})
        order: tuple[Conclusion, ...] = (*diagnosis.ENDED_BY_ITSELF, *diagnosis.UNHEARD, "left")
        cause = self._cause(messages, observed, 0.0, (*order, "behind") if timed_out else order)
        if cause or not report or not timed_out:
            return cause
        ahead = max(report.at, key=lambda rank: report.at[rank].order, default=self._rank)
        further = ahead != self._rank and report.at[ahead].order > report.at.get(self._rank, messages.at).order
        return messages.ahead(ahead, report.at[ahead]) if further else None

    def unaware(self) -> Mapping[int, Process]:
        """By rank, the live processes of this machine that have not left and not acknowledged the cause."""
        aware = self._link.acknowledged | self._link.left | self._left
        # If the store does not answer, nobody knows which ranks are aware. But a stopped process is certainly unaware.
        states = ("runs", "stopped") if self._link.answers(_ANSWER_S) else ("stopped",)
        processes = self._link.processes.items()
        return {rank: process for rank, process in processes if process.local_state() in states and rank not in aware}

    def _deadlock(self, messages: EndMessages) -> Cause | None:
        waiting = self._pending.waiting
        self._looks = self._looks + 1 if waiting is self._waiting else 0
        self._waiting = waiting
        if waiting is None or self._looks < 1 or (self._looks > _EVERY_LOOK and self._looks % _CALM):
            return None
        counts = self._link.pending()
        blocked = deadlocked(waiting, counts)
        # If it is still the same gather, this rank has begun nothing since the others sent their counts.
        if not blocked or self._pending.waiting is not waiting:
            return None
        return messages.passed(blocked, sum(each.gathers >= waiting.gather for each in counts.values()))

    def _observe(self, *, ask: bool, stopped: Mapping[int, float]) -> _Observed:
        """The symptoms of the other ranks, and the store's report, read only with `ask` or if a process is gone."""
        link = self._link
        states = {rank: process.local_state() for rank, process in link.processes.items()}
        gone = {rank for rank, state in states.items() if state == "gone"} - self._left
        codes = {rank: link.processes[rank].exit_code() for rank in gone}
        answer = link.report() if ask or gone else None
        report = answer or StoreReport(frozenset(), {})
        self._left |= {rank for rank in gone if codes[rank] == 0 or rank in report.left}
        left, mine = self._left | report.left, report.at.get(self._rank)
        symptoms: dict[int, Symptoms] = {}
        for rank in sorted((states.keys() | report.at.keys() | report.left) - {self._rank}):
            host_lost = link.store_lost and rank == link.store_host
            if answer is None and rank in gone - left and not host_lost:
                continue  # only the store knows whether it left in order
            silent_s = math.inf if host_lost and rank in states else link.silent_s * (rank == link.following)
            behind = mine is not None and rank in report.at and report.at[rank].order < mine.order
            code, stopped_s = 0 if rank in left else codes.get(rank), stopped.get(rank, 0.0)
            symptoms[rank] = Symptoms(states.get(rank, "elsewhere"), rank in left, code, stopped_s, silent_s, behind)
        return symptoms, answer

    def _cause(
        self, messages: EndMessages, observed: _Observed, stopped_s: float, order: Iterable[Conclusion]
    ) -> Cause | None:
        symptoms, report = observed
        patience = Patience(stopped_s, self._patience_s, unseen=True)
        concluded = {rank: diagnosis.conclude(each, patience) for rank, each in symptoms.items()}
        conclusion, ranks = diagnosis.first_conclusion(concluded, order)
        if not ranks:
            return None
        if conclusion == "behind" and report is not None:
            at, last = min(((report.at[rank], rank) for rank in ranks), key=lambda found: found[0].order)
            return messages.behind(last, at)
        rank, report = ranks[0], report or self._link.report()
        position = (Position() if report is None else report.at.get(rank, Position())).at_least(messages.at)
        if conclusion == "left":
            return messages.left(rank, position)
        process = self._link.processes[rank]
        if conclusion == "stopped":
            return messages.stopped(rank, process, position)
        if conclusion == "silent":
            return messages.silent(rank, process, self._link.silent_s, position)
        kills = (memory_kills() or 0) - self._kills  # 0 if the system does not count them
        return messages.died(rank, process, symptoms[rank].exit, kills, position)


class HaltSignal:
    """Stops all ranks for one `cause`: the first that any rank publishes, the same on every rank.

    The steps, in this order:

    1. Publish (`pull`, `failed`, `lost`, or the monitor): one key of a store, whose first writer wins (`HaltLink`).
       Otherwise ranks that find trouble at the same time would raise different errors.
    2. Learn: on each rank the thread of the link polls the key. `learn` sets `cause`, `_known` and `_awake`.
    3. Leave evidence (the part of the bundle, torch's error file) before anything can end the process.
    4. Raise: the loop calls `raise_if_halted` at each hook and while a gather waits. This sets `_raised`, and happens
       only once, so that a loop that catches the error can save its state.
    5. Interrupt, after `_RAISE_S`: a signal makes the main thread call `raise_if_halted`, even if it sleeps.
    6. Unblock, after `_UNBLOCK_S`, if no Python runs, as in a collective. With `hard_stop` the process ends here, and
       the rank that published kills those of its machine that cannot end themselves (SIGSTOP). Without it groups are
       aborted, which NCCL can do and gloo cannot.
    7. End: an uncaught error, or `close`, sets `_released`. With `hard_stop` a process that crashed and does not end
       within `_LAST_S`, because of its threads or a device, is ended.

    Three threads: that of the loop; "andon-halt-link", which alone waits for the store; "andon-halt", which looks for
    trouble and takes steps 3 and 5 to 7, because the loop may be blocked. `_publishing` makes the two act on one cause
    if both find something; `_leaving` makes both wait until the evidence is on the disk.
    """

    def __init__(
        self, store: SignedStore, rank: int, world_size: int, pending: PendingCollectives, *,
        hard_stop: bool, patience_s: float, warns: bool,
    ) -> None:  # fmt: skip
        """patience_s: a process that is stopped or silent for that long counts as hanging. warns: if a guarding thread
        fails, warn instead of halting.
        """
        self.pending = pending
        self.cause: Cause | None = None
        self.evidence = Evidence(rank=rank, world=world_size)
        self._rank, self._world, self._hard_stop, self._warns = rank, world_size, hard_stop, warns
        self._at, self._at_time = Position(point="before the first update"), time.monotonic()
        self._known, self._raised, self._released = threading.Event(), threading.Event(), threading.Event()
        self._over, self._awake = threading.Event(), threading.Event()
        self._publishing, self._leaving = threading.Lock(), threading.Lock()
        self._published, self._crashed, self._evidence_left, self._warned = False, False, False, ""
        self._owner, self._process = threading.get_ident(), os.getpid()
        self._shared = _shared_store()  # kept alive, since it may live in this process
        self._link = HaltLink(store, rank, world_size, self, _store_host(self._shared))
        self._monitor = PeerMonitor(self._link, rank, patience_s, pending)
        _allow_interrupt(self.raise_if_halted)
        self._hook, sys.excepthook = sys.excepthook, self._excepthook
        # Processes of multiprocessing catch what their function raises, and end without the interpreter's last calls.
        self._finalizer = multiprocessing.util.Finalize(None, self._at_exit, exitpriority=100)
        self._thread = threading.Thread(target=self._guard, name="andon-halt", daemon=True)
        self._thread.start()

    def at(self, step: int, point: str, last_equal: int | None) -> None:
        self._at, self._at_time = Position(step, point, 0.0, last_equal), time.monotonic()

    def meet(self) -> None:
        """Wait at most 5 s until this rank knows the processes nearby. Called on all ranks when the watch opens."""
        self._link.met.wait(5 * _ANSWER_S)

    def raise_if_halted(self, *, again: bool = False) -> None:
        """Raise `Violation` if there is a cause, the first time only. again: every time, as before an update."""
        if self.cause is not None and (again or not self._raised.is_set()):
            self._raised.set()
            raise self.cause.violation()

    def pull(self, reason: str) -> NoReturn:
        """Tell all ranks to stop for `reason` and raise `Violation`. Waits briefly for the others."""
        raise self._pull(self._messages.pulled(reason)).violation()

    def lost(self, error: BaseException) -> None:
        """A collective raised `error`. Raises `Violation` instead if `error` only reports that another rank is gone."""
        if consequence(error) is not None and not self._raised.is_set():
            raise self._pull(self._cause_of(error)).violation() from None  # its text has what `error` told

    def failed(self, error: BaseException) -> None:
        """Publish that `error` ends this rank's loop, so that no rank waits for it. Does nothing in a forked child."""
        if not self._open:
            return
        if self.cause is not None:
            self._raised.set()
            report_to_launcher(self.cause.text_for(self._rank), late=self.cause.rank != self._rank)
        elif consequence(error) is not None:
            self._pull(self._cause_of(error))
        elif isinstance(error, Violation):
            self._pull(Cause.of_violation(error, self._rank))
        else:
            self._pull(self._messages.failed(error, error_line(error)))

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
        _forbid_interrupt(self.raise_if_halted)
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._hook
        self._finalizer.cancel()
        self._link.leave()
        if self._link.reader.dropped:
            log(f"andon: {self._link.reader.account(self._rank)}")
        if threading.current_thread() is not self._thread:
            self._thread.join(_LOOK_S)

    @property
    def _open(self) -> bool:
        return not self._over.is_set() and os.getpid() == self._process

    @property
    def _messages(self) -> EndMessages:
        at = replace(self._at, since_s=time.monotonic() - self._at_time)
        return EndMessages(self._rank, self._world, at, self.evidence.folder)

    def _cause_of(self, error: BaseException) -> Cause:
        deadline = time.monotonic() + _SETTLE_S / 2
        while self.cause is None:
            cause = self._monitor.missing(self._messages, error)
            if cause is not None:
                return cause.with_rows(("noticed", f"by rank {self._rank}: {first_line(error)}"))
            if time.monotonic() > deadline:
                return self._messages.unknown(error)
            self._known.wait(_POLL_S / 2)
        return self.cause

    def _pull(self, cause: Cause) -> Cause:
        self._published = True
        self._raised.set()
        first = self._publish(cause)
        self._leave_evidence(first, with_state=True)
        self._acknowledge(first, settle=True)
        return first

    def _publish(self, cause: Cause) -> Cause:
        with self._publishing:
            if self.cause is None:
                self._link.publish(cause)
                if not self._known.wait(_SETTLE_S / 2):
                    self.learn(cause)  # the store does not answer: at least this rank acts
        assert self.cause is not None
        return self.cause

    def _leave_evidence(self, cause: Cause, *, with_state: bool) -> None:
        with self._leaving:
            if self._evidence_left:
                return
            self._evidence_left = True
            at = {**vars(self._messages.at), "doing": current_activity(self._owner)}
            lower = [process.local_state() for rank, process in self._link.processes.items() if rank < self._rank]
            lowest = len(lower) == self._rank and all(state in ("gone", "stopped") for state in lower)
            failed = write_cause(cause, self.evidence, at, state=with_state, account=lowest)
            if failed:
                log(f"andon: rank {self._rank} could not write all of its bundle: {failed}")

    def _acknowledge(self, cause: Cause, *, settle: bool) -> None:
        """settle: wait until all ranks of this machine know the cause or are gone; with `hard_stop` kill the rest."""
        report_to_launcher(cause.text_for(self._rank), late=cause.rank != self._rank)
        self._link.acknowledge()
        if not settle:
            return
        deadline = time.monotonic() + (_SETTLE_S if self._hard_stop else _SETTLE_S / 2)
        # A stopped process never learns the cause, so this does not wait for it.
        while time.monotonic() < deadline and "runs" in (p.local_state() for p in self._monitor.unaware().values()):
            time.sleep(_POLL_S / 4)
        for rank, process in self._monitor.unaware().items() if self._hard_stop else ():
            if process.error_file:
                report_to_launcher(cause.text, late=cause.rank != rank, path=process.error_file)
            if process.kill():
                log(f"andon: rank {rank} of {self._world} did not end, and rank {self._rank} killed it")

    def learn(self, cause: Cause) -> None:
        self.cause = self.cause or cause
        self._known.set()
        self._awake.set()

    def progress(self) -> Progress:
        return Progress(self._messages.at, self.pending.counts())

    def warn(self, text: str) -> None:
        if text != self._warned:
            self._warned = text
            log(f"andon: {text}")

    def unguarded(self, thread: str, error: Exception) -> Cause | str:
        """`error` ended a guarding thread. Returns the cause for which all halt, or a warning to send to them."""
        failure = self._messages.unguarded(thread, error)
        if not self._warns:
            return failure
        text = failure.text.partition("\n")[0]
        self.warn(text)
        return text

    def _guard(self) -> None:
        looks = True
        try:
            while not self._over.is_set():
                self._awake.wait(_LOOK_S)
                self._awake.clear()
                if self._over.is_set():
                    return
                trouble: Cause | str | None = None
                if looks and not self._known.is_set():
                    try:
                        trouble = self._monitor.trouble(self._messages)
                    except Exception as error:  # noqa: BLE001 - after any error this rank must not continue unguarded
                        looks, trouble = False, self.unguarded("andon-halt", error)
                if isinstance(trouble, str):
                    self._link.warn(trouble)
                elif trouble is not None:
                    self._publish(trouble)
                if self.cause is not None:
                    self._act(self.cause, settle=isinstance(trouble, Cause))
                    return
        except Exception as error:  # noqa: BLE001 - after any error this rank must not halt in silence
            log(self._messages.unguarded("andon-halt", error).text)
            _interrupt(self.raise_if_halted)

    def _act(self, cause: Cause, *, settle: bool) -> None:
        if not self._published:
            self._leave_evidence(cause, with_state=False)
            self._acknowledge(cause, settle=settle)
            if not self._raised.wait(_RAISE_S):
                _interrupt(self.raise_if_halted)
            if not self._raised.wait(_UNBLOCK_S) and not self._over.is_set():
                self._unblock(cause)
        self._released.wait()
        if self._hard_stop and self._crashed:
            time.sleep(_LAST_S)
            _end_process("")

    def _unblock(self, cause: Cause) -> None:
        place = current_activity(self._owner)
        if self._hard_stop:
            blocked = f"rank {self._rank}, which was blocked {place}: no hook ran (hard_stop)"
            _end_process(f"{cause.text}\n  ended    {blocked}")
        aborted = _abort_groups()
        if not aborted or not self._raised.wait(_UNBLOCK_S):
            head = cause.text.partition("\n")[0]  # the ranks that raise print the whole message
            log(f"{head}\n  blocked  rank {self._rank} {place}: {_what_ends(place, aborted)}")
        self._raised.wait()

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # After `close`, the hook of a watch that was opened later still calls this one. Then it must do nothing else.
        guarded = self._open
        self.failed(error)
        shown = error
        if (
            guarded
            and isinstance(error, Violation)
            and self._hook.__module__ in ("sys", dist.distributed_c10d.__name__)
        ):
            # Every rank raises the same text: the first of a machine shows it, with the line of the loop.
            lines = [*str(error).splitlines(), *row_lines([("line", error_line(error))])]
            first = os.environ.get("LOCAL_RANK", "0") == "0"
            shown, trace = type(error)("\n".join(lines if first else lines[:1])), None
        self._hook(kind, shown, trace)
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
    """Print the cause that ends all ranks, unless it is `error`, which ends this rank."""
    if cause is not None and cause.text != str(error) and not isinstance(error, KeyboardInterrupt):
        log(cause.text)


def own_store(name: str) -> Store | None:
    """A connection of our own to the process group's store, with keys under `name`; None without a group."""
    shared: Any = _shared_store()
    if hasattr(shared, "clone"):
        with contextlib.suppress(RuntimeError, NotImplementedError):
            # The loop's own connection answers one request at a time, and may wait for a key for minutes.
            shared = shared.clone()
            shared.set_timeout(datetime.timedelta(seconds=store_link.TIMEOUT_S))
    return None if shared is None else PrefixStore(f"andon/{name}", shared)


def _shared_store() -> Store | None:
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def _store_host(shared: Store | None) -> int | None:
    """The rank in whose process the store lives; None for torch's launcher, which hosts its own, and for a file."""
    while isinstance(shared, PrefixStore):
        shared = shared.underlying_store
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return 0 if isinstance(shared, TCPStore) and not agent else None


def _end_process(text: str) -> NoReturn:
    """Print `text` and end, even if the pipe is full, or the loop holds the lock of standard output."""

    def last_words() -> None:
        if text:
            log(text)
        sys.stdout.flush()

    run_within(_RAISE_S, last_words)
    # As the interpreter does at its end: a blocked worker of a loader would not notice by itself.
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
    os._exit(1)


# How to reach a main thread that comes to no hook. A blocking call of Python (a sleep, a read, a queue) returns when a
# signal handler raises. Native code continues, and the handler runs only when Python runs again.


def _handle(number: int, frame: FrameType | None) -> None:
    for raise_if_halted in list(_interruptible):
        raise_if_halted()


def _allow_interrupt(raise_if_halted: Callable[[], None]) -> None:
    """Let `_interrupt` call `raise_if_halted`, unless this is not the main thread, or other code uses the signal."""
    free = signal.getsignal(_SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN, _handle)
    if free and threading.current_thread() is threading.main_thread():
        signal.signal(_SIGNAL, _handle)
        _interruptible.append(raise_if_halted)


def _forbid_interrupt(raise_if_halted: Callable[[], None]) -> None:
    if raise_if_halted in _interruptible:
        _interruptible.remove(raise_if_halted)
        if not _interruptible and signal.getsignal(_SIGNAL) is _handle:
            with contextlib.suppress(ValueError):  # only the main thread may; else the handler stays, and calls nothing
                signal.signal(_SIGNAL, signal.SIG_IGN)  # not the default: a signal may still be on its way


def _interrupt(raise_if_halted: Callable[[], None]) -> None:
    """Make the main thread call all registered `raise_if_halted`, if this one is registered, once it runs Python."""
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
    groups = list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else []
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
