"""Bits flipped in gradients and partial sums, and how many of them the audit finds: `python -m benchmarks.flips`.

In one process stand the ranks of a small trainer (37 rows, dropout, AdamW, 8 micro-batches). Each trial is one update
at a step drawn at random, in which one bit of the mantissa of one element is flipped before the reduction: of the
gradient of one micro-batch, or of a partial sum once it is complete; all else would agree on all ranks. With full
coverage and K = 1 every flip must be found, by the audit, at that step and before the update. At the defaults the
number found must lie in the central interval that holds 99 % of a binomial distribution of the stated rate, 1 / (K L)
for gradients and for the one partial sum that each of two ranks sends 1 / K. It ends with 1 where a figure is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from andon.backend.inprocess import InlineBackend
from andon.step.audit import AuditSpec, default_every
from andon.step.micro_batch import Leaf, LeafResult
from andon.step.plan import rank_leaves
from andon.step.replica import Replica
from andon.step.step import TrainingStep
from andon.step.task import Task
from andon_contracts.violation import Violation
from benchmarks.runs import table
from tests.support.toy import CPU, Settings, ToyTask, replica

LEAVES = 8
_MANTISSA_BITS = 23
_STEPS = 1_000_000
_RATE = 1e-3
_CONFIDENCE = 0.99


@dataclass(frozen=True)
class Found:
    """How many of the planted flips were found, and how many are stated to be."""

    what: str
    ranks: int
    every: int
    coverage: int | str
    planted: int
    found: int
    rate: float
    interval: tuple[int, int]

    @property
    def holds(self) -> bool:
        """Whether it is as stated."""
        return self.interval[0] <= self.found <= self.interval[1]


def central_interval(count: int, rate: float, confidence: float = _CONFIDENCE) -> tuple[int, int]:
    """The numbers of successes of `count` trials below and above which lies at most half of what `confidence` leaves.

    rate: of success, in (0, 1].
    """
    if rate == 1.0:
        return count, count
    logs = [
        math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) + k * math.log(rate)
        + (count - k) * math.log1p(-rate)
        for k in range(count + 1)
    ]  # fmt: skip
    tail, below, low, high = (1 - confidence) / 2, 0.0, 0, count
    for k, log in enumerate(logs):
        if below <= tail:
            low = k
        below += math.exp(log)
        if below >= 1 - tail:
            high = k
            break
    return low, high


def _flip(flat: Tensor, draw: random.Random) -> None:
    """One bit of the mantissa of one element of `flat`, fp32 and 1-dim."""
    flat.view(torch.int32)[draw.randrange(flat.numel())] ^= 1 << draw.randrange(_MANTISSA_BITS)


@contextmanager
def _flipped_gradient(victim: Replica, leaf: int, draw: random.Random) -> Iterator[None]:
    inner = victim._leaf

    def wrong(step: int, given: Leaf, task: Task, *, checked: bool) -> LeafResult:
        report = inner(step, given, task, checked=checked)
        if given.index == leaf:
            victim._leaf = inner  # type: ignore[method-assign]
            _flip(victim.parameters.gradient, draw)
        return report

    victim._leaf = wrong  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        victim._leaf = inner  # type: ignore[method-assign]


@contextmanager
def _flipped_sum(victim: Replica, draw: random.Random) -> Iterator[None]:
    inner = victim.gradients

    def wrong(*given: Any, **named: Any) -> Any:
        partial = inner(*given, **named)
        _flip(draw.choice(list(partial.roots.values())), draw)
        return partial

    victim.gradients = wrong  # type: ignore[method-assign]
    try:
        yield
    finally:
        victim.gradients = inner  # type: ignore[method-assign]


def flips(what: str, ranks: int, spec: AuditSpec, planted: int, rate: float, draw: random.Random) -> Found:
    """Plant so many flips of `what` ("gradient" or "partial sum"), one an update; the audit is stated to find `rate`.

    Raises `RuntimeError` where anything else than the audit finds one, or an update is made all the same.
    """
    replicas = [replica() for _ in range(ranks)]
    step = TrainingStep(InlineBackend([CPU] * ranks), replicas, ToyTask(), LEAVES, None, spec)
    (batch,) = Settings(LEAVES, sizes=(16,)).batches()
    found = 0
    for _ in range(planted):
        leaf = draw.randrange(LEAVES)
        (owner,) = (rank for rank, own in enumerate(rank_leaves(LEAVES, ranks)) if leaf in own)
        victim, before = replicas[owner], replicas[0].updates
        planting = _flipped_gradient(victim, leaf, draw) if what == "gradient" else _flipped_sum(victim, draw)
        with planting:
            this = _is_found(lambda: step(replace(batch, step=draw.randrange(_STEPS)), _RATE, before + 1))  # noqa: B023
        if this == (replicas[0].updates > before):
            raise RuntimeError("an update was made of a gradient that was found to be wrong, or none of another")
        found += this
        if len({each.weights_digest() for each in replicas}) > 1:
            raise RuntimeError("the ranks do not agree, so that a flip would be seen without an audit")
    coverage = "all" if spec.coverage is None else spec.coverage
    return Found(what, ranks, spec.every, coverage, planted, found, rate, central_interval(planted, rate))


def _is_found(update: Callable[[], object]) -> bool:
    try:
        update()
    except Violation as violation:
        if violation.clause != "audit":
            raise RuntimeError(f"a flip was found by {violation.clause}, not by the audit") from violation
        return True
    return False


def main() -> int:
    """Print a table and one JSON object; 0 if all figures are as stated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", type=int, default=100, help="flips of each kind at full coverage and K = 1")
    parser.add_argument("--default", type=int, default=1000, help="flips of each kind at the defaults")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    draw, every, own = random.Random(options.seed), default_every(2, LEAVES), LEAVES // 2
    defaults = AuditSpec(every, 1, seed=options.seed)
    found = [
        *(flips(what, 3, AuditSpec(1, None), options.all, 1.0, draw) for what in ("gradient", "partial sum")),
        flips("gradient", 2, defaults, options.default, 1 / (every * own), draw),
        flips("partial sum", 2, defaults, options.default, 1 / every, draw),
    ]
    rows = [
        [each.what, each.ranks, each.every, each.coverage, f"{each.found} of {each.planted}", f"{each.rate:.2%}",
         f"{each.interval[0]} to {each.interval[1]}", "yes" if each.holds else "NO"]
        for each in found
    ]  # fmt: skip
    print(table(["a bit in a", "ranks", "K", "coverage", "found", "stated", "99 % interval", "as stated"], rows))
    print(json.dumps([{**asdict(each), "holds": each.holds} for each in found], indent=2))
    return 0 if all(each.holds for each in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
