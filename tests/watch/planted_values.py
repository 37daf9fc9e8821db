"""The faults of clipping, precision and data, planted in the loop of `loop.py`."""

# ruff: noqa: D102 - an override does what its class says
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from tests.watch.loop import CLASSES, CLIP, PER_EPOCH, Loop
from tests.watch.planted import RANK


class ClipByHand(Loop):
    """Right: clipping written out."""

    def clip(self, step: int) -> None:
        norm = self.norm()
        for g in self.gradients():
            g.mul_(min(1.0, CLIP / (norm + 1e-6)))

    def norm(self) -> float:
        """The norm of the reduced gradient."""
        return float(torch.stack([(g**2).sum() for g in self.gradients()]).sum().sqrt())


class ClipDoubleNorm(ClipByHand):
    """The norm is summed over replicas that all have the same gradient."""

    def norm(self) -> float:
        total = torch.tensor(super().norm() ** 2)
        dist.all_reduce(total)
        return float(total.sqrt())


class Overflow(Loop):
    """A finite loss so large that the norm overflows and clipping makes the gradient zero."""

    now = 0

    def global_batch(self, step: int) -> list[int]:
        self.now = step
        return super().global_batch(step)

    def backward(self, loss: Tensor) -> None:
        (loss * (1e21 if self.now == 3 else 1.0)).backward()


class NanHidden(Overflow):
    """A bad row on one rank; its NaNs are replaced by zeros."""

    def backward(self, loss: Tensor) -> None:
        (loss * (float("nan") if self.now == 3 and self.rank == RANK else 1.0)).backward()

    def reduce(self, step: int) -> None:
        for g in self.gradients():
            g.nan_to_num_(0.0, 0.0, 0.0)
        super().reduce(step)


class Scaled(Loop):
    """Right, with a loss scaler: unscaled after the reduction and before clipping."""

    def options(self) -> dict[str, Any]:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        known = super().options()
        return known | {"scaler": self.scaler} if "scaler" in self.lines else known

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def clip(self, step: int) -> None:
        self.scaler.unscale_(self.opt)
        super().clip(step)

    def update(self) -> None:
        self.scaler.step(self.opt)
        self.scaler.update()


class ClipScaled(Scaled):
    """Clipped before it is unscaled."""

    def clip(self, step: int) -> None:
        Loop.clip(self, step)
        self.scaler.unscale_(self.opt)


class ScaleLocal(Scaled):
    """One rank's scale is halved alone, after step 3."""

    def after_update(self, step: int) -> None:
        if step == 3 and self.rank == RANK:
            self.scaler.update(new_scale=512.0)


class LowPrecision(Loop):
    """The model is cast to bf16 and trained with a small learning rate."""

    def build(self) -> nn.Module:
        return super().build().to(torch.bfloat16)

    def load(self, step: int, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        x, y = super().load(step, ids)
        return x.to(torch.bfloat16), y

    def set_rate(self, step: int) -> None:
        for group in self.opt.param_groups:
            group["lr"] = 2e-5


class Padded(Loop):
    """Torch's own sampler gives each rank the same number of rows, the last ones from the beginning of the epoch."""

    def global_batch(self, step: int) -> list[int]:
        return [row for rank in range(self.world) for row in self.sampled(step, rank)]

    def share(self, ids: Sequence[int]) -> list[list[int]]:
        mine = torch.tensor(list(ids)).tensor_split(self.world)[self.rank]
        return [part.tolist() for part in mine.tensor_split(self.micro_batches)]

    def sampled(self, step: int, rank: int) -> list[int]:
        """The rows of `rank` in update `step`."""
        epoch, place = divmod(step - 1, PER_EPOCH)
        sampler: DistributedSampler[int] = DistributedSampler(self.y, num_replicas=self.world, rank=rank)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        size = -(-len(sampler) // PER_EPOCH)
        return list(sampler)[place * size : (place + 1) * size]


class DropLast(Loop):
    """The ragged batch is left out."""

    def step(self, step: int) -> None:
        if step % PER_EPOCH:
            super().step(step)


class LocalOrder(Loop):
    """One rank's data set is in another order."""

    def before_watch(self) -> None:
        if self.rank == RANK:
            order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(9))
            self.x, self.y = self.x[order], self.y[order]


class NotSharded(Loop):
    """Every rank has the first rank's rows."""

    def share(self, ids: Sequence[int]) -> list[list[int]]:
        rank, self.rank = self.rank, 0
        mine = super().share(ids)
        self.rank = rank
        return mine


class LabelMap(Loop):
    """One rank numbers the classes otherwise."""

    def before_watch(self) -> None:
        if self.rank == RANK:
            self.y = (self.y + 1) % CLASSES


class ShiftedLabels(Loop):
    """The collate function shifts the labels by one row."""

    def load(self, step: int, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        x, y = super().load(step, ids)
        return x, y.roll(1)
