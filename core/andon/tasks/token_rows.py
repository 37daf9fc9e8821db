"""Encoded conversations as columns: the tokens of all rows end to end, and where each row ends.

Columns may be memory-mapped files: rows that are not used take no memory, and the ranks of a host share the others.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

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
"""The `array` type of each column; `KINDS` has torch's."""
OF_TOKENS = ("tokens", "weights")
"""The columns with a number for each token; the others have a number for each row."""


def columns_of(rows: Iterable[EncodedRow], end: int = 0) -> dict[str, array[int] | array[float]]:
    """The columns of some rows. end: the number of tokens of the rows before them."""
    tokens, weights = array(COLUMNS["tokens"]), array("f")
    of_rows = {name: array(kind) for name, kind in COLUMNS.items() if name not in OF_TOKENS}
    for row in rows:
        end += len(row.ids)
        trained = len(row.weights) - 1 - row.weights[1:].count(0.0)
        for column, value in zip(of_rows.values(), (end, trained, row.cut, row.cut_trained), strict=True):
            column.append(value)
        tokens.extend(row.ids)
        weights.extend(row.weights)
    return {"tokens": tokens, "weights": weights, **of_rows}


def sums_of(values: torch.Tensor, packs: Sequence[Sequence[int]]) -> torch.Tensor:
    """int64 [packs]: the sum of the values of each pack's rows. values: one for each row of each pack, in order."""
    sizes = torch.tensor([len(pack) for pack in packs], dtype=torch.int64)
    ends = sizes.cumsum(0)
    upto = torch.cat([values.new_zeros(1), values.cumsum(0)])
    return upto[ends] - upto[ends - sizes]


class TokenRows:
    """Rows by position, from 0. int64 [rows]: `lengths`: tokens; `trained`: how many of them are trained; `cut`: tokens
    that were cut off; `cut_trained`: how many of these would have been trained."""

    def __init__(self, columns: Mapping[str, torch.Tensor]) -> None:
        self._columns = columns
        ends = columns["ends"]
        self._starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        self.lengths = ends - self._starts
        self.trained, self.cut, self.cut_trained = (columns[name].long() for name in ("trained", "cut", "cut_trained"))

    @classmethod
    def of(cls, rows: Sequence[EncodedRow]) -> Self:
        return cls(
            {name: torch.tensor(each, dtype=KINDS[COLUMNS[name]]) for name, each in columns_of(rows).items()},
        )

    def __len__(self) -> int:
        return self.lengths.numel()

    def tensors(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A row's tokens, int64, and their weights, fp32."""
        here = slice(int(self._starts[row]), int(self._columns["ends"][row]))
        return self._columns["tokens"][here].long(), self._columns["weights"][here]

    def row(self, row: int) -> EncodedRow:
        """A row as it was encoded; its id is its position."""
        tokens, weights = self.tensors(row)
        cut, cut_trained = (int(self._columns[name][row]) for name in ("cut", "cut_trained"))
        return EncodedRow(row, array("i", tokens.tolist()), array("f", weights.tolist()), cut, cut_trained)

    def laid_out(self, packs: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [packs, length, 4]: for each token its id, its position in its row, the number of its row in the pack,
        from 1, and the bits of its weight, 0 for a row's first. And int64 [packs]: tokens of each pack; the numbers
        after them are padding.
        """
        rows = torch.tensor([row for pack in packs for row in pack], dtype=torch.int64)
        lengths = self.lengths[rows]
        firsts = lengths.cumsum(0) - lengths
        places = torch.arange(int(lengths.sum())) - firsts.repeat_interleave(lengths)
        from_here = self._starts[rows].repeat_interleave(lengths) + places
        weights = self._columns["weights"][from_here]
        weights[firsts] = 0.0
        numbers = torch.tensor([number for pack in packs for number in range(1, len(pack) + 1)], dtype=torch.int64)
        laid = [
            self._columns["tokens"][from_here].long(),
            places,
            numbers.repeat_interleave(lengths),
            weights.view(torch.int32).long(),
        ]
        counts = sums_of(lengths, packs)
        real = torch.arange(int(counts.max())) < counts.unsqueeze(1)
        found = torch.zeros((*real.shape, len(laid)), dtype=torch.int64)
        found[real] = torch.stack(laid, dim=1)
        return found, counts
