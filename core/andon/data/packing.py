"""Rows of different lengths, packed together so that little is padded."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs of rows of at most `capacity` tokens; each row (its position in `lengths`) is in exactly one pack.

    Best-fit decreasing: the longest row first (of equal rows the first), into the pack with the least room left (of
    equal packs the oldest). So the packs are a function of the lengths alone. They are in the order of their creation,
    and a pack's rows in the order of their placement. At most 11/9 of the fewest packs possible, plus a constant
    (Johnson 1973).

    Raises `ValueError` for a length that is not from 1 to `capacity`.
    """
    for place, length in enumerate(lengths):
        if not 0 < length <= capacity:
            msg = f"row {place} has {length} tokens, and a pack has room for 1 to {capacity}"
            raise ValueError(msg)
    packs: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # by the room left: heaps of packs' numbers
    rooms = 0  # bit r is set where some pack has room for r tokens more
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        length = lengths[place]
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            pack = heappop(with_room[room])
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, pack = capacity, len(packs)
            packs.append([])
        packs[pack].append(place)
        left = room - length
        if left:
            heappush(with_room[left], pack)
            rooms |= 1 << left
    return packs


def padded_share(lengths: Sequence[int], packs: Sequence[Sequence[int]], capacity: int) -> float:
    """The share (0 to 1) of padding tokens if each pack is padded to `capacity`; 0 without packs."""
    room = len(packs) * capacity
    return 1 - sum(lengths[place] for pack in packs for place in pack) / room if room else 0.0
