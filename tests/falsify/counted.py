"""What the soak's account of memory sees in a process where nothing else happens: `python -m tests.falsify.counted`.

In the process of a test other threads come and go, and with them what they have mapped.
"""

from __future__ import annotations

import json
import mmap

from benchmarks.soak_ranks import beside, in_use

MIB = 2**20
BLOCKS = ((4000, 2000), (5 * MIB, 3))
"""(size, count) of blocks that are taken and given back."""


def main() -> None:
    """Print a JSON list, one row for each of `BLOCKS`, then one for 16 MiB that are mapped: how much more is in use and
    beside, and in use after they were given back."""
    found = []
    for size, count in BLOCKS:
        before, mapped = in_use(), beside()
        kept = [bytes(size) for _ in range(count)]
        held, apart = in_use() - before, beside() - mapped
        kept.clear()
        found.append((held, apart, in_use() - before))
    before, mapped = in_use(), beside()
    with mmap.mmap(-1, 16 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
        found.append((in_use() - before, beside() - mapped, 0))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
