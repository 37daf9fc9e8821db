"""Right resumes: a run that stops, and a second process of it, made anew from a checkpoint, with the same ledger.

A `fault` makes the resume wrong. Every update saves a checkpoint, so that any of them can be resumed from.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import andon
from andon_contracts.watch import Watch
from tests.watch.clean import Kind, Seen, ignore, path_of_all_ranks, seen_by
from tests.watch.loop import CLASSES, FEATURES, Model

ROWS, BATCH, SEED = 97, 8, 5
EPOCH = math.ceil(ROWS / BATCH)
"""The updates of an epoch."""


class Skipping(DistributedSampler[Any]):
    """Leaves out the first `skip` rows of this rank, as a sampler with a state does after its load."""

    skip = 0

    def __iter__(self) -> Iterator[Any]:
        rows = list(super().__iter__())[self.skip :]
        self.skip = 0
        return iter(rows)


class Wrapped(nn.Module):
    """An adapter around the old model, whose own adapter is frozen."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(FEATURES, 2), nn.Linear(2, CLASSES)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner(x) + self.lora_B(self.lora_A(x))
        return logits


@dataclass(frozen=True)
class Course:
    """How a run trains, where it stops, and the update from which each further process continues."""

    make: Any = torch.optim.SGD
    stops: tuple[int, ...] = (5, 14)
    resumed: tuple[int, ...] = (5,)
    worlds: tuple[int, ...] = (2, 2)
    scheduled: bool = False
    dropout: float = 0.0
    saved_in: torch.dtype = torch.float32
    adapter: bool = False
    average: bool = False
    told: bool = False
    fault: str = ""


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(ROWS, FEATURES, generator=generator), torch.arange(ROWS) % CLASSES)


def process(course: Course, number: int, folder: Path, group: Any) -> Watch:
    """Train from the checkpoint of this process, if it has one, to its last update."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    begin, stop = (0, *course.resumed)[number], course.stops[number]
    fault = course.fault if number == len(course.stops) - 1 else ""
    torch.manual_seed(SEED)
    inner = Model() if course.adapter else nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    saved: dict[str, Any] = torch.load(folder / f"{begin}-{rank % course.worlds[0]}.pt") if begin else {}
    if begin and fault != "weights":
        inner.load_state_dict(saved["model"], strict=False)
    if fault == "wrapped again":
        inner = Wrapped(inner)
    model = DistributedDataParallel(inner, process_group=group)
    average = copy.deepcopy(inner)
    optimizer = course.make([p for p in model.parameters() if p.requires_grad])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n) if course.scheduled else 1.0)
    sampler = Skipping(data(), world, rank, seed=SEED)
    if begin:
        if fault not in ("optimizer", "wrapped again"):
            rates = [group["lr"] for group in optimizer.param_groups]
            optimizer.load_state_dict(saved["optimizer"])
            for each, rate in zip(optimizer.param_groups, rates, strict=True):
                each["lr"] = rate if fault == "rate" else each["lr"]
        if fault != "rate":
            scheduler.load_state_dict(saved["scheduler"])
        if fault != "wrapped again":
            average.load_state_dict(saved["average"])
        done = begin - (course.resumed[number - 2] if fault == "second resume" else 0)
        lost = {"rows again": done % EPOCH, "rows skipped": -3}.get(fault, 0)
        sampler.skip = (done % EPOCH - lost) * BATCH // world
    made, watch = begin, andon.watch(
        model, optimizer, action=ignore, ledger=folder / "ledger.jsonl", group=group,
        start=begin if course.told else 0,
    )  # fmt: skip
    while made < stop:
        sampler.set_epoch(made // EPOCH)
        if made == begin:
            torch.manual_seed(SEED)
        if made == begin > 0 and fault != "seeded again":
            torch.set_rng_state(saved["random"])
        for x, y in DataLoader(data(), BATCH // world, sampler=sampler):
            hidden = nn.functional.dropout(x, course.dropout)
            cross_entropy(model(hidden), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            made += 1
            for p, q in zip(average.parameters(), inner.parameters(), strict=True):
                p.data.lerp_(q.data, 0.1)
            weights = {name: each.to(course.saved_in) for name, each in inner.state_dict().items()}
            if course.adapter:
                weights = {name: each for name, each in weights.items() if "lora" in name or "head" in name}
            states = {"optimizer": optimizer, "scheduler": scheduler, "average": average}
            saved = {name: each.state_dict() for name, each in states.items()}  # type: ignore[attr-defined]
            torch.save({"model": weights, "random": torch.get_rng_state(), **saved}, folder / f"{made}-{rank}.pt")
            if made >= stop:
                break
    watch.close()
    return watch


def run(course: Course, folder: Path | None = None) -> list[Watch]:
    """The watches of all processes of the run on this rank."""
    folder, watches = folder or path_of_all_ranks().parent, []
    for number, world in enumerate(course.worlds):
        group = dist.new_group(list(range(world)))
        if dist.get_rank() < world:
            watches.append(process(course, number, folder, group))
        dist.barrier()
    return watches


momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adamw = partial(torch.optim.AdamW, lr=0.01)
RIGHT = {
    "plain DDP": Course(),
    "mid-epoch, a sampler with a state": Course(adamw, dropout=0.3),
    "at the end of an epoch": Course(momentum, (EPOCH, EPOCH + 9), (EPOCH,)),
    "another world size": Course(adamw, worlds=(1, 2), scheduled=True),
    "AdamW and a schedule": Course(adamw, scheduled=True, told=True),
    "an adapter that is saved alone": Course(adamw, adapter=True, scheduled=True),
    "a checkpoint in bfloat16": Course(momentum, saved_in=torch.bfloat16),
    "an average of the weights": Course(adamw, average=True),
    "an older checkpoint": Course(adamw, (9, 14), (5,), scheduled=True, dropout=0.3),
    "resumed twice": Course(momentum, (5, 9, 14), (5, 8), (2, 2, 2), scheduled=True),
}


def _seen(course: Course, steps: int) -> Seen:
    longer = replace(course, stops=(*course.stops[:-1], max(course.stops[-1], steps)))
    return seen_by(*run(longer))


KINDS = {f"resumed: {name}": Kind(partial(_seen, course)) for name, course in RIGHT.items()}
