"""The gather of the contracts: every rank receives the observations of all ranks.

An observation is named integers of 64 bits. It is sent as an int64 vector whose length all ranks know: a header
(schema, rank, step, sequence, point, digest of the names) and the values. If a rank skipped a step, its header differs,
so the check reports the skip instead of comparing values of different steps.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import socket
import struct
import sys
import tempfile
import time
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from andon_contracts.digest import signed

Gather = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]  # from local replicas' int64 vectors to all ranks'
IntGather = Callable[[Sequence[int]], Sequence[Sequence[int]]]  # from the integers of this rank to those of all ranks
HEADER = 6  # the integers before the values of a message
_POLL = datetime.timedelta(seconds=0.2)  # how often a wait calls `raise_if_halted`
_POLL_TIMEVAL = struct.pack("ll", 0, 200_000)  # the same, as the system's seconds and microseconds
_SCHEMA = 1
_INT_BYTES = 8
V = TypeVar("V", bound=Hashable)
WRAP = 1 << 64
_RANK = slice(_INT_BYTES, 2 * _INT_BYTES)  # the bytes of a message that hold its rank
MOST_RANKS = 16  # larger groups use no sockets, because every rank sends its message to every other rank
_ADDRESS_BYTES = 104  # the longest socket address that all systems allow
_SPIN_S = 100e-6
_OPENING_S = 10.0


@dataclass(frozen=True)
class Observation:
    """The values of one rank at one point of one step: integers of 64 bits (signed or unsigned) by name."""

    rank: int
    step: int
    sequence: int
    point: str
    values: Mapping[str, int]
    payload: torch.Tensor | None = None  # int64, on its device until the gather; all ranks know its length
    names_match: bool = True  # False if its point or names are not those that the reader expected


def bits_of(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def real_of(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", signed(bits)))[0])


def majority(values: Sequence[V]) -> V:
    """The value that most ranks have; in a tie, the value of the lowest rank. All ranks compute the same result."""
    return Counter(values).most_common(1)[0][0]


def minority(values: Sequence[Hashable]) -> tuple[int, ...]:
    """The ranks that differ from the strict majority; empty if there is none, as with two different values."""
    most = majority(values)
    odd = tuple(rank for rank, value in enumerate(values) if value != most)
    return odd if 2 * len(odd) < len(values) else ()


def by_rank(shown: Sequence[str]) -> str:
    """The value of each rank in words: `2 on rank 1, 3 on the others`, or rank by rank if no majority agrees."""
    odd = minority(shown)
    words = [f"{shown[rank]} on rank {rank}" for rank in odd or range(len(shown))]
    others = [f"{next(text for rank, text in enumerate(shown) if rank not in odd)} on the others"] if odd else []
    return ", ".join(words + others)


def gather_observations(local: Sequence[Observation], gather: Gather) -> tuple[Observation, ...]:
    """Every replica's observation, by rank. local: those of this rank's replicas. All ranks must send equal names."""
    names, point = tuple(local[0].values), local[0].point
    end, sent = HEADER + len(names), []
    for seen in local:
        vector = torch.frombuffer(_encode(seen), dtype=torch.int64)
        payload = seen.payload
        sent.append(vector if payload is None else torch.cat([vector.to(payload.device), payload.flatten()]))
    return tuple(decode_message(vector[:end].tolist(), point, names, vector[end:]) for vector in gather(sent))


def gather_short(mine: Observation, gather: GroupGather) -> tuple[Observation, ...]:
    """`gather_observations` through sockets, without payloads. It decodes only messages that differ from its own."""
    names, sent = tuple(mine.values), _encode(mine).tobytes()
    own = decode_message(array("q", sent), mine.point, names, None)
    found = []
    for message in gather.messages(sent):
        if message[: _RANK.start] == sent[: _RANK.start] and message[_RANK.stop :] == sent[_RANK.stop :]:
            rank = int.from_bytes(message[_RANK], sys.byteorder, signed=True)
            found.append(Observation(rank, own.step, own.sequence, own.point, own.values))
        else:
            found.append(decode_message(array("q", message), mine.point, names, None))
    return tuple(found)


def header(rank: int, step: int, sequence: int, point: str, names: Sequence[str]) -> list[int]:
    """The `HEADER` integers before the values of a message."""
    return [_SCHEMA, rank, step, sequence, *_signature(point, tuple(names))]


@functools.lru_cache(maxsize=256)
def _signature(point: str, names: tuple[str, ...]) -> tuple[int, int]:
    return zlib.crc32(point.encode()), zlib.crc32("\0".join(names).encode())


def decode_message(row: Sequence[int], point: str, names: Sequence[str], payload: torch.Tensor | None) -> Observation:
    """Decode a header and values, for a rank that expects these names at this point."""
    _, rank, step, sequence, *_ = row[:HEADER]
    same = list(row[:HEADER]) == header(rank, step, sequence, point, names)
    values = dict(zip(names, row[HEADER : HEADER + len(names)], strict=True))
    return Observation(rank, step, sequence, point, values, payload=payload, names_match=same)


def _encode(seen: Observation) -> array[int]:
    head = header(seen.rank, seen.step, seen.sequence, seen.point, tuple(seen.values))
    return array("Q", [*head, *(value % WRAP for value in seen.values.values())])


_closed_groups: list[Any] = []  # other ranks may still be receiving the last messages that these groups sent


def own_group(group: dist.ProcessGroup | None, timeout: datetime.timedelta) -> Any:
    """A private gloo group over the ranks of `group`, in their order; None without torch.distributed.

    Collective on these ranks. Raises `ValueError` on a rank outside `group`.
    """
    if not dist.is_initialized():
        return None
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    if dist.get_rank() not in ranks:
        raise ValueError(f"andon.watch: rank {dist.get_rank()} is not in the group, which has ranks {ranks}")
    # torch would name the group by its ranks and by the number of groups, so a group made after another was destroyed
    # would read the old addresses from the store. These names are used once. The store counts them, so that a process
    # that replaces another continues its numbers.
    shared = dist.distributed_c10d._get_default_store()
    name = "andon/group/" + ("all" if group is None else "-".join(map(str, ranks)))
    number = shared.add(f"{name} of {dist.get_rank()}", 1)
    store = PrefixStore(f"{name}/{number}", shared)
    made = dist.ProcessGroupGloo(store, ranks.index(dist.get_rank()), len(ranks), timeout)
    _closed_groups.clear()  # all ranks are here, so none receives from an older group any more
    return made


class RankSet:
    """The ranks of a watch, by their numbers in the default group."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = frozenset(ranks)
        self._known: dict[str, bool] = {}

    def all_in(self, group: Any) -> bool:
        """Whether a collective over `group` (None: the default group) needs all these ranks. Cached by its name."""
        group = group or dist.group.WORLD
        name = getattr(group, "group_name", "")
        if name not in self._known:
            self._known[name] = bool(name) and self._ranks <= set(dist.get_process_group_ranks(group))
        return self._known[name]


