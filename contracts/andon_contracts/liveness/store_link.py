"""How ranks exchange values through a store: signed values, the one thread of a rank that waits for it, and heartbeats.

Any client of torch's store may set, delete and list its values. So every value is signed with the secret of the run,
which is never stored there: rank 0 draws it and gathers it to the others through a process group. The signature is
HMAC-SHA256 (RFC 2104) over the key and the value, so a value that was signed for one key is not valid for another.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from andon_contracts.fields import Count, Part, no_constant
from andon_contracts.liveness.process import Process

Form = TypeVar("Form", bound=Part)
Read = TypeVar("Read")
MOST_CHARACTERS = 1 << 16  # the longest text that a rank sends; the rest is cut off
MOST_BYTES = 1 << 20
"""Longer values are dropped: JSON needs six bytes for a character, and no value has more than two such texts."""
TIMEOUT_S = 5.0  # the timeout of a store that others reach: a client may delete a value between two requests
_SECRET_NAMES = ("secret 0", "secret 1", "secret 2", "secret 3")
_SECRET = struct.Struct("<4Q")
_SIGNATURE_CHARACTERS = 64
_NOTHING = "-"
"""`compare_set` with this as expected and new value reads a key without waiting. Unsigned, so never a valid value."""
_TRIES = 100  # how often a forged value is replaced by comparison, before it is overwritten


class StrictReader:
    """Parses values of a store, and drops and counts those that do not have the expected form."""

    def __init__(self) -> None:
        self.dropped = 0
        self._last: dict[str, int] = {}

    def read(self, key: str, raw: bytes, form: Callable[[object], Read]) -> Read | None:
        """Apply `form` to the JSON under `key`. Returns None if it is not JSON, or `form` raises `ValueError`."""
        try:
            if len(raw) > MOST_BYTES:
                raise ValueError(f"{len(raw)} bytes")
            return form(json.loads(raw.decode("utf-8"), parse_constant=no_constant))
        except (ValueError, RecursionError):  # deeply nested JSON also recurses in the form's own error messages
            self.drop(key, raw)
            return None

    def drop(self, key: str, raw: bytes) -> None:
        if self._last.get(key) != hash(raw):
            self._last[key] = hash(raw)
            self.dropped += 1

    def account(self, rank: int) -> str:
        """One line about the dropped values; empty without any."""
        many = f"{self.dropped} value{'s' * (self.dropped != 1)}"
        return f"rank {rank} ignored {many} in the ranks' store that no rank of this run wrote" if self.dropped else ""


def parse_strict(form: type[Form], body: object) -> Form:
    """`body` as `form`. Raises `ValueError` for anything else, also if a field is missing that has a default."""
    part = form.from_json(body)
    if part.to_json() != body:
        raise ValueError(f"{form.__name__} lacks a field")
    return part


def new_secret() -> bytes:
    return secrets.token_bytes(_SECRET.size)


def secret_to_ints(secret: bytes) -> dict[str, int]:
    """A secret as unsigned integers of 64 bits by name, for a gather."""
    return dict(zip(_SECRET_NAMES, _SECRET.unpack(secret), strict=True))


def secret_from_ints(values: Mapping[str, int]) -> bytes:
    """The secret from gathered values, whose integers may be signed."""
    return _SECRET.pack(*(values[name] % (1 << 64) for name in _SECRET_NAMES))


def _signature(secret: bytes, key: str, value: bytes) -> str:
    return hmac.new(secret, key.encode() + b"\0" + value, hashlib.sha256).hexdigest()


class SignedStore:
    """The methods of torch's `Store` for values signed in this run. `reader` counts values without a valid signature.

    No call waits for a value: a deleted value is missing (`get` returns b""). A call may take long, and raises
    `RuntimeError` or `OSError` once the store is gone. store: used by no other thread, with a timeout of
    `TIMEOUT_S` if other machines reach it.
    """

    def __init__(self, store: Store, secret: bytes) -> None:
        self.reader = StrictReader()
        self._store, self._secret = store, secret

    def set(self, key: str, value: str, /) -> None:
        self._store.set(key, self._signed(key, value))

    def get(self, key: str, /) -> bytes:
        return self._verified(key, self._raw(key))

    def check(self, keys: list[str], /) -> bool:
        return all(self.get(key) for key in keys)

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        values: Sequence[bytes] = []  # by two requests, if all exist
        with suppress(DistStoreError):  # a client deleted one in between
            values = self._store.multi_get(keys) if self._store.check(keys) else []
        values = values or [self._raw(key) for key in keys]
        return [self._verified(key, raw) for key, raw in zip(keys, values, strict=True)]

    def compare_set(self, key: str, expected: Any, value: str, /) -> bytes:
        """Set `value` if the current one is `expected` ("": none, or a forged one). Returns the value afterwards."""
        wanted = expected.decode() if isinstance(expected, bytes) else expected
        current: Any = self._signed(key, wanted) if wanted else ""
        for _ in range(_TRIES):
            raw = self._store.compare_set(key, current, self._signed(key, value))
            result = self._verified(key, raw)
            if result or wanted:
                return result
            current = raw  # replace the forged value
        self.set(key, value)
        return value.encode()

    def read(self, key: str, form: Callable[[object], Read]) -> Read | None:
        """Apply `form` to the JSON of a rank under `key`; None if no rank has set it."""
        raw = self.get(key)
        return self.reader.read(key, raw, form) if raw else None

    def _signed(self, key: str, value: str) -> str:
        return _signature(self._secret, key, value.encode()) + value

    def _raw(self, key: str) -> bytes:
        return self._store.compare_set(key, _NOTHING, _NOTHING)

    def _verified(self, key: str, raw: bytes) -> bytes:
        if raw in (b"", _NOTHING.encode()):
            return b""
        signature, value = raw[:_SIGNATURE_CHARACTERS], raw[_SIGNATURE_CHARACTERS:]
        if len(value) <= MOST_BYTES and hmac.compare_digest(signature, _signature(self._secret, key, value).encode()):
            return value
        self.reader.drop(key, raw)
        return b""


class StoreLink:
    """The one thread of a rank that uses a store. A store that does not answer blocks only this thread."""

    def __init__(self, name: str, routine: Callable[[], float | None], failed: Callable[[Exception], None]) -> None:
        """routine: runs at once, and again after the seconds that it returns, or sooner; None ends the thread.

        failed: runs in the thread, before it ends, with an error of the routine or of a request.
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
        """Run `last`, end the thread, and wait for it at most `within_s`. Does nothing in the thread itself."""
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._requests.append((last, threading.Event()))
            self._over = True
            self._awake.set()  # only now, so that the thread sees both
            self._thread.join(within_s)

    def _run(self) -> None:
        done, pause = threading.Event(), 0.0
        try:
            while True:
                self._awake.wait(pause)
                self._awake.clear()
                over = self._over  # read before the requests, so that the last one is not missed
                while self._requests:
                    request, done = self._requests.popleft()
                    request()
                    self._answered = time.monotonic()
                    done.set()
                again = None if over else self._routine()
                if again is None:
                    return
                self._answered, pause = time.monotonic(), again
        except Exception as error:  # noqa: BLE001 - `failed` has to know of every error
            self._failed(error)
        finally:
            done.set()
            while self._requests:  # not by iterating: other threads may still append
                self._requests.popleft()[1].set()


