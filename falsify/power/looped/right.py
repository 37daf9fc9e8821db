"""Right loops that do more than `PlainLoop`, for faults in what it does not do. `RIGHT_LOOPS` lists them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from andon_falsify.loops.protocol import Told
from andon_falsify.loops.task import collate, optimizer
from andon_falsify.peers.plain import PlainLoop, cut
from andon_falsify.subjects.case import Case

SCALE = 1024.0
"""The loss scale of half precision: a power of two, so that scaling rounds nothing."""


class Wrapped(PlainLoop):
    """It uses DistributedDataParallel, and undoes its average over the ranks. Every rank has rows in every update."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.model = self._wrapped()

    def _wrapped(self) -> nn.Module:
        self.ddp = DistributedDataParallel(self.model)
        return self.ddp

    def _update(self, batch: list[int]) -> Tensor:
        total = torch.zeros(())
        pieces = cut(self._mine(batch), self.case.local_batch)
        for place, piece in enumerate(pieces, start=1):
            with nullcontext() if place == len(pieces) else self.ddp.no_sync():
                loss = self._loss_sum(piece) / len(batch)
                (loss * dist.get_world_size()).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        dist.all_reduce(total)
        self._apply()
        return total


class Tracking(PlainLoop):
    """It keeps a running mean of its head's inputs, averaged over the ranks after every update."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.head = next(module for name, module in self.model.named_modules() if name.endswith("score"))
        self.mean = torch.zeros(case.hidden)
        self.head.register_buffer("running_mean", self.mean, persistent=False)
        self.head.register_forward_pre_hook(self._track)

    def _track(self, _: nn.Module, given: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            self.mean.lerp_(given[0].detach().flatten(0, -2).mean(0), 0.1)

    def _apply(self) -> None:
        super()._apply()
        self._share()

    def _share(self) -> None:
        dist.all_reduce(self.mean)
        self.mean.div_(dist.get_world_size())


class Scheduled(PlainLoop):
    """Its learning rate follows half a cosine, as it declares."""

    def rate(self, update: int) -> float:
        return 0.5 * self.case.lr * (1 + math.cos(math.pi * update / (1 + self.case.updates(self.case.global_batch))))

    def _counted(self) -> int:
        return self.done + 1

    def _apply(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self._counted())
        super()._apply()


class Grouped(PlainLoop):
    """AdamW with two groups: norms do not decay, as it declares."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        groups = [
            {"params": [p for name, p in named.items() if self._decays(name)], "weight_decay": case.weight_decay},
            {"params": [p for name, p in named.items() if not self._decays(name)], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=case.lr)

    def _decays(self, name: str) -> bool:
        return "norm" not in name

    def decay(self, name: str) -> float:
        return 0.0 if "norm" in name else self.case.weight_decay


class Tied(PlainLoop):
    """Two adapters of one shape share a weight."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        named = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        first, shared = next(iter(named.items()))
        other = next(name for name, parameter in named.items() if name != first and parameter.shape == shared.shape)
        place, _, name = other.rpartition(".")
        setattr(self.model.get_submodule(place), name, shared)
        self.tied = (first, other)
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = optimizer(case, self.trained)


class Labelled(PlainLoop):
    """The model itself computes the loss from the labels: the mean over its rows."""

    def _loss_sum(self, ids: Sequence[int]) -> Tensor:
        batch = collate([self.rows[row] for row in ids])
        batch["labels"] = self._labels(batch["labels"])
        loss: Tensor = self.model(**batch).loss
        return loss * float(len(ids))

    def _labels(self, labels: Tensor) -> Tensor:
        """int64 [rows]: the labels that the model receives."""
        return labels


class LossScaled(PlainLoop):
    """It scales the loss before the backward pass, and the summed gradient back before it is clipped."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1000)

    def _loss_sum(self, ids: Sequence[int]) -> Tensor:
        scaled: Tensor = self.scaler.scale(super()._loss_sum(ids))
        return scaled

    def _add_over_ranks(self, total: Tensor) -> None:
        super()._add_over_ranks(total)
        self._unscale()
        total.div_(SCALE)

    def _unscale(self) -> None:
        self.scaler.unscale_(self.optimizer)

    def _step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class Noisy(PlainLoop):
    """In training it adds noise to the token vectors, different on every rank."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)

        def noise(_: nn.Module, __: Any, vectors: Tensor) -> Tensor:
            return vectors + 0.01 * torch.randn_like(vectors) if torch.is_grad_enabled() else vectors

        inner: Any = self.model
        inner.get_input_embeddings().register_forward_hook(noise)


class Best(PlainLoop):
    """After its training it restores the weights that had the smallest loss."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.smallest = math.inf
        self.best: list[Tensor] = []

    def train(self, told: Told) -> None:
        super().train(told)
        self._restore_best()

    def _apply(self) -> None:
        loss = self._metric()
        if loss < self.smallest:
            self.smallest, self.best = loss, [p.detach().clone() for p in self.trained]
        super()._apply()

    def _add_over_ranks(self, total: Tensor) -> None:
        self.own = float(total)
        super()._add_over_ranks(total)
        self.summed = float(total)

    def _metric(self) -> float:
        """The best update has the smallest: the loss of the whole batch."""
        return self.summed

    @torch.no_grad()
    def _restore_best(self) -> None:
        for parameter, kept in zip(self.trained, self.best, strict=True):
            parameter.copy_(kept)


