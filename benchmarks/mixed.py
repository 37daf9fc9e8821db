"""Ranks on CPUs and GPUs in one group, beside a run on CPUs alone: `python -m benchmarks.mixed --workers 2,3`.

The embedded job. That the ranks of a `mixed` run hold the same bits as each other its contracts say at every step. Its
result is close to that of an unmixed run and not the same: what is dropped is, but kernels of a GPU round otherwise.
Each step's loss may be off by `--within` of itself. Prints who computed how many micro-batches; 0 if all holds. Without
a GPU all ranks are on CPUs, and the losses must be the same to the bit.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from andon.run.ledger import read_ledger
from andon_contracts.record import Step
from benchmarks.runs import run, table


def main() -> int:
    """Run and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="2,3")
    parser.add_argument("--within", type=float, default=1e-3, help="how far a step's loss may be off, of itself")
    parser.add_argument("--set", action="append", default=[], help="passed on to andon train")
    options = parser.parse_args()
    settings = [part for each in options.set for part in ("--set", each)]
    with tempfile.TemporaryDirectory() as base:
        alone = run(Path(base) / "gloo", "--backend", "gloo", "--workers", "2", *settings)
        plain = steps_in(alone.folder)
        rows = [_row("gloo", "2", alone.seconds, plain, plain)]
        for workers in options.workers.split(","):
            mixed = run(Path(base) / f"mixed-{workers}", "--backend", "mixed", "--workers", workers, *settings)
            rows.append(_row("mixed", workers, mixed.seconds, steps_in(mixed.folder), plain))
    print(table(list(rows[0]), [list(row.values()) for row in rows]))
    print(json.dumps(rows))
    allowed = options.within if torch.cuda.is_available() else 0.0
    return 0 if all(row["steps"] == len(plain) and row["loss off by"] <= allowed for row in rows) else 1


def steps_in(folder: Path) -> list[Step]:
    """The steps of a run, from its ledger."""
    return [record for record in read_ledger(folder / "ledger.jsonl") if isinstance(record, Step)]


def _row(backend: str, workers: str, seconds: float, steps: list[Step], plain: list[Step]) -> dict[str, Any]:
    """The most that a step's loss is off, of itself, and the micro-batches of each rank in the last step."""
    losses = [(_loss(one), _loss(other)) for one, other in zip(steps, plain, strict=False)]
    return {
        "backend": backend,
        "workers": workers,
        "seconds": round(seconds, 1),
        "steps": len(steps),
        "micro-batches of each rank": " ".join(str(len(part.leaves)) for part in steps[-1].ranks),
        "loss off by": max(abs(one - other) / other for one, other in losses),
    }


def _loss(step: Step) -> float:
    assert step.loss is not None  # our trainer always writes it
    return step.loss.value


if __name__ == "__main__":
    raise SystemExit(main())
