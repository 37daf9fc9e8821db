"""`python -m andon_falsify.nemesis`: plays nemeses, prints a line for each, and writes the table."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from andon_falsify.nemesis.bench import Bench
from andon_falsify.nemesis.protocol import Nemesis, Row
from andon_falsify.nemesis.registry import nemeses
from andon_falsify.nemesis.table import document, line


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every promise holds and every control is as it should be; 2 for options that mean nothing."""
    parser = argparse.ArgumentParser(prog="python -m andon_falsify.nemesis", description=__doc__)
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
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as base:
        bench = Bench.prepare(Path(base), options.seed)
        rows = _played(bench, chosen, options.jobs, began + options.deadline, options.table)
    good, skipped = sum(row.good for row in rows), sum(bool(row.skipped) for row in rows)
    print(
        f"{good - skipped} of {len(rows) - skipped} nemeses: every promise holds, every control is as it should be; "
        f"{skipped} skipped; {time.monotonic() - began:.0f} s"
    )
    return 0 if good == len(rows) else 1


def _played(bench: Bench, chosen: Sequence[Nemesis], jobs: int, deadline: float, table: Path | None) -> list[Row]:
    """A row for each, printed and written as it comes. A signal that ends this command ends the runs first."""
    rows = [Row(nemesis, skipped="not begun") for nemesis in chosen]
    writing = threading.Lock()

    def play(place: int) -> None:
        late = time.monotonic() > deadline
        row = Row(chosen[place], skipped="not begun: the deadline was over") if late else bench.play(chosen[place])
        with writing:
            rows[place] = row
            print(line(row), flush=True)
            if table is not None:
                table.write_text(document(rows, bench.seed), encoding="utf-8")

    def leave(signum: int, frame: object) -> None:
        bench.close()
        os._exit(128 + signum)

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, leave)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(play, range(len(chosen))))
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
