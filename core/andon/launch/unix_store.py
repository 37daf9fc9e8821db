"""The ranks' client of the launcher's `StoreServer`, in the form of torch's stores."""

from __future__ import annotations

import functools
import os
from collections import deque
from datetime import timedelta
from multiprocessing.connection import Client, Connection

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from andon.launch.store_server import packed, unpacked

_LATE_S = 5.0
"""How much longer than the server waits for a key, a client waits for the server to say so."""


class UnixStore(Store):
    """A client of a `StoreServer`, as torch takes stores, for any number of threads.

    A call that waits for a value has a connection to itself, so that no other call waits for it. Raises
    `DistNetworkError` once the server is gone, and `DistStoreError` for values that have not come in time.

    Torch keeps no reference to a store written in Python: the caller must keep it alive.
    """

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address
        self._idle: deque[Connection] = deque()
        self._process = os.getpid()

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        return self._awaited([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._awaited(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._awaited(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", *keys))

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Set the value if the present one is `expected` ("": none is there); returns the value afterwards."""
        return self._ask("compare_set", key, expected, value)[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, str(amount))[0])

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key))

    deleteKey = delete_key

    def _awaited(self, keys: list[str], timeout: timedelta | None = None) -> list[bytes]:
        seconds = (timeout or self.timeout).total_seconds()  # type: ignore[attr-defined]
        found = self._ask("get", repr(seconds), *keys, wait_s=seconds + _LATE_S) if keys else []
        if len(found) != len(keys):
            raise dist.DistStoreError(f"wait timeout after {seconds * 1000:.0f}ms, keys: {', '.join(keys)}")
        return found

    def _ask(self, *parts: str | bytes, wait_s: float | None = None) -> list[bytes]:
        if self._process != os.getpid():  # the connections of the process that this one was forked from are its own
            self._process, self._idle = os.getpid(), deque()
        try:
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = Client(self._address, "AF_UNIX")
            connection.send_bytes(packed([part.encode() if isinstance(part, str) else part for part in parts]))
            if wait_s is not None and not connection.poll(wait_s):
                connection.close()
                return []
            answer = unpacked(connection.recv_bytes())
        except (OSError, EOFError) as error:
            raise dist.DistNetworkError(f"the launcher's store is gone: {error or 'connection closed'}") from error
        self._idle.append(connection)
        return answer


@functools.cache
def unix_store(address: str) -> UnixStore:
    """The one client of this process for the server at `address`; it lives as long as the process."""
    return UnixStore(address)
