"""What the replicas of a backend tell each other about themselves: observations, and a second look on a mismatch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from andon.backend.base import Backend
from andon.backend.devices import on_device
from andon.console.exits import Exit
from andon.step.gate import Expected, encoded, expected_row
from andon.step.replica import Replica
from andon_contracts.agree import HEADER, Observation, decode_message, header
from andon_contracts.digest import digests_by_name, signed
from andon_contracts.laws.law import Judgement, Law, Rules, Seen, in_lockstep

Tensors = Mapping[str, torch.Tensor]
W = TypeVar("W")


@functools.lru_cache(maxsize=16)
def _zeros(device: torch.device, count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64, device=device)


class RankFailed(RuntimeError):
    """Another rank raised; that rank reports its own error, and this one only that it noticed."""

    ends_with = Exit.RANK_LOST


@dataclass(frozen=True)
class Gathered:
    """What all ranks said at one point of one step.

    table: int64 [world, `length` or more] on a device. Behind the header come the values of `names`, behind them a
    payload of a length that all ranks know. expected: what the gate holds against it (see `gate.encoded`), there too.
    """

    step: int
    sequence: int
    point: str
    names: tuple[str, ...]
    table: torch.Tensor
    length: int
    expected: torch.Tensor | None = None

    def observations(self, table: torch.Tensor) -> tuple[Observation, ...]:
        """Every rank's observation, by rank; `table` holds the values of the one here, on the CPU."""
        end = HEADER + len(self.names)
        rows: list[list[int]] = table[:, :end].tolist()
        payloads = table[:, end : self.length].unbind()
        return tuple(
            decode_message(row, self.point, self.names, tail) for row, tail in zip(rows, payloads, strict=True)
        )

    def read(self) -> tuple[Observation, ...]:
        """Every rank's observation, by rank; waits for the device."""
        return self.observations(self.table.cpu())

    def column(self, name: str) -> int:
        """Where in a message the value `name` stands."""
        return HEADER + self.names.index(name)

    @property
    def said(self) -> torch.Tensor:
        """int64 [world, length] on the device: the messages without what fills them up."""
        return self.table[:, : self.length]

    @property
    def payload(self) -> torch.Tensor:
        """int64 [world, n] on the device: what is behind the values."""
        return self.table[:, HEADER + len(self.names) : self.length]


class Agreement:
    """Gathers observations of all ranks, numbering every message. All ranks must call alike.

    Messages up to `width` integers are sent at that width, so that a rank at another point of a step is read and
    judged; a collective of unequal lengths would end its process.
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
        """What every rank says, from the local replicas: `observed` is known on the host, `facts` on their devices.

        facts: int64 [n]; the first of them are the values of `names`, what is behind these is a payload. expected: by
        rank, what must stand behind the header.
        """
        self._sequence += 1
        said = (*observed[0], *names)
        length = HEADER + len(observed[0]) + (0 if facts is None else facts[0].numel())
        behind: list[int] = []
        if expected is not None:
            heads = [header(rank, step, self._sequence, point, said) for rank in range(self._backend.world_size)]
            behind = encoded([[*head, *row] for head, row in zip(heads, expected, strict=True)])
        sent = []
        for place, (rank, device) in enumerate(zip(self._backend.ranks, self._backend.devices, strict=True)):
            values = observed[place]
            head = header(rank, step, self._sequence, point, (*values, *names))
            # All that the host knows goes to the device at once: each copy is a launch.
            known = on_device([*head, *map(signed, values.values()), *behind], device)
            if place == 0:
                held_against = known[len(known) - len(behind) :]
            parts = [known[: len(known) - len(behind)], *([] if facts is None else [facts[place]])]
            missing = self._width - sum(part.numel() for part in parts)  # ranks may hold another number of tensors
            if missing > 0:
                parts.append(_zeros(device, self._width)[:missing])
            sent.append(torch.cat(parts) if len(parts) > 1 else parts[0])
        gathered = self._backend.gather(sent)
        table = torch.stack(gathered) if len(gathered) > 1 else gathered[0].unsqueeze(0)
        return Gathered(step, self._sequence, point, said, table, length, held_against if behind else None)

    def observe(self, step: int, point: str, observed: Sequence[Mapping[str, int]]) -> tuple[Observation, ...]:
        """Every rank's observation, by rank, read at once."""
        return self.gather(step, point, observed).read()

    def expected(self, rules: Rules, names: Sequence[str]) -> Expected:
        """What a device holds the values of `names` against, on every rank alike."""
        return [expected_row(rules, names)] * self._backend.world_size

    def judgement(
        self, laws: Sequence[Law[Seen[W]]], seen: Seen[W], looks: Mapping[str, Callable[[Replica], Tensors]]
    ) -> Judgement[Seen[W]]:
        """`laws` held against what was seen; where one is broken, with a second look at what differs by `looks`."""
        judgement = Judgement(laws, seen)
        if judgement.first is not None:
            judgement.seen = replace(seen, details=self.second_looks(seen.observations, looks))
        return judgement

    def second_looks(
        self, observations: Sequence[Observation], tensors: Mapping[str, Callable[[Replica], Tensors]]
    ) -> dict[str, dict[str, tuple[int, ...]]]:
        """Where the ranks differ in a name of `tensors`: its tensors' digests by rank, after one more gather each.

        Every rank sees the same difference, so all of them look again, or none does.
        """
        return {name: self._second_look(observations, name, read) for name, read in tensors.items()}

    def _second_look(
        self, observations: Sequence[Observation], name: str, tensors: Callable[[Replica], Tensors]
    ) -> dict[str, tuple[int, ...]]:
        first = observations[0]
        if all(o.values[name] == first.values[name] for o in observations) or not in_lockstep(observations):
            return {}
        observed = [digests_by_name(tensors(replica)) for replica in self._replicas]
        looked = self.observe(first.step, f"tensors of {name}", observed)
        return {tensor: tuple(o.values[tensor] for o in looked) for tensor in looked[0].values}
