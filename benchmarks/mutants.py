"""Which claim sees which fault: `python -m benchmarks.mutants --write docs/mutants.md`.

Plants every known fault of `andon_falsify.faults`, one at a time, on each backend, with its controls, and prints the
matrix of faults and claims.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from andon_falsify.claims.of_trainer import verdicts
from andon_falsify.compliance.power import Attempt, Laboratory, matrix, untried
from andon_falsify.faults.registry import FAULTS
from andon_falsify.ranks.pool import RankPools
from andon_falsify.ranks.trainer import AndonTrainer
from andon_falsify.subjects.case import Case, make_rows
from andon_falsify.subjects.placing import CPU_BACKENDS, GPU_BACKENDS
from andon_falsify.subjects.trace import Remembering, Subject
from andon_falsify.verdict import Outcome

_INTRODUCTION = """# Faults and the claims that see them

Written by `python -m benchmarks.mutants --write docs/mutants.md`; do not edit.

Each fault is planted alone, in every process of the run, and must change something. `contract` is the clause that
stops the run while the trainer's contracts are on; the claims are those that fall, seen from outside, with the
contracts off. **KILLED** stands under the claim that is named for the fault. Without the fault every claim holds.
"""


def clean(subject: Subject, steps: int) -> tuple[str, bool]:
    """A line on `steps` updates without a fault on 2 ranks, and whether they raised and contradicted nothing."""
    case = Case(rows=make_rows(40), batch_size=10, epochs=-(-steps // 4), max_steps=steps, values=False, backend="gloo")
    trace = subject.run(case)
    found = verdicts(trace)
    fallen = [str(verdict) for verdict in found.values() if verdict.outcome not in (Outcome.HOLDS, Outcome.UNKNOWN)]
    violations = len(trace.seen.of_kind("violation")) + len(trace.errors)
    text = (
        f"without a fault: {violations} violations and {len(fallen)} claims fallen in {len(trace.seen.steps)} updates"
    )
    return text, not violations and not fallen and len(trace.seen.steps) == steps


def main() -> int:
    """Try all faults; 0 if each changed something and was seen by its claim, and no claim fell without one."""
    backends = (*CPU_BACKENDS, *GPU_BACKENDS)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", action="append", choices=backends, help="again for another; those on CPUs if not")
    parser.add_argument("--write", type=Path, help="the file to write")
    parser.add_argument("--clean-steps", type=int, default=1000, help="updates of the run without a fault")
    options = parser.parse_args()
    trials: list[Attempt] = []
    left_out = 0
    with RankPools() as pools:
        for backend in options.backend or CPU_BACKENDS:
            laboratory = Laboratory(Remembering(AndonTrainer(pools)))
            for fault in FAULTS:
                by_backend = fault.kind in ("trainer", "resume")
                if by_backend and (reason := untried(fault, backend)):
                    left_out += 1
                    print(f"{backend:8} {fault.name}: not tried: {reason}", flush=True)
                elif by_backend or backend == "inline":
                    trials.append(laboratory.attempt(fault, backend))
                    verdict = "; ".join(trials[-1].problems) or "killed"
                    print(f"{backend:8} {fault.name}: {verdict}", flush=True)
        unharmed, well = clean(AndonTrainer(pools), options.clean_steps)
    held = sum(not trial.problems for trial in trials)
    closing = f"{held} of {len(trials)} killed ({len(FAULTS)} faults); {unharmed}"
    closing += f"; {left_out} could not be tried" if left_out else ""
    text = f"{_INTRODUCTION}\n{matrix(trials)}\n\n{closing}.\n"
    print(text)
    if options.write is not None:
        options.write.write_text(text, encoding="utf-8")
    return 0 if trials and held == len(trials) and well else 1


if __name__ == "__main__":
    raise SystemExit(main())
