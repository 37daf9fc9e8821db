"""One rank in this process, the others in processes of the same torch process group (gloo, NCCL, or both kinds)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

# torch 2.13 renamed the collective and warns of the old name; 2.11 has only the old one.
_all_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class GroupBackend:
    """A rank of an initialised process group. It does not own the group; who initialised it destroys it.

    carrier: the device on which collectives run: the rank's own for gloo and NCCL, the CPU for `mixed`, where ranks
    on CPUs and GPUs share one gloo group.
    """

    def __init__(self, name: str, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise ValueError("the process group is not initialised")
        self.name = name
        self.world_size = dist.get_world_size(group)
        self.ranks: tuple[int, ...] = (dist.get_rank(group),)
        self.devices: tuple[torch.device, ...] = (device,)
        self._group = group
        self._carrier = device if name == "nccl" else torch.device("cpu")

    def map(self, work: Callable[[int], T]) -> list[T]:
        """work(0): this process has one replica."""
        return [work(0)]

    def gather(self, local: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All-gather, by rank, on the replica's device."""
        sent = local[0].to(self._carrier).contiguous()
        received = sent.new_empty(self.world_size * sent.numel())
        _all_gather(received, sent.view(-1), group=self._group)
        return list(received.to(self.devices[0]).view(self.world_size, *sent.shape).unbind(0))

    def exchange(self, local: Sequence[torch.Tensor], rows: Sequence[int]) -> list[list[torch.Tensor]]:
        """All-to-all by one collective with uneven splits."""
        sent = local[0].to(self._carrier).contiguous()
        width = sent.shape[-1]
        received = sent.new_empty(sum(rows) * width)
        dist.all_to_all_single(
            received,
            sent.view(-1),
            output_split_sizes=[count * width for count in rows],
            input_split_sizes=[sent.shape[1] * width] * self.world_size,
            group=self._group,
        )
        parts = torch.split(received.to(self.devices[0]), [count * width for count in rows])
        return [[part.view(count, width) for part, count in zip(parts, rows, strict=True)]]

    def total(self, local: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All-reduce."""
        whole = local[0].to(self._carrier, copy=True)
        dist.all_reduce(whole, group=self._group)
        return [whole.to(self.devices[0])]

    def close(self) -> None:
        """The group belongs to whoever made it."""
