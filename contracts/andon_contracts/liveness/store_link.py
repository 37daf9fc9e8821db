"""How ranks leave each other values: a board, the one thread of a rank that speaks with it, and signs of life on it.

A store is a board, torch's or one behind a socket that permissions protect. Whoever can reach a board can put anything
there: guards take it for what it is only where `signed` says that a rank put it there, and `Checked` alone reads it.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from andon_contracts.fields import Count, Part
from andon_contracts.liveness.process import Process

Told = TypeVar("Told", bound=Part)
Read = TypeVar("Read")
MOST_CHARACTERS = 1 << 16
"""How much text of one kind a rank may tell; more of it is left out."""
MOST_BYTES = 1 << 20
"""What is longer is none of ours: JSON needs six bytes for a character, and no value has more than two such texts."""


class Board(Protocol):
    """Values by name, which any rank may put and read.

    Each call may take long, and raises `RuntimeError` or `OSError` once the board is gone. A rank calls it in one
    thread alone.
    """

    def set(self, key: str, value: str, /) -> None:
        """Put a value in the place of what is there."""

    def get(self, key: str, /) -> bytes:
        """The value of a name that is there."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all of these are there."""
        ...

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """The values of names that are there, by one question."""
        ...

    def compare_set(self, key: str, expected: Any, value: str, /) -> bytes:
        """Put a value where there is what is expected (text or bytes; "": nothing); what is there afterwards."""
        ...


class Checked:
    """Values of a board, each read by one checked form. What is none is dropped, and counted as `dropped`."""

    def __init__(self) -> None:
        self.dropped = 0
        self._last: dict[str, int] = {}

    def read(self, key: str, raw: bytes, form: Callable[[object], Read]) -> Read | None:
        """What `form` makes of the JSON found under `key`; None where that is none, or `form` raises `ValueError`."""
        try:
            return form(_json(raw))
        except (ValueError, RecursionError):  # the form's words for what is wrong may nest as deeply
            self.drop(key, raw)
            return None

    def drop(self, key: str, raw: bytes) -> None:
        """Count what was found under `key`, however often the same is found there."""
        if self._last.get(key) != hash(raw):
            self._last[key] = hash(raw)
            self.dropped += 1

    def account(self, rank: int) -> str:
        """What was dropped, in words; empty: nothing."""
        many = f"{self.dropped} value{'s' * (self.dropped != 1)}"
        return f"rank {rank} dropped {many} of the ranks' store that no rank had put there" if self.dropped else ""


def _json(raw: bytes) -> object:
    if len(raw) > MOST_BYTES:
        raise ValueError(f"{len(raw)} bytes")
    return json.loads(raw.decode("utf-8"), parse_constant=_refuse)


def whole(form: type[Told], body: object) -> Told:
    """`body` as this form, with every field that a rank writes. Raises `ValueError` for anything else."""
    found = form.from_json(body)
    if found.to_json() != body:
        raise ValueError(f"{form.__name__} lacks a field")
    return found


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of ours")


class StoreLink:
    """The thread of this rank that speaks with a board, so that one which does not answer blocks nobody else."""

    def __init__(self, name: str, routine: Callable[[], float | None], failed: Callable[[Exception], None]) -> None:
        """routine: done at once, and again after the seconds that it gives, or sooner; None: never again.

        failed: called in the thread with the error of the routine or of a request, before who asked for it goes on.
        The thread ends then: what becomes of a rank without it, is for `failed` to decide.
        """
        self._routine, self._failed = routine, failed
        self._requests: deque[tuple[Callable[[], object], threading.Event]] = deque()
        self._awake, self._over = threading.Event(), False
        self._answered = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def answers(self, within_s: float) -> bool:
        """Whether the board has answered within so many seconds."""
        return self._thread.is_alive() and time.monotonic() - self._answered < within_s

    def hurry(self) -> None:
        """Have the routine done now."""
        self._awake.set()

    def post(self, request: Callable[[], object]) -> threading.Event:
        """Have this done in the thread; what is set once it was, or the thread has ended."""
        done = threading.Event()
        self._requests.append((request, done))
        self._awake.set()
        return done

    def ask(self, request: Callable[[], object], within_s: float) -> None:
        """Have this done in the thread and wait for it, but no longer than that."""
        if self._thread.is_alive():
            self.post(request).wait(within_s)

    def close(self, last: Callable[[], object], within_s: float) -> None:
        """Have this done and end the thread; wait for it, but no longer than that. Nothing in the thread itself."""
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._requests.append((last, threading.Event()))
            self._over = True
            # Last, so that whatever the thread has missed, it looks again at once and not after its pause.
            self._awake.set()
            self._thread.join(within_s)

    def _run(self) -> None:
        doing, pause = threading.Event(), 0.0
        try:
            while True:
                self._awake.wait(pause)
                self._awake.clear()
                over = self._over  # before the last look at the requests, so that none comes after it
                while self._requests:
                    request, doing = self._requests.popleft()
                    request()
                    self._answered = time.monotonic()
                    doing.set()
                again = None if over else self._routine()
                if again is None:
                    return
                self._answered, pause = time.monotonic(), again
        except Exception as error:  # noqa: BLE001 - whatever it is, somebody has to hear of it
            self._failed(error)
        finally:
            doing.set()
            while self._requests:  # not by iterating: others may still append
                self._requests.popleft()[1].set()


@dataclass(frozen=True)
class Beat(Generic[Told]):
    """One sign of life: the process that gave it, and what it told."""

    process: Process
    told: Told


@dataclass(frozen=True)
class _Sign(Part):
    """A beat as it stands on a board."""

    number: Count
    process: Process
    told: Mapping[str, Any]


class Heartbeats(Generic[Told]):
    """The signs of life of all ranks on one board. For the thread of a link alone."""

    def __init__(self, board: Board, rank: int, form: type[Told], checked: Checked) -> None:
        self._board, self._rank, self._form, self._checked = board, rank, form, checked
        self._here, self._number = Process.here(), 0
        self._raw: dict[int, bytes] = {}
        self._heard: dict[int, Beat[Told]] = {}
        self._numbers: dict[int, int] = {}
        """Of the last sign that was heard of each rank: an older one is not heard again."""

    def tell(self, told: Told) -> None:
        """Give a sign of life of this rank."""
        self._number += 1  # so that each is another, also where nothing has changed with the rank
        self._board.set(f"beat {self._rank}", json.dumps(_Sign(self._number, self._here, told.to_json()).to_json()))

    def hear(self, ranks: Iterable[int]) -> dict[int, Beat[Told]]:
        """The last sign of those of these ranks that have given any: the same object as long as it is the last.

        One question for all that were heard before; only of the others it must be asked whether they came.
        """
        known = [rank for rank in ranks if rank in self._raw or self._board.check([f"beat {rank}"])]
        found = self._board.multi_get([f"beat {rank}" for rank in known]) if known else []
        for rank, raw in zip(known, found, strict=True):
            if self._raw.get(rank) != raw and raw:
                self._raw[rank] = raw
                beat = self._checked.read(f"beat {rank}", raw, lambda body, rank=rank: self._read(rank, body))  # type: ignore[misc]
                if beat is not None:
                    self._heard[rank] = beat
        return {rank: self._heard[rank] for rank in known if rank in self._heard}

    def _read(self, rank: int, body: object) -> Beat[Told]:
        found = whole(_Sign, body)
        beat = Beat(found.process, whole(self._form, found.told))
        if found.number <= self._numbers.get(rank, 0):
            raise ValueError(f"number {found.number} was heard before")
        self._numbers[rank] = found.number
        return beat
