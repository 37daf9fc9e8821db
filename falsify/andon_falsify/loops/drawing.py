"""Random numbers of forward passes: what each rank draws from, and that no two ranks draw from the same."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from andon_falsify.loops.sightings import LoopSightings, first_of
from andon_falsify.subjects.case import Case, make_rows
from andon_falsify.subjects.trace import Trace
from andon_falsify.verdict import Claim, Counterexample, Verdict, conclude, not_applicable

RANDOMNESS = Claim(
    "randomness-apart",
    1,
    "Ranks that draw random numbers in their forward passes (dropout, noise) draw different ones (faults F55, F56).",
)


class Draws:
    """Enters into `seen` what the state of torch's generator was before a forward pass of `rank` that drew from it."""

    def __init__(self, seen: LoopSightings, rank: int) -> None:
        self._seen = seen
        self._rank = rank
        self._before: tuple[int, str] | None = None

    def before_forward(self, step: int) -> None:
        """A forward pass of update `step` begins."""
        self._before = (step, _state())

    def after_forward(self, *_: Any) -> None:
        """It ended."""
        if self._before is None:
            return
        step, state = self._before
        self._before = None
        if state != _state():
            self._seen.draws.setdefault((self._rank, step), state)


def with_dropout(case: Case) -> Case:
    """One update of a model with dropout, on as many ranks as `case` has, two rows on each."""
    world = case.world
    return Case(
        rows=make_rows(4 * world),
        batch_size=2 * world,
        micro_batches=world,
        max_steps=1,
        optimizer="sgd",
        clip_norm=None,
        weight_decay=0.0,
        dropout=0.1,
        values=False,
        fault=case.fault,
        world=world,
        backend="gloo",
    )


def _state() -> str:
    return hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8).hexdigest()


def randomness(trace: Trace) -> Verdict:
    """The states from which the ranks drew in each update; two that are equal gave the same numbers."""
    if trace.case.world == 1:
        return not_applicable(RANDOMNESS, "one rank has nobody to draw the same as")
    held: dict[tuple[int, int], str] = trace.gathered("draws")
    if not held:
        return not_applicable(RANDOMNESS, "no forward pass draws from torch's generator")
    found, checked = [], 0
    for step in sorted(first_of(trace).made):
        by_state: dict[str, list[str]] = {}
        for (rank, of_step), state in sorted(held.items()):
            if of_step == step:
                by_state.setdefault(state, []).append(str(rank))
        drew = sum(map(len, by_state.values()))
        checked += drew > 1
        if len(by_state) < drew:
            same = "; ".join(f"ranks {', '.join(ranks)}" for ranks in by_state.values() if len(ranks) > 1)
            what = "ranks draw the same random numbers in their forward passes"
            found.append(Counterexample(what, f"step {step}", "another state of the generator on every rank", same))
    missing = "" if checked else "in no update did two ranks draw"
    return conclude(RANDOMNESS, checked, found, missing)
