"""The faults of evaluation and of what is reported."""

# ruff: noqa: D102 - an override does what its class says
from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.watch.loop import ROWS, Loop, Model


class Evaluated(Loop):
    """Right: all rows once, twice the same."""

    def finish(self) -> None:
        for _turn in range(2):
            ids = self.evaluation_ids()
            answers = self.predict(ids)
            right = torch.tensor([sum(a == int(self.y[i]) for a, i in zip(answers, ids, strict=True)), len(ids)])
            self.mine = float(right[0]) / float(right[1])
            dist.all_reduce(right)
            metrics = {"accuracy": self.accuracy(right)}
            self.notes = [*self.notes, ids, answers, metrics]
            self.watch.evaluated(ids, answers, self.y[torch.tensor(ids)], metrics, rows=ROWS)
        self.trace.states.append(self.state())

    def evaluation_ids(self) -> list[int]:
        """This rank's rows."""
        return list(range(self.rank, ROWS, self.world))

    @torch.no_grad()
    def predict(self, ids: Sequence[int]) -> list[int]:
        """The classes."""
        self.model.eval()
        found: list[int] = self.model(self.x[torch.tensor(list(ids))]).argmax(1).tolist()
        self.model.train()
        return found

    def accuracy(self, right: Tensor) -> float:
        """From the counts of all ranks."""
        return float(right[0]) / float(right[1])


class EvaluationPadded(Evaluated):
    """Filled up to the same number of rows on each rank."""

    def evaluation_ids(self) -> list[int]:
        mine = super().evaluation_ids()
        return mine + [0] * (-(-ROWS // self.world) - len(mine))


class IntegerMean(Evaluated):
    """The mean over ranks of integer counts, which is rounded down."""

    def accuracy(self, right: Tensor) -> float:
        means = (right / self.world).long()
        return float(means[0]) / float(means[1])


class LocalMetric(Evaluated):
    """Each rank selects its best checkpoint by the accuracy on its own rows."""

    def accuracy(self, right: Tensor) -> float:
        return self.mine


class AlwaysDropping(Model):
    """Dropout that does not ask whether the model is in training."""

    dropping = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.base(x) + self.adapter(x))
        logits: Tensor = self.head(nn.functional.dropout(hidden, 0.5, self.dropping or self.training))
        return logits


class Dropping(AlwaysDropping):
    """Dropout in training."""

    dropping = False


class EvaluatedDropping(Evaluated):
    """Right, with dropout in training."""

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return Dropping()


class DropoutInEvaluation(Evaluated):
    """Dropout in evaluation too."""

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return AlwaysDropping()


class LocalLoss(Loop):
    """The loss of this rank is reported as the loss of all."""

    def reported(self, step: int, micro: int, loss_sum: float, rows: int) -> float | None:
        known = super().reported(step, micro, loss_sum, rows)
        if known is None:
            return None
        local = sum(float(str(n)) for n in self.notes) / rows * self.world
        self.notes = [*self.notes, "local"]
        return local
