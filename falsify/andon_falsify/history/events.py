"""The events of a history: what one line of a ledger says, as plain values.

Written from the description of the ledger line and not from the code that writes it, so that a writer who is wrong is
not read by his own error. Nothing here needs torch.
"""

from __future__ import annotations

import marshal
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Generic, TypeVar

RowId = int | str
"""What names a row of the data set: its index, or the key that its owner gave it."""
_WITNESS = "witness"
"""The writer of what this package itself saw of a run."""


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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


Value = TypeVar("Value")


class _Packed(Generic[Value]):
    """A field of `StepEvent` that is unpacked when it is read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, event: StepEvent, owner: type) -> Value:
        found: Value = _unpacked(event.packed)[self._name]
        return found


@dataclass(frozen=True, slots=True)
class StepEvent(Event):
    """One update. `ids` is the global batch in plan order, `count` its rows; `number` is the update, from 1.

    `weights_norm` is the 2-norm of the trained weights after it. `gradient_at` is "optimizer" where the gradient's
    digest and norm are of what the optimizer got, clipped or not; else they are of the gradient before clipping.
    `skipped`: a loss scaler let the update change nothing. `draws`: what draws random numbers in its forward passes, as
    far as somebody looked. `terms`: what the loss is the mean of; None: the rows.

    A history holds hundreds of thousands of updates, so all but `number` and `epoch` is in `packed` (see `pack`): ten
    times smaller than the objects. `fields` is empty.
    """

    number: int = 0
    epoch: int | None = None
    packed: bytes = b""

    position = _Packed[int | None]()
    ids = _Packed[tuple[RowId, ...]]()
    count = _Packed[int | None]()
    correct = _Packed[int | None]()
    terms = _Packed[int | None]()
    lr = _Packed[Number | None]()
    loss = _Packed[Number | None]()
    grad_norm = _Packed[Number | None]()
    world = _Packed[int | None]()
    backend = _Packed[str | None]()
    digests = _Packed[Mapping[str, str]]()
    ranks = _Packed[tuple[RankStep, ...]]()
    weights_norm = _Packed[Number | None]()
    gradient_at = _Packed[str | None]()
    skipped = _Packed[bool]()
    draws = _Packed[str | None]()

    @property
    def step(self) -> int:
        """The number of the update."""
        return self.number

    @property
    def finite(self) -> bool:
        """Whether every recorded loss and gradient norm of this update is a real number."""
        return all(number.finite for number in (self.loss, self.grad_norm) if number is not None)


_NUMBERS = ("lr", "loss", "grad_norm", "weights_norm")
_INTEGERS = ("position", "count", "correct", "terms", "world")
_PLAIN = (*_INTEGERS, "ids", "gradient_at", "skipped", "draws", "backend", "digests")


def pack(fields: Mapping[str, Any], ranks: tuple[RankStep, ...]) -> bytes:
    """The fields of a `StepEvent`. The ids of ranks that together are the batch, in its order, are packed once."""
    split = [row for part in ranks for row in part.ids] == [*fields["ids"]]
    parts = [
        (each.rank, each.leaves, len(each.ids) if split else each.ids, each.weights, each.optimizer, each.gradient)
        for each in ranks
    ]
    numbers = [(number.value, number.hex) if (number := fields[name]) is not None else None for name in _NUMBERS]
    packed: Any = ([fields[name] for name in _PLAIN], numbers, parts)
    return marshal.dumps(packed)


@lru_cache(8)  # a checker reads several fields of an update in a row
def _unpacked(packed: bytes) -> Mapping[str, Any]:
    plain, numbers, parts = marshal.loads(packed)
    fields = dict(zip(_PLAIN, plain, strict=True))
    fields |= {name: each and Number(*each) for name, each in zip(_NUMBERS, numbers, strict=True)}
    ranks, at = [], 0
    for rank, leaves, ids, weights, optimizer, gradient in parts:
        if isinstance(ids, int):
            at, ids = at + ids, fields["ids"][at : at + ids]
        ranks.append(RankStep(rank, leaves, ids, weights, optimizer, gradient))
    fields["ranks"] = tuple(ranks)
    return fields


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
