"""Faults that real training runs had, each planted in the loop of `loop.py` as its smallest change.

The codes are those of the catalogue in docs/watch-faults.md. `RANK` is the culprit where only one rank is wrong.
"""

# ruff: noqa: D102 - an override does what its class says
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.watch.loop import BATCH, CLASSES, PER_EPOCH, Loop, Model, plan

RANK = 1


@dataclass(frozen=True)
class Planted:
    """A fault: what it is, the clause that must name it, by which step, and the loops with and without it."""

    code: str
    what: str
    clause: str
    by: int
    loop: type[Loop]
    lines: tuple[str, ...] = ()
    clean: type[Loop] = Loop

    def faulty(self) -> Loop:
        """The loop with the fault, telling the watch `lines`."""
        return self._with_lines(self.loop)

    def right(self) -> Loop:
        """The loop without it, telling the watch the same."""
        return self._with_lines(self.clean)

    def _with_lines(self, loop: type[Loop]) -> Loop:
        made = loop()
        made.lines, made.steps = frozenset(self.lines), 6
        return made


class RankSeed(Loop):
    """Each rank initialises its own weights."""

    def build(self) -> nn.Module:
        torch.manual_seed(self.rank)
        return Model()


class NoReduce(Loop):
    """The wrapper is bypassed: nothing is reduced."""

    def reduce(self, step: int) -> None:
        pass


class AdaptersLocal(Loop):
    """The adapter is outside the wrapped module."""

    def reduce(self, step: int) -> None:
        for name, p in self.model.named_parameters():
            if p.grad is not None and "lora" not in name:
                dist.all_reduce(p.grad)


class LateModel(Model):
    """With one more layer."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.late(x)


class WithLate(Loop):
    """Right, with one more layer."""

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return LateModel()


class AddedLate(WithLate):
    """The layer came after the wrapper, which does not know it."""

    def reduce(self, step: int) -> None:
        for name, p in self.model.named_parameters():
            if p.grad is not None and "late" not in name:
                dist.all_reduce(p.grad)


class AddedAfterWatch(Loop):
    """A module is injected into the model in the middle of the run."""

    def before_update(self, step: int) -> None:
        if step == 3:
            self.model.injected = nn.Linear(2, 2)
            self.notes.append("injected")


class Replaced(Loop):
    """A parameter is re-created after wrapping."""

    def before_update(self, step: int) -> None:
        if step == 3:
            self.model.get_submodule("head").weight = nn.Parameter(self.model.get_parameter("head.weight").clone())


class LastMicroOnly(Loop):
    """Only the last micro-batch is reduced, the earlier ones are added locally."""

    def micro_batch(self, step: int, micro: int, ids: Sequence[int], rows: int) -> None:
        super().micro_batch(step, micro, ids, rows)
        if micro == 0:
            self.kept = [g.clone() for g in self.gradients()]
            for g in self.gradients():
                g.zero_()

    def reduce(self, step: int) -> None:
        super().reduce(step)
        for g, kept in zip(self.gradients(), self.kept, strict=True):
            g += kept


class BuffersLocal(Loop):
    """Nothing broadcasts the buffers."""

    def broadcast_buffers(self) -> None:
        pass


class MomentCorrupt(Loop):
    """One rank's Adam moment changes."""

    def before_update(self, step: int) -> None:
        if step == 4 and self.rank == RANK:
            self.opt.state[self.model.get_parameter("head.weight")]["exp_avg"][0] += 1


class LocalRate(Loop):
    """One rank lowers its learning rate after an unreduced metric."""

    def before_update(self, step: int) -> None:
        if step >= 5 and self.rank == RANK:
            for group in self.opt.param_groups:
                group["lr"] *= 0.1


class SumNotMean(Loop):
    """Local means, summed over ranks."""

    def loss(self, logits: Tensor, y: Tensor, rows: int) -> Tensor:
        return super().loss(logits, y, rows) * self.world


class MeanOfMeans(Loop):
    """The mean of the ranks' means."""

    def share(self, ids: Sequence[int]) -> list[list[int]]:
        mine = super().share(ids)
        self.local = sum(map(len, mine))
        return mine

    def loss(self, logits: Tensor, y: Tensor, rows: int) -> Tensor:
        return nn.functional.cross_entropy(logits, y, reduction="sum") / self.local / self.world


