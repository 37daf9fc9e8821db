"""The rendezvous of a world's ranks in their store, before a process group exists. Names missing ranks.

Torch's launcher keeps one store for all attempts of a run, so gloo could read addresses that an earlier attempt left.
So ranks first meet: each calls rank 0 with a random word, rank 0 answers to that word with the name of this world, and
all later keys have this name as prefix.
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

from andon.console.messages import Exit, InputError, say
from andon.launch.context import STORE, RankContext
from andon.launch.store_server import packed, unpacked
from andon_contracts.fields import Count, Hex16, Part
from andon_contracts.liveness import store_link
from andon_contracts.liveness.store_link import SignedStore, StrictReader, parse_strict
from andon_contracts.violation import named_ranks

Form = TypeVar("Form", bound=Part)
_POLL_S = 0.02
_VERDICT_S = 1.0  # the others wait this much longer than rank 0, to learn which ranks are missing
_LATE_S = 5.0  # a client waits this much longer than the server, which reports a missing key
_INTERFACE = "GLOO_SOCKET_IFNAME"
_STORE_ERRORS = (dist.DistStoreError, dist.DistNetworkError)


class Absent(RuntimeError):
    """A rank did not reach the store in time, or the store could not be reached."""

    ends_with = Exit.RANK_SILENT


class Refused(RuntimeError):
    """Another rank cannot join; that rank reports its own error."""

    ends_with = Exit.RANK_LOST


def join(kinds: str, timeout_s: float, problem: str = "") -> tuple[SignedStore, int, int]:
    """Initialise the default process group from the environment variables of torch's launcher, or of ours.

    kinds: the backends of the group. problem: why this rank cannot train, or empty; the other ranks report it, too.
    Returns the store of this world alone, with a separate connection and signed values; this rank; the number of ranks.

    Raises `InputError` on a rank with a problem or whose network interface does not exist, and on all ranks if they
    chose different `kinds`; `Refused` on the others; `Absent` after `timeout_s`, which names the missing ranks unless
    the store itself cannot be reached.
    """
    timeout = timedelta(seconds=timeout_s)
    context, address = RankContext.from_environment(), os.environ.get(STORE, "")
    rank, world = context.rank, context.world_size
    store: Store = unix_store(address) if address else _torch_store(timeout)
    store.set_timeout(timeout)
    # Gloo does not report an interface that does not exist.
    interfaces = [name for _, name in socket.if_nameindex()]
    wrong = [name for name in os.environ.get(_INTERFACE, "").split(",") if name and name not in interfaces]
    if wrong:
        absent = f"{', '.join(wrong)}: no such interface on {socket.gethostname()}, only {', '.join(interfaces)}"
        problem = f"{_INTERFACE}: {absent}"
    ours = Meeting(store, rank, world, timeout_s, kinds).meet(problem)
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
    """The random word of a rank's call to rank 0, or the name of the world in the answer."""

    word: Hex16


@dataclass(frozen=True)
class Here(Part):
    """A rank has arrived. `problem`: why it cannot join, or empty. `kinds`: the backends that it chose."""

    problem: str
    host: str
    kinds: str


@dataclass(frozen=True)
class Verdict(Part):
    """The outcome of a rendezvous on rank 0: which ranks are missing, and why others cannot join, by rank.

    choices: the backends that hosts chose, if they differ; else empty.
    """

    missing: tuple[Count, ...]
    problems: Mapping[str, str]
    choices: str


