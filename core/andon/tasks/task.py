"""What the trainer asks of a task beyond the step: how its rows are scored, exactly, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, Self

import torch
from torch import nn

from andon.data.tokens import Tokenizer
from andon.metrics.scores import Scores
from andon.step.task import Batch, Task


class ScoredTask(Task, Protocol):
    """Encoded rows by their ids, from 0: trained on as a `Task` of the step, and scored row by row.

    What a model makes of a row is `width` numbers, whichever rank computes them. Scores are a function of those of all
    rows, computed on every rank alike, so they are the same to the bit on any number of ranks.
    """

    output: str
    """What the numbers of a row are, in the word that a message has for them."""
    notes: tuple[str, ...]
    """What a user should know of how rows became tensors, a line each."""

    counts_right: bool
    """Whether a term of the loss is predicted right or wrong, so that `LeafLoss.correct` says something."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> torch.Tensor:
        """int64 [rows]: tokens of each row."""
        ...

    def padded_to(self, multiple: int, max_length: int) -> Self:
        """The same rows; batches of them are padded to a multiple of `multiple`, but never beyond `max_length`."""
        ...

    def in_copies(self, copies: int) -> Self:
        """Each of the N rows several times, to be trained on: copy k of row r has the id r + k * N."""
        ...

    @property
    def width(self) -> int:
        """How many numbers a row has."""
        ...

    def cut_rows(self, ids: Sequence[int]) -> int:
        """How many of these rows were cut at their end."""
        ...

    def shown(self, row: int, tokenizer: Tokenizer) -> Iterator[str]:
        """A row for a reader, as the model is given it: a line a token, and what is learned of it."""
        ...

    def require_fit(self, model: nn.Module, device: torch.device) -> None:
        """Raise `InputError` for a model, on `device` as it is trained, that cannot be given these rows."""
        ...

    def outputs(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """[rows of the batch, width], fp32 or fp64, in eval mode and without a graph."""
        ...

    def score(self, ids: Sequence[int], outputs: torch.Tensor) -> Scores:
        """The scores of these rows by their outputs, fp64 [rows, width] on the CPU."""
        ...
