"""The only collective of ours: what every rank observed, by rank, with step and sequence in every message.

An observation is plain integers by name. On the wire it is one int64 vector whose length all ranks know. Its header
(schema, rank, step, sequence, point, digest of the names) makes a rank that skipped a step a finding, not a mispairing.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import struct
import sys
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from andon_contracts.digest import signed
from andon_contracts.mesh import Mesh, connect

Gather = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""From one int64 vector for each local replica to one for each rank, in order of rank."""

HEADER = 6
"""The integers before the values of a message."""
_LOOK = datetime.timedelta(seconds=0.2)
_SCHEMA = 1
_WORD = 8
V = TypeVar("V", bound=Hashable)
_WRAP = 1 << 64
_SPEAKER = slice(_WORD, 2 * _WORD)
"""Where the bytes of a message hold its rank."""


@dataclass(frozen=True)
class Observation:
    """What one rank saw at one point of one step. Values are integers of 64 bits (signed or unsigned).

    payload: further int64 values, on their device until they are gathered; all ranks know how many. names_match: the
    message was for the point and the names that the reader expected.
    """

    rank: int
    step: int
    sequence: int
    point: str
    values: Mapping[str, int]
    payload: torch.Tensor | None = None
    names_match: bool = True


def bits_of(value: float) -> int:
    """The 64 bits of a float, so that it can be compared exactly and sent as an integer."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def real_of(bits: int) -> float:
    """The float with these 64 bits."""
    return float(struct.unpack("<d", struct.pack("<q", signed(bits)))[0])


def majority(values: Sequence[V]) -> V:
    """The value that most ranks have; in a tie, that of the lowest rank. All ranks that judge find the same."""
    return Counter(values).most_common(1)[0][0]


def minority(values: Sequence[Hashable]) -> tuple[int, ...]:
    """The ranks that differ from the strict majority; empty if there is none (1 against 1), as nobody can tell."""
    most = majority(values)
    odd = tuple(rank for rank, value in enumerate(values) if value != most)
    return odd if 2 * len(odd) < len(values) else ()


def gather_observations(local: Sequence[Observation], gather: Gather) -> tuple[Observation, ...]:
    """Every rank's observation, by rank. Each rank passes those of its own replicas; all pass the same names.

    Raises whatever `gather` raises (a dead rank, a timeout). `laws` judge the result.
    """
    names, point = tuple(local[0].values), local[0].point
    end = HEADER + len(names)
    vectors = gather([_encode(observation) for observation in local])
    return tuple(received(vector[:end].tolist(), point, names, vector[end:]) for vector in vectors)


def gather_short(mine: Observation, gather: GroupGather) -> tuple[Observation, ...]:
    """`gather_observations` through the sockets of `gather`, for an observation without a payload.

    A message that equals this rank's but for the speaker is not decoded again.
    """
    names = tuple(mine.values)
    sent = _words(mine).tobytes()
    own = received(array("q", sent), mine.point, names, None)
    found = []
    for message in gather.messages(sent):
        if message[_SPEAKER.stop :] == sent[_SPEAKER.stop :] and message[: _SPEAKER.start] == sent[: _SPEAKER.start]:
            rank = int.from_bytes(message[_SPEAKER], sys.byteorder, signed=True)
            found.append(Observation(rank, own.step, own.sequence, own.point, own.values))
        else:
            found.append(received(array("q", message), mine.point, names, None))
    return tuple(found)


def header(rank: int, step: int, sequence: int, point: str, names: Sequence[str]) -> list[int]:
    """The `HEADER` integers of a message: who speaks, of which point of which step, with values of these names."""
    return [_SCHEMA, rank, step, sequence, *_signature(point, tuple(names))]


@functools.lru_cache(maxsize=256)
def _signature(point: str, names: tuple[str, ...]) -> tuple[int, int]:
    return zlib.crc32(point.encode()), zlib.crc32("\0".join(names).encode())


def received(row: Sequence[int], point: str, names: Sequence[str], payload: torch.Tensor | None) -> Observation:
    """The observation in a message of header and values, for a rank that expects `names` at `point`."""
    _, rank, step, sequence, *_ = row[:HEADER]
    same = list(row[:HEADER]) == header(rank, step, sequence, point, names)
    values = dict(zip(names, row[HEADER : HEADER + len(names)], strict=True))
    return Observation(rank, step, sequence, point, values, payload=payload, names_match=same)


def _words(seen: Observation) -> array[int]:
    head = header(seen.rank, seen.step, seen.sequence, seen.point, tuple(seen.values))
    return array("Q", [*head, *(value % _WRAP for value in seen.values.values())])


def _encode(seen: Observation) -> torch.Tensor:
    vector = torch.frombuffer(_words(seen), dtype=torch.int64)
    if seen.payload is None:
        return vector
    return torch.cat([vector.to(seen.payload.device), seen.payload.flatten()])


_idle: list[Any] = []
"""Groups that this rank has closed, while others may still be reading what it sent last."""


def own_group(group: dist.ProcessGroup | None, timeout: datetime.timedelta) -> Any:
    """A gloo group of our own over the ranks of `group`, in their order; None if there is only this process.

    Collective on these ranks. Raises `ValueError` on a rank that is not one of `group`.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    if dist.get_rank() not in ranks:
        msg = f"andon.watch: rank {dist.get_rank()} is not one of the group, which has ranks {ranks}"
        raise ValueError(msg)
    # Not in torch's register: torch names a group by its ranks and by how many groups there are, so one that is made
    # after another was destroyed finds the addresses of that one in the store. These names are used once. They are
    # counted in the store, so that a process which replaces another goes on with its number.
    shared = dist.distributed_c10d._get_default_store()
    name = "andon/group/" + ("all" if group is None else "-".join(map(str, ranks)))
    number = shared.add(f"{name} of {dist.get_rank()}", 1)
    made = dist.ProcessGroupGloo(
        PrefixStore(f"{name}/{number}", shared), ranks.index(dist.get_rank()), len(ranks), timeout
    )
    _idle.clear()  # all ranks have come here, so none reads from an older group any more
    return made


