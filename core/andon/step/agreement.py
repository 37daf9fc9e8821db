"""What the replicas of a backend tell each other about themselves: observations, and a second look on a mismatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from andon.backend.base import Backend
from andon.step.replica import Replica
from andon_contracts.agree import Observation, gather_observations
from andon_contracts.observe import digests_by_name

Tensors = Mapping[str, torch.Tensor]


class Agreement:
    """Gathers observations of all ranks, numbering every message. All ranks must call alike."""

    def __init__(self, backend: Backend, replicas: Sequence[Replica]) -> None:
        self._backend = backend
        self._replicas = tuple(replicas)
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
        local = [
            Observation(rank, step, self._sequence, point, values, payload)
            for rank, values, payload in zip(
                self._backend.ranks, observed, payloads or [None] * len(observed), strict=True
            )
        ]
        return gather_observations(local, self._exchange)

    def _exchange(self, local: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self._backend.gather([t.to(d) for t, d in zip(local, self._backend.devices, strict=True)])

    def second_look(
        self, observations: Sequence[Observation], name: str, tensors: Callable[[Replica], Tensors]
    ) -> dict[str, tuple[int, ...]]:
        """Where the ranks differ in `name`: each tensor's digest by rank. All ranks see that, so all look again."""
        if all(o.values[name] == observations[0].values[name] for o in observations):
            return {}
        observed = [digests_by_name(tensors(replica)) for replica in self._replicas]
        looked = self.gather(observations[0].step, f"tensors of {name}", observed)
        return {tensor: tuple(o.values[tensor] for o in looked) for tensor in looked[0].values}
