"""Loops to judge: the right one with one thing changed, one over its own model, and loops that misbehave."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from andon_falsify import Case, Told
from andon_falsify.loops.task import collate
from andon_falsify.peers.plain import PlainLoop, cut
from falsify.power.looped.right import Grouped, Loaded, Tracking


class Undivided(PlainLoop):
    """As if no mean were taken over micro-batches and ranks."""

    def _loss_sum(self, ids: Sequence[int]) -> Tensor:
        return super()._loss_sum(ids) * self.case.accumulation * self.case.world


class Halved(PlainLoop):
    def _loss_sum(self, ids: Sequence[int]) -> Tensor:
        return super()._loss_sum(ids) / 2


class Weighted(PlainLoop):
    """Row 5 counts `times`, and nothing else is wrong."""

    times: float

    def _loss_sum(self, ids: Sequence[int]) -> Tensor:
        batch = collate([self.rows[row] for row in ids])
        labels = batch.pop("labels")
        times = torch.tensor([self.times if row == 5 else 1.0 for row in ids])
        return times @ cross_entropy(self.model(**batch).logits, labels, reduction="none")


class Twice(Weighted):
    times = 2.0


class Muted(Weighted):
    times = 0.0


class TensorRate(PlainLoop):
    """Right: the rate is a tensor in fp32, as torch documents it for compiled and captured steps."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        for group in self.optimizer.param_groups:
            group["lr"] = torch.tensor(case.lr)


class DecoupledAdam(PlainLoop):
    """Right: AdamW under torch's other name for it."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.optimizer = torch.optim.Adam(
            self.trained, lr=case.lr, weight_decay=case.weight_decay, decoupled_weight_decay=True
        )


class Declared(Grouped):
    """Right: norms and biases do not decay, and betas move with the updates; it says both."""

    def _apply(self) -> None:
        for group in self.optimizer.param_groups:
            group["betas"] = list(self.tuned(self.done + 1)["betas"])
        super()._apply()

    def tuned(self, update: int) -> Mapping[str, tuple[float, float]]:
        return {"betas": (0.95 - 0.01 * update, 0.99)}


class Exempting(Grouped):
    """Right: norms and embeddings do not decay, of which it says nothing."""

    decay = None  # type: ignore[assignment]

    def _decays(self, name: str) -> bool:
        return "norm" not in name and "embed" not in name


class SeldomTold(PlainLoop):
    """Right: every second loss is told."""

    def train(self, told: Told) -> None:
        for update, batch in enumerate(self._batches(), start=1):
            if update > self.done:
                loss = self._update(batch)
                self.done = update
                if update % 2 == 0:
                    told.loss(loss)


class OnceMore(PlainLoop):
    """A step of the optimizer more, without a forward pass."""

    def train(self, told: Told) -> None:
        super().train(told)
        for parameter in self.trained:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()


class Measuring(PlainLoop):
    """Right: it asks torch's clip for the norm of its own part, without a limit, and clips what is reduced."""

    def _add_over_ranks(self, total: Tensor) -> None:
        torch.nn.utils.clip_grad_norm_(self.trained, torch.inf)
        super()._add_over_ranks(total)


class InStep(PlainLoop):
    """Right: a rank with fewer micro-batches calls the model as often as the others, with a row that counts 0 times."""

    def _update(self, batch: list[int]) -> Tensor:
        pieces, most = (cut(part, self.case.local_batch) for part in (self._mine(batch), batch[:: self.case.world]))
        total = torch.zeros(())
        for place in range(len(most)):
            short = place >= len(pieces)
            loss = self._loss_sum([0] if short else pieces[place]) * (0.0 if short else 1 / len(batch))
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        self._add_over_ranks(total)
        self._apply()
        return total


class OddRate(PlainLoop):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        last = self.optimizer.param_groups[0]["params"].pop()
        self.optimizer.add_param_group({"params": [last], "lr": 3 * case.lr})


class Dropping(PlainLoop):
    def evaluate(self) -> Mapping[str, float]:
        with torch.no_grad():
            every = list(range(len(self.rows)))
            return {"loss": float(self._loss_sum(every)) / len(every)}


