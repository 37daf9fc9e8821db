"""Direct preference optimisation (DPO) of pairs of answers to one prompt (Rafailov et al. 2023).

The loss of a pair is -log sigmoid(beta * margin). The margin is the change of log p(chosen) - log p(rejected) since the
reference, which is the model at step 0. The log-probability of an answer is the sum over its tokens. The loss of a
micro-batch is the SUM over its pairs; the step divides it once by the pairs of the global batch.

A pair is one row of the data and one item of the plan: its answers are two rows of one pack, so no split of a batch
separates them. Packing joins several pairs. The reference is data: its values are computed before step 0
(`andon.training.reference`) and are part of the content digest. No pair's loss depends on another pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from andon.data.chat import show_row
from andon.data.conversations import PAIR
from andon.data.tokens import Tokenizer
from andon.metrics.scores import Scores
from andon.model.build import evaluating
from andon.model.causal import hidden_of, row_log_probs
from andon.model.masks import placed
from andon.step.micro_batch import Batch, LeafLoss
from andon.tasks.sft import SftTask, TokenRows
from andon_contracts.digest import mix64, row_digests


@dataclass(frozen=True)
class PairScores:
    """Scores of `rows` pairs. loss: mean over pairs. reward_accuracy: share with a positive margin. chosen_reward,
    rejected_reward: mean of beta * (log p - log p of the reference); margin: of their differences."""

    rows: int
    loss: float
    reward_accuracy: float
    margin: float
    chosen_reward: float
    rejected_reward: float


@dataclass(frozen=True)
class PreferenceScores(PairScores, Scores):
    """`PairScores` of all pairs. sources: those of each value of the data's column `source`."""

    sources: Mapping[str, PairScores] = field(default_factory=dict)


class DpoTask(SftTask):
    """Preferences in packs. Outputs: log p of the chosen and of the rejected answer, of packs of one pair.

    references: fp64 [pairs, 2], the same of the reference. All copies of a task share them. They are NaN until they are
    computed, so that an earlier use breaks `finite`.
    """

    output = "log-probabilities"
    width = 2
    _of_each = 2

    def __init__(self, rows: TokenRows, *, beta: float, **options: Any) -> None:
        """Rows 2n and 2n + 1 are the chosen and the rejected answer of pair n. options: of `SftTask`."""
        self.references = torch.full((len(rows) // 2, 2), math.nan, dtype=torch.float64)
        self._beta = beta
        super().__init__(rows, **options)

    def _members(self, pack: int) -> Sequence[int]:
        return [row for pair in self._packs[pack] for row in (2 * pair, 2 * pair + 1)]

    def load(self, ids: Sequence[int], device: torch.device) -> Batch:
        """As `SftTask.load`, with `references`: int64 [packs, n], the bits of each row's reference, 0 for no row."""
        batch = super().load(ids, torch.device("cpu"))
        return placed({**batch, "references": self._references_of(ids).view(torch.int64)}, device)

    def _references_of(self, ids: Sequence[int]) -> torch.Tensor:
        """fp64 [packs, n], padded with zeros to a power of 2, so that shapes repeat."""
        most = max(len(self._packs[pack]) for pack in ids)
        table = torch.zeros(len(ids), 1 << (most - 1).bit_length(), 2, dtype=torch.float64)
        for place, pack in enumerate(ids):
            table[place, : len(self._packs[pack])] = self.references[list(self._packs[pack])]
        return table.flatten(1)

    def content(self, batch: Batch) -> torch.Tensor:
        return _bound(super().content(batch), batch["references"], batch["rows"].amax(dim=1))

    def planned_content(self, ids: Sequence[int]) -> torch.Tensor:
        counts = torch.tensor([2 * len(self._packs[pack]) for pack in ids])
        return _bound(super().planned_content(ids), self._references_of(ids).view(torch.int64), counts)

    def planned_terms(self, ids: Sequence[int]) -> Sequence[int]:
        return [len(self._packs[pack]) for pack in ids]

    def loss_sum(self, model: nn.Module, batch: Batch) -> LeafLoss:
        references = batch["references"].view(torch.float64)
        gains = row_log_probs(model, hidden_of(model, batch), batch, references.shape[1]) - references
        margins = gains[:, 0::2] - gains[:, 1::2]
        pairs = torch.arange(margins.shape[1], device=margins.device) * 2 < batch["rows"].amax(dim=1, keepdim=True)
        losses = -nn.functional.logsigmoid(self._beta * margins) * pairs
        return LeafLoss(losses.sum().float(), ((margins > 0) & pairs).sum(), pairs.sum())

    def outputs(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        with evaluating(model, batch["input_ids"].device):
            return row_log_probs(model, hidden_of(model, batch), batch, 2)

    def shown(self, row: int, tokenizer: Tokenizer) -> Iterator[str]:
        for side, name in enumerate(PAIR):
            yield f"{name}:"
            yield from show_row(tokenizer, replace(self._rows.row(2 * row + side), id=row))

    def score(self, ids: Sequence[int], outputs: torch.Tensor) -> PreferenceScores:  # type: ignore[override]
        pairs = [self._packs[pack][0] for pack in ids]
        rewards = self._beta * (outputs - self.references[pairs])
        places: dict[str, list[int]] = {}
        for place, pair in enumerate(pairs):
            if self._sources and self._sources[pair]:
                places.setdefault(self._sources[pair], []).append(place)
        by_source = {name: _scored(rewards[places[name]]) for name in sorted(places)}
        return PreferenceScores(**vars(_scored(rewards)), sources=by_source)


def _scored(rewards: torch.Tensor) -> PairScores:
    """rewards: fp64 [pairs, 2]. `math.fsum` makes the means independent of the order of pairs."""
    margins, count = rewards[:, 0] - rewards[:, 1], max(len(rewards), 1)
    values = (-nn.functional.logsigmoid(margins), margins > 0, margins, *rewards.unbind(dim=1))
    return PairScores(len(rewards), *(math.fsum(each.tolist()) / count for each in values))


def _bound(digests: torch.Tensor, references: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Digests of tokens joined with those of the first `counts` references of each pack."""
    return mix64(digests + row_digests(references, counts))
