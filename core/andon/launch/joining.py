"""How the ranks of one world meet in their store, before a process group: who is missing is known, and named.

Torch's launcher keeps one store for all attempts of a run, and gloo reads from it the addresses that an earlier attempt
left. So ranks first meet: each calls rank 0 with a word that nobody used before, rank 0 answers to that word with the
name of this world, and all that follows stands under this name.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from andon.console.exits import Exit
from andon.console.messages import say
from andon.console.problems import InputError, Problem
from andon.launch.context import STORE, RankContext
from andon.launch.store_server import packed, unpacked
from andon_contracts.fields import Count, Hex16, Part
from andon_contracts.liveness import store_link
from andon_contracts.liveness.store_link import SignedStore, StrictReader, parse_strict
from andon_contracts.violation import named_ranks

Form = TypeVar("Form", bound=Part)
_POLL_S = 0.02
_VERDICT_S = 1.0  # how much longer than rank 0 the others wait, to hear from it who is missing
_LATE_S = 5.0  # how much longer than the server waits for a key, a client waits for the server to say so
_INTERFACE = "GLOO_SOCKET_IFNAME"
_STORE_ERRORS = (dist.DistStoreError, dist.DistNetworkError)


class Absent(RuntimeError):
    """A rank did not come to the store, or the store could not be reached."""

    ends_with = Exit.RANK_SILENT


class Refused(RuntimeError):
    """Another rank came, and cannot join; it reports its own error."""

    ends_with = Exit.RANK_LOST


def join(kinds: str, timeout_s: float) -> tuple[SignedStore, int, int]:
    """Initialise the default process group from the variables of torch's launcher, or of ours.

    Returns the part of the store that is this world's alone, through a connection of its own and with values signed,
    this rank, and the number of ranks.

    Raises `InputError` on a rank whose interface does not exist, `Refused` on the others, and `Absent` after
    `timeout_s` with the ranks that are missing, or without them if the store itself cannot be reached.
    """
    timeout = timedelta(seconds=timeout_s)
    context, address = RankContext.from_environment(), os.environ.get(STORE, "")
    rank, world = context.rank, context.world_size
    store: Store = unix_store(address) if address else _torch_store(timeout)
    store.set_timeout(timeout)
    # Gloo itself says nothing of an interface that does not exist.
    there = [name for _, name in socket.if_nameindex()]
    wrong = [name for name in os.environ.get(_INTERFACE, "").split(",") if name and name not in there]
    absent = f"{', '.join(wrong)}: no such interface on {socket.gethostname()}, only {', '.join(there)}"
    ours = Meeting(store, rank, world, timeout_s).meet(absent if wrong else "")
    reached = store_link.open_store() if rank == 0 else ""
    if reached:
        say(f"warning: {reached}")
    dist.init_process_group(kinds, store=ours, rank=rank, world_size=world, timeout=timeout)
    if not address:
        ours = ours.clone()  # type: ignore[attr-defined]
        ours.set_timeout(timedelta(seconds=store_link.TIMEOUT_S))
    secret = torch.frombuffer(bytearray(store_link.new_secret()), dtype=torch.uint8)
    dist.broadcast(secret, 0)
    return SignedStore(ours, bytes(secret.tolist())), rank, world


def _torch_store(timeout: timedelta) -> Store:
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store, _, _ = next(rendezvous("env://", timeout=timeout))
    except _STORE_ERRORS as error:
        seconds = timeout.total_seconds()
        raise Absent(f"the ranks' store at {where} cannot be met at within {seconds:g} s: {_line(error)}") from error
    return store  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Word(Part):
    """What a rank calls rank 0 with, or the name of the world, which rank 0 answers."""

    word: Hex16


@dataclass(frozen=True)
class Here(Part):
    """A rank has come; `problem` is why it cannot join, if so."""

    problem: str


@dataclass(frozen=True)
class Verdict(Part):
    """What came of a meeting, as rank 0 saw it: who did not come, and why others cannot join, by rank."""

    missing: tuple[Count, ...]
    problems: Mapping[str, str]


@dataclass
class Meeting:
    """One rank at the meeting of its world."""

    store: Store
    rank: int
    world: int
    timeout_s: float
    _word: str = field(default_factory=lambda: secrets.token_hex(8))
    _reader: StrictReader = field(default_factory=StrictReader)

    def meet(self, problem: str) -> Store:
        """The store of this world, once all have come. problem: why this rank cannot join, if so.

        Raises `InputError`, `Refused`, `Absent` as `join` does.
        """
        name = self._word if self.rank == 0 else self._called()
        ours = PrefixStore(f"andon/world/{name}", self.store)
        try:
            _put(ours, f"here {self.rank}", Here(problem))
            if problem and self.rank != 0:  # rank 0 tells the others
                raise InputError([Problem(_INTERFACE, problem)])
            verdict = self._gathered(ours, problem) if self.rank == 0 else self._verdict(ours)
        except _STORE_ERRORS as error:
            raise Absent(f"the ranks' store stopped answering while they met: {_line(error)}") from error
        finally:
            if self._reader.dropped:
                say(self._reader.account(self.rank))
        if problem:
            raise InputError([Problem(_INTERFACE, problem)])
        for rank, text in verdict.problems.items():
            raise Refused(f"rank {rank} of {self.world} cannot join: {_INTERFACE}: {text}")
        if verdict.missing:
            raise Absent(f"{named_ranks(verdict.missing)} of {self.world} did not come within {self.timeout_s:g} s")
        return ours

    def _called(self) -> str:
        answer, deadline = f"andon/answer {self.rank} {self._word}", time.monotonic() + self.timeout_s
        late = f"rank 0 of {self.world} did not come within {self.timeout_s:g} s"
        try:
            while True:
                _put(self.store, f"andon/call {self.rank}", Word(self._word))
                found = self._read(self.store, answer, Word)
                if found is not None:
                    return found.word
                if time.monotonic() > deadline:
                    raise Absent(late)
                time.sleep(_POLL_S)
        except _STORE_ERRORS as error:
            raise Absent(f"{late}: {_line(error)}") from error

    def _gathered(self, ours: Store, problem: str) -> Verdict:
        """As rank 0: answer each call, until all are here or it has taken too long; tell all the outcome."""
        deadline, pause = time.monotonic() + self.timeout_s, _POLL_S
        missing, answered, told = set(range(1, self.world)), set[str](), {0: problem}
        while missing and time.monotonic() < deadline:
            for rank in sorted(missing):
                call = self._read(self.store, f"andon/call {rank}", Word)
                if call is not None and call.word not in answered:
                    _put(self.store, f"andon/answer {rank} {call.word}", Word(self._word))
                    answered.add(call.word)
                here = self._read(ours, f"here {rank}", Here)
                if here is not None:
                    told[rank] = here.problem
                    missing.discard(rank)
            if missing:
                time.sleep(pause)
                pause = min(2 * pause, 10 * _POLL_S)
        verdict = Verdict(tuple(sorted(missing)), {str(rank): told[rank] for rank in sorted(told) if told[rank]})
        _put(ours, "verdict", verdict)
        if missing or verdict.problems:
            # The store may end with this rank: the others that are here need a moment to read why.
            readers, deadline = [rank for rank in told if rank and not told[rank]], time.monotonic() + _VERDICT_S / 2
            while readers and not ours.check([f"read {rank}" for rank in readers]) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        return verdict

    def _verdict(self, ours: Store) -> Verdict:
        deadline = time.monotonic() + self.timeout_s + _VERDICT_S
        while True:
            found = self._read(ours, "verdict", Verdict)
            if found is not None:
                ours.set(f"read {self.rank}", "1")
                return found
            if time.monotonic() > deadline:
                raise Absent(f"rank 0 of {self.world} fell silent while the ranks met")
            time.sleep(_POLL_S)
            _put(ours, f"here {self.rank}", Here(""))  # again: somebody may have overwritten it

    def _read(self, store: Store, key: str, form: type[Form]) -> Form | None:
        if not store.check([key]):
            return None
        return self._reader.read(key, store.get(key), lambda body: parse_strict(form, body))


def _put(store: Store, key: str, part: Part) -> None:
    store.set(key, json.dumps(part.to_json()))


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


class UnixStore(Store):
    """A client of a `StoreServer`, as torch takes stores, for any number of threads.

    A call that waits for a value has a connection to itself, so that no other call waits for it. Raises
    `DistNetworkError` once the server is gone, and `DistStoreError` for values that have not come in time.

    Torch keeps no reference to a store written in Python: the caller must keep it alive.
    """

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address
        self._idle: deque[Connection] = deque()
        self._process = os.getpid()

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        return self._awaited([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._awaited(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._awaited(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", *keys))

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Set the value if the present one is `expected` ("": none is there); returns the value afterwards."""
        return self._ask("compare_set", key, expected, value)[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, str(amount))[0])

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key))

    deleteKey = delete_key

    def _awaited(self, keys: list[str], timeout: timedelta | None = None) -> list[bytes]:
        seconds = (timeout or self.timeout).total_seconds()  # type: ignore[attr-defined]
        found = self._ask("get", repr(seconds), *keys, wait_s=seconds + _LATE_S) if keys else []
        if len(found) != len(keys):
            raise dist.DistStoreError(f"wait timeout after {seconds * 1000:.0f}ms, keys: {', '.join(keys)}")
        return found

    def _ask(self, *parts: str | bytes, wait_s: float | None = None) -> list[bytes]:
        if self._process != os.getpid():  # the connections of the process that this one was forked from are its own
            self._process, self._idle = os.getpid(), deque()
        try:
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = Client(self._address, "AF_UNIX")
            connection.send_bytes(packed([part.encode() if isinstance(part, str) else part for part in parts]))
            if wait_s is not None and not connection.poll(wait_s):
                connection.close()
                return []
            answer = unpacked(connection.recv_bytes())
        except (OSError, EOFError) as error:
            raise dist.DistNetworkError(f"the launcher's store is gone: {error or 'connection closed'}") from error
        self._idle.append(connection)
        return answer


@functools.cache
def unix_store(address: str) -> UnixStore:
    """The one client of this process for the server at `address`; it lives as long as the process."""
    return UnixStore(address)