class GroupGather:
    """A `Gather` over a process group of our own, on the CPU. One process without a group gathers from itself.

    Messages up to `width` integers are sent at that width, so that a rank at another point is read and judged: a
    collective of unequal lengths would end its process. Longer ones must have one length on all ranks.
    After `connect`, those up to `width` go through sockets between ranks of one machine.
    """

    def __init__(self, group: Any, width: int) -> None:
        """group: one of `own_group`, or any of torch with a backend for the CPU."""
        self.rank = 0 if group is None else group.rank()
        self.world_size = 1 if group is None else group.size()
        self._alone = group is None
        self._group: Any = group
        if isinstance(group, dist.ProcessGroup):
            self._group = group._get_backend(torch.device("cpu"))
        self._unfinished: Any = None
        self._width = width
        self.heed: Callable[[], None] | None = None
        """Called now and then while a gather waits; what it raises ends the wait."""
        self.lost: Callable[[RuntimeError], None] | None = None
        """Called with the error that ended a gather, before it is raised."""
        self._mesh: Mesh | None = None

    def connect(self) -> None:
        """Send short messages through sockets from now on, if the ranks can reach each other so. Collective."""
        self._mesh = self.sockets()

    def sockets(self) -> Mesh | None:
        """Connections to all ranks, which the caller closes; None if not all reach each other. Collective."""
        if self._alone:
            return None

        def numbers(mine: Sequence[int]) -> list[list[int]]:
            return [row.tolist() for row in self._through_group(torch.tensor(mine, device="cpu"))]

        return connect(self.rank, self.world_size, numbers, self._group.options._timeout.total_seconds())

    def takes(self, count: int) -> bool:
        """Whether `messages` can send `count` values."""
        return (self._mesh is not None or self._alone) and HEADER + count <= self._width

    def messages(self, sent: bytes) -> list[bytes]:
        """The message of each rank, by rank, all as long as `sent`, that of this rank. Through sockets.

        Raises `DistNetworkError` if a rank is gone, and what `heed` raises.
        """
        if self._mesh is None:
            return [sent]
        filled = sent.ljust(_WORD * self._width, b"\0")
        try:
            found = self._mesh.gather(filled, self.heed)
        except dist.DistNetworkError as error:
            if self.lost is not None:
                self.lost(error)
            raise
        found[self.rank] = filled
        return [found[rank][: len(sent)] for rank in range(self.world_size)]

    def close(self) -> None:
        """End the sockets and let the group go. Later gathers raise `ValueError`."""
        if self._mesh is not None:
            self._mesh.close()
        if self._group is None:
            return
        if self._unfinished is None or self._unfinished.is_completed():
            # Kept until the next group is made: gloo drops what it has sent and other ranks have not yet received.
            _idle.append(self._group)
        else:
            # Kept for good: the end of a group waits for its collectives.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._group, self._unfinished = None, None

    def __call__(self, local: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The vector of each rank, by rank, from the one of this rank. Raises what the group raises."""
        (mine,) = local
        if self._alone:
            return [mine]
        if self._mesh is None or mine.numel() > self._width:
            return self._through_group(mine)
        mine = mine.cpu()
        sent = ctypes.string_at(mine.data_ptr(), _WORD * mine.numel())
        return [torch.frombuffer(bytearray(row), dtype=torch.int64) for row in self.messages(sent)]

    def _through_group(self, mine: torch.Tensor) -> list[torch.Tensor]:
        if self._group is None:
            raise ValueError("nothing is gathered any more")
        length = mine.numel()
        sent = mine.new_zeros(max(self._width, length))
        sent[:length] = mine
        rows = list(sent.new_empty(self.world_size, sent.numel()).unbind())
        # The backend's own method: a wrapper of torch.distributed costs as much again, and its name depends on torch's.
        self._wait(self._group.allgather([rows], [sent]))
        return [row[:length] for row in rows]

    def _wait(self, work: Any) -> None:
        self._unfinished = work
        while True:
            try:
                work.wait(_LOOK)
                self._unfinished = None
                return
            except RuntimeError:
                # A wait that timed out raises the same as a collective that failed; only the work knows which.
                if work.is_completed():
                    break
            if self.heed is not None:
                self.heed()
        try:
            work.wait()  # raises what the collective raised, unless the last rank has answered in between
        except RuntimeError as error:
            if self.lost is not None:
                self.lost(error)
            raise
