"""What the replicas of a backend tell each other about themselves: observations, and a second look on a mismatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from andon.backend.base import Backend
from andon.step.replica import Replica
from andon_contracts.agree import Observation, gather_observations
from andon_contracts.judge import in_lockstep
from andon_contracts.observe import digests_by_name

Tensors = Mapping[str, torch.Tensor]


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
        payloads: Sequence[torch.Tensor] | None = None,
    ) -> tuple[Observation, ...]:
        """Every rank's observation, by rank, from those of the local replicas (values, and int64 payloads if any)."""
        self._sequence += 1
        carried: Sequence[torch.Tensor | None] = payloads or [None] * len(observed)
        local = [
            Observation(rank, step, self._sequence, point, values, payload)
            for rank, values, payload in zip(self._backend.ranks, observed, carried, strict=True)
        ]
        return gather_observations(local, self._exchange)

    def _exchange(self, local: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        length = local[0].numel()
        missing = max(0, self._width - length)
        sent = [nn.functional.pad(t.to(d), (0, missing)) for t, d in zip(local, self._backend.devices, strict=True)]
        return [received[:length] for received in self._backend.gather(sent)]

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
        looked = self.gather(first.step, f"tensors of {name}", observed)
        return {tensor: tuple(o.values[tensor] for o in looked) for tensor in looked[0].values}
