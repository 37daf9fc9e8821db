"""What no optimizer holds. Frozen weights: all read at the start, and again part by part, so that no step pays for
all. Buffers: small ones are read at every look; large ones where a version counter of torch moved, and in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter

import torch
from torch import Tensor

from andon_contracts.multi_tensor import ListSums, bring, listable
from andon_contracts.observe import Observer, chained, dense_parts, flat_digest
from andon_contracts.watch.values import text_digest

ROUND = 64
"""Looks within which every frozen weight was read, and every large buffer."""
SMALL_BYTES = 1 << 18
"""A buffer of no more is read at every look, as long as all such are no more than `_PART_BYTES`."""
_PART_BYTES = 1 << 20
_version = attrgetter("_version")


class FrozenBase:
    """The digest of weights that nobody is to change. All are read where a version counter of torch moved."""

    def __init__(self, frozen: Sequence[torch.nn.Parameter]) -> None:
        self._frozen = frozen
        self._parts: list[list[Tensor]] = []
        self._pieces: list[list[int]] = []
        """By part that has several tensors, the digest of each as it was at first."""
        self._sums: list[int] = []
        self._marks: list[int] = []
        self._looks = 0
        self._looked = self._moved = False
        self._turn: tuple[range, PartLook] | None = None
        self._readers: dict[int, PartReader] = {}
        """By turn, where a look is worth preparing."""
        self.first = self._begin()
        """The digest at the start, in [0, 2^64)."""
        self._now = self.first

    def __bool__(self) -> bool:
        """Whether there is anything frozen."""
        return bool(self._frozen)

    def look(self) -> None:
        """Look at the part whose turn it is; `digest`, which otherwise does so itself, says what was found."""
        self._looked, self._turn, self._moved = True, None, not self.untouched
        if self._moved:
            return
        parts, turn = len(self._parts), self._looks % ROUND
        self._looks += 1
        these = range(parts * turn // ROUND, parts * (turn + 1) // ROUND)
        if these:
            if turn not in self._readers:
                self._readers[turn] = PartReader(self._parts[these.start : these.stop])
            self._turn = these, self._readers[turn].look()

    def waiting(self) -> list[list[Tensor]]:
        """What devices have yet to say of the look, in lists that may be brought to the CPU before `digest`."""
        return [] if self._turn is None else [self._turn[1].waiting]

    def digest(self, *, whole: bool = False) -> int:
        """The digest of what was last read of each weight; one call for each update. whole: read all of them now."""
        if not self._looked:
            self.look()
        self._looked = False
        if whole:
            return self.last_look()
        if self._moved:
            return self.first if self._thawed() else self.last_look()
        if self._turn is None:
            return self._now
        these, looked = self._turn
        seen = looked.sums()
        changed = seen != self._sums[these.start : these.stop]
        self._sums[these.start : these.stop] = seen
        if changed and self._thawed():
            return self.first
        if changed:
            self._now = chained(len(self._sums), self._sums)
        return self._now

    @property
    def untouched(self) -> bool:
        """Whether no version counter moved since the last look."""
        return self._marks == self._marked()

    def accept(self) -> int:
        """What is there now is the base from here on. Returns its digest."""
        self.first = self._now = self._begin()
        return self.first

    def changed(self) -> torch.nn.Parameter | None:
        """The first weight that is not what it was at first; None where there is none."""
        for part, first, pieces in zip(_parts(self._frozen), self._first_sums, self._pieces, strict=True):
            if sums_of_parts([part]) != [first]:
                odd = (each for each, was in zip(part, pieces, strict=False) if sums_of_parts([[each]]) != [was])
                place = next(odd, part[0]).data_ptr()
                ends = ((p, each.data_ptr(), each.nbytes) for p in self._frozen for each in dense_parts(p))
                return next((p for p, begin, size in ends if begin <= place < begin + size), None)
        return None

    def _begin(self) -> int:
        """Read all, as what it is held to. Returns the digest."""
        found = self._read_all()
        self._first_sums = list(self._sums)
        several = [part if len(part) > 1 else [] for part in self._parts]
        sums = iter(sums_of_parts([[each] for part in several for each in part]))
        self._pieces = [list(islice(sums, len(part))) for part in several]
        return found

    def last_look(self) -> int:
        """The digest of all as they are now, whatever was read before."""
        self._now = self._read_all()
        return self._now

    def _thawed(self) -> bool:
        """Whether a weight is frozen no longer; then it is none of the base, and what is left begins anew."""
        left = [parameter for parameter in self._frozen if not parameter.requires_grad]
        if len(left) == len(self._frozen):
            return False
        self._frozen = left
        self.accept()
        return True

    def _marked(self) -> list[int]:
        # A write in place is counted in the version; `.data = ` is not, and moves the memory.
        return [*map(_version, self._frozen), *map(Tensor.data_ptr, self._frozen)]

    def _read_all(self) -> int:
        self._marks = self._marked()
        self._parts, self._readers = list(_parts(self._frozen)), {}
        self._sums = sums_of_parts(self._parts)
        return chained(len(self._sums), self._sums)


@dataclass(frozen=True)
class PartLook:
    """The sums of parts: where a CPU found them, and by device those that it has yet to say."""

    found: dict[int, int]
    places: list[list[int]]
    waiting: list[Tensor]

    def sums(self) -> list[int]:
        """One in [0, 2^64) for each part, in order. Waits for the devices, unless `waiting` was brought to the CPU."""
        bring(self.waiting)
        found = dict(self.found)
        for places, sums in zip(self.places, self.waiting, strict=True):
            found |= {place: value % (1 << 64) for place, value in zip(places, sums.tolist(), strict=True)}
        return [found[place] for place in sorted(found)]


class PartReader:
    """Reads the same parts again and again, each a list of tensors: those of a GPU, with Triton, in one launch."""

    def __init__(self, parts: Sequence[Sequence[Tensor]]) -> None:
        self._others: dict[int, Sequence[Tensor]] = {}
        self._places: dict[torch.device, list[int]] = {}
        for place, part in enumerate(parts):
            device = part[0].device
            alike = all(each.device == device and each.is_contiguous() for each in part)
            if alike and listable(device):
                self._places.setdefault(device, []).append(place)
            else:
                self._others[place] = part
        self._lists = [
            ([*chain.from_iterable(parts[i] for i in places)], _list_of(device, [parts[i] for i in places]))
            for device, places in self._places.items()
        ]

    def look(self) -> PartLook:
        """What is there now. No wait for a GPU with Triton."""
        found = {place: flat_digest(part) for place, part in self._others.items()}
        return PartLook(found, list(self._places.values()), [each.look(tensors) for tensors, each in self._lists])


def _list_of(device: torch.device, parts: Sequence[Sequence[Tensor]]) -> ListSums:
    """Of each of `parts` one sum, of its tensors as if each were filled up to whole words."""
    rows: list[tuple[int, int, int]] = []
    for place, part in enumerate(parts):
        start = 0
        for each in part:
            rows.append((each.nbytes, start, place))
            start += -(-each.nbytes // 8)
    return ListSums(device, rows)


def sums_of_parts(parts: Sequence[Sequence[Tensor]]) -> list[int]:
    """One in [0, 2^64) for each of `parts`, as `PartReader` gives it."""
    return PartReader(parts).look().sums()


class Buffers:
    """The digest of a model's buffers. What is read is decided by sizes and by the update alone, so that ranks that
    miss a look still compare the same.
    """

    def __init__(self) -> None:
        self._small, self._large, self._part = Observer(stable=True), Observer(), Observer()
        self._marks: list[int] | None = None
        self._now = 0

    def portable(self, portable: bool) -> None:
        """Whether digests must be the same on all kinds of devices, because the ranks' devices differ."""
        for reader in (self._small, self._large, self._part):
            reader.portable = portable
        self._marks = None

    def digest(self, buffers: Sequence[Tensor], update: int) -> int:
        """The digest in [0, 2^64) of the small ones of `buffers`, of what was last read of the large ones, and of the
        part of these whose turn is at `update`, read now.
        """
        small, large = _by_size(buffers)
        found = [self._small.look(small).digest]
        if large:
            marks = [*map(id, large), *map(_version, large), *map(Tensor.data_ptr, large)]
            if marks != self._marks:
                self._marks, self._now = marks, self._large.look(large).digest
            found += [self._now, self._part.look(_turn(large, update)).digest]
        return chained(len(found), found)


