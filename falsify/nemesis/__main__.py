"""`python -m falsify.nemesis`: plays nemeses, prints a line for each, and writes the table."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from .bench import Bench, nemeses
from .language import Nemesis, Row
from .table import document, line


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if something was measured, every promise holds and every control is right; else 1.

    2 for options without a meaning. 128 plus the number of a signal that ended it, after all faults are undone.
    """
    parser = argparse.ArgumentParser(prog="python -m falsify.nemesis", description=__doc__)
    parser.add_argument("--tier", choices=("seconds", "minutes"), default="minutes")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="those whose name holds this")
    parser.add_argument("--seed", type=int, default=1, help="of the steps at which faults strike")
    parser.add_argument("--jobs", type=int, default=1, help="nemeses at a time, of up to five processes each")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds after which none is begun")
    parser.add_argument("--table", type=Path, help="file to write the table to, as Markdown")
    options = parser.parse_args(arguments)
    try:
        chosen = nemeses(options.tier, options.only)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    began = time.monotonic()
    print(f"seed {options.seed}: {len(chosen)} nemeses", flush=True)
    try:
        with _signals_raise(), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as base:
            bench = Bench.prepare(Path(base), options.seed)
            rows = _played(bench, chosen, options.jobs, began + options.deadline, options.table)
    except _Asked as asked:
        return 128 + int(asked.args[0])
    print(f"{told(rows)}; {time.monotonic() - began:.0f} s")
    return verdict(rows)


class _Asked(BaseException):
    """A signal, its only argument, asked this command to end."""


@contextmanager
def _signals_raise() -> Iterator[None]:
    """The first SIGTERM or SIGINT raises `_Asked` in the main thread. Later ones are ignored."""
    signums = (signal.SIGTERM, signal.SIGINT)

    def ask(signum: int, _frame: object) -> None:
        for each in signums:
            signal.signal(each, signal.SIG_IGN)
        print(f"{signal.Signals(signum).name}: undoing what is under way", file=sys.stderr, flush=True)
        raise _Asked(signum)

    before = [signal.signal(each, ask) for each in signums]
    try:
        yield
    finally:
        for each, handler in zip(signums, before, strict=True):
            signal.signal(each, handler)


def told(rows: Sequence[Row]) -> str:
    """Counts of the nemeses that were measured, are as promised, were skipped and were not played."""
    good, measured, skipped, unplayed = _counted(rows)
    said = f"{good} of {measured} nemeses: every promise holds, every control is as it should be; {skipped} skipped"
    return f"{said}, {unplayed} not played" if unplayed else said


def verdict(rows: Sequence[Row]) -> int:
    """0 if something was measured, everything was played, and all is as promised; else 1."""
    good, measured, _, unplayed = _counted(rows)
    return 0 if measured and good == measured and not unplayed else 1


def _counted(rows: Sequence[Row]) -> tuple[int, int, int, int]:
    skipped, unplayed = sum(bool(row.skipped) for row in rows), sum(bool(row.unplayed) for row in rows)
    return sum(row.good for row in rows) - skipped, len(rows) - skipped - unplayed, skipped, unplayed


def _played(bench: Bench, chosen: Sequence[Nemesis], jobs: int, deadline: float, table: Path | None) -> list[Row]:
    """A row for each nemesis, printed and written as soon as it is measured."""
    rows = [Row(nemesis, unplayed="not begun") for nemesis in chosen]
    writing = threading.Lock()

    def play(place: int) -> None:
        late = time.monotonic() > deadline
        row = Row(chosen[place], unplayed="not begun: the deadline was over") if late else bench.play(chosen[place])
        with writing:
            rows[place] = row
            print(line(row), flush=True)
            if table is not None:
                table.write_text(document(rows, bench.seed), encoding="utf-8")

    with ThreadPoolExecutor(jobs) as pool:
        try:
            list(pool.map(play, range(len(chosen))))
        except BaseException:
            bench.close()
            raise
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
