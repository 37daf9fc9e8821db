"""The values that ranks send each other during a step: their names, sources and rules.

At three points of an update each rank sends one message of int64 values, and one gather gives all ranks the same table.
A message is a header (`agree.header`), the values known on the host, the values known only on the device, and at the
first point one report per micro-batch. Senders, laws and the device's gate look values up by name.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import nn

from andon.config.schema import Optimizer
from andon.step.flat import counts_updates, moments_of
from andon_contracts.agree import Observation, real_of
from andon_contracts.digest import has_triton, join, mix_integer, seal, signed
from andon_contracts.laws import update as laws
from andon_contracts.laws.law import Law, Rule, Seen, rules_of
from andon_contracts.laws.update import FACTOR_STEP, NORM_FLOOR, LeafPlan, LeafReport, Reduced
from andon_contracts.violation import Finding

FIXED = 1  # in addition to the codes of `Rule`: the value must equal one known integer
_EXPONENT = 0x7FF0000000000000


class Gate:
    """One flag per device: 1 after a table broke a rule. While the gate is closed, the optimizer changes nothing.

    Invariant: the gate closes for exactly the tables that break a law on the host. If it closed for fewer, a GPU would
    apply an update that the host rejects only a step later. If it closed for more, the host would find no reason for
    the missing update (`step._refuse_closed` raises then). So the rules come from the laws themselves
    (`message.Field.law`), and tests compare both on random tables.

    A closed gate stays closed: updates launched after a broken one do nothing until the host has read the table and
    raised. All ranks have the same table, so their gates agree without another collective.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._closed = {device: torch.zeros((), device=device) for device in devices}

    def on(self, device: torch.device) -> torch.Tensor:
        """0-dim fp32 on `device`: 0 if updates may be applied, else 1."""
        return self._closed[device]

    @property
    def closed(self) -> torch.Tensor:
        """The flag on the first device, where the tables are."""
        return next(iter(self._closed.values()))

    def open(self) -> None:
        for flag in self._closed.values():
            flag.zero_()

    def close_if(self, broken: torch.Tensor) -> None:
        """Close if `broken` (0-dim bool on the first device) is true."""
        self.closed.masked_fill_(broken, 1.0)
        self._spread()

    def look(
        self, table: torch.Tensor, expected: torch.Tensor, held: torch.Tensor | None = None, want: Reduced | None = None
    ) -> None:
        """Close if any value in `table` (int64 [world, width]) breaks its rule in `expected` (`message.encoded`).

        held: 0-dim int64 for `Rule.PREVIOUS`. want: the clipping limits, for `Rule.MAJORITY` and `Rule.CLIPPED`.
        """
        wanted, rules = expected.view(2, *table.shape).unbind()
        if table.is_cuda and has_triton():
            from andon.step.gate_cuda import close_on_device

            # The kernel cannot take None. Without `Rule.PREVIOUS` in `rules` it ignores this value.
            close_on_device(table, wanted, rules, table if held is None else held, self.closed, want)
        else:
            self.closed.masked_fill_(broken(table, wanted, rules, held, want), 1.0)
        self._spread()

    def _spread(self) -> None:
        first, *others = self._closed.values()
        for flag in others:
            flag.copy_(first, non_blocking=True)


def broken(
    table: torch.Tensor,
    wanted: torch.Tensor,
    rules: torch.Tensor,
    held: torch.Tensor | None,
    want: Reduced | None = None,
) -> torch.Tensor:
    """0-dim bool on the device: whether any value in `table` breaks its rule. The Triton kernel must agree."""
    violated = (rules == FIXED) & (table != wanted)
    violated |= (rules == Rule.SAME) & (table != table[:1])
    violated |= (rules == Rule.FINITE) & ((table & _EXPONENT) == _EXPONENT)
    if held is not None:
        violated |= (rules == Rule.PREVIOUS) & (table != held)
    if want is not None:
        majority = most(torch.roll(table, 1, dims=1))
        violated |= (rules == Rule.MAJORITY) & (table != majority)
        norm = majority.view(torch.float64)
        left = table.contiguous().view(torch.float64)
        # The factor of `clip_grads_with_norm_`, with its 1e-6.
        right = norm if want.limit is None else norm * (want.limit / (norm + 1e-6)).clamp(max=1.0)
        close = (left - right).abs() <= want.norm_tolerance * right + FACTOR_STEP * norm + NORM_FLOOR
        violated |= (rules == Rule.CLIPPED) & close.logical_not()
    return violated.any()


