"""Short messages between the ranks of one machine, through sockets that connect each rank with each.

Gloo hands a collective from thread to thread, which takes several times as long as the message itself, and a watch
gathers a few hundred bytes twice a step. A gather that works sets the sockets up. They are used only if it shows that
all ranks reach each other.
"""

from __future__ import annotations

import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

MOST = 16
"""At most so many ranks are connected: every rank sends its message to every other one."""
_ADDRESS_BYTES = 104
"""The length of a socket's address that all systems allow."""
_LOOK = struct.pack("ll", 0, 200_000)
"""How long a wait lasts until it heeds: seconds and microseconds, in the system's format."""
_AWAKE_S = 100e-6
_OPENING_S = 10.0
_RANK_BYTES = 8

Numbers = Callable[[Sequence[int]], Sequence[Sequence[int]]]
"""A gather that works: from some integers of this rank to those of every rank, by rank. Collective."""


class Mesh:
    """Open connections of this rank to all others, by rank. timeout_s: how long a gather waits for another rank."""

    def __init__(self, peers: Mapping[int, socket.socket], timeout_s: float) -> None:
        self._peers, self._timeout_s = peers, timeout_s
        for peer in peers.values():
            # The socket's own timeout makes a wait one system call; Python's makes it two.
            peer.settimeout(None)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _LOOK)

    def gather(self, message: bytes, heed: Callable[[], None] | None = None) -> dict[int, bytes]:
        """The message of each other rank, all as long as `message`. Collective.

        heed: called now and then during the wait, which ends with what it raises. Raises `DistNetworkError` if another
        rank is gone, or silent for the timeout.
        """
        try:
            for peer in self._peers.values():
                peer.sendall(message)
            return {rank: self._receive(rank, len(message), heed) for rank in self._peers}
        except ConnectionError as error:
            raise dist.DistNetworkError(f"Connection closed by peer: {error}") from error

    def _receive(self, rank: int, size: int, heed: Callable[[], None] | None) -> bytes:
        peer, received, began = self._peers[rank], b"", time.monotonic()
        while len(received) < size:
            # Most ranks answer sooner than this one could fall asleep and wake up, so at first it polls. It does not
            # yield meanwhile: another thread or process would keep this core for longer than the answer takes.
            polls = time.monotonic() - began < _AWAKE_S
            try:
                part = peer.recv(size - len(received), socket.MSG_DONTWAIT if polls else 0)
            except BlockingIOError:
                if polls:
                    continue
                if time.monotonic() - began > self._timeout_s:
                    msg = f"Timed out waiting {self._timeout_s:g} s for rank {rank}"
                    raise dist.DistNetworkError(msg) from None
                if heed is not None:
                    heed()
                continue
            if not part:
                raise ConnectionError(f"rank {rank} is gone")
            received += part
        return received

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


def connect(rank: int, world: int, gather: Numbers, timeout_s: float) -> Mesh | None:
    """Connect the ranks with each other; None on every rank if that is not possible for all. Collective.

    timeout_s: how long a gather of the mesh waits. Raises what `gather` raises.
    """
    if not 1 < world <= MOST or not hasattr(socket, "AF_UNIX"):
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
    """Connect to the ranks below this one and send this rank. Returns whether all were reached."""
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


def _all(gather: Numbers, here: bool) -> bool:
    return all(numbers[0] for numbers in gather([int(here)]))
