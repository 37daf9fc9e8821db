"""Evaluation over all ranks: every row once, in fixed batches of like lengths, scored from one table that all hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from andon.backend.base import Backend
from andon.metrics.scores import Scores
from andon.model.batches import EvaluationBatching
from andon.step.replica import Replica
from andon.tasks.task import ScoredTask
from andon_contracts.laws.law import Judgement, enforce
from andon_contracts.laws.update import EVALUATED, OUTPUT, Evaluation, Output

_SMALL = EvaluationBatching()


@dataclass
class Evaluator:
    """Scores rows. Caches the last and the best evaluation, so that repeating one needs no forward pass.

    The key is the count of updates, which is equal on all ranks. With a digest of weights, a rank with damaged weights
    would wait alone in a gather.
    """

    backend: Backend
    replicas: Sequence[Replica]
    batching: EvaluationBatching
    _known: dict[tuple[int, int, tuple[int, ...]], Scores] = field(default_factory=dict)

    def __call__(self, task: ScoredTask, ids: Sequence[int], after: int | None = None) -> Scores:
        """Scores as `evaluate` gives them. after: how many updates the weights have; None: as many as were made."""
        key = (self.replicas[0].updates if after is None else after, id(task), tuple(ids))
        if key not in self._known:
            best = sorted(self._known.items(), key=lambda known: math.inf if known[1].loss is None else known[1].loss)
            models = [replica.model for replica in self.replicas]
            self._known = dict(best[:1]) | {key: evaluate(self.backend, models, task, ids, self.batching)}
        return self._known[key]


def evaluate(
    backend: Backend,
    models: Sequence[nn.Module],
    task: ScoredTask,
    ids: Sequence[int],
    batching: EvaluationBatching = _SMALL,
) -> Scores:
    """Scores of the rows `ids` by the replicas' `models`, exactly the same on any number of ranks.

    Each rank evaluates whole batches. The raw outputs are gathered, and every rank scores the same table. Raises
    `Violation` if that does not have each row once, in order, or is scored otherwise (`evaluation-once`), or is not
    finite (`finite`).
    """
    batches = batching.of(task.lengths[list(ids)].tolist())
    # In turns, since the batches are sorted by length.
    owned = [batches[rank :: backend.world_size] for rank in range(backend.world_size)]
    most = max(sum(map(len, each)) for each in owned)

    def outputs_of(index: int) -> torch.Tensor:
        device = backend.devices[index]
        # Padded with -1, since all ranks send one length to a collective. fp64 holds ids and fp32 outputs exactly.
        table = torch.full((most, 1 + task.width), -1.0, dtype=torch.float64, device=device)
        row = 0
        for batch in owned[backend.ranks[index]]:
            rows = [ids[place] for place in batch]
            table[row : row + len(rows), 0] = torch.tensor(rows, dtype=torch.float64, device=device)
            table[row : row + len(rows), 1:] = task.outputs(models[index], task.load(rows, device)).double()
            row += len(rows)
        return table

    table = torch.cat([part.cpu() for part in backend.gather(backend.map(outputs_of))])
    table = table[table[:, 0] >= 0]
    places = torch.tensor([place for each in owned for batch in each for place in batch], dtype=torch.int64)
    if len(table) == len(places):  # a table with more or fewer rows goes to the contract as it came
        table = table[places.argsort()]
    row_ids, outputs = [int(value) for value in table[:, 0].tolist()], table[:, 1:]
    evaluation = Evaluation(0, (tuple(row_ids),), len(ids), {}, {}, planned=tuple(ids))
    enforce(Judgement(EVALUATED, evaluation))
    finite = outputs.isfinite().all(dim=1).tolist()
    odd = tuple(row for row, whole in zip(row_ids, finite, strict=True) if not whole)
    enforce(Judgement(OUTPUT, Output(task.output, len(row_ids), odd)))
    result = task.score(row_ids, outputs)
    counted = {"rows": float(len(ids))}
    enforce(Judgement(EVALUATED, replace(evaluation, reported={"rows": [float(result.rows)]}, counted=counted)))
    return result
