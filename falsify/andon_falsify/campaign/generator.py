"""Trials drawn from a seed: the same seed draws the same, on any machine, whatever else is selected.

Rows are sorted by label and drawn at random, so that ranks train on different data; batches are ragged by default.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from andon_falsify.campaign.budget import Budget, Flavour
from andon_falsify.campaign.trial import HALT, LAW, MEMORY, RESUME, Trial
from andon_falsify.subjects.case import Case, Poison, make_rows

_DROPOUT = 0.1
"""Of every second case; the others have none."""
_KINDS_OF_POISON = ("nan", "inf", "gradient")


@dataclass(frozen=True)
class Layout:
    """Where a subject is tried."""

    backends: tuple[str, ...]
    worlds: tuple[int, ...]
    accumulations: tuple[int, ...]


def draw(seed: int, budget: Budget, layout: Layout, kinds: Collection[str]) -> Iterator[Trial]:
    """The trials of `kinds` that `budget` has for `layout`; the cheapest and most telling first."""
    wanted = [kind for kind in budget.kinds if kind in kinds]
    places = list(product(layout.backends, layout.worlds, layout.accumulations))
    if LAW in wanted:
        for number, flavour in product(range(budget.draws), budget.flavours):
            for backend, world, accumulation in places:
                case = _case(seed, number, flavour, world, accumulation)
                yield Trial(LAW, case.but(backend=backend), seed)
    for kind in wanted:
        if kind in _DRAWN:
            yield from _once_each(kind, seed, budget, places)


def _case(seed: int, number: int, flavour: Flavour, world: int, accumulation: int) -> Case:
    """One or two whole batches, and where it is ragged a rest that does not divide evenly among the micro-batches."""
    drawn = random.Random(f"case {seed} {number} {flavour.name} {world} {accumulation}")
    leaves = world * accumulation
    local = drawn.randint(2 if leaves == 1 else 1, 3)
    batch = leaves * local
    whole = drawn.randint(1, 2)
    rest = drawn.choice([size for size in range(1, batch) if size % leaves or leaves == 1]) if flavour.ragged else 0
    while whole * batch + rest < 3:
        whole += 1
    return Case(
        rows=make_rows(whole * batch + rest, drawn.randrange(32)),
        batch_size=batch,
        micro_batches=leaves,
        epochs=2,
        seed=drawn.randrange(1000),
        dropout=drawn.choice([0.0, _DROPOUT]),
        world=world,
        **flavour.settings,
    )


Places = Sequence[tuple[str, int, int]]


def _once_each(kind: str, seed: int, budget: Budget, places: Places) -> Iterator[Trial]:
    """Trials of `kind`, at every place for some of the flavours.

    A run is cut off and taken up with an optimizer that remembers: without, nobody would notice that it forgot.
    """
    flavours = tuple(each for each in budget.flavours if kind != RESUME or each.remembers) or budget.flavours
    for (at, (backend, world, accumulation)), number in product(enumerate(places), range(budget.draws)):
        flavour = flavours[(at + number) % len(flavours)]
        case = _case(seed, number, flavour, world, accumulation).but(backend=backend)
        drawn = random.Random(f"{kind} {seed} {number} {world} {accumulation}")
        yield _DRAWN[kind](drawn, case, seed, tuple(dict.fromkeys(world for _, world, _ in places)))


def _halting(drawn: random.Random, case: Case, seed: int, _: Sequence[int]) -> Trial:
    """A value that is not finite, in any micro-batch of the first or second update, which have all their rows."""
    whole, rest = divmod(len(case.rows), case.batch_size)
    longer = case.but(rows=make_rows(max(2, whole) * case.batch_size + rest, drawn.randrange(32)))
    poison = Poison(drawn.randint(1, 2), drawn.randrange(case.micro_batches), drawn.choice(_KINDS_OF_POISON))
    return Trial(HALT, longer.but(poison=poison), seed)


def _resuming(drawn: random.Random, case: Case, seed: int, worlds: Sequence[int]) -> Trial:
    """Cut off behind a checkpoint and before the last update, taken up by any of the worlds."""
    each = case.updates_of_epoch()
    longer = case.but(epochs=max(case.epochs, -(-3 // each)))
    updates = each * longer.epochs
    every = drawn.randint(1, updates - 2)
    after = drawn.randint(every + 1, updates - 1)
    return Trial(RESUME, longer.but(stop_after=after, checkpoint_every=every), seed, drawn.choice(worlds))


def _weighing(drawn: random.Random, case: Case, seed: int, _: Sequence[int]) -> Trial:
    """A model so large that its gradients weigh more than the fixed costs."""
    big = case.but(
        rows=make_rows(40), batch_size=8, micro_batches=8, hidden=64, inner=128, layers=1, epochs=1, class_weights=None
    )
    return Trial(MEMORY, big.but(rank=16, dropout=0.1, values=False, memory=True, seed=drawn.randrange(1000)), seed)


_DRAWN = {HALT: _halting, RESUME: _resuming, MEMORY: _weighing}
