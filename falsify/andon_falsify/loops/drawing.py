"""Random numbers of forward passes: that they are drawn, and that no two ranks draw from the same state."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from andon_falsify.loops.law import LoopLaw
from andon_falsify.loops.sightings import LoopSightings, first_of
from andon_falsify.subjects.case import Case, make_rows
from andon_falsify.subjects.trace import Trace
from andon_falsify.verdict import Claim, Counterexample, Verdict, conclude, not_applicable

RANDOMNESS = Claim(
    "randomness-apart",
    2,
    "What draws random numbers in training (dropout, noise) draws them in every forward pass, and ranks draw different "
    "ones (faults F55, F56, F58).",
)


class Draws:
    """Enters into `seen` what a forward pass of `rank` drew from torch's generator: its state before it, or nothing."""

    def __init__(self, seen: LoopSightings, rank: int) -> None:
        self._seen = seen
        self._rank = rank
        self._before: tuple[int, int, str] | None = None

    def before_forward(self, step: int, rows: int) -> None:
        """A forward pass of update `step` begins, of so many rows."""
        self._before = (step, rows, _state())

    def after_forward(self, module: nn.Module, *_: Any) -> None:
        """It ended."""
        if self._before is None:
            return
        step, rows, state = self._before
        self._before = None
        if state != _state():
            self._seen.draws.setdefault((self._rank, step), state)
        elif rows:
            self._seen.undrawn.setdefault((self._rank, step), module.training)


def with_dropout(case: Case) -> Case:
    """Two epochs of two updates of a model with dropout, on as many ranks as `case` has, two rows on each.

    So many that a loop that evaluates after an update or an epoch trains on behind it.
    """
    world = case.world
    return Case(
        rows=make_rows(4 * world),
        batch_size=2 * world,
        micro_batches=world,
        epochs=2,
        optimizer="sgd",
        clip_norm=None,
        weight_decay=0.0,
        dropout=0.1,
        fault=case.fault,
        world=world,
        backend="gloo",
    )


def _state() -> str:
    return hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8).hexdigest()


def randomness(trace: Trace) -> Verdict:
    """The states from which the ranks drew in each update; two that are equal gave the same numbers.

    Before that, that the case's model with dropout draws at all, on one rank too.
    """
    still = list(_undrawn(trace))
    if still:
        return conclude(RANDOMNESS, len(first_of(trace).made), still)
    if trace.case.world == 1:
        return not_applicable(RANDOMNESS, "one rank has nobody to draw the same as")
    held: dict[tuple[int, int], str] = trace.gathered("draws")
    if not held:
        return not_applicable(RANDOMNESS, "no forward pass draws from torch's generator")
    found: list[Counterexample] = []
    checked = 0
    for step in sorted(first_of(trace).made):
        states = {rank: state for (rank, of_step), state in sorted(held.items()) if of_step == step}
        checked += len(states) > 1
        found += _same(step, states)
    missing = "" if checked else "in no update did two ranks draw"
    return conclude(RANDOMNESS, checked, found, missing)


def _same(step: int, states: Mapping[int, str]) -> Iterator[Counterexample]:
    """Ranks that drew from one state in `step`."""
    by_state: dict[str, list[str]] = {}
    for rank, state in states.items():
        by_state.setdefault(state, []).append(str(rank))
    if len(by_state) < len(states):
        same = "; ".join(f"ranks {', '.join(ranks)}" for ranks in by_state.values() if len(ranks) > 1)
        what = "ranks draw the same random numbers in their forward passes"
        yield Counterexample(what, f"step {step}", "another state of the generator on every rank", same)


def _undrawn(trace: Trace) -> Iterator[Counterexample]:
    """The first update in which a rank's forward pass drew nothing, though the case's model has dropout."""
    held: dict[tuple[int, int], bool] = trace.gathered("undrawn")
    steps = [step for _, step in held if step in first_of(trace).made]
    if not trace.case.dropout or not steps or LoopLaw(trace).why_no_model:
        return
    step = min(steps)
    ranks = {rank: training for (rank, of_step), training in sorted(held.items()) if of_step == step}
    where = f"step {step}, rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    seen = "nothing drawn" + ("" if all(ranks.values()) else ", the model in evaluation mode")
    what = f"training goes on without dropout, which the model has (at {trace.case.dropout:g})"
    yield Counterexample(what, where, "masks drawn in every forward pass", seen)
