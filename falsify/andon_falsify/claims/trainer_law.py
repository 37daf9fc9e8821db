"""What one process in float64 makes of the batches of a trace: its plan, losses, gradients and updates.

Everything starts again at every update from the weights that the accused had then, so that an error is charged to the
update that made it. Only his dropout masks, and the length to which he padded, are taken from him.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from functools import cached_property, partial

import torch
from torch import Tensor

from andon_falsify.checkers import schedule
from andon_falsify.claims.run_law import Expected, Stepping
from andon_falsify.reference.decoder import Decoder
from andon_falsify.reference.encoder import Encoder
from andon_falsify.reference.params import Lora, Masks, canonical, canonical_name
from andon_falsify.reference.training import Piece, Update, gradient, train
from andon_falsify.reference.update import AdamW, Law, Sgd, global_norm
from andon_falsify.subjects.case import PAD, Case, Rows
from andon_falsify.subjects.trace import LeafMasks, Trace

Shares = tuple[tuple[int, ...], ...]


def planned(case: Case) -> dict[int, tuple[int, ...]]:
    """The rows of each update, from the published rule: a shuffle keyed by (seed, epoch), cut into batches."""
    batches: list[tuple[int, ...]] = []
    for epoch in range(case.epochs):
        order = list(range(len(case.rows)))
        random.Random(f"andon order {case.seed} {epoch}").shuffle(order)
        batches += [tuple(order[at : at + case.batch_size]) for at in range(0, len(order), case.batch_size)]
    kept = batches if case.max_steps is None else batches[: case.max_steps]
    return dict(enumerate(kept, start=1))


def shares(ids: tuple[int, ...], count: int) -> Shares:
    """`ids` in `count` contiguous parts whose sizes differ by at most one, the larger ones first."""
    size, larger = divmod(len(ids), count)
    found, start = [], 0
    for place in range(count):
        end = start + size + (place < larger)
        found.append(ids[start:end])
        start = end
    return tuple(found)


def piece_of(rows: Rows, ids: tuple[int, ...], length: int) -> Piece:
    """The rows `ids`, padded on the right to `length`."""
    tokens = torch.full((len(ids), length), PAD, dtype=torch.int64)
    attention = torch.zeros(len(ids), length, dtype=torch.int64)
    for place, row in enumerate(ids):
        own = rows.tokens[row]
        tokens[place, : len(own)] = torch.tensor(own)
        attention[place, : len(own)] = 1
    return Piece(tokens, attention, torch.tensor([rows.labels[row] for row in ids], dtype=torch.int64))


def rate_law(case: Case) -> schedule.WarmupCosine:
    """The published schedule."""
    return schedule.WarmupCosine(case.lr, len(planned(case)), 0.1, 1e-6)


def optimizer_law(case: Case) -> Law:
    """The optimizer of `case` as a pure function."""
    if case.optimizer == "adamw":
        return AdamW(weight_decay=case.weight_decay)
    return Sgd(case.momentum, case.weight_decay)


class Reference:
    """The law of one trace. Raises `LookupError` for a micro-batch that was to drop something and was never seen."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.case = trace.case
        self._seen: dict[tuple[int, tuple[int, ...]], LeafMasks] = trace.gathered("masks")
        self._weights = None if self.case.class_weights is None else torch.tensor(self.case.class_weights).double()

    @cached_property
    def why_not(self) -> str:
        """Why there is no law for this trace, "" if there is: an operation dropped something that nobody can see."""
        hidden = sorted({leaf.hidden for leaf in self._seen.values() if leaf.hidden})
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
    def updates(self) -> tuple[int, ...]:
        """See `RunLaw`."""
        return tuple(step for step, values in sorted(self.trace.first.values.items()) if values.weights)

    def laws(self) -> Iterator[Expected]:
        """See `RunLaw`."""
        yield from self.expected

    def seen(self, step: int) -> dict[str, Tensor]:
        """See `RunLaw`."""
        return self.given(step)

    def given(self, step: int) -> dict[str, Tensor]:
        """See `RunLaw`: our trainer sets all of them."""
        held = self.trace.first.values[step].gradients
        return {short_name(name): tensor.double() for name, tensor in held.items()}

    def after(self, step: int) -> dict[str, Tensor]:
        """See `RunLaw`."""
        held = self.trace.first.values[step].weights
        return {short_name(name): tensor.double() for name, tensor in held.items()}

    def optimizer(self, step: int) -> str:
        """See `RunLaw`: one throughout."""
        return self.case.optimizer

    def groups(self, step: int) -> tuple[Stepping, ...]:
        """See `RunLaw`: all that trains, at the rate of the published schedule."""
        return (Stepping(self.trainable, optimizer_law(self.case), rate_law(self.case)(step)),)

    def limit(self, step: int) -> float | None:
        """See `RunLaw`."""
        return self.case.clip_norm

    @cached_property
    def model(self) -> Decoder | Encoder:
        """The architecture."""
        lora = Lora(2.0 * self.case.rank) if self.case.rank else None
        kind = Decoder if self.case.architecture == "decoder" else Encoder
        return kind.from_config(self.trace.first.config, lora)

    @cached_property
    def initial(self) -> dict[str, Tensor]:
        """All weights before the first update, under canonical names, in float64."""
        return canonical(self.trace.first.state)

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        """The canonical names of what trains."""
        return tuple(short_name(name) for name, _, _ in self.trace.first.layouts[0])

    def pieces(self, step: int) -> list[Piece]:
        """The micro-batches of `step` by the plan."""
        return [piece_of(self.case.rows, ids, self._length(step, ids)) for ids in self._leaves(step)]

    def _leaves(self, step: int) -> Shares:
        return shares(planned(self.case)[step], self.case.micro_batches)

    def _length(self, step: int, ids: tuple[int, ...]) -> int:
        if (step, ids) in self._seen:
            return self._seen[step, ids].length
        return max((len(self.case.rows.tokens[row]) for row in ids), default=1)

    def masks(self, step: int) -> Callable[[int], Masks]:
        """The masks of each micro-batch of `step`, as the accused drew them."""
        leaves = self._leaves(step)

        def of_leaf(index: int) -> Masks:
            held = self._seen.get((step, leaves[index]))
            if held is None and self.case.dropout:
                msg = f"micro-batch {index} of step {step} was never computed, so its masks are unknown"
                raise LookupError(msg)

            def mask(name: str, shape: tuple[int, ...]) -> Tensor | None:
                found = held.masks.get(name) if held is not None else None
                return None if found is None else found.view(shape).double()

            return mask

        return of_leaf

    def before(self, step: int) -> dict[str, Tensor]:
        """All weights before `step`, as the accused had them."""
        if step == 1:
            return self.initial
        held = self.trace.first.values[step - 1].weights
        return self.initial | {short_name(name): tensor.double() for name, tensor in held.items()}

    @cached_property
    def expected(self) -> tuple[Expected, ...]:
        """The law for each update that was made."""
        return tuple(map(self._row_by_row, self.updates))

    def _row_by_row(self, step: int) -> Expected:
        """Each row's part by itself; the law is their sum over the count of rows."""
        weights, masks, rows = self.before(step), self.masks(step), len(planned(self.case)[step])
        loss, sums, sizes = 0.0, dict.fromkeys(self.trainable, torch.zeros(())), dict.fromkeys(self.trainable, 0.0)
        for index, piece in enumerate(self.pieces(step)):
            for row in range(len(piece.labels)):
                own = Piece(*(part[row : row + 1] for part in (piece.tokens, piece.attention, piece.labels)))
                of_row = partial(_of_row, masks(index), len(piece.labels), row)
                part_loss, part = gradient(self.model, weights, self.trainable, [own], self._weights, _always(of_row))
                loss += part_loss
                for name, tensor in part.items():
                    sums[name] = sums[name] + tensor
                    sizes[name] += float(tensor.norm())
        gradients = {name: tensor / rows for name, tensor in sums.items()}
        summed = math.hypot(*sizes.values()) / rows
        return Expected(step, loss / rows, gradients, global_norm(gradients), summed)

    def trajectory(self) -> Iterator[Update]:
        """The law on its own from the initial weights: nothing of the accused but his masks enters."""
        plan, rates = planned(self.case), {reported.step: reported.lr for reported in self.trace.first.reported}

        def masks(step: int, index: int) -> Masks:
            return self.masks(step)(index)

        yield from train(
            self.model,
            self.initial,
            self.trainable,
            (self.pieces(step) for step in plan),
            optimizer_law(self.case),
            rates.__getitem__,
            clip_norm=self.case.clip_norm,
            class_weights=self._weights,
            masks=masks,
        )


def _always(masks: Masks) -> Callable[[int], Masks]:
    return lambda _: masks


def _of_row(masks: Masks, rows: int, row: int, name: str, shape: tuple[int, ...]) -> Tensor | None:
    """One row of the masks of a micro-batch of `rows` rows."""
    found = masks(name, (rows, *shape[1:]))
    return None if found is None else found[row : row + 1]


def short_name(name: str) -> str:
    """The canonical name of a trained tensor."""
    short = canonical_name(name)
    assert short is not None, name
    return short