def most(table: torch.Tensor) -> torch.Tensor:
    """[1, width]: the majority of each column, as `agree.majority`; in a tie, the value of the lowest rank."""
    votes = (table.unsqueeze(1) == table).sum(1)
    return table.gather(0, votes.argmax(0, keepdim=True))


(ROWS_AGREE,) = laws.PLANNED
EACH_ONCE, ROWS_PLANNED, TERMS_PLANNED, PARTS_FINITE = laws.LEAVES

Expected = Sequence[Sequence[int]]
"""The requirements on each rank's message: for each value an integer, or a `Rule` if no integer is known."""
_NO_COUNT = -1


@dataclass(frozen=True)
class Field:
    """One value. law: gives the value's rule on the device; None: `fixed` does.

    judged: the law's name for the value, if different. beside: the field of the previous column, with which the rule
    compares it. fixed: its only correct value without a law. code: converts the law's integer to the transmitted one.
    """

    name: str
    source: Literal["host", "device"]
    law: Law[Any] | None = None
    judged: str = ""
    beside: str = ""
    fixed: int = Rule.ANY
    code: Callable[[int], int] = int


@dataclass(frozen=True)
class Message:
    """The values at one point, in transmission order: those of the host first."""

    point: str
    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        for before, field in pairwise(self.fields):
            if field.beside not in ("", before.name):
                raise ValueError(f"{field.name} must stand beside {field.beside}")

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.fields)

    @cached_property
    def on_device(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.fields if field.source == "device")

    @cached_property
    def _laws(self) -> tuple[Law[Any], ...]:
        return tuple(dict.fromkeys(field.law for field in self.fields if field.law is not None))

    def expected(self, want: object) -> list[int]:
        """The device's requirements on one rank's values. want: the laws' expected value."""
        rules = rules_of(self._laws, want)
        required = []
        for field in self.fields:
            rule = rules[field.judged or field.name] if field.law else field.fixed
            required.append(rule if isinstance(rule, Rule) or not field.law else field.code(rule))
        return required


REPORT = Message(
    "report",
    (
        Field("index", "device", EACH_ONCE),
        Field("rows", "device", EACH_ONCE),
        Field("loss_bits", "device", PARTS_FINITE),  # of the fp64 loss sum
        Field("correct", "device"),
        Field("terms", "device", TERMS_PLANNED),
        Field("total_bits", "device", PARTS_FINITE),  # of an fp64 that is finite exactly if the gradient is
        Field("content", "device", ROWS_PLANNED),
        Field("gradient", "device"),  # the gradient's word sum; 0 if no audit is due
    ),
)
"""A rank's report on one micro-batch. A message holds one report for each (`padded`)."""
WIDTH = len(REPORT.fields)

COMPUTED = Message(
    "computed",
    (
        Field("failed", "host", fixed=0),  # whether the rank raised
        Field("stop", "host"),  # whether its process must stop
        Field("save", "host"),  # whether it requests a checkpoint
        Field("plan", "host", ROWS_AGREE),  # the digest of its planned rows for all ranks
    ),
)
"""After the backward pass, before the reduction. The reports follow these values."""

REDUCED = Message(
    "reduced",
    (
        Field("planned", "host"),  # the bits of the schedule's learning rate
        Field("rate", "host", laws.RATE, beside="planned"),  # the bits of the optimizer's learning rate
        Field("gradient", "device", laws.GRADIENTS_AGREE),  # a word sum
        Field("nonfinite", "device", laws.FINITE),
        Field("weights", "device", laws.WEIGHTS_UNCHANGED),  # a word sum
        Field("norm", "device", laws.FINITE),  # the bits of the norm before clipping, as fp64
        Field("clipped", "device", laws.CLIP, beside="norm"),  # the bits of the norm after clipping
    ),
)
"""After the reduction and the clipping, before the update."""

MOVED = " moved"


def _unmoved(what: str, columns: Callable[[str], bool], seen: Seen[object]) -> Finding | None:
    moved = {name: seen.ranks(name) for name in filter(columns, seen.observations[0].values) if seen.any(name)}
    tensor = next(iter(moved), "").removesuffix(MOVED)
    said = f"{what} ({tensor}) is not what was left there; something outside the step changed it"
    return Finding(said, seen.step, next(iter(moved.values())), tensor) if moved else None


