"""Which claim sees which fault: `python -m benchmarks.mutants --write docs/mutants.md`.

Plants every known fault of `andon_falsify.faults`, one at a time, on each backend, with its controls, and prints the
matrix of faults and claims.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from andon_falsify.compliance.power import Laboratory, Trial, matrix
from andon_falsify.faults.registry import FAULTS
from andon_falsify.ranks.pool import RankPools
from andon_falsify.subjects.protocol import Remembering
from andon_falsify.subjects.trainer import CPU_BACKENDS, AndonTrainer

_INTRODUCTION = """# Faults and the claims that see them

Written by `python -m benchmarks.mutants --write docs/mutants.md`; do not edit.

Each fault is planted alone, in every process of the run, and must change something. `contract` is the clause that
stops the run while the trainer's contracts are on; the claims are those that fall, seen from outside, with the
contracts off. **KILLED** stands under the claim that is named for the fault. Without the fault every claim holds.
"""


def main() -> int:
    """Try all faults; 0 if each changed something and was seen by its claim, and no claim fell without one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", action="append", choices=CPU_BACKENDS, help="again for another; all if not given")
    parser.add_argument("--write", type=Path, help="the file to write")
    options = parser.parse_args()
    trials: list[Trial] = []
    with RankPools() as pools:
        for backend in options.backend or CPU_BACKENDS:
            laboratory = Laboratory(Remembering(AndonTrainer(pools)))
            for fault in FAULTS:
                if fault.kind in ("trainer", "resume") or backend == "inline":
                    trials.append(laboratory.attempt(fault, backend))
                    verdict = "; ".join(trials[-1].problems) or "killed"
                    print(f"{backend:8} {fault.name}: {verdict}", flush=True)
    held = sum(not trial.problems for trial in trials)
    closing = f"{held} of {len(trials)} killed ({len(FAULTS)} faults)"
    text = f"{_INTRODUCTION}\n{matrix(trials)}\n\n{closing}.\n"
    print(text)
    if options.write is not None:
        options.write.write_text(text, encoding="utf-8")
    return 0 if held == len(trials) else 1


if __name__ == "__main__":
    raise SystemExit(main())
