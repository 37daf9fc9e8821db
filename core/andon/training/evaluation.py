"""Evaluation over all ranks: every row once, in fixed batches of like lengths, scored from one table that all hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from andon.backend.base import Backend
from andon.metrics.scores import Scores
from andon.model.batches import evaluation_batches
from andon.tasks.task import ScoredTask
from andon_contracts.laws.law import Judgement, settle
from andon_contracts.laws.outcome import EVALUATED, OUTPUT, EvaluationTold, Output

_ROWS = 64


def evaluate(backend: Backend, models: Sequence[nn.Module], task: ScoredTask, ids: Sequence[int]) -> Scores:
    """Scores of the rows `ids` by the replicas' `models`, exactly the same on any number of ranks.

    Whole batches are shared out, and what comes back is bits, scored alike everywhere.

    Raises `Violation` if what came back is not each row once, in order, or is scored otherwise (`evaluation-once`), or
    is not finite (`finite`).
    """
    row_ids, outputs = _gathered(backend, models, task, ids)
    told = EvaluationTold(0, (tuple(row_ids),), len(ids), {}, {}, planned=tuple(ids))
    settle(Judgement(EVALUATED, told))
    finite = outputs.isfinite().all(dim=1).tolist()
    odd = tuple(row for row, whole in zip(row_ids, finite, strict=True) if not whole)
    settle(Judgement(OUTPUT, Output(task.output, len(row_ids), odd)))
    result = task.score(row_ids, outputs)
    counted = {"rows": float(len(ids))}
    settle(Judgement(EVALUATED, replace(told, told={"rows": [float(result.rows)]}, counted=counted)))
    return result


def _gathered(
    backend: Backend, models: Sequence[nn.Module], task: ScoredTask, ids: Sequence[int]
) -> tuple[list[int], torch.Tensor]:
    """The rows that came back, put in the order of `ids`, and their outputs, fp64 [rows, width] on the CPU."""
    batches = evaluation_batches(task.lengths[list(ids)].tolist(), _ROWS)
    # In turns, since those of one end are longer than those of the other.
    owned = [batches[rank :: backend.world_size] for rank in range(backend.world_size)]
    most = max(sum(map(len, each)) for each in owned)

    def work(index: int) -> torch.Tensor:
        device = backend.devices[index]
        # Filled up with -1, since collectives take one length; fp64 holds ids and fp32 outputs as they are.
        table = torch.full((most, 1 + task.width), -1.0, dtype=torch.float64, device=device)
        row = 0
        for batch in owned[backend.ranks[index]]:
            rows = [ids[place] for place in batch]
            table[row : row + len(rows), 0] = torch.tensor(rows, dtype=torch.float64, device=device)
            table[row : row + len(rows), 1:] = task.outputs(models[index], task.load(rows, device)).double()
            row += len(rows)
        return table

    table = torch.cat([part.cpu() for part in backend.gather(backend.map(work))])
    table = table[table[:, 0] >= 0]
    places = torch.tensor([place for each in owned for batch in each for place in batch], dtype=torch.int64)
    if len(table) == len(places):  # of others than were sent the contract is to tell, as they came
        table = table[places.argsort()]
    return [int(value) for value in table[:, 0].tolist()], table[:, 1:]
