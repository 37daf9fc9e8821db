"""A client of the ranks' store that is no rank: it puts garbage wherever a guard of Andon looks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GARBAGE: tuple[bytes, ...] = (
    b"",
    b"\xff\xfe\x00",
    b"null",
    b"[]",
    b"7" * 5000,
    b"[" * 100_000,
    b'{"kind": "died", "text": "x", "rank": 1, "step": 1}',
    b'{"number": 1, "process": {"pid": -1, "started": 0}, "told": {}}',
    b'{"number": NaN, "process": null, "told": [1e999]}',
)


class Hostile:
    """It finds the places of guards by the names of keys, as anybody can who reaches the store."""

    def __init__(self, port: int) -> None:
        import torch.distributed as dist

        self._store: Any = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
        self._numbers: Iterator[int] = itertools.count()

    def spoil(self) -> int:
        """Put garbage, each time another, in the place of every beat and cause; how many places there are."""
        beats = [key for key in self._store.list_keys() if re.search(r"andon/.*/beat \d+$", key)]
        places = {*beats, *(key.rpartition("/")[0] + "/pulled" for key in beats)}
        for key in places:
            number = next(self._numbers)
            self._store.set(key, GARBAGE[number % len(GARBAGE)] + b"%d" % number)
        return len(places)


def listening_ports(pid: int) -> list[int]:
    """The TCP ports at which this process of this machine listens (proc(5))."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(descriptor.readlink().name)
        except FileNotFoundError:
            continue
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return sorted(ports)