class Followers:
    """Frozen copies of what is trained, which a loop moves after it: teachers, momentum encoders, averages.

    A part of them is read at each update, all within `ROUND`, and nothing is kept of it: they change at any time.
    """

    def __init__(self, copies: Sequence[Tensor]) -> None:
        self._copies = copies
        self._first = [flat_digest(part) for part in _parts(copies)]

    def digests(self, update: int) -> dict[str, int]:
        """Of the part whose turn is at `update`: as it is now, and as it was at the start; 0 where there is none."""
        if not self._first:
            return {"followed": 0, "first followed": 0}
        turns = self._turns(update)
        now = [flat_digest(part) for index, part in enumerate(_parts(self._copies)) if index in turns]
        first = [self._first[index] for index in turns]
        return {"followed": chained(len(now), now), "first followed": chained(len(first), first)}

    def _turns(self, update: int) -> range:
        parts, turn = len(self._first), update % ROUND
        if parts < ROUND:
            return range(update % parts, update % parts + 1)
        return range(parts * turn // ROUND, parts * (turn + 1) // ROUND)


class BufferLooks:
    """The digests of buffers with which the forward passes of a window began, by the module that was called."""

    def __init__(self, homes: int) -> None:
        self._found: list[tuple[int, int, int] | None] = [None] * homes

    def add(self, home: int, digests: tuple[int, int, int]) -> None:
        """What was found of the buffers of module `home`: `BufferProbe.digests`."""
        self._found[home] = digests

    def values(self) -> dict[str, int]:
        """The integers of a message; 0 where there was no forward pass."""
        columns = zip(*[each or (0, 0, 0) for each in self._found], strict=True) if any(self._found) else ((0,),) * 3
        names = ("buffers", "caches", "cache shapes")
        return {name: chained(len(c), c) if any(c) else 0 for name, c in zip(names, columns, strict=True)}

    def clear(self) -> None:
        """Another window begins."""
        self._found = [None] * len(self._found)


class BufferProbe:
    """The buffers of one module: those that a checkpoint has, and caches, which may grow on one rank alone."""

    def __init__(self) -> None:
        self._kept, self._caches = Buffers(), Buffers()

    def portable(self, portable: bool) -> None:
        """Whether digests must be the same on all kinds of devices, because the ranks' devices differ."""
        self._kept.portable(portable)
        self._caches.portable(portable)

    def digests(self, kept: Sequence[Tensor], caches: Sequence[Tensor], update: int) -> tuple[int, int, int]:
        """Of the buffers in a checkpoint, of the others, and of the shapes of these; 0 where there are none."""
        return (
            self._kept.digest(kept, update) if kept else 0,
            self._caches.digest(caches, update) if caches else 0,
            text_digest([tuple(each.shape) for each in caches]) if caches else 0,
        )


def _by_size(buffers: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The small ones of `buffers` and the others, each in order."""
    small: list[Tensor] = []
    large: list[Tensor] = []
    room = _PART_BYTES
    for buffer in buffers:
        size = buffer.numel() * buffer.element_size()
        if size <= min(SMALL_BYTES, room):
            room -= size
            small.append(buffer)
        else:
            large.append(buffer)
    return small, large


def _turn(tensors: Sequence[Tensor], update: int) -> list[Tensor]:
    """The parts of `tensors` whose turn it is: all of them within `ROUND` updates."""
    parts, turn = list(_parts(tensors)), update % ROUND
    if len(parts) < ROUND:
        return parts[update % len(parts)]
    return [piece for part in parts[len(parts) * turn // ROUND : len(parts) * (turn + 1) // ROUND] for piece in part]


def _parts(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """`tensors` in order as lists of views of about `_PART_BYTES`, large ones in slices."""
    part: list[Tensor] = []
    size = 0
    for tensor in chain.from_iterable(map(dense_parts, tensors)):
        for piece in _slices(tensor):
            bytes_ = piece.numel() * piece.element_size()
            if part and size + bytes_ > _PART_BYTES:
                yield part
                part, size = [], 0
            part.append(piece)
            size += bytes_
    if part:
        yield part


def _slices(tensor: Tensor) -> Sequence[Tensor]:
    # Only a contiguous tensor has slices that stay views of it.
    if not tensor.is_contiguous():
        return (tensor,)
    return torch.split(tensor.view(-1), max(1, _PART_BYTES // tensor.element_size()))
