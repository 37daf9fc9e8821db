"""False alarms: `python -m benchmarks.clean_runs` runs 1,000 right steps of every kind of loop under a watch.

Each kind runs on 2 ranks (gloo) with `action="collect"`; the last kind is a run of our own trainer under its contracts.
The program prints a table and one line of JSON. The exit code is 1 if a watch reported anything, or a loop did not end.
Suspicions that docs/watch-reference.md announces, for loops whose weights differ for a while, are counted apart.
`--twins` plants faults in each kind instead (`tests/watch/clean_twins`), prints which the watch reports, and the exit
code is 1 if it reports none of a kind's faults. A kind whose libraries are not installed is listed as such.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.runs import run, table
from tests.support.ranks import run_ranks
from tests.watch.clean_kinds import KINDS, installed, run_kinds, run_twin, unannounced
from tests.watch.clean_twins import TWINS

TRAINER = "trainer of andon"
_SMALL = ("training.batch_size=8", "training.micro_batches=2", "training.epochs=1000")
_LOADED_ONCE = ("torch", "torch.distributed.fsdp", "icontract", "torch._dynamo", "accelerate", "lightning.fabric",
                "transformers.trainer")  # fmt: skip
_DEADLINE_S = 900.0
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--kind", action="append", choices=[*KINDS, TRAINER], metavar="KIND", default=[])
    parser.add_argument("--twins", action="store_true", help="give each kind a fault, and say which are seen")
    parser.add_argument("--json", type=Path, help="where the JSON goes too")
    options = parser.parse_args()
    # Imported by a server that starts no thread, once for all ranks; what is not installed is passed over.
    multiprocessing.set_forkserver_preload(list(_LOADED_ONCE))
    if options.twins:
        return _twins(options.kind or list(KINDS), options.steps)
    rows = [_row(name, options.steps) for name in options.kind or [*KINDS, TRAINER]]
    header = ("kind", "steps", "evaluations", "violations", "suspicions", "announced")
    print(table(header, [[row[word] for word in header] for row in rows]))
    text = json.dumps({"steps": options.steps, "ranks": 2, "kinds": rows})
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")
    return int(any(row["violations"] or row["suspicions"] or row["said"] for row in rows))


def _row(name: str, steps: int) -> Row:
    measure: Callable[[str, int], Row] = _of_trainer if name == TRAINER else _of_kind
    row: Row = {"kind": name, "steps": 0, "evaluations": 0, "violations": 0, "suspicions": 0, "announced": 0,
                "said": [], "note": ""}  # fmt: skip
    row |= measure(name, steps)
    for said in row["said"]:
        print(f"{name}: {said}", flush=True)
    return row


def _of_kind(name: str, steps: int) -> Row:
    if not installed(KINDS[name]):
        return {"note": f"not run: needs {', '.join(KINDS[name].needs)}"}
    outcomes = run_ranks(2, run_kinds, [name], steps, deadline_s=_DEADLINE_S)
    errors = [o.error for o in outcomes if o.error is not None]
    if errors:
        notes = [note for error in errors for note in getattr(error, "__notes__", [])]
        print(*notes, sep="\n", file=sys.stderr, flush=True)
        return {"said": [f"{type(error).__name__}: {error}" for error in errors]}
    by_rank = [outcome.get()[name] for outcome in outcomes]
    return {
        "steps": steps,
        "evaluations": by_rank[0].evaluations,
        "violations": max(len(seen.violations) for seen in by_rank),
        "suspicions": max(len(unannounced(name, seen)) - len(seen.violations) for seen in by_rank),
        "announced": max(
            len(seen.suspicions) + len(seen.violations) - len(unannounced(name, seen)) for seen in by_rank
        ),
        "said": sorted({said for seen in by_rank for said in unannounced(name, seen)}),
    }


def _twins(names: Sequence[str], steps: int) -> int:
    rows = []
    for name in names:
        if name == TRAINER or not installed(KINDS[name]):
            continue
        outcomes = run_ranks(2, _every_twin, name, steps, deadline_s=_DEADLINE_S)
        seen = [outcome.value for outcome in outcomes if outcome.value is not None]
        rows.append([name, *("yes" if any(found[fault] for found in seen) else "no" for fault in TWINS)])
    print(table(("kind", *TWINS), rows))
    blind = [name for name, *caught in rows if "yes" not in caught]
    print(json.dumps({"steps": steps, "ranks": 2, "kinds": len(rows), "blind": blind}))
    return int(bool(blind))


def _every_twin(name: str, steps: int) -> dict[str, bool]:
    return {fault: bool(unannounced(name, run_twin(name, fault, steps))) for fault in TWINS}


def _of_trainer(name: str, steps: int) -> Row:
    settings = [f"training.max_steps={steps}", *_SMALL]
    words = [word for setting in settings for word in ("--set", setting)]
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder) / "run", "--backend", "gloo", "--workers", "2", *words, expect=(0, 70))
    made = found.summary.get("steps", 0)
    return {
        "steps": made,
        "evaluations": sum(found.summary.get("contracts", {}).values()),
        "violations": int(found.code != 0),
        "said": [] if (found.code, made) == (0, steps) else [f"ended with exit code {found.code} after {made} steps"],
    }


if __name__ == "__main__":
    raise SystemExit(main())