class InTurn(PlainLoop):
    """Right: two optimizers, each of half of the tensors."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        groups = self.trained[::2], self.trained[1::2]
        self.both = [torch.optim.SGD(group, lr=case.lr) for group in groups]

    def _apply(self) -> None:
        for each in self.both:
            each.step()
        self.model.zero_grad()


class DealtOut(PlainLoop):
    """Right: every rank steps its own tensors and sends them round."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.optimizer = torch.optim.SGD(self.trained[dist.get_rank() :: case.world], lr=case.lr)

    def _apply(self) -> None:
        self.optimizer.step()
        self.model.zero_grad()
        for place, parameter in enumerate(self.trained):
            dist.broadcast(parameter.data, place % self.case.world)


class Bag(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.tokens = nn.EmbeddingBag(128, 8)
        self.head = nn.Linear(8, classes)

    def forward(self, tokens: Tensor, starts: Tensor) -> Tensor:
        scores: Tensor = self.head(self.tokens(tokens, starts).tanh())
        return scores


class OwnModel(PlainLoop):
    """A bag of tokens that is no model of transformers; it tells its rows. `wrong`: it forgets one rank's gradient."""

    wrong = False

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        torch.manual_seed(1)
        self.model = Bag(case.rows.classes)
        self.trained = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.trained, lr=case.lr)
        self.told: Told | None = None

    def train(self, told: Told) -> None:
        self.told = told
        super().train(told)

    def _loss_sum(self, ids: Sequence[int]) -> Tensor:
        self.told.rows(ids)
        return self.loss_sum(self.model, ids)[0]

    def _add_over_ranks(self, total: Tensor) -> None:
        if self.wrong and dist.get_rank() == 1:
            self.optimizer.zero_grad()
        super()._add_over_ranks(total)

    def loss_sum(self, model: nn.Module, ids: Sequence[int]) -> tuple[Tensor, int]:
        tokens = [torch.tensor(self.case.rows.tokens[row]) for row in ids]
        starts = torch.tensor([0, *map(len, tokens)]).cumsum(0)[:-1]
        labels = torch.tensor([self.case.rows.labels[row] for row in ids])
        return cross_entropy(model(torch.cat(tokens), starts), labels, reduction="sum"), len(ids)

    def evaluate(self) -> Mapping[str, float]:
        return {}


class OwnModelWrong(OwnModel):
    """It does not clip either."""

    wrong = True

    def _apply(self) -> None:
        self._step()


class OwnModelEvaluating(OwnModel):
    """Its evaluation moves a weight of a model that the reference does not know."""

    def evaluate(self) -> Mapping[str, float]:
        with torch.no_grad():
            self.trained[0].view(-1)[0] += 1
        return {}


class TakingOver(Tracking):
    """Every rank keeps its own running statistics, and takes over rank 0's to evaluate, as DDP does."""

    def _share(self) -> None:
        pass

    def evaluate(self) -> Mapping[str, float]:
        dist.broadcast(self.mean, 0)
        return super().evaluate()


class WithoutTrain:
    def __init__(self, case: Case) -> None:
        self.model = nn.Linear(1, 1)


class WithoutModel:
    def __init__(self, case: Case) -> None:
        pass

    def train(self, told: object) -> None:
        pass


class WithEmptyModel(WithoutModel):
    model = None


def nothing(case: Case) -> None:
    pass


not_a_function = 3


class Killed(PlainLoop):
    def train(self, told: Told) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super().train(told)


class Raising(PlainLoop):
    def train(self, told: Told) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise ArithmeticError("nothing adds up")
        super().train(told)


class Garbling(PlainLoop):
    def train(self, told: Told) -> None:
        print("checked 99 of 99 claims\x00\x1b[2J\ud800", end="", file=sys.stdout)
        os.write(1, b"\xff\xfe checked 99 of 99 claims" * 100)
        os.write(2, b'{"outcome": "holds"')
        super().train(told)
        os.close(2)


class WithWorker(Loaded):
    """A process of its own loads the rows."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.loader = DataLoader(self.rows, case.local_batch, sampler=self.sampler, collate_fn=collate, num_workers=1)
