"""Samples as a user has them, rows as the step has them, and what one batch gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from andon.model.task import ClassificationTask
from andon.pipeline.config import ClassifyConfig, TransformerConfig
from andon.problems import InputError
from andon.step.task import Batch, LeafLoss


@dataclass(frozen=True)
class SafetySample:
    """One text and its class (seed S1)."""

    input: str
    label: int

    def input_ids(self) -> list[int]:
        """The bytes of the text in UTF-8. Raises `InputError` for text that has none (half of a surrogate pair)."""
        try:
            return list(self.input.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise InputError(f"{self.input!r} is no Unicode text: {error.reason}") from error


@dataclass(frozen=True)
class BatchResult:
    """What one batch gave (seed S23).

    avg_loss: sum of w[label] * cross entropy over all samples, divided once by their number. correct, total: samples.
    grad_norm: global L2 norm of the batch's gradient before clipping, whether or not there is clipping (V6).
    """

    avg_loss: float
    correct: int
    total: int
    grad_norm: float

    def accuracy(self) -> float:
        """The share of samples predicted right; 0 of none is 0."""
        return self.correct / max(self.total, 1)


NOTHING = BatchResult(0.0, 0, 0, 0.0)
"""What no samples give: nothing is computed and nothing changes."""


class SampleEncoder:
    """Turns samples into rows, and refuses a whole batch for one bad sample before any state is touched (V20)."""

    def __init__(self, model_config: TransformerConfig, config: ClassifyConfig) -> None:
        self._config = config
        self._vocab_size = model_config.vocab_size
        self._max_length = min(config.max_seq_len, model_config.max_position_embeddings)

    def of_samples(self, samples: Sequence[SafetySample]) -> ClassificationTask:
        """The rows of `samples`, one or more, cut to the longest that the model takes.

        Raises `InputError` naming every sample with an empty text, a byte outside of the vocabulary, or a label that
        is not a class (F-CLASS-002, V30).
        """
        rows = [sample.input_ids() for sample in samples]
        return self.of_ids(rows, [sample.label for sample in samples])

    def of_ids(self, rows: Sequence[Sequence[int]], labels: Sequence[int]) -> ClassificationTask:
        """The same from token ids."""
        return ClassificationTask(
            [row[: self._max_length] for row in rows],
            labels,
            num_labels=self._config.num_classes,
            vocab_size=self._vocab_size,
            pad_id=self._vocab_size,
            class_weights=self._config.class_weights,
            max_length=self._max_length,
            places=[f"sample {place}" for place in range(len(rows))],
        )


class CurrentRows:
    """A `Task` of the step whose rows are those of the batch at hand."""

    def __init__(self, rows: ClassificationTask) -> None:
        self.rows = rows

    def load(self, ids: Sequence[int], device: torch.device) -> Batch:
        """See `Task.load`."""
        return self.rows.load(ids, device)

    def loss_sum(self, model: nn.Module, batch: Batch) -> LeafLoss:
        """See `Task.loss_sum`."""
        return self.rows.loss_sum(model, batch)

    def content(self, batch: Batch) -> torch.Tensor:
        """See `Task.content`."""
        return self.rows.content(batch)

    def planned_content(self, ids: Sequence[int]) -> torch.Tensor:
        """See `Task.planned_content`."""
        return self.rows.planned_content(ids)
