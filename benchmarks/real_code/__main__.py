"""Run well-known scripts plain and watched, and hold what a watch says of them to the table.

A row that cannot be run here (its repository is not in the mirror, a package is not installed) is named and left out.
Exit codes: 0 all is as the table says, 1 not, 2 nothing could be run or the command line is wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.real_code.checkout import repository
from benchmarks.real_code.row import Row
from benchmarks.real_code.running import Judged, judge
from benchmarks.real_code.table import ROWS
from benchmarks.runs import table


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each script; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_code", description=__doc__)
    parser.add_argument("--mirror", type=Path, required=True, help="a folder of git repositories, named owner+name")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows by name, or by how their names begin")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything, written after each row")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where what the runs print is left")
    options = parser.parse_args(arguments)
    if not options.mirror.is_dir():
        parser.error(f"--mirror: there is no folder {options.mirror}")
    rows = [row for row in ROWS if not options.only or row.name.startswith(tuple(options.only))]
    if not rows:
        parser.error(f"--only: no row is named so; there are {', '.join(row.name for row in ROWS)}")
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    results: list[Judged] = []
    for row in rows:
        if why := _missing(row, options.mirror):
            print(f"{row.name}: left out, {why}", file=sys.stderr, flush=True)
            continue
        git = repository(options.mirror, row)
        assert git is not None
        try:
            results.append(judge(row, git, options.keep))
        except ValueError as error:  # a line of the table that does not fit the repository
            results.append(Judged(row.name, wrong=[str(error)]))
        print(_line(results[-1]), file=sys.stderr, flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(each) for each in results], indent=1), encoding="utf-8")
    print(_table(results))
    for each in results:
        for wrong in each.wrong:
            print(f"{each.name}: {wrong}")
    if not results:
        return 2
    return 1 if any(each.wrong for each in results) else 0


def _missing(row: Row, mirror: Path) -> str:
    """Why a row cannot be run here; "" where it can."""
    if repository(mirror, row) is None:
        return f"{row.repository} is not in the mirror"
    absent = [name for name in row.modules if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


def _line(judged: Judged) -> str:
    return f"{judged.name}: {'; '.join(judged.wrong) or 'as the table says'} ({judged.seconds:.0f} s)"


def _table(results: Sequence[Judged]) -> str:
    head = ("script", "exit plain, watched", "updates", "bits", "true alarms", "false", "planted", "share")
    return str(table(head, [_cells(each) for each in results]))


def _cells(each: Judged) -> tuple[str, ...]:
    true = [f"{alarm['clause']} ({alarm['step']})" for alarm in each.alarms if alarm["true"]]
    false = [f"{alarm['clause']} ({alarm['step']})" for alarm in each.alarms if not alarm["true"]]
    planted = f"{sum(bool(plant['caught']) for plant in each.plants)} of {len(each.plants)}" if each.plants else ""
    share = "" if each.share is None else f"{each.share:.1%}"
    codes = ", ".join(map(str, each.codes))
    said = (", ".join(true), ", ".join(false), planted, share)
    return (each.name, codes, str(each.updates), each.bits, *said)


if __name__ == "__main__":
    raise SystemExit(main())