class DoubleAverage(Loop):
    """Divided by the world size once more."""

    def reduce(self, step: int) -> None:
        super().reduce(step)
        for g in self.gradients():
            g /= self.world


class LossTimesWorld(Loop):
    """The loss is multiplied by the world size."""

    def backward(self, loss: Tensor) -> None:
        (loss * self.world).backward()


class ClassWeights(Loop):
    """Right: weighted losses over the global sum of weights."""

    weight = torch.tensor([1.0, 2.0, 5.0])

    def loss(self, logits: Tensor, y: Tensor, rows: int) -> Tensor:
        return nn.functional.cross_entropy(logits, y, self.weight, reduction="sum") / self.total(y)

    def total(self, y: Tensor) -> float:
        """The sum of the weights of the rows of all ranks."""
        return float(self.weight[self.y[torch.tensor(self.now)]].sum())

    def global_batch(self, step: int) -> list[int]:
        self.now = plan(step)
        return self.now

    def reference(self, model: nn.Module, ids: Sequence[int]) -> tuple[Tensor, int]:
        index = torch.tensor(list(ids))
        y = self.y[index]
        loss = nn.functional.cross_entropy(model(self.x[index]), y, self.weight, reduction="sum")
        return loss / self.weight[y].sum() * len(ids), len(ids)


class ClassWeightsLocal(ClassWeights):
    """The weights are normalised over the rows of one micro-batch."""

    def total(self, y: Tensor) -> float:
        return float(self.weight[y].sum()) * self.world * self.micro_batches


class ReducedTemporary(Loop):
    """The reduced copy of a gradient is dropped."""

    def reduce(self, step: int) -> None:
        for g in self.gradients():
            dist.all_reduce(g.t().contiguous() if g.dim() == 2 else g)


class OtherOrder(Loop):
    """One rank reduces two tensors of one shape the other way round."""

    def reduce(self, step: int) -> None:
        g = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        names = list(g)
        if self.rank == RANK:
            a, b = names.index("lora_A.weight"), names.index("lora_B.weight")
            names[a], names[b] = names[b], names[a]
        for name in names:
            dist.all_reduce(g[name])


class StaleGradient(Loop):
    """One rank contributes its gradient of the step before."""

    kept: list[Tensor] | None = None

    def reduce(self, step: int) -> None:
        now = [g.clone() for g in self.gradients()]
        if self.rank == RANK and self.kept is not None:
            for g, old in zip(self.gradients(), self.kept, strict=True):
                g.copy_(old)
        self.kept = now
        super().reduce(step)


class MeanOfMicroMeans(Loop):
    """Each micro-batch weighs the same."""

    def loss(self, logits: Tensor, y: Tensor, rows: int) -> Tensor:
        return nn.functional.cross_entropy(logits, y) / self.micro_batches / self.world


class DividedTwice(Loop):
    """Divided by the number of micro-batches once more."""

    def backward(self, loss: Tensor) -> None:
        (loss / self.micro_batches).backward()


class NoZero(Loop):
    """zero_grad is missing."""

    def zero(self) -> None:
        pass


class ZeroPerMicro(Loop):
    """zero_grad before every micro-batch."""

    def micro_batch(self, step: int, micro: int, ids: Sequence[int], rows: int) -> None:
        self.opt.zero_grad()
        super().micro_batch(step, micro, ids, rows)


class WindowDropped(Loop):
    """The rest of an epoch is computed and never applied."""

    def step(self, step: int) -> None:
        if step % PER_EPOCH:
            super().step(step)
            return
        ids = self.global_batch(step)
        for micro, mine in enumerate(self.share(ids)):
            self.micro_batch(step, micro, mine, len(ids))
        self.opt.zero_grad()


class WindowFullDivisor(Loop):
    """The rest of an epoch is divided by the size of a full batch."""

    def loss(self, logits: Tensor, y: Tensor, rows: int) -> Tensor:
        return super().loss(logits, y, BATCH)
