"""The operations that the step needs of a backend; all ranks in this process, or one rank of a torch process group.

Operations take and return lists indexed by *local replica*, unless a docstring says "by rank". In `inline` every rank
is local, in a process group only one is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from andon_contracts.agree import GroupGather, Mesh
from andon_contracts.liveness.diagnosis import StepClock

T = TypeVar("T")


class InlineBackend:
    """All ranks in this process, one after another: the simplest backend, and the best one for debugging.

    ranks: the local ones. devices: the device of each local replica.
    """

    name = "inline"

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        self.world_size = len(self.devices)
        self.ranks = tuple(range(self.world_size))

    def map(self, work: Callable[[int], T]) -> list[T]:
        """work(local index) for each local replica, in order."""
        return [work(index) for index in self.ranks]

    def gather(self, local: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All-gather: every rank's tensor, by rank. All have one shape and dtype. local: by local replica."""
        return [tensor.to(self.devices[0]) for tensor in local]

    def exchange(self, local: Sequence[torch.Tensor], rows: Sequence[int]) -> list[list[torch.Tensor]]:
        """All-to-all of bits; nothing is added.

        Rank r passes [world, rows[r], width]. Local replica d gets, by rank s, [rows[s], width].
        """
        return [[sent[index].to(device) for sent in local] for index, device in enumerate(self.devices)]

    def fill(self, local: Sequence[torch.Tensor]) -> None:
        """All-gather in place: each local tensor is [world, n], and row r of every rank becomes that of rank r."""
        for row, owner in enumerate(local):
            for tensor in local:
                tensor[row] = owner[row]

    def close(self) -> None:
        """Free the backend's resources. It cannot be used afterwards."""


# torch 2.13 renamed the collective and deprecated the old name; 2.11 has only the old one.
_all_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SHORT_BYTES = 4096
"""Messages up to this size go through sockets between ranks of one machine, if there are any. They are padded to it:
ranks detect a message of another length, and none waits for missing bytes."""
_LENGTH_BYTES = 8


def groups_of(backend: str) -> str:
    """The process groups of `backend` by type of device, for torch's `init_process_group`."""
    # NCCL needs a CPU group too, for messages of a rank whose GPU does not work.
    return "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo"


class GroupBackend:
    """One rank of the default process group, with the verbs of `InlineBackend`. `close` keeps the group open.

    clock: records when this rank waits for others.

    Collectives of `mixed` run on the CPU, because its ranks on CPUs and GPUs share one gloo group. Creating a backend
    over gloo is collective: ranks of one machine open sockets for short messages, of which a step has several.
    """

    def __init__(self, name: str, device: torch.device, *, clock: StepClock | None = None) -> None:
        if not dist.is_initialized():
            raise ValueError("the process group is not initialised")
        self.name = name
        self.world_size = dist.get_world_size()
        self.ranks: tuple[int, ...] = (dist.get_rank(),)
        self.devices: tuple[torch.device, ...] = (device,)
        self._clock = StepClock() if clock is None else clock
        self._carrier = device if name == "nccl" else torch.device("cpu")
        self._mesh = None if name == "nccl" else GroupGather(dist.group.WORLD, 0).sockets()

    def map(self, work: Callable[[int], T]) -> list[T]:
        return [work(0)]

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._clock.wait()
        yield
        self._clock.work()

    def gather(self, local: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with self._waiting():
            sent = local[0].to(self._carrier).contiguous()
            if self._mesh is not None and 0 < sent.numel() * sent.itemsize <= _SHORT_BYTES:
                return self._through(self._mesh, sent)
            received = sent.new_empty(self.world_size * sent.numel())
            _all_gather(received, sent.view(-1))
            return list(received.to(self.devices[0]).view(self.world_size, *sent.shape).unbind(0))

    def _through(self, mesh: Mesh, sent: torch.Tensor) -> list[torch.Tensor]:
        size = sent.numel() * sent.itemsize
        message = size.to_bytes(_LENGTH_BYTES, "little") + ctypes.string_at(sent.data_ptr(), size)
        message = message.ljust(_LENGTH_BYTES + _SHORT_BYTES, b"\0")
        messages = {self.ranks[0]: message, **mesh.gather(message)}
        rows = []
        for rank in range(self.world_size):
            length = int.from_bytes(messages[rank][:_LENGTH_BYTES], "little")
            if length != size:
                msg = f"rank {rank} sends {length} bytes and this rank {size}: they are in different collectives"
                raise RuntimeError(msg)
            row = torch.frombuffer(bytearray(messages[rank][_LENGTH_BYTES : _LENGTH_BYTES + size]), dtype=torch.uint8)
            rows.append(row.view(sent.dtype).view(sent.shape).to(self.devices[0]))
        return rows

    def exchange(self, local: Sequence[torch.Tensor], rows: Sequence[int]) -> list[list[torch.Tensor]]:
        with self._waiting():
            sent = local[0].to(self._carrier).contiguous()
            width = sent.shape[-1]
            sizes = [count * width for count in rows]
            received = sent.new_empty(sum(sizes))
            # Only copies bits: a collective that adds would choose the order of the sum.
            dist.all_to_all_single(received, sent.view(-1), sizes, [sent.shape[1] * width] * self.world_size)
            parts = torch.split(received.to(self.devices[0]), sizes)
            return [[part.view(count, width) for part, count in zip(parts, rows, strict=True)]]

    def fill(self, local: Sequence[torch.Tensor]) -> None:
        with self._waiting():
            _all_gather(local[0].view(-1), local[0][self.ranks[0]])

    def close(self) -> None:
        if self._mesh is not None:
            self._mesh.close()


Backend = InlineBackend | GroupBackend
