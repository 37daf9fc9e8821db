"""A small loop with rows, losses and clipping, whose ledgers are looked at; one process can compute all of it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from andon_contracts.record import Record, Step
from andon_contracts.watch import Watch

ROWS, BATCH, EPOCHS, RATE, CLIP = 11, 4, 2, 0.05, 0.1
STEPS = EPOCHS * 3


def model_of(kind: str = "plain") -> nn.Module:
    """The same weights on every rank, wrapped as `kind` says."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    if kind == "ddp":
        return DistributedDataParallel(model)
    return fully_shard(model) if kind == "fsdp" else model


def data() -> tuple[Tensor, list[list[int]]]:
    """The rows, and the ids of every batch: the last one of an epoch is ragged."""
    rows = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1))
    orders = [torch.randperm(ROWS, generator=torch.Generator().manual_seed(7 + e)).tolist() for e in range(EPOCHS)]
    return rows, [order[at : at + BATCH] for order in orders for at in range(0, ROWS, BATCH)]


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """The sum over `rows`, on a graph even where there are none."""
    return model(rows).square().sum()


def train(w: Watch, model: nn.Module, optimizer: torch.optim.Optimizer, *, clip: bool, tell: bool = True) -> None:
    """Every rank takes every world-th row; the gradient is that of the mean over the whole batch."""
    rows, batches = data()
    rank, world = dist.get_rank(), dist.get_world_size()
    averages = not isinstance(model, nn.Sequential) or hasattr(model, "set_requires_gradient_sync")
    for ids in batches:
        mine = ids[rank::world]
        loss = loss_of(model, rows[mine])
        if tell:
            w.batch(mine)
            w.loss(loss.detach(), len(mine))
        (loss * (world if averages else 1) / len(ids)).backward()
        if not averages:
            for p in model.parameters():
                dist.all_reduce(p.grad)  # type: ignore[arg-type]
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def steps_of(records: list[Record]) -> list[Step]:
    return [record for record in records if isinstance(record, Step)]
