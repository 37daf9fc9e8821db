"""The contract of a phase: one message per rank is gathered, and laws check the record of all messages.

A phase returns a `Report`: the record of all ranks' messages, without a verdict. `requires` and `ensures` name laws of
`andon_contracts.laws.update` and check the record against them. On CPUs the record is read and checked before the phase
returns. On GPUs a phase must not wait for its device: the record is read and checked a step later, and until then the
device's gate keeps a broken update from being applied. After a mismatch, ranks compare tensor by tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from andon.backend.base import Backend
from andon.backend.devices import on_device
from andon.console.messages import Exit
from andon.step.message import Expected, encoded
from andon.step.replica import Replica
from andon_contracts.agree import HEADER, Observation, decode_message, header
from andon_contracts.digest import digests_by_name, signed
from andon_contracts.laws.law import Details, Judgement, Law, Seen, in_lockstep
from andon_contracts.policy import Predicate, ensure, require
from andon_contracts.violation import Violation

Tensors = Mapping[str, torch.Tensor]


class RankFailed(RuntimeError):
    """Another rank raised. That rank reports the error itself; this one only reports that a peer failed."""

    ends_with = Exit.RANK_LOST


@dataclass(frozen=True)
class Gathered:
    """The messages of all ranks at one point of one step.

    table: int64 [world, at least `length`] on a device. A row is a header, the values of `names`, a payload whose
    length all ranks know, and padding. expected: the gate's values and rules (`message.encoded`), on the same device.
    """

    step: int
    sequence: int
    point: str
    names: tuple[str, ...]
    table: torch.Tensor
    length: int
    expected: torch.Tensor | None = None

    def observations(self, table: torch.Tensor) -> tuple[Observation, ...]:
        """One observation per rank, in rank order. table: `self.table` copied to the CPU."""
        end = HEADER + len(self.names)
        rows: list[list[int]] = table[:, :end].tolist()
        payloads = table[:, end : self.length].unbind()
        return tuple(decode_message(row, self.point, self.names, own) for row, own in zip(rows, payloads, strict=True))

    def seen(
        self, table: torch.Tensor, want: Any = None, values: Callable[[Mapping[str, int]], Mapping[str, int]] = dict
    ) -> Seen[Any]:
        """The observations for the laws. want: the laws' expected value. values: converts one message's values."""
        return Seen([replace(each, values=values(each.values)) for each in self.observations(table)], want)

    def joined(self, table: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
        """`table` with the sum of all ranks in the columns `names`, of which each rank sent the part of its slice."""
        columns, table = [HEADER + self.names.index(name) for name in names], table.clone()
        table[:, columns] = table[:, columns].sum(0, keepdim=True)
        return table

    def column(self, name: str) -> torch.Tensor:
        """int64 [world] on the device: the value `name` of each rank."""
        return self.table[:, HEADER + self.names.index(name)]

    @property
    def sent(self) -> torch.Tensor:
        """int64 [world, length] on the device: the messages without their padding."""
        return self.table[:, : self.length]

    @property
    def payload(self) -> torch.Tensor:
        """int64 [world, n] on the device: the part of each message after the values."""
        return self.table[:, HEADER + len(self.names) : self.length]


@functools.lru_cache(maxsize=16)
def _zeros(device: torch.device, count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64, device=device)


class Agreement:
    """Gathers messages of all ranks and numbers them. All ranks must make the same calls.

    Messages of up to `width` integers are padded to it, so that ranks at different points of a step can still read each
    other's messages and report the mismatch. A collective with unequal lengths would abort the process.
    """

    def __init__(self, backend: Backend, replicas: Sequence[Replica], width: int) -> None:
        self._backend = backend
        self._replicas = tuple(replicas)
        self._width = width
        self._sequence = 0

    def gather(
        self,
        step: int,
        point: str,
        observed: Sequence[Mapping[str, int]],
        facts: Sequence[torch.Tensor] | None = None,
        names: Sequence[str] = (),
        expected: Expected | None = None,
    ) -> Gathered:
        """Gather the messages of all ranks. observed: for each local replica, the values known on the host.

        facts: for each local replica, int64 [n] on its device: the values of `names`, then a payload. expected: for
        each rank, the integers or rules for everything after the header.
        """
        self._sequence += 1
        all_names = (*observed[0], *names)
        wanted: list[int] = []
        if expected is not None:
            heads = [header(rank, step, self._sequence, point, all_names) for rank in range(self._backend.world_size)]
            wanted = encoded([[*head, *row] for head, row in zip(heads, expected, strict=True)])
        sent, held = [], None
        for place, (rank, device) in enumerate(zip(self._backend.ranks, self._backend.devices, strict=True)):
            values = observed[place]
            head = header(rank, step, self._sequence, point, (*values, *names))
            # One copy for all host values: each copy is a launch.
            known = on_device([*head, *map(signed, values.values()), *wanted], device)
            own = known[: len(known) - len(wanted)]
            if wanted and held is None:
                held = known[len(own) :]
            parts = [own] if facts is None else [own, facts[place]]
            missing = self._width - sum(part.numel() for part in parts)  # ranks may send different numbers of values
            if missing > 0:
                parts.append(_zeros(device, self._width)[:missing])
            sent.append(torch.cat(parts) if len(parts) > 1 else parts[0])
        gathered = self._backend.gather(sent)
        table = torch.stack(gathered) if len(gathered) > 1 else gathered[0].unsqueeze(0)
        length = HEADER + len(observed[0]) + (0 if facts is None else facts[0].numel())
        return Gathered(step, self._sequence, point, all_names, table, length, held)

    def compare(self, seen: Seen[object], tensors: Mapping[str, Callable[[Replica], Tensors]]) -> Details:
        """For each value of `tensors` that differs between ranks: the digests of its tensors, by rank."""
        # Every rank sees the same differences, so all ranks gather or none does.
        details: dict[str, Mapping[str, Sequence[int]]] = {name: {} for name in tensors}
        for name in tensors if in_lockstep(seen.observations) else ():
            if name in seen.differing:
                observed = [digests_by_name(tensors[name](replica)) for replica in self._replicas]
                gathered = self.gather(seen.step, f"tensors of {name}", observed)
                ranks = gathered.observations(gathered.table.cpu())
                details[name] = {tensor: [each.values[tensor] for each in ranks] for tensor in ranks[0].values}
        return details


Record = Seen[Any]
Reader = Callable[[torch.Tensor, Callable[[torch.Tensor], None]], None]
F = TypeVar("F", bound=Callable[..., "Report | None"])


@dataclass(frozen=True)
class Report:
    """The messages of all ranks at the end of a phase, and how to check them.

    table: int64, still on its device. record: builds the record from the table on the CPU. reader: calls its second
    argument with the table on the CPU, now or later. keep: receives the record after the contract held. look: compares
    differing values tensor by tensor, for the message of a violation; a collective. checked: false if contracts were
    suspended during the phase. result: the output of the phase, for the next one.
    """

    table: torch.Tensor
    record: Callable[[torch.Tensor], Record]
    reader: Reader = lambda table, then: then(table.cpu())
    keep: Callable[[Any], None] = lambda record: None
    look: Callable[[Record], Details] = lambda record: {}
    checked: bool = True
    result: Any = None


def requires(*laws: Law[Any]) -> Callable[[F], F]:
    """Preconditions: `laws` hold for the state at the start of the phase, as its record shows it."""
    return lambda phase: _with_condition(phase, require, laws, lambda record: record)


def ensures(*laws: Law[Any], of: Callable[[Any], Any] = lambda record: record) -> Callable[[F], F]:
    """Postconditions: `laws` hold for the record. Evaluated after all preconditions.

    of: the part of the record that the laws check. With several of these decorators, the one closest to the function is
    evaluated first. Both kinds raise the `Violation` of the first broken law.
    """
    return lambda phase: _with_condition(phase, ensure, laws, of)


def _with_condition(
    phase: F,
    contract: Callable[[Predicate], Callable[[Any], Any]],
    laws: tuple[Law[Any], ...],
    of: Callable[[Any], Any],
) -> F:
    # One condition for all laws of a decorator: icontract takes 5 microseconds per condition.
    def rows_hold(record: Record, look: Callable[[Record], Details]) -> bool:
        return Judgement(laws, of(record)).first is None

    def violation(record: Record, look: Callable[[Record], Details]) -> Violation:
        broken = next(law for law in laws if law.check(of(record)) is not None)
        finding = broken.check(of(replace(record, details=look(record))))
        assert finding is not None
        return Violation.of(broken.clause, finding)

    rows_hold.__name__ = ", ".join(law.id for law in laws)
    rows_hold.__andon_error__ = violation  # type: ignore[attr-defined]  # the attribute that `policy.clause` sets too
    run: Any = phase if hasattr(phase, "judge") else _judged(phase)
    run.judge = contract(rows_hold)(run.judge)
    return run  # type: ignore[no-any-return]


def _judged(phase: Callable[..., Report | None]) -> Callable[..., Report | None]:
    """Wrap `phase` to pass its record through `judge` when it is read. The decorators add conditions to `judge`."""

    @functools.wraps(phase)
    def run(*args: Any, **kwargs: Any) -> Report | None:
        report = phase(*args, **kwargs)
        if report is not None:
            record, look, keep, checked = report.record, report.look, report.keep, report.checked

            def read(values: torch.Tensor) -> None:
                seen = record(values)
                keep(run.judge(seen, look) if checked else seen)  # type: ignore[attr-defined]

            report.reader(report.table, read)
        return report

    run.judge = lambda record, look: record  # type: ignore[attr-defined]
    return run
