"""`python -m falsify.nemesis.fuzz --cases N --seed S`: prints the number of cases; exits with 1 if any went wrong.

(seed, surface, number) determines a case, so any case can be repeated.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from .surfaces import SURFACES, Attempt

DEADLINE_S = 60
"""A case that takes longer hangs. The first case of a surface also imports what it needs."""


class Hung(BaseException):
    """A case took too long. Not an `Exception`, so that no code under test can swallow it."""


def fuzz(name: str, attempt: Attempt, seed: int, numbers: Iterable[int]) -> list[tuple[int, str]]:
    """Try the cases `numbers` of a surface. Returns the numbers of those that went wrong, and what was wrong.

    Only in the main thread, because the deadline is an alarm.
    """
    wrong = []
    for number in numbers:
        with tempfile.TemporaryDirectory(prefix="andon-fuzz-") as base:
            folder = Path(base) / "case"
            folder.mkdir()
            if what := _tried(attempt, random.Random(f"{seed} {name} {number}"), folder):
                wrong.append((number, what))
    return wrong


def _tried(attempt: Attempt, draw: random.Random, folder: Path) -> str:
    def hang(_signum: int, _frame: FrameType | None) -> NoReturn:
        raise Hung

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(DEADLINE_S)
    try:
        return attempt(draw, folder)
    except Hung:
        return f"no answer within {DEADLINE_S} s"
    except (Exception, SystemExit) as error:  # noqa: BLE001 -- the fuzzer looks for exactly these errors
        return f"{type(error).__name__}: {error}"[:400]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000, help="over all surfaces")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=SURFACES)
    parser.add_argument("--case", type=int, help="only the case of this number, of the surface that --only names")
    options = parser.parse_args()
    chosen = [options.only] if options.only else list(SURFACES)
    each = -(-options.cases // len(chosen))
    numbers = range(each) if options.case is None else range(options.case, options.case + 1)
    count = 0
    for name in chosen:
        wrong = fuzz(name, SURFACES[name], options.seed, numbers)
        count += len(wrong)
        print(f"{name:12} {len(numbers):6} cases, {len(wrong)} wrong", flush=True)
        for number, what in wrong[:10]:
            print(f"    case {number}: {what}")
            again = f"--seed {options.seed} --only '{name}' --case {number}"
            print(f"    again: python -m falsify.nemesis.fuzz {again}")
    print(f"{len(numbers) * len(chosen)} cases, {count} wrong, seed {options.seed}")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
