"""How ranks leave each other values: a store, the one thread of a rank that talks to it, and heartbeats on it.

A store is a store: torch's, or one behind a socket that permissions protect. Whoever reaches it can put anything there.
`signed` drops what no rank of this run has put there; `StrictReader` alone parses the rest, by a strict form.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from andon_contracts.fields import Count, Part
from andon_contracts.liveness.process import Process

Form = TypeVar("Form", bound=Part)
Read = TypeVar("Read")
MOST_CHARACTERS = 1 << 16  # the longest text that a rank sends; the rest is cut off
MOST_BYTES = 1 << 20
"""Longer values are dropped: JSON needs six bytes for a character, and no value has more than two such texts."""


class KeyValueStore(Protocol):
    """Values by key, which any rank may put and read, as in a store of torch.

    A call may take long. It raises `RuntimeError` or `OSError` once the store is gone. A rank calls it in one thread.
    check: whether all keys are there. compare_set: sets the value if `expected` (text or bytes; "": no value) is there,
    and returns the value afterwards.
    """

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def compare_set(self, key: str, expected: Any, value: str, /) -> bytes: ...


class StrictReader:
    """Parses values of a store by one strict form, and drops and counts those that do not have it."""

    def __init__(self) -> None:
        self.dropped = 0
        self._last: dict[str, int] = {}

    def read(self, key: str, raw: bytes, form: Callable[[object], Read]) -> Read | None:
        """What `form` makes of the JSON under `key`; None if it is not JSON, or `form` raises `ValueError`."""
        try:
            if len(raw) > MOST_BYTES:
                raise ValueError(f"{len(raw)} bytes")
            return form(json.loads(raw.decode("utf-8"), parse_constant=_refuse))
        except (ValueError, RecursionError):  # deeply nested JSON also recurses in the form's own error messages
            self.drop(key, raw)
            return None

    def drop(self, key: str, raw: bytes) -> None:
        if self._last.get(key) != hash(raw):
            self._last[key] = hash(raw)
            self.dropped += 1

    def account(self, rank: int) -> str:
        many = f"{self.dropped} value{'s' * (self.dropped != 1)}"
        return f"rank {rank} dropped {many} of the ranks' store that no rank had put there" if self.dropped else ""


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of ours")


def parse_strict(form: type[Form], body: object) -> Form:
    """`body` as this form, with no field left to its default. Raises `ValueError` for anything else."""
    found = form.from_json(body)
    if found.to_json() != body:
        raise ValueError(f"{form.__name__} lacks a field")
    return found


class StoreLink:
    """The one thread of a rank that talks to a store, so that a store which does not answer blocks no other thread."""

    def __init__(self, name: str, routine: Callable[[], float | None], failed: Callable[[Exception], None]) -> None:
        """routine: runs at once, and again after the seconds that it returns, or sooner; None: never again.

        failed: runs in the thread, which then ends, with an error of the routine or a request, before `ask` returns.
        """
        self._routine, self._failed = routine, failed
        self._requests: deque[tuple[Callable[[], object], threading.Event]] = deque()
        self._awake, self._over = threading.Event(), False
        self._answered = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def answers(self, within_s: float) -> bool:
        return self._thread.is_alive() and time.monotonic() - self._answered < within_s

    def wake(self) -> None:
        self._awake.set()

    def post(self, request: Callable[[], object]) -> threading.Event:
        """Run `request` in the thread. The event is set once it has run, or the thread has ended."""
        done = threading.Event()
        self._requests.append((request, done))
        self._awake.set()
        return done

    def ask(self, request: Callable[[], Read], within_s: float) -> Read | None:
        """Run `request` in the thread and return its result; None if it failed or took longer."""
        answer: list[Read] = []
        if self._thread.is_alive():
            self.post(lambda: answer.append(request())).wait(within_s)
        return answer[0] if answer else None

    def close(self, last: Callable[[], object], within_s: float) -> None:
        """Run `last`, end the thread, and wait for it no longer than that. Does nothing in the thread itself."""
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._requests.append((last, threading.Event()))
            self._over = True
            self._awake.set()  # last, so that the thread looks again at once, whatever it has missed
            self._thread.join(within_s)

    def _run(self) -> None:
        doing, pause = threading.Event(), 0.0
        try:
            while True:
                self._awake.wait(pause)
                self._awake.clear()
                over = self._over  # read before the last look at the requests, so that none is missed
                while self._requests:
                    request, doing = self._requests.popleft()
                    request()
                    self._answered = time.monotonic()
                    doing.set()
                again = None if over else self._routine()
                if again is None:
                    return
                self._answered, pause = time.monotonic(), again
        except Exception as error:  # noqa: BLE001 - whatever it is, `failed` has to know of it
            self._failed(error)
        finally:
            doing.set()
            while self._requests:  # not by iterating: other threads may still append
                self._requests.popleft()[1].set()


@dataclass(frozen=True)
class Beat(Generic[Form]):
    """One heartbeat: the process that sent it, and what it said of itself."""

    process: Process
    status: Form
    number: int


@dataclass(frozen=True)
class _Envelope(Part):
    """A heartbeat as it is on a store."""

    number: Count
    process: Process
    status: Mapping[str, Any]


class Heartbeats(Generic[Form]):
    """The heartbeats of all ranks on one store. For the thread of a link alone."""

    def __init__(self, store: KeyValueStore, rank: int, form: type[Form], reader: StrictReader) -> None:
        self._store, self._rank, self._form, self._reader = store, rank, form, reader
        self._here, self._number = Process.here(), 0
        self._raw: dict[int, bytes] = {}
        self._heard: dict[int, Beat[Form]] = {}

    def send(self, status: Form) -> None:
        self._number += 1  # makes each heartbeat new, even if nothing has changed with the rank
        body = _Envelope(self._number, self._here, status.to_json())
        self._store.set(f"beat {self._rank}", json.dumps(body.to_json()))

    def read(self, ranks: Iterable[int]) -> dict[int, Beat[Form]]:
        """The last heartbeat of each of these ranks that has sent any: the same object until the next one."""
        known = [rank for rank in ranks if rank in self._raw or self._store.check([f"beat {rank}"])]
        found = self._store.multi_get([f"beat {rank}" for rank in known]) if known else []
        for rank, raw in zip(known, found, strict=True):
            if self._raw.get(rank) != raw and raw:
                self._raw[rank] = raw
                beat = self._reader.read(f"beat {rank}", raw, partial(self._read, rank))
                if beat is not None:
                    self._heard[rank] = beat
        return {rank: self._heard[rank] for rank in known if rank in self._heard}

    def _read(self, rank: int, body: object) -> Beat[Form]:
        found = parse_strict(_Envelope, body)
        if found.number <= (self._heard[rank].number if rank in self._heard else 0):
            raise ValueError(f"number {found.number} was heard before")  # somebody put an older one back
        return Beat(found.process, parse_strict(self._form, found.status), found.number)
