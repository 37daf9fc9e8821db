"""Supervised fine-tuning (SFT) on conversations: the loss is over the tokens of the answers.

The loss is the SUM over trained tokens of weight * cross entropy in fp32; the step divides it once by the number of
trained tokens of the global batch. A mean of means, over micro-batches or ranks, would weight the tokens of short
answers more. A batch consists of packs. A pack is one row, or several rows with at most `max_length` tokens in total.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, get_args

import torch
from torch import nn

from andon.console.problems import InputError, Problem
from andon.data.chat import EncodedRow, show_row
from andon.data.conversations import Form
from andon.data.tokens import Tokenizer
from andon.metrics.scores import Scores
from andon.model.causal import check_packing_isolation, collate_packs, content, loss_sum, row_outputs
from andon.model.masks import placed
from andon.run.atomic import write_json
from andon.step.task import Batch, LeafLoss
from andon.tasks.token_rows import PaddedRows, TokenRows, best_fit, sums_of
from andon_contracts.digest import row_digests
from andon_contracts.fields import Count, json_object, read_field
from andon_contracts.untrusted import read_json

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
        self._set_packs([(place,) for place in range(len(rows))])

    def _set_packs(self, packs: list[tuple[int, ...]]) -> None:
        self._packs, places = packs, [place for pack in packs for place in pack]
        self._terms = sums_of(self._rows.trained[places], packs).tolist()
        self.lengths = sums_of(self._rows.lengths[places], packs)

    def planned_content(self, ids: Sequence[int]) -> torch.Tensor:
        """int64 [len(ids)]: the expected digests of these packs, computed from the stored rows."""
        digests, few = [torch.empty(0, dtype=torch.int64)], 64
        for first in range(0, len(ids), few):
            laid, counts = self._rows.laid_out([self._packs[pack] for pack in ids[first : first + few]])
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
        lengths, limit = self._rows.lengths[list(ids)].tolist(), self._limit
        packs = best_fit(lengths, limit)
        padding = 1 - sum(lengths) / (len(packs) * limit)
        task = copy.copy(self)
        task._set_packs([tuple(ids[place] for place in pack) for pack in packs])
        note = f"{len(ids)} rows in {len(packs)} packs of {limit} tokens ({padding:.1%} padding)"
        task.notes, task.skipped = (*self.notes, note), {}
        return task

    def cut_rows(self, ids: Sequence[int]) -> int:
        return int((self._rows.cut[[row for pack in ids for row in self._packs[pack]]] > 0).sum())

    def rows_of(self, pack: int) -> tuple[int, ...]:
        return self._packs[pack]

    def load(self, ids: Sequence[int], device: torch.device) -> Batch:
        """Packs `ids` on `device`, collated by `collate_packs`: int64, right-padded."""
        self._require_known(ids)
        packs = [[self._rows.tensors(place) for place in self._packs[each]] for each in ids]
        return placed(collate_packs(packs, self._pad_id, self._multiple, self._limit), device)

    def loss_sum(self, model: nn.Module, batch: Batch) -> LeafLoss:
        return loss_sum(model, batch)

    def content(self, batch: Batch) -> torch.Tensor:
        return content(batch)

    def planned_terms(self, ids: Sequence[int]) -> Sequence[int]:
        return [self._terms[pack] for pack in ids]

    def shown(self, row: int, tokenizer: Tokenizer) -> Iterator[str]:
        return show_row(tokenizer, self._rows.row(row))

    def require_fit(self, model: nn.Module, device: torch.device) -> None:
        """Raise `InputError` if the model lets rows of a pack attend to each other, or if its attention span is shorter
        than the longest row."""
        rows = [row for pack in self._packs for row in pack]
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
