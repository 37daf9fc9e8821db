"""The only collective of ours: what every rank observed, by rank, with step and sequence in every message.

An observation is plain integers by name. On the wire it is one int64 vector of a length that all ranks know, with a
header (schema, rank, step, sequence, point, digest of the names), so that a rank that skipped a step is a finding and
not a mispairing.
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
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from andon_contracts.digest import signed
from andon_contracts.mesh import Mesh, connect

Gather = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""From one int64 vector for each local replica to one for each rank, in order of rank."""

HEADER = 6
"""Integers ahead of the values of a message."""
_LOOK = datetime.timedelta(seconds=0.2)
_SCHEMA = 1
_WORD = 8
V = TypeVar("V", bound=Hashable)
_WRAP = 1 << 64
_SPEAKER = slice(_WORD, 2 * _WORD)
"""Where in the bytes of a message its rank is."""


@dataclass(frozen=True)
class Observation:
    """What one rank saw at one point of one step. Values are integers of 64 bits (signed or unsigned)."""

    rank: int
    step: int
    sequence: int
    point: str
    values: Mapping[str, int]
    payload: torch.Tensor | None = None
    """Further int64 values whose number all ranks know, kept on their device until they are gathered."""
    names_match: bool = True


def bits_of(value: float) -> int:
    """The 64 bits of a real, so that it can be compared exactly and travel as an integer."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def real_of(bits: int) -> float:
    """The real whose 64 bits these are."""
    return float(struct.unpack("<d", struct.pack("<q", signed(bits)))[0])


def majority(values: Sequence[V]) -> V:
    """The value that most ranks have; of several, that of the lowest rank. The same on all ranks that judge."""
    return Counter(values).most_common(1)[0][0]


def minority(values: Sequence[Hashable]) -> tuple[int, ...]:
    """The ranks that differ from the strict majority; none without one (as 1 against 1), where nobody can tell."""
    most = majority(values)
    odd = tuple(rank for rank, value in enumerate(values) if value != most)
    return odd if 2 * len(odd) < len(values) else ()


def gather_observations(local: Sequence[Observation], gather: Gather) -> tuple[Observation, ...]:
    """Every rank's observation, by rank. Each rank passes those of its own replicas; all pass the same names.

    Raises whatever `gather` raises (a peer that died, a timeout); judging is left to `laws`.
    """
    names, point = tuple(local[0].values), local[0].point
    end = HEADER + len(names)
    vectors = gather([_encode(observation) for observation in local])
    return tuple(received(vector[:end].tolist(), point, names, vector[end:]) for vector in vectors)


def gather_short(mine: Observation, gather: GroupGather) -> tuple[Observation, ...]:
    """What `gather_observations` gives for an observation without a payload, where `gather` takes it the shorter way.

    A message that is the same as this rank's, but for who speaks, is not taken apart again.
    """
    names, count = tuple(mine.values), HEADER + len(mine.values)
    head = header(mine.rank, mine.step, mine.sequence, mine.point, names)
    sent = array("Q", [*head, *(value % _WRAP for value in mine.values.values())]).tobytes()
    own = received(array("q", sent), mine.point, names, None)
    found = []
    for message in gather.messages(sent):
        if message[_SPEAKER.stop :] == sent[_SPEAKER.stop :] and message[: _SPEAKER.start] == sent[: _SPEAKER.start]:
            rank = int.from_bytes(message[_SPEAKER], sys.byteorder, signed=True)
            found.append(Observation(rank, own.step, own.sequence, own.point, own.values))
        else:
            found.append(received(array("q", message[: _WORD * count]), mine.point, names, None))
    return tuple(found)


def header(rank: int, step: int, sequence: int, point: str, names: Sequence[str]) -> list[int]:
    """The `HEADER` integers ahead of a message of these values' names: who speaks, of which point of which step."""
    return [_SCHEMA, rank, step, sequence, *_signature(point, tuple(names))]


@functools.lru_cache(maxsize=256)
def _signature(point: str, names: tuple[str, ...]) -> tuple[int, int]:
    return zlib.crc32(point.encode()), zlib.crc32("\0".join(names).encode())


def received(row: Sequence[int], point: str, names: Sequence[str], payload: torch.Tensor | None) -> Observation:
    """The observation in a message of header and values, as a rank reads it that expects `names` at `point`."""
    _, rank, step, sequence, *_ = row[:HEADER]
    same = list(row[:HEADER]) == header(rank, step, sequence, point, names)
    values = dict(zip(names, row[HEADER : HEADER + len(names)], strict=True))
    return Observation(rank, step, sequence, point, values, payload=payload, names_match=same)


def _encode(observation: Observation) -> torch.Tensor:
    values = observation.values
    head = header(observation.rank, observation.step, observation.sequence, observation.point, tuple(values))
    words = array("Q", [*head, *(value % _WRAP for value in values.values())])
    vector = torch.frombuffer(words, dtype=torch.int64)
    if observation.payload is None:
        return vector
    return torch.cat([vector.to(observation.payload.device), observation.payload.flatten()])


# Groups of our own over the ranks of the loop's, apart from torch's register of groups. Torch names a group of some of
# the ranks by these ranks and by how many groups there are, so that one that is made after another was destroyed finds
# the addresses of that one in the store. The names here are used once.

