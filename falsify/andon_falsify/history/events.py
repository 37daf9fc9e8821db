"""The events of a history: what one line of a ledger says, as plain values.

Written from the description of the ledger line and not from the code that writes it, so that a writer who is wrong is
not read by his own error. Nothing here needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

RowId = int | str
"""What names a row of the data set: its index, or the key that its owner gave it."""
_WITNESS = "witness"
"""The writer of what this package itself saw of a run."""


@dataclass(frozen=True)
class Number:
    """A measured float. `value` is None where it was not finite (JSON has no NaN); `hex` is its exact form."""

    value: float | None
    hex: str

    @property
    def finite(self) -> bool:
        """Whether it is a real number."""
        return self.value is not None and math.isfinite(self.value)

    def __str__(self) -> str:
        return self.hex if self.value is None else f"{self.value:.9g}"


@dataclass(frozen=True)
class RankStep:
    """What one rank did in one update; a digest that it did not record is None.

    `gradient` is the digest of the reduced gradient before clipping, as this rank holds it.
    """

    rank: int
    leaves: tuple[int, ...] = ()
    ids: tuple[RowId, ...] = ()
    weights: str | None = None
    optimizer: str | None = None
    gradient: str | None = None


@dataclass(frozen=True)
class Event:
    """One line. `line` counts from 1; `seq` and `prev` are the writer's; `digest` is taken from the line's bytes."""

    line: int
    kind: str
    seq: int | None
    prev: str | None
    digest: str
    fields: Mapping[str, object] = field(default_factory=dict)

    @property
    def step(self) -> int | None:
        """The number of the update that the line speaks of, where it names one."""
        return whole(self.fields.get("step"))


@dataclass(frozen=True)
class Plan:
    """What the start line says was planned; None where it does not say. `ids` are the rows that an epoch visits."""

    rows: int | None = None
    ids: tuple[RowId, ...] | None = None
    batch_size: int | None = None
    micro_batches: int | None = None
    seed: int | None = None
    epochs: int | None = None
    steps: int | None = None


@dataclass(frozen=True)
class StartEvent(Event):
    """The first line of a run that began anew."""

    plan: Plan = field(default_factory=Plan)
    initial_weights: str | None = None

    @property
    def fingerprint(self) -> object:
        """What bits may depend on (device model, library versions), as recorded; the witness records none."""
        # its empty field is no fingerprint, or a run without a start line would be of another machine than its own
        return None if self.fields.get("writer") == _WITNESS else self.fields.get("fingerprint")

    @property
    def watched(self) -> bool:
        """Whether a watch wrote it, beside a loop that promises nothing, and not the trainer itself."""
        return self.fields.get("writer") not in (None, _WITNESS)


@dataclass(frozen=True)
class StepEvent(Event):
    """One update. `ids` is the global batch in plan order, `count` its rows; `number` is the update, from 1.

    `weights_norm` is the 2-norm of the trained weights after it. `gradient_at` is "optimizer" where the gradient's
    digest and norm are of what the optimizer got, clipped or not; else they are of the gradient before clipping.
    `skipped`: a loss scaler let the update change nothing. `draws`: what draws random numbers in its forward passes, as
    far as somebody looked. `terms`: what the loss is the mean of; None: the rows.
    """

    number: int = 0
    epoch: int | None = None
    position: int | None = None
    ids: tuple[RowId, ...] = ()
    count: int | None = None
    correct: int | None = None
    terms: int | None = None
    lr: Number | None = None
    loss: Number | None = None
    grad_norm: Number | None = None
    world: int | None = None
    backend: str | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    ranks: tuple[RankStep, ...] = ()
    weights_norm: Number | None = None
    gradient_at: str | None = None
    skipped: bool = False
    draws: str | None = None

    @property
    def finite(self) -> bool:
        """Whether every recorded loss and gradient norm of this update is a real number."""
        return all(number.finite for number in (self.loss, self.grad_norm) if number is not None)


@dataclass(frozen=True)
class Unread:
    """A line that is not an event, with the reason. `torn` is a last line without its newline: a write cut short."""

    line: int
    why: str
    excerpt: str
    digest: str
    torn: bool = False


def whole(value: object) -> int | None:
    """`value` if it is a JSON integer of 64 bits, else None (true and false are not numbers here)."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63 else None
