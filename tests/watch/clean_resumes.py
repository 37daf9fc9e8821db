"""Right resumes: processes of one run, each made anew from a checkpoint of the one before, that write to one ledger.

Every update saves a checkpoint. A `fault` makes the last process's resume wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, dropout
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import andon
from andon_contracts.watch import Watch
from tests.watch.clean import Kind, Seen, ignore, path_of_all_ranks, seen_by
from tests.watch.loop import CLASSES, FEATURES, Model

ROWS, BATCH, EPOCH = 97, 8, 13
"""13 updates use the rows once, in batches of 8."""


class Skipping(DistributedSampler[Any]):
    """Leaves out the first `skip` rows of this rank once, as a sampler with a state does after its load."""

    skip = 0

    def __iter__(self) -> Iterator[Any]:
        begin, self.skip = self.skip, 0
        return iter(list(super().__iter__())[begin:])


@dataclass(frozen=True)
class Course:
    """The last update of each process, the updates from which the further ones continue, and how the run trains."""

    make: Any = torch.optim.SGD
    stops: tuple[int, ...] = (5, 14)
    resumed: tuple[int, ...] = (5,)
    worlds: tuple[int, ...] = (2, 2)
    scheduled: bool = False
    dropout: float = 0.0
    saved_in: torch.dtype = torch.float32
    adapter: bool = False
    told: bool = False
    skips: bool = False
    """Batches before the checkpoint are drawn and left out, and the model gets copies, as on a GPU."""
    seeded: bool = False
    """Each epoch begins with a seed of its own."""
    fault: str = ""


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(ROWS, FEATURES, generator=generator), torch.arange(ROWS) % CLASSES)


def process(course: Course, number: int, folder: Path, group: Any) -> Watch:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    begin, stop = (0, *course.resumed)[number], course.stops[number]
    fault = course.fault if stop == course.stops[-1] else ""
    torch.manual_seed(0)
    inner = Model() if course.adapter else nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    saved: dict[str, Any] = torch.load(folder / f"{begin}-{rank % course.worlds[0]}.pt") if begin else {}
    if begin and fault != "weights":
        inner.load_state_dict(saved["weights"], strict=False)
    if fault == "wrapped":  # the adapter of the checkpoint is frozen under a new one
        inner = nn.Sequential(inner.requires_grad_(False), nn.Linear(CLASSES, CLASSES))
    model, average = DistributedDataParallel(inner, process_group=group), copy.deepcopy(inner)
    optimizer = course.make([p for p in model.parameters() if p.requires_grad])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n) if course.scheduled else 1.0)
    parts: dict[str, Any] = {"optimizer": optimizer, "scheduler": scheduler, "average": average}
    for name, part in parts.items():
        if begin and fault not in (name, "wrapped"):
            part.load_state_dict(saved[name])
    done = (begin - course.resumed[0] * (fault == "second resume")) % EPOCH
    sampler = Skipping(data(), world, rank)
    skip = {"rows again": 0, "rows skipped": done + 3}.get(fault, done)
    sampler.skip = 0 if course.skips else skip * BATCH // world
    drawn = skip if course.skips else 0
    told = {"start": begin} if course.told else {}
    with andon.watch(model, optimizer, action=ignore, ledger=folder / "ledger", group=group, **told) as watch:
        made = begin
        torch.manual_seed(1)
        if begin and fault != "seeded again":
            torch.set_rng_state(saved["random"])
        if begin and course.told:
            watch.loaded(folder / str(begin))
        while made < stop:
            sampler.set_epoch(made // EPOCH)
            if course.seeded:
                torch.manual_seed(100 + made // EPOCH)
            for x, y in DataLoader(data(), BATCH // world, sampler=sampler):
                drawn -= 1
                if drawn >= 0:
                    continue
                inputs = x.clone() if course.skips else x
                cross_entropy(model(dropout(inputs, course.dropout)), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                made += 1
                for p, q in zip(average.parameters(), inner.parameters(), strict=True):
                    p.data.lerp_(q.data, 0.1)
                weights = {n: w.to(course.saved_in) for n, w in inner.state_dict().items() if "base" not in n}
                saved = {name: part.state_dict() for name, part in parts.items()}
                saved |= {"weights": weights, "random": torch.get_rng_state()}
                torch.save(saved, folder / f"{made}-{rank}.pt")
                if course.told:
                    watch.saved(folder / str(made))
                if made == stop:
                    break
    return watch


def run(course: Course, folder: Path) -> list[Watch]:
    """The watches of this rank, one for each process in which it takes part."""
    watches = []
    for number, world in enumerate(course.worlds):
        group = dist.new_group(list(range(world)))
        if dist.get_rank() < world:
            watches.append(process(course, number, folder, group))
        dist.barrier()
    return watches


momentum, adamw = partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(torch.optim.AdamW, lr=0.01)
RIGHT = {
    "plain DDP": Course(),
    "a sampler with a state, in mid-epoch": Course(adamw, dropout=0.3),
    "at the end of an epoch": Course(momentum, (EPOCH, EPOCH + 9), (EPOCH,)),
    "on more ranks": Course(adamw, worlds=(1, 2), scheduled=True),
    "AdamW and a schedule": Course(adamw, scheduled=True, told=True),
    "an adapter that is saved alone": Course(adamw, adapter=True, scheduled=True),
    "a checkpoint in bfloat16": Course(momentum, saved_in=torch.bfloat16),
    "an average of the weights": Course(adamw),
    "an older checkpoint": Course(adamw, (9, 14), (5,), scheduled=True, dropout=0.3),
    "batches left out one by one, on a GPU": Course(momentum, skips=True),
    "a seed for each epoch, at its first update": Course(momentum, (EPOCH + 1, EPOCH + 8), (EPOCH + 1,), seeded=True),
    "twice": Course(momentum, (5, 9, 14), (5, 8), (2, 2, 2), scheduled=True),
}


def _seen(course: Course, steps: int) -> Seen:
    longer = replace(course, stops=(*course.stops[:-1], max(course.stops[-1], steps)))
    return seen_by(*run(longer, path_of_all_ranks().parent))


KINDS = {f"resumed: {name}": Kind(partial(_seen, course)) for name, course in RIGHT.items()}
