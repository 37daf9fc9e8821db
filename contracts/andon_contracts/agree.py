"""The only collective of ours: what every rank observed, by rank, with step and sequence in every message.

An observation is plain integers by name. On the wire it is one int64 vector whose length all ranks know. Its header
(schema, rank, step, sequence, point, digest of the names) makes a rank that skipped a step a finding, not a mispairing.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import shutil
import socket
import struct
import sys
import tempfile
import time
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from andon_contracts.digest import signed

Gather = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]  # int64 vectors of local replicas to those of all
HEADER = 6  # the integers before the values of a message
_LOOK = datetime.timedelta(seconds=0.2)  # how long a wait lasts until it heeds
_SCHEMA = 1
_INT_BYTES = 8
V = TypeVar("V", bound=Hashable)
_WRAP = 1 << 64
_RANK_FIELD = slice(_INT_BYTES, 2 * _INT_BYTES)  # where the bytes of a message hold its rank
MOST_RANKS = 16  # at most so many ranks are connected: every rank sends its message to every other one
_ADDRESS_BYTES = 104  # the length of a socket's address that all systems allow
_LOOK_TIMEVAL = struct.pack("ll", 0, 200_000)  # the same, as the system's seconds and microseconds
_AWAKE_S = 100e-6
_OPENING_S = 10.0
_RANK_BYTES = 8
IntGather = Callable[[Sequence[int]], Sequence[Sequence[int]]]  # a gather: from integers of one rank to those of each


@dataclass(frozen=True)
class Observation:
    """What one rank saw at one point of one step. Values are integers of 64 bits (signed or unsigned)."""

    rank: int
    step: int
    sequence: int
    point: str
    values: Mapping[str, int]
    payload: torch.Tensor | None = None  # further int64, on their device until the gather; all ranks know how many
    names_match: bool = True  # whether the message was for the point and the names that the reader expected


def bits_of(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def real_of(bits: int) -> float:
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
    """Every rank's observation, by rank. Each rank passes those of its own replicas; all pass the same names."""
    names, point = tuple(local[0].values), local[0].point
    end, sent = HEADER + len(names), []
    for seen in local:
        vector = torch.frombuffer(_encode(seen), dtype=torch.int64)
        payload = seen.payload
        sent.append(vector if payload is None else torch.cat([vector.to(payload.device), payload.flatten()]))
    return tuple(decode_message(vector[:end].tolist(), point, names, vector[end:]) for vector in gather(sent))


def gather_short(mine: Observation, gather: GroupGather) -> tuple[Observation, ...]:
    """`gather_observations` through the sockets of `gather`, without payloads. Decodes only what differs from mine."""
    names = tuple(mine.values)
    sent = _encode(mine).tobytes()
    own = decode_message(array("q", sent), mine.point, names, None)
    found = []
    for message in gather.messages(sent):
        if (
            message[_RANK_FIELD.stop :] == sent[_RANK_FIELD.stop :]
            and message[: _RANK_FIELD.start] == sent[: _RANK_FIELD.start]
        ):
            rank = int.from_bytes(message[_RANK_FIELD], sys.byteorder, signed=True)
            found.append(Observation(rank, own.step, own.sequence, own.point, own.values))
        else:
            found.append(decode_message(array("q", message), mine.point, names, None))
    return tuple(found)


def header(rank: int, step: int, sequence: int, point: str, names: Sequence[str]) -> list[int]:
    """The `HEADER` integers of a message: who speaks, of which point of which step, with values of these names."""
    return [_SCHEMA, rank, step, sequence, *_signature(point, tuple(names))]


@functools.lru_cache(maxsize=256)
def _signature(point: str, names: tuple[str, ...]) -> tuple[int, int]:
    return zlib.crc32(point.encode()), zlib.crc32("\0".join(names).encode())


def decode_message(row: Sequence[int], point: str, names: Sequence[str], payload: torch.Tensor | None) -> Observation:
    """The observation in a message of header and values, for a rank that expects these names at this point."""
    _, rank, step, sequence, *_ = row[:HEADER]
    same = list(row[:HEADER]) == header(rank, step, sequence, point, names)
    values = dict(zip(names, row[HEADER : HEADER + len(names)], strict=True))
    return Observation(rank, step, sequence, point, values, payload=payload, names_match=same)


def _encode(seen: Observation) -> array[int]:
    head = header(seen.rank, seen.step, seen.sequence, seen.point, tuple(seen.values))
    return array("Q", [*head, *(value % _WRAP for value in seen.values.values())])


_closed_groups: list[Any] = []  # groups that this rank has closed, while others may still be reading what it sent last


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
    store = PrefixStore(f"{name}/{number}", shared)
    made = dist.ProcessGroupGloo(store, ranks.index(dist.get_rank()), len(ranks), timeout)
    _closed_groups.clear()  # all ranks have come here, so none reads from an older group any more
    return made


