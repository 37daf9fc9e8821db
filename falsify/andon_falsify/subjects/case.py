"""A case: what is trained, where, and under which circumstances. Plain values, which travel to a rank."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt
from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveInt

FromZero = Annotated[FiniteFloat, Ge(0)]
VOCABULARY = 127
"""Token ids of rows are 33 to 126, the printable characters of ASCII, so a row is also a text."""
PAD = VOCABULARY
BETA = 0.3
"""Of the loss of preferences."""


@dataclass(frozen=True)
class Rows:
    """A dataset: token ids and label of each row. The id of a row is its index."""

    tokens: tuple[tuple[int, ...], ...]
    labels: tuple[int, ...]
    classes: int

    def __len__(self) -> int:
        return len(self.labels)


def make_rows(count: int, seed: int = 0, *, classes: int = 3, longest: int = 7) -> Rows:
    """`count` rows of 1 to `longest` tokens, sorted by label, so that contiguous shards see different classes.

    Each class has its own alphabet. A fifth of its tokens is drawn from all alphabets.
    """
    drawn = random.Random(f"rows {count} {seed} {classes}")
    width = (VOCABULARY - 33) // classes
    labels = tuple(place * classes // count for place in range(count))
    tokens = [
        tuple(
            33 + width * (label if drawn.random() > 0.2 else drawn.randrange(classes)) + drawn.randrange(width)
            for _ in range(drawn.randint(1, longest))
        )
        for label in labels
    ]
    return Rows(tuple(tokens), labels, classes)


@dataclass(frozen=True)
class Poison:
    """A value that is not finite, planted in the data path at update `step` in micro-batch `leaf`.

    kinds: `nan` and `inf` in the loss with its graph, `gradient` for a finite loss with a NaN in its gradient.
    """

    step: PositiveInt
    leaf: NonNegativeInt
    kind: Annotated[str, Field(pattern="^(nan|inf|gradient)$")]


@dataclass(frozen=True)
class Case:
    """One run. The first block of fields defines its result. World and backend must not change it.

    task: what the rows teach: their class, or (`sft`) their tokens, see `token_weights`, or (`dpo`) that row 2n is
    preferred to row 2n + 1; `packed` trains several rows or pairs as one item. hidden, heads, inner, layers: of the
    embedded model. rank: of LoRA, 0 trains every weight. dropout: in attention and adapter. stop_after: the run is cut
    off after that update, as by a kill. values: record gradients, weights and masks; memory: count live bytes. folder:
    for the files of a run that is to be resumed. fault: what is planted: in our trainer `named(NAME).plant` of a
    module, written as `package.module:NAME`; a loop reads the text itself.
    """

    rows: Rows = field(default_factory=lambda: make_rows(13))
    task: Literal["classification", "sft", "packed sft", "dpo", "packed dpo"] = "classification"
    batch_size: PositiveInt = 5
    micro_batches: PositiveInt = 4
    epochs: PositiveInt = 1
    max_steps: PositiveInt | None = None
    optimizer: Literal["adamw", "sgd"] = "adamw"
    momentum: FromZero = 0.0
    weight_decay: FromZero = 0.01
    lr: FromZero = 1e-2
    clip_norm: FromZero | None = 0.5
    seed: NonNegativeInt = 0
    class_weights: tuple[FromZero, ...] | None = None
    architecture: Literal["decoder", "encoder"] = "decoder"
    layers: PositiveInt = 1
    hidden: PositiveInt = 16
    heads: PositiveInt = 2
    inner: PositiveInt = 24
    rank: NonNegativeInt = 2
    dropout: Annotated[FromZero, Lt(1)] = 0.1
    longest: PositiveInt = 16

    world: int = 2
    backend: str = "inline"

    poison: Poison | None = None
    fault: str | None = None
    contracts: bool = True
    values: bool = True
    memory: bool = False
    folder: str | None = None
    stop_after: PositiveInt | None = None
    checkpoint_every: PositiveInt | None = None

    @property
    def accumulation(self) -> int:
        """Micro-batches of a rank in an update: `micro_batches` counts those of all ranks."""
        return max(1, self.micro_batches // self.world)

    @property
    def local_batch(self) -> int:
        """Rows of a rank's micro-batch; the global batch is `local_batch x accumulation x world` rows."""
        return max(1, self.batch_size // (self.accumulation * self.world))

    @property
    def global_batch(self) -> int:
        """Rows of an update of a loop: what the ranks' micro-batches add up to."""
        return self.local_batch * self.accumulation * self.world

    @property
    def items(self) -> tuple[tuple[int, ...], ...]:
        """What a plan orders: single rows or pairs, or packs of them (best-fit decreasing) with at most `longest`
        tokens, or twice that for pairs. Pair n has the rows 2n and 2n + 1."""
        each = 2 if self.task.endswith("dpo") else 1
        lengths = [len(tokens) for tokens in self.rows.tokens]
        sizes = [sum(lengths[row : row + each]) for row in range(0, len(lengths) - each + 1, each)]
        if not self.task.startswith("packed"):
            return tuple((row,) for row in range(len(sizes)))
        packs: list[list[int]] = []
        for row in sorted(range(len(sizes)), key=lambda row: -sizes[row]):
            left = [each * self.longest - sum(sizes[other] for other in pack) for pack in packs]
            fitting = [(free, place) for place, free in enumerate(left) if free >= sizes[row]]
            if not fitting:
                packs.append([])
            packs[min(fitting)[1] if fitting else -1].append(row)
        return tuple(map(tuple, packs))

    def token_weights(self, row: int) -> tuple[float, ...]:
        """sft: the loss weight of each token of a row. The first half is the prompt; every fourth answer is uneven."""
        size = len(self.rows.tokens[row])
        prompt = max(1, size // 2)
        weights = [0.0] * prompt + [1.0] * (size - prompt)
        if row % 4 == 3 and size > prompt + 1:
            weights[-2:] = 0.5, 2.0
        return tuple(weights)

    def updates_of_epoch(self, batch: int = 0) -> int:
        """Updates of an epoch of batches of `batch` rows, by default `batch_size`; the last has what is left."""
        return -(-len(self.items) // (batch or self.batch_size))

    def updates(self, batch: int = 0) -> int:
        """Updates of the whole case, as far as `max_steps` lets it go."""
        return min(self.updates_of_epoch(batch) * self.epochs, self.max_steps or sys.maxsize)

    def but(self, **changes: Any) -> Case:
        """This case with `changes`."""
        return replace(self, **changes)