@dataclass
class Meeting:
    """One rank's side of the rendezvous of its world."""

    store: Store
    rank: int
    world: int
    timeout_s: float
    kinds: str
    _word: str = field(default_factory=lambda: secrets.token_hex(8))
    _reader: StrictReader = field(default_factory=StrictReader)

    def meet(self, problem: str) -> Store:
        """Wait for all ranks and return the store of this world. problem: why this rank cannot join, or empty.

        Raises `InputError`, `Refused`, `Absent` as `join` does.
        """
        name = self._word if self.rank == 0 else self._called()
        ours = PrefixStore(f"andon/world/{name}", self.store)
        mine = Here(problem, socket.gethostname(), self.kinds)
        try:
            _put(ours, f"here {self.rank}", mine)
            if problem and self.rank != 0:  # rank 0 tells the others
                raise InputError.of_text(problem)
            verdict = self._gathered(ours, mine) if self.rank == 0 else self._verdict(ours, mine)
        except _STORE_ERRORS as error:
            raise Absent(f"the ranks' store stopped answering while they met: {_line(error)}") from error
        finally:
            if self._reader.dropped:
                say(self._reader.account(self.rank))
        if problem or verdict.choices:
            raise InputError.of_text(problem or verdict.choices)
        for rank, text in verdict.problems.items():
            raise Refused(f"rank {rank} of {self.world} cannot join: {InputError.of_text(text).line}")
        if verdict.missing:
            raise Absent(f"{named_ranks(verdict.missing)} of {self.world} did not come within {self.timeout_s:g} s")
        return ours

    def _called(self) -> str:
        answer, deadline = f"andon/answer {self.rank} {self._word}", time.monotonic() + self.timeout_s
        late = f"rank 0 of {self.world} did not come within {self.timeout_s:g} s"
        try:
            while True:
                _put(self.store, f"andon/call {self.rank}", Word(self._word))
                answered = self._read(self.store, answer, Word)
                if answered is not None:
                    return answered.word
                if time.monotonic() > deadline:
                    raise Absent(late)
                time.sleep(_POLL_S)
        except _STORE_ERRORS as error:
            raise Absent(f"{late}: {_line(error)}") from error

    def _gathered(self, ours: Store, mine: Here) -> Verdict:
        """On rank 0: answer calls until all ranks have arrived or the time is over, then publish the verdict."""
        deadline, pause = time.monotonic() + self.timeout_s, _POLL_S
        missing, answered, present = set(range(1, self.world)), set[str](), {0: mine}
        while missing and time.monotonic() < deadline:
            for rank in sorted(missing):
                call = self._read(self.store, f"andon/call {rank}", Word)
                if call is not None and call.word not in answered:
                    _put(self.store, f"andon/answer {rank} {call.word}", Word(self._word))
                    answered.add(call.word)
                here = self._read(ours, f"here {rank}", Here)
                if here is not None:
                    present[rank] = here
                    missing.discard(rank)
            if missing:
                time.sleep(pause)
                pause = min(2 * pause, 10 * _POLL_S)
        problems = {str(rank): here.problem for rank, here in sorted(present.items()) if here.problem}
        verdict = Verdict(tuple(sorted(missing)), problems, "" if problems else _choices(present))
        _put(ours, "verdict", verdict)
        if missing or problems or verdict.choices:
            # The store may end with this rank: the others need a moment to read the verdict.
            others, deadline = [r for r in present if r and str(r) not in problems], time.monotonic() + _VERDICT_S / 2
            while others and not ours.check([f"read {rank}" for rank in others]) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        return verdict

    def _verdict(self, ours: Store, mine: Here) -> Verdict:
        deadline = time.monotonic() + self.timeout_s + _VERDICT_S
        while True:
            verdict = self._read(ours, "verdict", Verdict)
            if verdict is not None:
                ours.set(f"read {self.rank}", "1")
                return verdict
            if time.monotonic() > deadline:
                raise Absent(f"rank 0 of {self.world} fell silent while the ranks met")
            time.sleep(_POLL_S)
            _put(ours, f"here {self.rank}", mine)  # again: another client may have overwritten it

    def _read(self, store: Store, key: str, form: type[Form]) -> Form | None:
        if not store.check([key]):
            return None
        return self._reader.read(key, store.get(key), lambda body: parse_strict(form, body))


def _choices(present: Mapping[int, Here]) -> str:
    first: dict[str, str] = {}
    for rank, here in sorted(present.items()):
        first.setdefault(here.kinds.rpartition(":")[2], f"(rank {rank} on {here.host})")
    if len(first) < 2:
        return ""
    chosen = " and ".join(f"{kind} {who}" for kind, who in first.items())
    return f"run.backend: ranks chose {chosen}: name one for all hosts, as in --backend gloo; nccl needs GPUs on each"


def _put(store: Store, key: str, part: Part) -> None:
    store.set(key, json.dumps(part.to_json()))


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


class UnixStore(Store):
    """A thread-safe client of a `StoreServer`, with the interface of torch's stores.

    A call that waits for a value uses a separate connection and does not delay other calls. Raises `DistNetworkError`
    if the server is gone, and `DistStoreError` if values do not arrive in time.

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
        """Set the value if the present one is `expected` ("": unset). Returns the value afterwards."""
        return self._ask("compare_set", key, expected, value)[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, str(amount))[0])

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key))

    deleteKey = delete_key

    def _awaited(self, keys: list[str], timeout: timedelta | None = None) -> list[bytes]:
        seconds = (timeout or self.timeout).total_seconds()  # type: ignore[attr-defined]
        values = self._ask("get", repr(seconds), *keys, wait_s=seconds + _LATE_S) if keys else []
        if len(values) != len(keys):
            raise dist.DistStoreError(f"wait timeout after {seconds * 1000:.0f}ms, keys: {', '.join(keys)}")
        return values

    def _ask(self, *parts: str | bytes, wait_s: float | None = None) -> list[bytes]:
        if self._process != os.getpid():  # forked: the connections belong to the parent process
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
    """This process's only client for the server at `address`; it lives as long as the process."""
    return UnixStore(address)
