"""Supervised fine-tuning (SFT) on conversations: the loss is over the tokens of the answers.

The loss is the SUM over trained tokens of weight * cross entropy in fp32; the step divides it once by the number of
trained tokens of the global batch. A mean of means, over micro-batches or ranks, would weight the tokens of short
answers more. A batch consists of packs. A pack is one row, or several rows with at most `max_length` tokens in total.

Encoded rows are columns of concatenated tokens, which may be memory-mapped files: unused rows take no memory, and the
ranks of a host share the pages of used ones.
"""

from __future__ import annotations

import copy
import math
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, Self, get_args

import torch
from torch import nn

from andon.console.messages import InputError, Problem
from andon.data.chat import EncodedRow, show_row
from andon.data.conversations import Form
from andon.data.tokens import Tokenizer
from andon.metrics.scores import Scores
from andon.model.causal import check_packing_isolation, collate_packs, content, loss_sum, row_outputs
from andon.model.masks import placed
from andon.run.atomic import write_json
from andon.step.micro_batch import Batch, LeafLoss
from andon_contracts.digest import row_digests
from andon_contracts.fields import Count, json_object, read_field
from andon_contracts.untrusted import read_json

KINDS: Mapping[str, torch.dtype] = {"i": torch.int32, "q": torch.int64, "f": torch.float32, "d": torch.float64}
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

    @property
    def longest(self) -> int:
        """Tokens of the longest row, for `model.max_length`."""
        return int(self.lengths.max())

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


CONVERSATIONS = "conversations.json"
_LARGEST_EXPONENT = math.log(sys.float_info.max)


@dataclass(frozen=True)
class SourceScores:
    """Scores of one source's rows. tokens: trained tokens, cut ones too; loss: mean over the tokens that were read."""

    rows: int
    tokens: int
    loss: float
    token_accuracy: float


@dataclass(frozen=True)
class LanguageScores(Scores):
    """Scores of `rows` conversations with `tokens` trained tokens.

    loss: mean of weight * cross entropy over the trained tokens that were read. perplexity: exp(loss). token_accuracy:
    share of trained tokens whose logit is the largest under teacher forcing. exact_match: share of rows in which all
    trained tokens have the largest logit, so greedy decoding would reproduce them. cut: trained tokens beyond
    `model.max_length`, which are not read and count as wrong. sources: scores by the data's column `source`.
    """

    rows: int
    tokens: int
    loss: float
    perplexity: float
    token_accuracy: float
    exact_match: float
    cut: int = 0
    sources: Mapping[str, SourceScores] = field(default_factory=dict)


