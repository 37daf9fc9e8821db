"""The law of our trainer: which rows an update has by its published plan, its schedule and its optimizer.

Only dropout masks, and the length to which micro-batches were padded, are taken from the accused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

from torch import Tensor

from andon_falsify.checkers import schedule
from andon_falsify.checkers.plan_followed import PublishedPlan
from andon_falsify.claims.run_law import Expected, RunLaw, Stepping, mean_of, piece_of
from andon_falsify.reference.params import Masks
from andon_falsify.reference.training import Piece, RowGradients, Update, row_gradients, train
from andon_falsify.reference.update import AdamW, Sgd, UpdateRule
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.trace import LeafMasks, Trace

Shares = tuple[tuple[int, ...], ...]


def planned(case: Case) -> dict[int, tuple[int, ...]]:
    """The rows of each update, from the published rule."""
    plan = PublishedPlan(range(len(case.rows)), case.seed, case.batch_size, case.updates())
    return {update: tuple(rows) for update, rows in plan.items()}


def shares(ids: tuple[int, ...], count: int) -> Shares:
    """`ids` in `count` contiguous parts whose sizes differ by at most one, the larger ones first."""
    size, larger = divmod(len(ids), count)
    found, start = [], 0
    for place in range(count):
        end = start + size + (place < larger)
        found.append(ids[start:end])
        start = end
    return tuple(found)


def rate_law(case: Case) -> schedule.Published:
    """The published schedule."""
    return schedule.Published(case.lr, case.updates(), 0.1, 1e-6)


def update_rule(case: Case, *, matrices_only: bool = True) -> UpdateRule:
    """The optimizer of `case` as a pure function. matrices_only: norms and biases do not decay, as in our trainer."""
    if case.optimizer == "adamw":
        return AdamW(weight_decay=case.weight_decay, matrices_only=matrices_only)
    return Sgd(case.momentum, case.weight_decay, matrices_only)


class TrainerLaw(RunLaw):
    """The law of one trace. Raises `LookupError` for a micro-batch that was to drop something and was never seen."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self._masks: dict[tuple[int, tuple[int, ...]], LeafMasks] = trace.gathered("masks")

    @cached_property
    def why_not(self) -> str:
        """See `RunLaw`: an operation dropped something that nobody can see."""
        hidden = sorted({leaf.hidden for leaf in self._masks.values() if leaf.hidden})
        return f"the dropout inside {', '.join(hidden)} cannot be seen from outside" if hidden else ""

    @property
    def why_no_update(self) -> str:
        """See `RunLaw`: from the first weights and every gradient, which are kept."""
        return ""

    @property
    def factors(self) -> dict[str, int]:
        """See `RunLaw`."""
        return {"world": self.case.world, "micro-batches": self.case.micro_batches, "batch": self.case.batch_size}

    @cached_property
    def expected(self) -> tuple[Expected, ...]:
        """See `RunLaw`."""
        return tuple(mean_of(step, self._of(step)) for step in self.updates)

    def _of(self, step: int) -> RowGradients:
        pieces, masks = self.pieces(step), self.masks(step)
        found = row_gradients(self.model, self.before(step), self.trainable, pieces, self.class_weights, masks)
        return RowGradients(planned(self.case)[step], *found)

    def optimizer(self, step: int) -> str:
        """See `RunLaw`: one throughout."""
        del step
        return self.case.optimizer

    def groups(self, step: int) -> tuple[Stepping, ...]:
        """See `RunLaw`: all that trains, at the rate of the published schedule."""
        return (Stepping(self.trainable, update_rule(self.case), rate_law(self.case)(step)),)

    def pieces(self, step: int) -> list[Piece]:
        """The micro-batches of `step` by the plan, as long as they were seen to be."""
        seen = ((ids, self._masks.get((step, ids))) for ids in self._leaves(step))
        return [piece_of(self.case.rows, ids, 0 if leaf is None else leaf.length) for ids, leaf in seen]

    def _leaves(self, step: int) -> Shares:
        return shares(planned(self.case)[step], self.case.micro_batches)

    def masks(self, step: int) -> Callable[[int], Masks]:
        """The masks of each micro-batch of `step`, as the accused drew them."""
        leaves = self._leaves(step)

        def of_leaf(index: int) -> Masks:
            held = self._masks.get((step, leaves[index]))
            if held is None and self.case.dropout:
                msg = f"micro-batch {index} of step {step} was never computed, so its masks are unknown"
                raise LookupError(msg)

            def mask(name: str, shape: tuple[int, ...]) -> Tensor | None:
                found = held.masks.get(name) if held is not None else None
                return None if found is None else found.view(shape).double()

            return mask

        return of_leaf

    def trajectory(self) -> Iterator[Update]:
        """The law on its own from the initial weights: nothing of the accused but his masks enters."""
        rates = {reported.step: reported.lr for reported in self.trace.first.reported}
        yield from train(
            self.model,
            self.initial,
            self.trainable,
            (self.pieces(step) for step in planned(self.case)),
            update_rule(self.case),
            rates.__getitem__,
            clip_norm=self.case.clip_norm,
            class_weights=self.class_weights,
            masks=lambda step, index: self.masks(step)(index),
        )
