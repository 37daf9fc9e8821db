"""A tag for each word: the loss is the SUM over words of the cross entropy of each word's first token, in fp32.

The model reads the other tokens of a word and the special tokens, but they have no loss. Terms are words, so a long row
counts more than a short one, as in a mean over all words of a global batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self, Unpack

import torch
from torch import nn

from andon.metrics.spans import UNREAD, SpanScores, span_scores
from andon.model.batches import logits_of, predictions
from andon.step.task import Batch, LeafLoss
from andon.tasks.encoded import EncodedRows, RowOptions

NO_TAG = -100
"""The tag of a token without loss."""


class TaggingTask(EncodedRows):
    """Rows with tags of some of their tokens; in a batch they are `labels` [rows, length].

    The outputs of a row are two numbers for each word, in order: the likeliest tag and the word's loss; then zeros.
    """

    output = "losses"

    def __init__(
        self,
        tokens: Sequence[Sequence[int]],
        tags: Sequence[Sequence[int]],
        *,
        names: Sequence[str],
        unread: Mapping[int, Mapping[int, int]] | None = None,
        **options: Unpack[RowOptions],
    ) -> None:
        """tags: one for each token, or `NO_TAG`. names: of the tags. unread: by row and by the word's position in it,
        the tag of each word without a token, for example after a cut; scores count such a word as missed.

        Raises `InputError` as `EncodedRows` does, also for a row without a tag.
        """
        self.names = tuple(names)
        self._tags = [[tag for tag in row if tag != NO_TAG] for row in tags]
        self.width = 2 * max(map(len, self._tags), default=0)  # two for each word of the longest row
        self._unread = dict(unread or {})
        options["columns"] = {**(options.get("columns") or {}), "labels": (tags, NO_TAG)}
        super().__init__(tokens, tags, **options)

    def label_fault(self, label: Sequence[int], tokens: Sequence[int]) -> str:
        if len(label) != len(tokens):
            return f"{len(label)} tags for {len(tokens)} tokens"
        odd = next((tag for tag in label if tag != NO_TAG and not 0 <= tag < len(self.names)), None)
        if odd is not None:
            return f"tag {odd!r} is not one of the {len(self.names)} tags 0 to {len(self.names) - 1}"
        return "" if any(tag != NO_TAG for tag in label) else "no word of it has a token"

    def label_tensor(self, labels: Sequence[Any]) -> torch.Tensor:
        return torch.empty((len(labels), 0), dtype=torch.int64)

    def in_copies(self, copies: int) -> Self:
        found = super().in_copies(copies)
        found._tags = self._tags * copies
        return found

    def planned_terms(self, ids: Sequence[int]) -> Sequence[int]:
        return [len(self._tags[row]) for row in ids]

    def loss_sum(self, model: nn.Module, batch: Batch) -> LeafLoss:
        """Sum over the batch's words of the cross entropy, in fp32, their number, and how many are right."""
        logits, tags = logits_of(model, batch), batch["labels"]
        right = (logits.detach().argmax(dim=2) == tags).sum()
        return LeafLoss(_losses(logits, tags).sum(), right, (tags != NO_TAG).sum())

    def learned(self, row: int) -> str:
        return " ".join(self.names[tag] for tag in self._tags[row])

    def outputs(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        logits, tags = predictions(model, batch), batch["labels"]
        there = tags != NO_TAG
        places = 2 * (there.cumsum(dim=1) - 1)[there]
        rows = there.nonzero()[:, 0]
        table = torch.zeros((len(tags), self.width), dtype=torch.float64, device=tags.device)
        table[rows, places] = logits.argmax(dim=2)[there].double()
        table[rows, places + 1] = _losses(logits, tags)[there].double()
        return table

    def scores_of(self, ids: Sequence[int], outputs: torch.Tensor) -> SpanScores:
        found = [row[: 2 * len(self._tags[id_])] for id_, row in zip(ids, outputs.tolist(), strict=True)]
        losses = [loss for row in found for loss in row[1::2]]
        predicted = [[self.names[int(tag)] for tag in row[::2]] for row in found]
        actual = [[self.names[tag] for tag in self._tags[id_]] for id_ in ids]
        for id_, guess, truth in zip(ids, predicted, actual, strict=True):
            for place, tag in sorted(self._unread.get(id_, {}).items()):
                guess.insert(place, UNREAD)
                truth.insert(place, self.names[tag])
        return span_scores(predicted, actual, self.names, math.fsum(losses) / max(len(losses), 1))


def _losses(logits: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
    """fp32 [rows, length]; 0 for tokens without a tag."""
    return nn.functional.cross_entropy(logits.float().transpose(1, 2), tags, ignore_index=NO_TAG, reduction="none")