_idle: list[Any] = []
"""Groups that this rank has done with, while others may still be reading what it sent last."""


def own_group(group: dist.ProcessGroup | None, timeout: datetime.timedelta) -> Any:
    """A gloo group of our own over the ranks of `group`, in their order; None where there is only this process.

    Collective on these ranks. Raises `ValueError` on a rank that is not one of `group`.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    if dist.get_rank() not in ranks:
        msg = f"andon.watch: rank {dist.get_rank()} is not one of the group, which has ranks {ranks}"
        raise ValueError(msg)
    shared = dist.distributed_c10d._get_default_store()
    name = "andon/group/" + ("all" if group is None else "-".join(map(str, ranks)))
    # Counted in the store: a process that takes another's place goes on with its number.
    number = shared.add(f"{name} of {dist.get_rank()}", 1)
    made = dist.ProcessGroupGloo(
        PrefixStore(f"{name}/{number}", shared), ranks.index(dist.get_rank()), len(ranks), timeout
    )
    # All ranks have come here, so that none reads from an older group any more.
    _idle.clear()
    return made


def _let_go(group: Any, unfinished: Any) -> None:
    """Keep `group`, with its threads and connections, for no longer than until the next one is made.

    At once would be too early: gloo drops what it has sent and no other rank has received yet. unfinished: a collective
    that this rank began and did not wait for, if there is one; its group is kept for good, since the end of a group
    waits for its collectives.
    """
    if unfinished is None or unfinished.is_completed():
        _idle.append(group)
    else:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


class _Closed:
    """What there is after the end of a group: no answer, rather than that of this rank alone."""

    def allgather(self, *_: object) -> NoReturn:
        """Raises `ValueError`."""
        raise ValueError("nothing is gathered any more")


class GroupGather:
    """A `Gather` over a process group of our own, on the CPU. One process without a group gathers from itself.

    Messages up to `width` integers are sent at that width, so that a rank at another point is read and judged: a
    collective of unequal lengths would end its process. Longer ones must have one length on all ranks.
    After `connect`, those up to `width` take the shorter way between ranks of one machine.
    """

    def __init__(self, group: Any, width: int) -> None:
        """group: one of `own_group`, or any of torch with a backend for the CPU."""
        self.rank = 0 if group is None else group.rank()
        self.world_size = 1 if group is None else group.size()
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

    @property
    def connected(self) -> bool:
        """Whether short messages go through sockets."""
        return self._mesh is not None

    def connect(self) -> None:
        """Let short messages go through sockets from now on, where the ranks can reach each other so. Collective."""
        self._mesh = self.sockets()

    def sockets(self) -> Mesh | None:
        """Connections to all ranks, for whoever called to close; None where there is no way to all. Collective."""
        if self._group is None:
            return None
        timeout = self._group.options._timeout

        def numbers(mine: Sequence[int]) -> list[list[int]]:
            return [row.tolist() for row in self._through_group(torch.tensor(mine, device="cpu"))]

        return connect(self.rank, self.world_size, numbers, timeout.total_seconds())

    def takes(self, count: int) -> bool:
        """Whether `messages` takes one of `count` values: where there are sockets, or no other rank."""
        return (self._mesh is not None or self._group is None) and HEADER + count <= self._width

    def messages(self, sent: bytes) -> list[bytes]:
        """The message of each rank, by rank, as long as `sent`, the one of this rank. Several ranks: through sockets.

        Raises `DistNetworkError` where a rank is gone, and what `heed` raises.
        """
        if self._mesh is None:
            return [sent]
        filled = sent.ljust(_WORD * self._width, b"\0")
        try:
            received = self._mesh.gather(filled, self.heed)
        except dist.DistNetworkError as error:
            if self.lost is not None:
                self.lost(error)
            raise
        received[self.rank] = filled
        return [received[rank][: len(sent)] for rank in range(self.world_size)]

    def close(self) -> None:
        """End the sockets, and let the group go."""
        if self._mesh is not None:
            self._mesh.close()
        if self._group is not None and not isinstance(self._group, _Closed):
            _let_go(self._group, self._unfinished)
            self._group, self._unfinished = _Closed(), None

    def __call__(self, local: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The vector of each rank, by rank, from the one of this rank. Raises what the group raises."""
        (mine,) = local
        if self._group is None:
            return [mine]
        if self._mesh is not None and mine.numel() <= self._width:
            return self._through_mesh(mine.cpu())
        return self._through_group(mine)

    def _through_mesh(self, mine: torch.Tensor) -> list[torch.Tensor]:
        sent = ctypes.string_at(mine.data_ptr(), _WORD * mine.numel())
        return [torch.frombuffer(bytearray(row), dtype=torch.int64) for row in self.messages(sent)]

    def _through_group(self, mine: torch.Tensor) -> list[torch.Tensor]:
        assert self._group is not None
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
                # A wait that ends early says the same as a collective that failed: only the work knows, and the last
                # rank may have answered in between.
                if work.is_completed():
                    self._take_answer(work)
                    return
            if self.heed is not None:
                self.heed()

    def _take_answer(self, work: Any) -> None:
        """Raise what a collective that is over raised, if it did."""
        try:
            work.wait()
        except RuntimeError as error:
            if self.lost is not None:
                self.lost(error)
            raise
