"""Evaluation over all ranks: every row once, in fixed batches, scored from one table that all ranks hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from andon.backend.base import Backend
from andon.metrics.scores import Scores, confusion_matrix, scores
from andon.model.task import ClassificationTask, evaluation_batches, predictions
from andon.step.shard import balanced_bounds
from andon_contracts.observe import nonfinite
from andon_contracts.policy import clause, ensure, require
from andon_contracts.violation import Finding

_ROWS = 64


def _explain_rows(row_ids: Sequence[int], planned: Sequence[int]) -> Finding:
    return Finding(seen=f"{len(planned)} rows were to be evaluated once each, {len(row_ids)} were, in another order")


@clause("samples-once", _explain_rows)
def _rows_once(row_ids: Sequence[int], planned: Sequence[int]) -> bool:
    """The rows that the ranks evaluated, end to end, are the planned ones."""
    return list(row_ids) == list(planned)


def evaluate(backend: Backend, models: Sequence[nn.Module], task: ClassificationTask, ids: Sequence[int]) -> Scores:
    """Scores of the rows `ids` by the replicas' `models`, exactly the same on any number of ranks.

    Whole batches are shared out, and what comes back is bits, scored alike everywhere.

    Raises `Violation` if what came back is not each row once (`samples-once`), or not finite (`finite`).
    """
    row_ids, logits = _gathered(backend, models, task, ids)
    return _scored(row_ids, ids, logits, task)


def _explain_nothing(result: Scores, planned: Sequence[int]) -> Finding:
    return Finding(seen=f"{len(planned)} rows were to be scored, {result.rows} were")


@clause("samples-once", _explain_nothing)
def _all_scored(result: Scores, planned: Sequence[int]) -> bool:
    """The confusion matrix counts every planned row."""
    return result.rows == len(planned)


def _explain_logits(row_ids: Sequence[int], logits: torch.Tensor) -> Finding:
    odd = [row for row, finite in zip(row_ids, logits.isfinite().all(dim=1).tolist(), strict=True) if not finite]
    return Finding(seen=f"the model gives {len(odd)} of {len(row_ids)} rows no finite logits, row {odd[0]} first")


@clause("finite", _explain_logits)
def _logits_finite(row_ids: Sequence[int], logits: torch.Tensor) -> bool:
    """No NaN or Inf is scored: as a prediction it would count as some class."""
    return not bool(nonfinite(logits))


# Rows before logits before scores: the last decorator of a kind is the first to be looked at.
@require(_logits_finite)
@require(_rows_once)
@ensure(_all_scored)
def _scored(row_ids: Sequence[int], planned: Sequence[int], logits: torch.Tensor, task: ClassificationTask) -> Scores:
    labels = task.labels_of(row_ids)
    confusion = confusion_matrix(logits.argmax(dim=1), labels, task.num_labels)
    losses: list[float] = task.row_losses(logits, labels).double().tolist()
    positive = (logits[:, 1] - logits[:, 0]).tolist() if task.num_labels == 2 else None
    return scores(confusion, positive, labels.tolist() if positive is not None else None, losses)


def _gathered(
    backend: Backend, models: Sequence[nn.Module], task: ClassificationTask, ids: Sequence[int]
) -> tuple[list[int], torch.Tensor]:
    """Every rank's rows and logits [rows, classes], end to end on the CPU."""
    batches = evaluation_batches(len(ids), _ROWS)
    owned = balanced_bounds(len(batches), backend.world_size)
    most = max((sum(len(b) for b in batches[start:end]) for start, end in owned), default=0)

    def work(index: int) -> torch.Tensor:
        start, end = owned[backend.ranks[index]]
        device = backend.devices[index]
        table = torch.full((most, 1 + task.num_labels), -1.0, dtype=torch.float64, device=device)
        row = 0
        for batch in batches[start:end]:
            rows = [ids[place] for place in batch]
            table[row : row + len(rows), 0] = torch.tensor(rows, dtype=torch.float64, device=device)
            table[row : row + len(rows), 1:] = predictions(models[index], task.load(rows, device)).double()
            row += len(rows)
        return table

    table = torch.cat([part.cpu() for part in backend.gather(backend.map(work))])
    table = table[table[:, 0] >= 0]
    return [int(value) for value in table[:, 0].tolist()], table[:, 1:].float()
