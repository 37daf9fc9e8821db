"""Short messages between the ranks of one machine, through sockets that connect each with each.

Gloo hands a collective from thread to thread, which takes several times as long as the message itself; a watch gathers
a few hundred bytes twice a step. The sockets are made with the help of a gather that works, and used only where that
shows that all ranks reach each other.
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
"""Up to so many ranks are connected: every rank sends its message to every other one."""
_ADDRESS_BYTES = 104
"""What the address of such a socket may have on all systems."""
_LOOK = struct.pack("ll", 0, 200_000)
"""How long a wait lasts until it heeds: seconds and microseconds, as the system wants them."""
_AWAKE_S = 100e-6
_OPENING_S = 10.0
_RANK_BYTES = 8

Numbers = Callable[[Sequence[int]], Sequence[Sequence[int]]]
"""A gather that works: from some integers of this rank to those of every rank, by rank. Collective."""


class Mesh:
    """Open connections of this rank to all others, by rank."""

    def __init__(self, peers: Mapping[int, socket.socket], timeout_s: float) -> None:
        """timeout_s: how long a gather waits for another rank."""
        self._peers = peers
        self._timeout_s = timeout_s
        for peer in peers.values():
            # A wait with a limit of the socket's own is one call of the system; one of Python's is two.
            peer.settimeout(None)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _LOOK)

    def gather(self, message: bytes, heed: Callable[[], None] | None = None) -> dict[int, bytes]:
        """The message of each other rank, all as long as `message`. All ranks gather alike.

        heed: called now and then while this waits; what it raises ends the wait. Raises `DistNetworkError` where
        another rank is gone, or silent for the timeout.
        """
        try:
            for peer in self._peers.values():
                peer.sendall(message)
            return {rank: self._receive(rank, len(message), heed) for rank in self._peers}
        except ConnectionError as error:
            raise dist.DistNetworkError(f"Connection closed by peer: {error}") from error

    def _receive(self, rank: int, size: int, heed: Callable[[], None] | None) -> bytes:
        received = b""
        began = time.monotonic()
        while len(received) < size:
            try:
                part = self._part(rank, size - len(received), began)
            except BlockingIOError:
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

    def _part(self, rank: int, size: int, began: float) -> bytes:
        """At most `size` bytes of what `rank` sent. Raises `BlockingIOError` where nothing came for `_LOOK`.

        Ranks mostly come within less than it takes to fall asleep and to be woken up: so at first this stays awake. It
        does not give way meanwhile: whatever else runs on this core would keep it for longer than this takes.
        """
        peer = self._peers[rank]
        while time.monotonic() - began < _AWAKE_S:
            try:
                return peer.recv(size, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
        return peer.recv(size)

    def close(self) -> None:
        """End the connections."""
        for peer in self._peers.values():
            peer.close()


def connect(rank: int, world: int, gather: Numbers, timeout_s: float) -> Mesh | None:
    """Connect the ranks with each other; None on every rank where that is not possible for all. Collective.

    timeout_s: how long a gather is to wait. Raises what `gather` raises.
    """
    if not 1 < world <= MOST or not hasattr(socket, "AF_UNIX"):
        return None
    peers: dict[int, socket.socket] = {}
    with ExitStack() as undo:
        undo.callback(_close, peers)
        if not _connected(peers, rank, world, gather):
            return None
        undo.pop_all()
    return Mesh(peers, timeout_s)


def _close(peers: Mapping[int, socket.socket]) -> None:
    for peer in peers.values():
        peer.close()


def _connected(peers: dict[int, socket.socket], rank: int, world: int, gather: Numbers) -> bool:
    """Fill `peers`; whether every rank could. All ranks listen, call those below them, and answer those above."""
    with ExitStack() as undo:
        listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        address = _listen(listener, world, undo)
        addresses = [bytes(numbers).rstrip(b"\0").decode() for numbers in gather(list(address))]
        called = all(addresses) and _call(peers, rank, addresses[:rank])
        # Who answers has been called by all, so that nobody waits for a call that does not come.
        return _all(gather, called) and _all(gather, _answer(peers, listener, world - 1 - rank))


def _listen(listener: socket.socket, world: int, undo: ExitStack) -> bytes:
    """Where `listener` listens; zeros where it cannot. `undo` takes away what that leaves on the disk."""
    try:
        folder = tempfile.mkdtemp(prefix="andon-")  # nobody but this user can enter it
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        address = str(Path(folder) / "s")
        listener.bind(address)
        listener.listen(world)
    except OSError:
        return bytes(_ADDRESS_BYTES)
    return address.encode().ljust(_ADDRESS_BYTES, b"\0")


def _call(peers: dict[int, socket.socket], rank: int, addresses: Sequence[str]) -> bool:
    """Connect to the ranks below this one and say who calls. Whether all were reached."""
    for other, address in enumerate(addresses):
        peer = peers[other] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer.settimeout(_OPENING_S)
        try:
            peer.connect(address)
            peer.sendall(rank.to_bytes(_RANK_BYTES, "little"))
        except OSError:
            return False
    return True


def _answer(peers: dict[int, socket.socket], listener: socket.socket, count: int) -> bool:
    """Accept the calls of the ranks above this one. Whether all came."""
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