class Mesh:
    """Sockets between the ranks of one machine, by rank, for short messages. timeout_s: how long a gather waits.

    Gloo hands a collective from thread to thread, which takes several times as long as the message itself, and a watch
    gathers a few hundred bytes twice a step.
    """

    def __init__(self, peers: Mapping[int, socket.socket], timeout_s: float) -> None:
        self._peers, self._timeout_s = peers, timeout_s
        for peer in peers.values():
            # The socket's own timeout makes a wait one system call; Python's makes it two.
            peer.settimeout(None)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _LOOK_TIMEVAL)

    def gather(self, message: bytes, raise_if_halted: Callable[[], None] | None = None) -> dict[int, bytes]:
        """The message of each other rank, all as long as `message`. Collective. `raise_if_halted` may end the wait.

        Raises `DistNetworkError` if another rank is gone, or silent for the timeout.
        """
        try:
            for peer in self._peers.values():
                peer.sendall(message)
            return {rank: self._receive(rank, len(message), raise_if_halted) for rank in self._peers}
        except ConnectionError as error:
            raise dist.DistNetworkError(f"Connection closed by peer: {error}") from error

    def _receive(self, rank: int, size: int, raise_if_halted: Callable[[], None] | None) -> bytes:
        peer, received, began = self._peers[rank], b"", time.monotonic()
        while len(received) < size:
            # Most ranks answer sooner than this one could fall asleep and wake up, so at first it polls. It does not
            # yield meanwhile: another thread or process would keep this core for longer than the answer fits_sockets.
            polls = time.monotonic() - began < _AWAKE_S
            try:
                part = peer.recv(size - len(received), socket.MSG_DONTWAIT if polls else 0)
            except BlockingIOError:
                if time.monotonic() - began > self._timeout_s:
                    msg = f"Timed out waiting {self._timeout_s:g} s for rank {rank}"
                    raise dist.DistNetworkError(msg) from None
                if raise_if_halted is not None and not polls:
                    raise_if_halted()
                continue
            if not part:
                raise ConnectionError(f"rank {rank} is gone")
            received += part
        return received

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


def connect(rank: int, world: int, gather: IntGather, timeout_s: float) -> Mesh | None:
    """Connect the ranks with each other; None on every rank if that is not possible for all. Collective."""
    if not 1 < world <= MOST_RANKS or not hasattr(socket, "AF_UNIX"):
        return None
    peers: dict[int, socket.socket] = {}
    connected = False
    try:
        with ExitStack() as undo:
            listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            address = _listen(listener, world, undo)
            addresses = [bytes(numbers).rstrip(b"\0").decode() for numbers in gather(list(address))]
            # All ranks listen, call those below them, and then answer those above: these have called by then, so that
            # no rank waits for a call that does not come.
            called = all(addresses) and _call(peers, rank, addresses[:rank])
            connected = _all(gather, called) and _all(gather, _answer(peers, listener, world - 1 - rank))
    finally:
        if not connected:
            for peer in peers.values():
                peer.close()
    return Mesh(peers, timeout_s) if connected else None


def _listen(listener: socket.socket, world: int, undo: ExitStack) -> bytes:
    """The address at which `listener` listens, or zeros if it cannot. `undo` removes what that leaves on the disk."""
    try:
        folder = tempfile.mkdtemp(prefix="andon-")  # only this user can enter it
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        address = str(Path(folder) / "s")
        listener.bind(address)
        listener.listen(world)
    except OSError:
        return bytes(_ADDRESS_BYTES)
    return address.encode().ljust(_ADDRESS_BYTES, b"\0")


def _call(peers: dict[int, socket.socket], rank: int, addresses: Sequence[str]) -> bool:
    """Call the ranks below this one, and say who calls. Returns whether all were reached."""
    try:
        for other, address in enumerate(addresses):
            peer = peers[other] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            peer.settimeout(_OPENING_S)
            peer.connect(address)
            peer.sendall(rank.to_bytes(_RANK_BYTES, "little"))
    except OSError:
        return False
    return True


def _answer(peers: dict[int, socket.socket], listener: socket.socket, count: int) -> bool:
    """Accept the calls of the ranks above this one. Returns whether all came."""
    listener.settimeout(_OPENING_S)
    try:
        for _ in range(count):
            peer, _unnamed = listener.accept()
            peer.settimeout(_OPENING_S)
            peers[int.from_bytes(peer.recv(_RANK_BYTES), "little")] = peer
    except OSError:
        return False
    return True


def _all(gather: IntGather, here: bool) -> bool:
    return all(numbers[0] for numbers in gather([int(here)]))


class GroupGather:
    """A `Gather` over a group on the CPU: one of `own_group`, or of torch. Without a group, of this process alone.

    Messages up to `width` integers are sent at that width, so that a rank at another point is read and judged: a
    collective of unequal lengths would end its process. Longer ones must have one length on all ranks.
    After `connect`, those up to `width` go through sockets between ranks of one machine.
    """

    def __init__(self, group: Any, width: int) -> None:
        self.rank = 0 if group is None else group.rank()
        self.world_size = 1 if group is None else group.size()
        self._alone = group is None
        self._group: Any = group
        if isinstance(group, dist.ProcessGroup):
            self._group = group._get_backend(torch.device("cpu"))
        self._unfinished: Any = None
        self._width = width
        self.raise_if_halted: Callable[[], None] | None = (
            None  # called now and then during a gather; may raise to end it
        )
        self.on_error: Callable[[RuntimeError], None] | None = None  # called with an error, before it ends a gather
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

    def fits_sockets(self, count: int) -> bool:
        return (self._mesh is not None or self._alone) and HEADER + count <= self._width

    def messages(self, sent: bytes) -> list[bytes]:
        """The message of each rank, by rank, all as long as `sent`, through sockets. Raises `DistNetworkError`."""
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
        """End the sockets and let the group go. Later gathers raise `ValueError`."""
        if self._mesh is not None:
            self._mesh.close()
        if self._group is None:
            return
        if self._unfinished is None or self._unfinished.is_completed():
            # Kept until the next group is made: gloo drops what it has sent and other ranks have not yet received.
            _closed_groups.append(self._group)
        else:
            # Kept for good: the end of a group waits for its collectives.
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
            if self.raise_if_halted is not None:
                self.raise_if_halted()
        try:
            work.wait()  # raises what the collective raised, unless the last rank has answered in between
        except RuntimeError as error:
            if self.on_error is not None:
                self.on_error(error)
            raise
