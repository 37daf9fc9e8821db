"""An attack of another user of the same machine on a run, through the ports at which the run listens.

`Caller` connects to listeners and sends anything. `Forger` is a client of torch's store and writes what ranks write.
Neither reads the memory or the files of a run, because only the run's own user can.
"""

from __future__ import annotations

import json
import random
import re
import socket
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

import psutil
from psutil import Process

from andon_contracts.violation import Cause

GARBAGE: tuple[bytes, ...] = (
    b"",
    b"\xff\xfe\x00",
    b"null",
    b"[]",
    b"7" * 5000,
    b"[" * 100_000,
    b'{"kind": "died", "text": "x", "rank": 1, "step": 1}',
    b'{"number": 1, "process": {"pid": -1, "started": 0}, "status": {}}',
    b'{"number": NaN, "process": null, "status": [1e999]}',
)
Writes = dict[str, str | bytes | None]
"""Values by key; None deletes the key."""
Address = tuple[IPv4Address | IPv6Address, int]
_ANSWER_S = 0.2
_HELD = 64
"""The largest number of connections that stay open."""
_VALIDATE, _SET, _GET, _DELETE = 0, 1, 3, 9
_MAGIC = 0x3C85F7CE
"""The first message of a client of torch's TCPStore (torch/csrc/distributed/c10d/TCPStoreBackend.hpp)."""


def listeners(processes: Iterable[Process]) -> list[Address]:
    found: set[Address] = set()
    for process in processes:
        with suppress(psutil.Error):  # it has ended, or belongs to another user
            links = process.net_connections("tcp")
            found |= {(ip_address(each.laddr.ip), each.laddr.port) for each in links if each.status == "LISTEN"}
    return sorted(found, key=str)


class Caller:
    """Connects, sends something, and leaves or stays. `sent` counts each kind."""

    def __init__(self, seed: int, *, guesses: bool = False) -> None:
        """guesses: also send numbers of 8 bytes, which gloo accepts as the number of a rank while ranks connect."""
        self.sent: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._held: deque[socket.socket] = deque()
        self._kinds: dict[str, Callable[[], bytes]] = {
            "nothing": bytes,
            "garbage": lambda: self._random.randbytes(self._random.randint(1, 4096)),
            "a long text": lambda: self._random.choice(GARBAGE),
            "HTTP": lambda: b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
            "TCPStore": self._store_requests,
            "lengths": lambda: struct.pack("<Q", self._random.choice([1 << 31, 1 << 62, (1 << 64) - 1])) * 4,
        }
        if guesses:
            self._kinds["a number"] = lambda: struct.pack("<Q", self._random.randrange(1 << 8))

    def call(self, host: IPv4Address | IPv6Address, port: int) -> None:
        kind = self._random.choice(list(self._kinds))
        with suppress(OSError):  # the listener is gone, refuses, or hangs up
            loopback = "::1" if host.version == 6 else "127.0.0.1"
            link = socket.create_connection((loopback if host.is_unspecified else str(host), port), _ANSWER_S)
            link.settimeout(_ANSWER_S)
            self._held.append(link)
            self.sent[kind] += 1
            link.sendall(self._kinds[kind]())
            if self._random.random() < 0.02:  # the others do not wait for an answer
                link.recv(64)
        while len(self._held) > (_HELD if self._random.random() < 0.9 else 0):
            self._held.popleft().close()

    def close(self) -> None:
        while self._held:
            self._held.pop().close()

    def _store_requests(self) -> bytes:
        magic = _MAGIC if self._random.random() < 0.8 else self._random.getrandbits(32)
        key = self._random.choice(["/andon/world/x/verdict", "/andon/call 1", "/0//cpu//0/rank_1", "/beat 1"]).encode()
        named = struct.pack("<Q", len(key)) + key
        value = struct.pack("<Q", 3) + b"lie"
        requests = [bytes([_SET]) + named + value, bytes([_GET]) + named, bytes([_DELETE]) + named]
        return struct.pack("<BI", _VALIDATE, magic) + b"".join(self._random.choices(requests, k=4))


class Forger:
    """A client of a run's TCPStore that writes as ranks do. `forged` counts each kind.

    It finds the boards of guards by the names of their keys, which any client of the store can list.
    """

    def __init__(self, port: int, seed: int) -> None:
        import torch.distributed as dist

        self.forged: Counter[str] = Counter()
        self._store: Any = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
        self._random = random.Random(seed)
        self._kept: dict[str, list[bytes]] = {}
        self.kinds: dict[str, Callable[[str, int], Writes]] = {
            "garbage": self._garbage,
            "left": lambda _, rank: {f"left {rank}": "1"},
            "ended": lambda _, rank: {f"ended {rank}": "1"},
            "pulled": lambda _, rank: {"pulled": json.dumps(_failed(rank).to_json())},
            "unguarded": lambda _, rank: {"unguarded": json.dumps({"rank": rank, "text": "a lie of somebody"})},
            "beat": self._changed_beat,
            "deleted": lambda _, rank: dict.fromkeys(
                [f"beat {rank}", "pulled", f"left {rank}", f"ended {rank}", f"saw {rank}"]
            ),
            "replayed": lambda board, rank: {f"beat {rank}": self._beats(board, rank)[0]},
            "of another": self._beat_of_another,
        }

    def forge(self, kind: str = "") -> None:
        """Write something of this kind, or a random one, on every board in the name of one of its ranks."""
        boards: dict[str, list[int]] = {}
        for key in self._store.list_keys():
            if match := re.fullmatch(r"/?(.*andon/.*/)beat (\d+)", key):
                boards.setdefault(match[1], []).append(int(match[2]))
        for board, ranks in boards.items():
            for rank in ranks:
                key = f"{board}beat {rank}"
                value, kept = self._store.compare_set(key, "-", "-"), self._kept.setdefault(key, [])  # does not wait
                if value not in (b"-", *kept):
                    kept.append(value)
                    del kept[:-8]
            name = kind or self._random.choice(list(self.kinds))
            for key, value in self.kinds[name](board, self._random.choice(ranks)).items():
                if value is None:
                    self._store.delete_key(board + key)
                else:
                    self._store.set(board + key, value)
            self.forged[name] += 1

    def _garbage(self, _board: str, rank: int) -> Writes:
        key = self._random.choice([f"beat {rank}", "pulled", "unguarded", f"left {rank}"])
        return {key: self._random.choice(GARBAGE) + b"%d" % self._random.getrandbits(32)}

    def _beats(self, board: str, rank: int) -> list[bytes]:
        return self._kept.get(f"{board}beat {rank}") or [b""]

    def _changed_beat(self, board: str, rank: int) -> Writes:
        """The rank's last heartbeat with other numbers in it, with its signature or without."""
        beat = self._beats(board, rank)[-1]
        text = re.sub(rb'"(number|step|pid)": \d+', lambda m: b'"%s": %d' % (m[1], 1 << 40), beat)
        return {f"beat {rank}": text[self._random.choice([0, max(text.find(b"{"), 0)]) :]}

    def _beat_of_another(self, board: str, rank: int) -> Writes:
        """The signed value of one key under another key or on another board."""
        kept = [values[-1] for key, values in self._kept.items() if key != f"{board}beat {rank}" and values]
        key = self._random.choice([f"beat {rank}", f"left {rank}", "pulled"])
        return {key: self._random.choice(kept)} if kept else {}


def _failed(rank: int) -> Cause:
    return Cause("failed", f"rank {rank} failed: a lie.", rank, 1, ranks=(rank,))