class Mesh:
    """Sockets to the other ranks of one machine, for the few hundred bytes that a watch gathers twice a step.

    Gloo passes a collective between threads, which takes several times as long as such a message.
    """

    def __init__(self, peers: Mapping[int, socket.socket], timeout_s: float) -> None:
        self._peers, self._timeout_s = peers, timeout_s
        for peer in peers.values():
            # The socket's own timeout makes a wait one system call; Python's makes it two.
            peer.settimeout(None)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _POLL_TIMEVAL)

    def gather(self, message: bytes, raise_if_halted: Callable[[], None] | None = None) -> dict[int, bytes]:
        """Send `message`, and return by rank the message of each other rank, all of its length. Collective.

        Calls `raise_if_halted` while it waits. Raises `DistNetworkError` if a rank is gone, or silent for `timeout_s`.
        """
        try:
            for peer in self._peers.values():
                peer.sendall(message)
            return {rank: self._receive(rank, len(message), raise_if_halted) for rank in self._peers}
        except ConnectionError as error:
            raise dist.DistNetworkError(f"Connection closed by peer: {error}") from None

    def _receive(self, rank: int, size: int, raise_if_halted: Callable[[], None] | None) -> bytes:
        peer, received, began = self._peers[rank], b"", time.monotonic()
        while len(received) < size:
            # Most answers arrive before this thread could sleep and wake up, so it spins first. It does not yield:
            # another thread or process would keep this core for longer than the answer takes.
            spins = time.monotonic() - began < _SPIN_S
            try:
                part = peer.recv(size - len(received), socket.MSG_DONTWAIT if spins else 0)
            except BlockingIOError:
                part = None
            if part:
                received += part
            elif part is not None:
                raise ConnectionError(f"rank {rank} is gone")
            elif time.monotonic() - began > self._timeout_s:
                raise dist.DistNetworkError(f"Timed out waiting {self._timeout_s:g} s for rank {rank}")
            elif raise_if_halted is not None and not spins:
                raise_if_halted()
        return received

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


def connect(rank: int, world: int, gather: IntGather, timeout_s: float) -> Mesh | None:
    """Connect 2 to `MOST_RANKS` ranks with each other. Returns None on every rank if any cannot connect. Collective."""
    if not 1 < world <= MOST_RANKS or not hasattr(socket, "AF_UNIX"):
        return None
    peers: dict[int, socket.socket] = {}
    address, connected = "", False

    def call_lower_ranks() -> None:
        for other in range(rank):
            peer = peers[other] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            peer.settimeout(_OPENING_S)
            peer.connect(addresses[other])
            peer.sendall(rank.to_bytes(_INT_BYTES, "little"))

    def accept_higher_ranks() -> None:
        listener.settimeout(_OPENING_S)
        for _ in range(world - 1 - rank):
            peer, _unnamed = listener.accept()
            peer.settimeout(_OPENING_S)
            peers[int.from_bytes(peer.recv(_INT_BYTES), "little")] = peer

    try:
        with ExitStack() as undo:
            listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            with suppress(OSError):
                folder = tempfile.TemporaryDirectory(prefix="andon-", ignore_cleanup_errors=True)  # private
                path = f"{undo.enter_context(folder)}/s"
                listener.bind(path)
                listener.listen(world)
                address = path
            rows = gather(list(address.encode().ljust(_ADDRESS_BYTES, b"\0")))
            addresses = [bytes(row).rstrip(b"\0").decode() for row in rows]
            # All ranks agree that every call reached a listener before any accepts, so none waits for a missing call.
            steps = (call_lower_ranks, accept_higher_ranks)
            connected = all(addresses) and all(_all_succeed(step, gather) for step in steps)
    finally:
        if not connected:
            for peer in peers.values():
                peer.close()
    return Mesh(peers, timeout_s) if connected else None


