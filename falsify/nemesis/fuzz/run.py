"""Runs the cases of one surface. A case is a function of (seed, surface, number): any of them can be repeated."""

from __future__ import annotations

import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

from .surfaces import Surface

DEADLINE_S = 10
"""A case that takes longer hangs."""


class Hung(BaseException):
    """The deadline of a case is over. Not an `Exception`, so that nothing that is tried can swallow it."""


@dataclass
class Tried:
    """What came of the cases: how many, the longest in seconds, and what was wrong by number of the case."""

    tried: int = 0
    slowest_s: float = 0.0
    wrong: list[tuple[int, str]] = field(default_factory=list)


def fuzz(surface: Surface, seed: int, numbers: Iterable[int]) -> Tried:
    """Try the cases `numbers` of `surface`. Must run in the main thread: the deadline is an alarm."""
    found = Tried()
    surface.prepare()
    with tempfile.TemporaryDirectory(prefix="andon-fuzz-") as base:
        for number in numbers:
            folder = Path(base) / "case"
            folder.mkdir()
            begun = time.monotonic()
            what = _attempt(surface, random.Random(f"{seed} {surface.name} {number}"), folder)
            found.slowest_s = max(found.slowest_s, time.monotonic() - begun)
            found.tried += 1
            if what:
                found.wrong.append((number, what))
            shutil.rmtree(folder)
    return found


def _attempt(surface: Surface, draw: random.Random, folder: Path) -> str:
    try:
        with _deadline(DEADLINE_S):
            return surface.attempt(draw, folder)
    except Hung:
        return f"no answer within {DEADLINE_S} s"
    except KeyboardInterrupt:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 -- any error that is not the promised one is what is looked for
        return f"{type(error).__name__}: {error}"[:400]


@contextmanager
def _deadline(seconds: int) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, _hang)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _hang(signum: int, frame: FrameType | None) -> NoReturn:
    raise Hung
