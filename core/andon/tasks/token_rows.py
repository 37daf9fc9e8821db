"""Storage of encoded rows as columns of concatenated tokens, best-fit packing, and padding of batches.

Columns may be memory-mapped files: unused rows take no memory, and the ranks of a host share the pages of used ones.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, Self

import torch

from andon.data.chat import EncodedRow

KINDS: Mapping[str, torch.dtype] = {"i": torch.int32, "q": torch.int64, "f": torch.float32}
COLUMNS: Mapping[str, str] = {
    "tokens": "i",
    "weights": "f",
    "ends": "q",
    "trained": "i",
    "cut": "i",
    "cut_trained": "i",
}
"""The `array` type code of each column; `KINDS` maps it to torch. `tokens` and `weights` have one value per token."""


class PaddedRows:
    """Base of all tasks: rows by id, in batches padded to a multiple of `_multiple` tokens, but not beyond `_limit`.

    notes: lines for the user. counts_right: predictions are right or wrong, so `LeafLoss.correct` has a meaning.
    lengths: int64 [rows], tokens. _table: int64 [rows], the expected digests.
    """

    notes: tuple[str, ...] = ()
    counts_right = True
    lengths: torch.Tensor
    _table: Any
    _multiple: int
    _limit: int | None

    def __len__(self) -> int:
        return self.lengths.numel()

    def padded_to(self, multiple: int, max_length: int) -> Self:
        """The same rows with batches padded to a multiple of `multiple`, but not beyond `max_length`."""
        task = copy.copy(self)
        task._multiple, task._limit = multiple, max_length
        return task

    def planned_content(self, ids: Sequence[int]) -> torch.Tensor:
        """int64 [len(ids)] on the CPU: the expected digests (`content`), computed from the stored rows."""
        digests: torch.Tensor = self._table[list(ids)]
        return digests

    def _require_known(self, ids: Sequence[int]) -> None:
        if not ids:
            raise ValueError("a batch needs at least one row")
        if min(ids) < 0 or max(ids) >= len(self):
            raise IndexError(f"rows {min(ids)} to {max(ids)} asked of a task with {len(self)}")


class FlatRows(Sequence[Sequence[int]]):
    """Ragged rows of integers, concatenated in one tensor, possibly memory-mapped. ends: end offset of each row."""

    def __init__(self, flat: torch.Tensor, ends: Sequence[int]) -> None:
        self.flat, self._ends = flat, [0, *ends]

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, row: Any) -> Any:
        return self.flat[self._ends[row] : self._ends[row + 1]].tolist()


def columns_of(rows: Iterable[EncodedRow], end: int = 0) -> dict[str, array[int] | array[float]]:
    """The columns of `rows`. end: the number of tokens in all earlier rows."""
    columns: dict[str, Any] = {name: array(kind) for name, kind in COLUMNS.items()}
    for row in rows:
        end += len(row.ids)
        columns["tokens"].extend(row.ids)
        columns["weights"].extend(row.weights)
        columns["ends"].append(end)
        columns["trained"].append(len(row.weights) - 1 - row.weights[1:].count(0.0))
        columns["cut"].append(row.cut)
        columns["cut_trained"].append(row.cut_trained)
    return columns


def sums_of(values: torch.Tensor, packs: Sequence[Sequence[int]]) -> torch.Tensor:
    """int64 [packs]: sum of `values` over each pack. values: one per row of each pack, in the order of `packs`."""
    sizes = torch.tensor([len(pack) for pack in packs], dtype=torch.int64)
    ends = sizes.cumsum(0)
    upto = torch.cat([values.new_zeros(1), values.cumsum(0)])
    return upto[ends] - upto[ends - sizes]


class TokenRows:
    """Encoded rows by position, from 0. int64 [rows]: `lengths`, `trained` (trained tokens), `cut` (tokens cut off),
    `cut_trained` (trained tokens among those)."""

    def __init__(self, columns: Mapping[str, torch.Tensor]) -> None:
        self._columns = columns
        ends = columns["ends"]
        self._starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        self.lengths = ends - self._starts
        self.trained, self.cut, self.cut_trained = (columns[name].long() for name in ("trained", "cut", "cut_trained"))

    @classmethod
    def of(cls, rows: Sequence[EncodedRow]) -> Self:
        return cls({name: torch.tensor(each, dtype=KINDS[COLUMNS[name]]) for name, each in columns_of(rows).items()})

    def __len__(self) -> int:
        return self.lengths.numel()

    def tensors(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A row's tokens int64 [length] and weights fp32 [length]."""
        here = slice(int(self._starts[row]), int(self._columns["ends"][row]))
        return self._columns["tokens"][here].long(), self._columns["weights"][here]

    def row(self, row: int) -> EncodedRow:
        """A row as it was encoded; its id is its position."""
        tokens, weights = self.tensors(row)
        cut, cut_trained = (int(self._columns[name][row]) for name in ("cut", "cut_trained"))
        return EncodedRow(row, array("i", tokens.tolist()), array("f", weights.tolist()), cut, cut_trained)

    def laid_out(self, packs: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [packs, length, 4]: per token, its id, its position in the row, the 1-based number of its row in the
        pack, and the bits of its fp32 weight (0 for a row's first token). Zeros are padding. Also int64 [packs]: the
        number of tokens of each pack.
        """
        rows = torch.tensor([row for pack in packs for row in pack], dtype=torch.int64)
        lengths = self.lengths[rows]
        firsts = lengths.cumsum(0) - lengths
        places = torch.arange(int(lengths.sum())) - firsts.repeat_interleave(lengths)
        sources = self._starts[rows].repeat_interleave(lengths) + places
        weights = self._columns["weights"][sources]
        weights[firsts] = 0.0
        numbers = torch.tensor([number for pack in packs for number in range(1, len(pack) + 1)], dtype=torch.int64)
        fields = [
            self._columns["tokens"][sources].long(),
            places,
            numbers.repeat_interleave(lengths),
            weights.view(torch.int32).long(),
        ]
        counts = sums_of(lengths, packs)
        real = torch.arange(int(counts.max())) < counts.unsqueeze(1)
        table = torch.zeros((*real.shape, len(fields)), dtype=torch.int64)
        table[real] = torch.stack(fields, dim=1)
        return table, counts


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bin-pack rows into packs of at most `capacity` tokens. Returns the positions in `lengths` of each pack's rows.

    Best-fit decreasing: the longest row first (ties: the earliest), into the fullest pack that has room (ties: the
    oldest). The packs depend only on the lengths. They are in order of creation, and a pack's rows in order of
    placement. Uses at most 11/9 of the optimal number of packs, plus a constant (Johnson 1973).

    Raises `ValueError` for a length outside 1 to `capacity`.
    """
    for place, length in enumerate(lengths):
        if not 0 < length <= capacity:
            raise ValueError(f"row {place} has {length} tokens, and a pack has room for 1 to {capacity}")
    packs: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # by free tokens: a heap of pack numbers
    rooms = 0  # bit r is set if a pack has exactly r free tokens
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
