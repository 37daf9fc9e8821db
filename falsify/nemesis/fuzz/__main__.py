"""`python -m falsify.nemesis.fuzz --cases N --seed S`: prints the number of cases; exits with 1 if any went wrong.

(seed, surface, number) determines a case, so any case can be repeated.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

from .surfaces import SURFACES, Surface

DEADLINE_S = 10
"""A case that takes longer hangs."""


class Hung(BaseException):
    """A case took too long. Not an `Exception`, so that no code under test can swallow it."""


@dataclass
class Tried:
    """The number of cases, the longest in seconds, and what was wrong, with the number of its case."""

    tried: int = 0
    slowest_s: float = 0.0
    wrong: list[tuple[int, str]] = field(default_factory=list)


def fuzz(surface: Surface, seed: int, numbers: Iterable[int]) -> Tried:
    """Try the cases `numbers` of `surface`. Only in the main thread, because the deadline is an alarm."""
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
        with _deadline():
            return surface.attempt(draw, folder)
    except Hung:
        return f"no answer within {DEADLINE_S} s"
    except KeyboardInterrupt:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 -- the fuzzer looks for exactly these errors
        return f"{type(error).__name__}: {error}"[:400]


@contextmanager
def _deadline() -> Iterator[None]:
    def hang(_signum: int, _frame: FrameType | None) -> NoReturn:
        raise Hung

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(DEADLINE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000, help="over all surfaces")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=[surface.name for surface in SURFACES])
    parser.add_argument("--case", type=int, help="only the case of this number, of the surface that --only names")
    options = parser.parse_args()
    chosen = [surface for surface in SURFACES if options.only in (None, surface.name)]
    each = -(-options.cases // len(chosen))
    numbers = range(each) if options.case is None else [options.case]
    wrong = 0
    for surface in chosen:
        found = fuzz(surface, options.seed, numbers)
        wrong += len(found.wrong)
        print(f"{surface.name:12} {found.tried:6} cases, slowest {found.slowest_s:.2f} s")
        for number, what in found.wrong[:10]:
            print(f"    case {number}: {what}")
            again = f"--seed {options.seed} --only '{surface.name}' --case {number}"
            print(f"    again: python -m falsify.nemesis.fuzz {again}")
        sys.stdout.flush()
    print(f"{each * len(chosen) if options.case is None else 1} cases, {wrong} wrong, seed {options.seed}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