def _all_succeed(step: Callable[[], None], gather: IntGather) -> bool:
    done = False
    with suppress(OSError):
        step()
        done = True
    return all(numbers[0] for numbers in gather([int(done)]))


class GroupGather:
    """A `Gather` over a CPU group of `own_group` or of torch. Without a group it returns this process's message.

    A message of up to `width` integers is padded to that width, so that a rank at another point can be decoded and
    judged: a collective of unequal lengths would end the process. A longer message must have one length on all ranks.
    After `connect`, messages of up to `width` integers go through sockets if all ranks are on one machine.
    """

    def __init__(self, group: Any, width: int) -> None:
        self.rank = 0 if group is None else group.rank()
        self.world_size = 1 if group is None else group.size()
        self._alone = group is None
        self._group: Any = group._get_backend(torch.device("cpu")) if isinstance(group, dist.ProcessGroup) else group
        self._unfinished: Any = None
        self._width = width
        # Called every 0.2 s while a gather waits. May raise to end it.
        self.raise_if_halted: Callable[[], None] | None = None
        # Called with the error of a gather, before that raises it.
        self.on_error: Callable[[RuntimeError], None] | None = None
        self._mesh: Mesh | None = None

    def connect(self) -> None:
        """Send short messages through sockets from now on, if all ranks can connect. Collective."""
        self._mesh = self.sockets()

    def sockets(self) -> Mesh | None:
        """Connect to all ranks; the caller closes. None if any two ranks cannot connect. Collective."""
        if self._alone:
            return None

        def numbers(mine: Sequence[int]) -> list[list[int]]:
            return [row.tolist() for row in self._through_group(torch.tensor(mine, device="cpu"))]

        return connect(self.rank, self.world_size, numbers, self._group.options._timeout.total_seconds())

    def fits_sockets(self, count: int) -> bool:
        return (self._mesh is not None or self._alone) and HEADER + count <= self._width

    def messages(self, sent: bytes) -> list[bytes]:
        """Every rank's message, by rank, all as long as `sent`. Uses the sockets; a single process gets its own back.

        Raises `DistNetworkError` as `Mesh.gather` does.
        """
        if self._mesh is None:
            return [sent]
        filled = sent.ljust(_INT_BYTES * self._width, b"\0")
        try:
            found = self._mesh.gather(filled, self.raise_if_halted)
        except dist.DistNetworkError as error:
            if self.on_error is not None:
                self.on_error(error)
            raise
        found[self.rank] = filled
        return [found[rank][: len(sent)] for rank in range(self.world_size)]

    def close(self) -> None:
        """Close the sockets and release the group. Later gathers raise `ValueError`."""
        if self._mesh is not None:
            self._mesh.close()
        if self._group is None:
            return
        if self._unfinished is None or self._unfinished.is_completed():
            # Keep it until the next group is made: gloo would drop messages that other ranks have not yet received.
            _closed_groups.append(self._group)
        else:
            # Never destroy it: the destructor waits for unfinished collectives.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._group, self._unfinished = None, None

    def __call__(self, local: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        (mine,) = local
        if self._alone:
            return [mine]
        if self._mesh is None or mine.numel() > self._width:
            return self._through_group(mine)
        mine = mine.cpu()
        sent = ctypes.string_at(mine.data_ptr(), _INT_BYTES * mine.numel())
        return [torch.frombuffer(bytearray(row), dtype=torch.int64) for row in self.messages(sent)]

    def _through_group(self, mine: torch.Tensor) -> list[torch.Tensor]:
        if self._group is None:
            raise ValueError("the gather is closed")
        length = mine.numel()
        sent = mine.new_zeros(max(self._width, length))
        sent[:length] = mine
        rows = list(sent.new_empty(self.world_size, sent.numel()).unbind())
        # Call the backend directly: the wrapper of torch.distributed doubles the cost.
        self._wait(self._group.allgather([rows], [sent]))
        return [row[:length] for row in rows]

    def _wait(self, work: Any) -> None:
        self._unfinished = work
        while True:
            try:
                work.wait(_POLL)
                self._unfinished = None
                return
            except RuntimeError:
                # A wait that timed out raises the same error as a failed collective. Only the work knows which it was.
                if work.is_completed():
                    break
            if self.raise_if_halted is not None:
                self.raise_if_halted()
        try:
            work.wait()  # raises the error of the collective, unless the last rank answered in between
        except RuntimeError as error:
            if self.on_error is not None:
                self.on_error(error)
            raise
