"""Our fp32 gradient against a plain loop in float64: `python -m benchmarks.gradient_law`.

The embedded default job (its texts, model, adapter, rate; dropout on), in batches of 30 rows and so in 8 micro-batches
of 4 and of 3, on 2 ranks. At each of 50 updates one process computes the gradient of the same global batch from the
same weights, in float64, with code that shares nothing with the trainer and no class of transformers, under the same
dropout masks. The figure is the largest relative L2 error of any tensor at any update.
"""

from __future__ import annotations

import argparse
from collections import defaultdict

from andon.data.shell import embedded
from andon_falsify.claims.run_law import short_name
from andon_falsify.claims.trainer_law import TrainerLaw
from andon_falsify.ranks.pool import RankPools
from andon_falsify.ranks.trainer import AndonTrainer
from andon_falsify.reference.training import gradient
from andon_falsify.subjects.case import Case, Rows
from andon_falsify.subjects.placing import CPU_BACKENDS, GPU_BACKENDS, why_not
from andon_falsify.subjects.trace import Trace
from benchmarks.runs import table

BOUND = 2e-6


def case(backend: str, world: int, steps: int, seed: int) -> Case:
    """The embedded default job in ragged micro-batches."""
    data, _ = embedded(seed)
    rows = Rows(
        tuple(tuple(row.text.encode()) for row in data.rows), tuple(row.label for row in data.rows), len(data.labels)
    )
    return Case(
        rows=rows,
        batch_size=30,
        micro_batches=8,
        max_steps=steps,
        lr=2.5e-3,
        clip_norm=1.0,
        seed=seed,
        layers=2,
        hidden=64,
        heads=4,
        inner=128,
        rank=16,
        dropout=0.1,
        longest=128,
        backend=backend,
        world=world,
    )


def errors(trace: Trace) -> dict[str, list[float]]:
    """For each tensor the relative L2 error of its gradient at each update; 0 where both are exactly 0."""
    law, found = TrainerLaw(trace), defaultdict(list)
    for step, values in sorted(trace.first.values.items()):
        _, wanted = gradient(law.model, law.before(step), law.trainable, law.pieces(step), None, law.masks(step))
        for name, tensor in values.gradients.items():
            short = short_name(name)
            off, size = float((tensor.double() - wanted[short]).norm()), float(wanted[short].norm())
            found[short].append(off / size if size else float(off > 0))
    return dict(found)


def main() -> int:
    """Print the table by tensor and the figure; 0 if it is within the bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=(*CPU_BACKENDS, *GPU_BACKENDS), default="gloo")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=42)
    options = parser.parse_args()
    if reason := why_not(options.backend, options.world):
        parser.error(reason)
    with RankPools() as pools:
        trace = AndonTrainer(pools).run(case(options.backend, options.world, options.steps, options.seed))
    if trace.errors or trace.violation:
        print(trace.errors, trace.violation)
        return 1
    if reason := TrainerLaw(trace).why_not:
        print(reason)
        return 1
    found = errors(trace)
    rows = [
        (name, len(each), f"{sorted(each)[len(each) // 2]:.2e}", f"{max(each):.2e}")
        for name, each in sorted(found.items())
    ]
    print(table(("tensor", "updates", "median", "largest"), rows))
    worst = max(map(max, found.values()))
    print(f"largest relative L2 error {worst:.2e} over {len(found)} tensors, bound {BOUND:.0e}: {worst <= BOUND}")
    return 0 if worst <= BOUND else 1


if __name__ == "__main__":
    raise SystemExit(main())