@dataclass(frozen=True)
class GenerationSettings:
    """How to prompt a model trained on conversations. form: of the training rows. stops: ids that end an answer."""

    form: Form
    stops: tuple[int, ...]

    def write(self, folder: Path, pad_id: int) -> None:
        """Write `conversations.json`, and `generation_config.json` for transformers' `generate`."""
        write_json(folder / CONVERSATIONS, {"form": self.form, "stops": list(self.stops)})
        ends = {"eos_token_id": list(self.stops), "pad_token_id": pad_id, "do_sample": False}
        write_json(folder / "generation_config.json", ends)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read `conversations.json`. Raises `InputError` that names the file if it is missing or malformed."""
        file = folder / CONVERSATIONS
        try:
            fields = json_object(read_json(file), "the file")
            form, stops = fields["form"], fields["stops"]
            if form not in get_args(Form) or not isinstance(stops, list):
                raise ValueError(f"it has no form of rows, or no list of stops ({form!r})")
            return cls(form, tuple(read_field(Count, stop, "stops") for stop in stops))
        except (OSError, ValueError, KeyError) as error:
            raise InputError.at(file, f"does not say how to prompt the model: {error}") from error


class SftTask(PaddedRows):
    """Encoded conversations in packs. A pack's id is its position. Outputs: three sums per pack (`outputs`)."""

    _limit: int
    output = "losses"
    width = 3
    _of_each = 1
    """Encoded rows of each row of the data."""

    def __init__(
        self,
        rows: Sequence[EncodedRow] | TokenRows,
        *,
        pad_id: int,
        max_length: int,
        padding_multiple: int = 8,
        sources: Sequence[str] = (),
        notes: Sequence[str] = (),
        asked: GenerationSettings = GenerationSettings("text", ()),
        skipped: Mapping[int, Problem] | None = None,
    ) -> None:
        """Each row is a pack. sources: one per row, or empty. asked: how to prompt the trained model. padding_multiple:
        batches are padded to a multiple of it, but not beyond max_length. skipped: the fault of each unusable row by
        position; `rows` has one untrained token in its place.
        """
        self.notes, self.asked, self.skipped = tuple(notes), asked, skipped or {}
        self._rows = rows if isinstance(rows, TokenRows) else TokenRows.of(rows)
        self._pad_id, self._limit, self._multiple = pad_id, max_length, padding_multiple
        self._sources = tuple(sources)
        self._set_packs([(row,) for row in range(len(self._rows) // self._of_each)])

    def _set_packs(self, packs: list[tuple[int, ...]]) -> None:
        self._packs = packs
        members = [self._members(pack) for pack in range(len(packs))]
        places = [place for pack in members for place in pack]
        self._trained = sums_of(self._rows.trained[places], members).tolist()
        self.lengths = sums_of(self._rows.lengths[places], members)

    def _members(self, pack: int) -> Sequence[int]:
        return self._packs[pack]

    def planned_content(self, ids: Sequence[int]) -> torch.Tensor:
        """int64 [len(ids)]: the expected digests of these packs, computed from the stored rows."""
        digests, few = [torch.empty(0, dtype=torch.int64)], 64
        for first in range(0, len(ids), few):
            laid, counts = self._rows.laid_out([*map(self._members, ids[first : first + few])])
            digests.append(row_digests(laid.flatten(1), laid.shape[2] * counts))
        return torch.cat(digests)

    def in_copies(self, copies: int) -> Self:
        """The N packs repeated `copies` times: copy k of pack r has the id r + k * N (`mixed`)."""
        task = copy.copy(self)
        task._set_packs(self._packs * copies)
        return task

    def packed(self, ids: Sequence[int]) -> SftTask:
        """Best-fit pack the rows `ids` into packs of up to `max_length` tokens. Needs a task of one-row packs.

        The packs depend only on `ids` and the rows' lengths. `notes` reports their number and padding.
        """
        lengths, limit = self.lengths[list(ids)].tolist(), self._limit
        packs = best_fit(lengths, limit)
        padding = 1 - sum(lengths) / (len(packs) * limit)
        task = copy.copy(self)
        task._set_packs([tuple(ids[place] for place in pack) for pack in packs])
        note = f"{len(ids)} rows in {len(packs)} packs of {limit} tokens ({padding:.1%} padding)"
        task.notes, task.skipped = (*self.notes, note), {}
        return task

    def cut_rows(self, ids: Sequence[int]) -> int:
        members = [*map(self._members, ids)]
        return int((sums_of(self._rows.cut[[row for pack in members for row in pack]], members) > 0).sum())

    def rows_of(self, pack: int) -> tuple[int, ...]:
        return self._packs[pack]

    def load(self, ids: Sequence[int], device: torch.device) -> Batch:
        """Packs `ids` on `device`, collated by `collate_packs`: int64, right-padded."""
        self._require_known(ids)
        packs = [[self._rows.tensors(place) for place in self._members(each)] for each in ids]
        return placed(collate_packs(packs, self._pad_id, self._multiple, self._limit), device)

    def loss_sum(self, model: nn.Module, batch: Batch) -> LeafLoss:
        return loss_sum(model, batch)

    def content(self, batch: Batch) -> torch.Tensor:
        return content(batch)

    @property
    def longest(self) -> int:
        return int(self._rows.lengths.max())

    def planned_terms(self, ids: Sequence[int]) -> Sequence[int]:
        return self.trained_tokens(ids)

    def trained_tokens(self, ids: Sequence[int]) -> Sequence[int]:
        return [self._trained[pack] for pack in ids]

    def shown(self, row: int, tokenizer: Tokenizer) -> Iterator[str]:
        return show_row(tokenizer, self._rows.row(row))

    def require_fit(self, model: nn.Module, device: torch.device) -> None:
        """Raise `InputError` if the model lets rows of a pack attend to each other, or if its attention span is shorter
        than the longest row."""
        rows = [row for pack in range(len(self)) for row in self._members(pack)]
        check_packing_isolation(model, device, int(self._rows.lengths[rows].max()))

    def outputs(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """fp64 [packs, 3]: sum of losses, correctly predicted tokens, trained tokens. Eval mode, no gradients."""
        return row_outputs(model, batch)

    def score(self, ids: Sequence[int], outputs: torch.Tensor) -> LanguageScores:
        """Scores from the outputs of these packs, each of which must be a single row."""
        cut = self._rows.cut_trained[[self._packs[pack][0] for pack in ids]].tolist()
        values: list[list[float]] = [[*each, lost] for each, lost in zip(outputs.tolist(), cut, strict=True)]
        by_source: dict[str, list[list[float]]] = {}
        for pack, value in zip(ids, values, strict=True):
            if self._sources and (source := self._sources[self._packs[pack][0]]):
                by_source.setdefault(source, []).append(value)
        whole = _scored(values)
        return LanguageScores(
            **vars(whole),
            perplexity=math.inf if whole.loss > _LARGEST_EXPONENT else math.exp(whole.loss),
            exact_match=sum(right == tokens + lost for _, right, tokens, lost in values) / max(len(values), 1),
            cut=sum(cut),
            sources={name: _scored(by_source[name]) for name in sorted(by_source)},
        )


def _scored(values: Sequence[Sequence[float]]) -> SourceScores:
    """values: per row, loss, correct tokens, trained tokens read, trained tokens cut off. `math.fsum` makes the sum of
    losses independent of row order."""
    read = sum(int(each[2]) for each in values)
    tokens = read + sum(int(each[3]) for each in values)
    loss = math.fsum(each[0] for each in values) / max(read, 1)
    return SourceScores(len(values), tokens, loss, sum(int(each[1]) for each in values) / max(tokens, 1))