class Loaded(PlainLoop):
    """Its rows come from torch's data loader, with a `DistributedSampler`."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.sampler = self._sampler()
        self.loader = DataLoader(self.rows, batch_size=case.local_batch, sampler=self.sampler, collate_fn=collate)

    def _sampler(self) -> Sampler[int]:
        """The rows of this rank, in order."""
        return DistributedSampler(self.rows, seed=self.case.seed)

    def _begin(self, epoch: int) -> None:
        if isinstance(self.sampler, DistributedSampler):
            self.sampler.set_epoch(epoch)

    def _batches(self) -> Iterator[Any]:
        yield from islice(self._windows(), self.case.max_steps)

    def _windows(self) -> Iterator[list[dict[str, Tensor]]]:
        for epoch in range(self.case.epochs):
            self._begin(epoch)
            micro_batches = iter(self.loader)
            while window := list(islice(micro_batches, self.case.accumulation)):
                yield window

    def _update(self, batch: Any) -> Tensor:
        rows = torch.tensor(float(sum(len(each["labels"]) for each in batch)))
        dist.all_reduce(rows)
        total = torch.zeros(())
        for each in batch:
            loss = self._loss_sum(each) / rows
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        self._add_over_ranks(total)
        self._apply()
        return total

    def _loss_sum(self, ids: Any) -> Tensor:
        labels = ids["labels"]
        given = {name: tensor for name, tensor in ids.items() if name != "labels"}
        return cross_entropy(self.model(**given).logits, labels, self.weights, reduction="sum")


class EveryNth(Sampler[int]):
    """This rank's rows of the order that `sampler` draws on each rank. Some ranks have one row more than others."""

    def __init__(self, sampler: Sampler[int]) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[int]:
        return islice(self.sampler, dist.get_rank(), None, dist.get_world_size())


class Dealt(Loaded):
    """Its order comes from a random generator that has the same state on all ranks, and no row is repeated."""

    def _sampler(self) -> Sampler[int]:
        self.stream = torch.Generator().manual_seed(self.case.seed)
        return EveryNth(RandomSampler(self.rows, generator=self.stream))


class Averaged(PlainLoop):
    """Every rank keeps a moving average of the weights outside the model."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.average = copy.deepcopy(self.model).requires_grad_(False)

    def _step(self) -> None:
        super()._step()
        self._follow()

    @torch.no_grad()
    def _follow(self) -> None:
        for kept, parameter in zip(self.average.parameters(), self.model.parameters(), strict=True):
            kept.lerp_(parameter, 0.1)


RIGHT_LOOPS = (
    *(Averaged, Dealt, Loaded, Wrapped, Tracking, Scheduled, Grouped),
    *(Tied, Labelled, LossScaled, Noisy, Best),
)
"""All of them; a fault changes one of these, or `PlainLoop`."""
