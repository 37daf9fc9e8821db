"""The ranks' store on one machine: a Unix socket that other users cannot open (torch's own store listens on TCP).

The socket lies in multiprocessing's temporary folder, which only this user may enter. The server also asks the kernel
for the user of each client. It runs a thread per connection in the launcher's process and ends with it. Messages are
byte strings with their lengths; nothing is unpickled.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Client, Connection, Listener

_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")  # process, user and group of the other end (unix(7), SO_PEERCRED)


class StoreServer:
    """Values by name for the processes of this user, at the socket `address`, until it is closed.

    Raises `OSError` if no socket can be created in the temporary folder.
    """

    def __init__(self) -> None:
        self._listener = Listener(family="AF_UNIX", backlog=512)
        self.address = str(self._listener.address)
        self._values: dict[bytes, bytes] = {}
        self._changed, self._closed = threading.Condition(), threading.Event()
        self._accepting = threading.Thread(target=self._accept, name="andon-store", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Stop accepting connections. Connected clients are still answered."""
        self._closed.set()
        with suppress(OSError):  # it has been closed before, or its folder is gone
            Client(self.address, "AF_UNIX").close()  # wakes the accepting thread
            self._accepting.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                with ExitStack() as stack:
                    connection = stack.enter_context(self._listener.accept())
                    if not self._closed.is_set() and _is_ours(connection):
                        serve = threading.Thread(
                            target=self._serve, args=(connection,), name="andon-store", daemon=True
                        )
                        serve.start()
                        stack.pop_all()  # the thread closes it
            except (OSError, RuntimeError):
                if not self._closed.is_set():
                    time.sleep(0.01)  # no descriptor or thread is free, or the client has gone: keep accepting

    def _serve(self, connection: Connection) -> None:
        # Until the client disconnects or sends an invalid call.
        with connection, suppress(EOFError, OSError, ValueError, TypeError, struct.error):
            while True:
                call = unpacked(connection.recv_bytes())
                with self._changed:
                    answer = self._answer(*call)
                connection.send_bytes(packed(answer))

    def _answer(self, name: bytes, *parts: bytes) -> list[bytes]:
        values = self._values
        match name, parts:
            case b"set", (key, value):
                values[key] = value
            case b"get", (seconds, *keys):
                complete = self._changed.wait_for(lambda: values.keys() >= {*keys}, float(seconds))
                return [values[key] for key in keys] if complete else []
            case b"check", keys:
                return [b"1"] if values.keys() >= {*keys} else []
            case b"compare_set", (key, expected, desired):
                if values.get(key, b"") != expected:
                    return [values.get(key, expected)]
                values[key] = desired
            case b"add", (key, amount):
                values[key] = b"%d" % (int(values.get(key, b"0")) + int(amount))
            case b"delete", (key,):
                return [b"1"] if values.pop(key, None) is not None else []
            case _:
                raise ValueError(f"no call of a store: {name!r}")
        self._changed.notify_all()
        return [values[key]] if name in (b"compare_set", b"add") else []


def _is_ours(connection: Connection) -> bool:
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    with socket.socket(fileno=os.dup(connection.fileno())) as shared:
        raw = shared.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.geteuid())


def packed(parts: Sequence[bytes]) -> bytes:
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def unpacked(raw: bytes) -> list[bytes]:
    parts, at = [], 0
    while at < len(raw):
        (length,) = _LENGTH.unpack_from(raw, at)
        at += _LENGTH.size + length
        parts.append(raw[at - length : at])
    return parts