@dataclass(frozen=True)
class Beat(Generic[Form]):
    """One heartbeat: the process that sent it, and the status of its rank."""

    process: Process
    status: Form
    number: int


@dataclass(frozen=True)
class _Envelope(Part):
    number: Count
    process: Process
    status: Mapping[str, Any]


class Heartbeats(Generic[Form]):
    """The heartbeats of all ranks in one store. Only the thread of a `StoreLink` may use it."""

    def __init__(self, store: SignedStore, rank: int, form: type[Form], reader: StrictReader) -> None:
        self._store, self._rank, self._form, self._reader = store, rank, form, reader
        self._here, self._number = Process.here(), 0
        self._raw: dict[int, bytes] = {}
        self._last: dict[int, Beat[Form]] = {}

    def send(self, status: Form) -> None:
        self._number += 1  # makes each heartbeat new, even if the status is the same
        body = _Envelope(self._number, self._here, status.to_json())
        self._store.set(f"beat {self._rank}", json.dumps(body.to_json()))

    def read(self, ranks: Iterable[int]) -> dict[int, Beat[Form]]:
        """By rank, the last heartbeat if it has sent one. It is the same object until the next heartbeat arrives."""
        known = [rank for rank in ranks if rank in self._raw or self._store.check([f"beat {rank}"])]
        values = self._store.multi_get([f"beat {rank}" for rank in known]) if known else []
        for rank, raw in zip(known, values, strict=True):
            if self._raw.get(rank) != raw and raw:
                self._raw[rank] = raw
                beat = self._reader.read(f"beat {rank}", raw, partial(self._parse, rank))
                if beat is not None:
                    self._last[rank] = beat
        return {rank: self._last[rank] for rank in known if rank in self._last}

    def _parse(self, rank: int, body: object) -> Beat[Form]:
        envelope = parse_strict(_Envelope, body)
        if envelope.number <= (self._last[rank].number if rank in self._last else 0):
            raise ValueError(f"heartbeat {envelope.number} was received before")  # a client put an older one back
        return Beat(envelope.process, parse_strict(self._form, envelope.status), envelope.number)