_OF_GRADIENT = f"gradient{MOVED}"
_GRADIENT = partial(_unmoved, "a rank's slice of the reduced gradient", _OF_GRADIENT.__eq__)
_MOMENTS = partial(_unmoved, "a rank's slice of the optimizer state", lambda name: name.endswith(MOVED))
GRADIENT_KEPT = Law("gradients-agree/kept", (_OF_GRADIENT,), _GRADIENT, lambda _: {_OF_GRADIENT: 0})
MOMENTS_KEPT = Law("optimizers-agree/kept", (), _MOMENTS, lambda _: {"optimizer": 0})
"""No other rank has the same slice, so it is compared with what the same rank read when it was written."""


@cache
def reduced(settings: Optimizer, sharded: bool) -> Message:
    """`REDUCED`; if `sharded`, the gradient's word sum is that of the rank's slice, and columns NAME moved say whether
    its slice of the gradient or of a moment has changed since it was written."""
    if not sharded:
        return REDUCED
    fields = tuple(Field("gradient", "device") if each.name == "gradient" else each for each in REDUCED.fields)
    moments = (Field(f"{name}{MOVED}", "device", MOMENTS_KEPT, "optimizer") for name in moments_of(settings))
    return Message("reduced", (*fields, Field(_OF_GRADIENT, "device", GRADIENT_KEPT), *moments))


@cache
def updated(settings: Optimizer, sharded: bool = False) -> Message:
    """After the update: word sums of the weights and of each moment, and the bits of the fp32 count of updates.

    sharded: the sums of moments are those of the rank's slice.
    """
    law = None if sharded else laws.OPTIMIZERS
    moments = (Field(name, "device", law, judged="optimizer") for name in moments_of(settings))
    count = Field(
        "updates", "device", laws.ONE_UPDATE, code=lambda value: struct.unpack("<I", struct.pack("<f", value))[0]
    )
    return Message("updated", (Field("weights", "device", laws.REPLICAS), *moments, count))


def encoded(expected: Expected) -> list[int]:
    """All integers of `expected`, then all rules. `Gate.look` reads them as int64 [2, world, width]."""
    values = [0 if isinstance(value, Rule) else signed(value) for row in expected for value in row]
    return values + [int(value) if isinstance(value, Rule) else FIXED for row in expected for value in row]


def padded(reports: torch.Tensor, count: int) -> torch.Tensor:
    """Cut or pad reports [n, WIDTH] with -1 to `count` rows, because all ranks' messages must have one length."""
    return nn.functional.pad(reports[:count], (0, 0, 0, max(0, count - reports.shape[0])), value=-1)


def expected_computed(plan: Sequence[LeafPlan], world: int, count: int, *, checked: bool) -> Expected:
    """The requirements on `COMPUTED` with `count` reports, by rank. Unless `checked`: only that no rank failed."""
    if not checked:
        return [[*(field.fixed for field in COMPUTED.fields), *[Rule.ANY] * (count * WIDTH)]] * world
    rows = [COMPUTED.expected(None) for _ in range(world)]
    for leaf in plan:
        rows[leaf.rank] += REPORT.expected(leaf)
    return [row + [-1] * (len(COMPUTED.fields) + count * WIDTH - len(row)) for row in rows]


def reports_of(observations: Sequence[Observation]) -> tuple[LeafReport, ...]:
    """Every rank's reports, in order of rank and micro-batch."""
    result: list[LeafReport] = []
    for each in observations:
        assert each.payload is not None
        for index, rows, loss, correct, terms, total, content, gradient in each.payload.view(-1, WIDTH).tolist():
            if index >= 0:
                bad = not math.isfinite(real_of(total))
                result.append(LeafReport(each.rank, index, rows, real_of(loss), correct, terms, bad, content, gradient))
    return tuple(result)


def reduced_values(size: int, raw: Mapping[str, int]) -> dict[str, int]:
    """The values of `REDUCED`, with digests of the flat gradient and weights [size] instead of word sums."""
    return {**raw, **{name: signed(seal(raw[name], torch.float32, (size,))) for name in ("gradient", "weights")}}


def state_values(settings: Optimizer, size: int, raw: Mapping[str, int]) -> dict[str, int]:
    """From the values of `updated`: the digests `weights` and `optimizer`, and the count `updates`."""
    bits = raw["updates"] & 0xFFFFFFFF
    count = float(struct.unpack("<f", struct.pack("<I", bits))[0])
    parts = {name: seal(raw[name], torch.float32, (size,)) for name in moments_of(settings) if raw[name]}
    if counts_updates(settings) and bits:
        parts["step"] = seal(mix_integer(bits), torch.float32, ())
    return {
        "weights": signed(seal(raw["weights"], torch.float32, (size,))),
        "optimizer": signed(join(parts)),
        "updates": int(count) if count.is_integer() else _NO_COUNT,
    }
