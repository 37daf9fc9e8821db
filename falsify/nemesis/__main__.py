"""`python -m falsify.nemesis`: plays nemeses and prints a line for each."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

from .bench import NEMESES, Bench
from .language import Nemesis, Row
from .table import line, summary

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main() -> int:
    """0 if something was measured, every promise holds and every control is right; else 1.

    2 for wrong options. 128 plus the number of a signal that ended it, after all faults are undone.
    """
    parser = argparse.ArgumentParser(prog="python -m falsify.nemesis", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="those with NAME in their name")
    parser.add_argument("--seed", type=int, default=1, help="seed of the steps at which faults strike")
    parser.add_argument("--jobs", type=int, default=1, help="nemeses in parallel, of up to five processes each")
    options = parser.parse_args()
    chosen = [each for each in NEMESES if not options.only or any(part in each.name for part in options.only)]
    if not chosen:
        names = ", ".join(each.name for each in NEMESES)
        parser.error(f"no nemesis is called {' or '.join(options.only)}; there are: {names}")
    began = time.monotonic()
    print(f"seed {options.seed}: {len(chosen)} nemeses", flush=True)
    for signum in _SIGNALS:
        signal.signal(signum, _end)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as base:
        rows = _played(Bench.prepare(Path(base), options.seed), chosen, options.jobs)
    print(f"{summary(rows)}; {time.monotonic() - began:.0f} s")
    return verdict(rows)


def _end(signum: int, _frame: object) -> NoReturn:
    """Handle the first signal. Later ones are ignored."""
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    print(f"{signal.Signals(signum).name}: undoing what is under way", file=sys.stderr, flush=True)
    sys.exit(128 + signum)


def _played(bench: Bench, chosen: Sequence[Nemesis], jobs: int) -> list[Row]:
    def play(nemesis: Nemesis) -> Row:
        row = bench.play(nemesis)
        print(line(row), flush=True)
        return row

    with ThreadPoolExecutor(jobs) as pool:
        try:
            return list(pool.map(play, chosen))
        except BaseException:
            bench.close()
            raise


def verdict(rows: Sequence[Row]) -> int:
    """0 if something was measured and all is as promised; else 1."""
    return 0 if all(row.good for row in rows) and not all(row.skipped for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
