"""What a loop does without telling: right loops that look like faulty ones stay silent, and the closing lines say what
is no fault.
"""

from __future__ import annotations

import contextlib
import copy
import io
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import andon
from andon_contracts.agree import Observation
from andon_contracts.violation import Violation
from andon_contracts.watch.copies import Copies
from andon_contracts.watch.loaders import places_of, yielded
from andon_contracts.watch.model_probe import ModelProbe
from tests.support.ranks import run_ranks

ROWS = 40


def rows(count: int = ROWS) -> TensorDataset:
    """Rows with features and a label, alike on all ranks."""
    draws = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(count, 6, generator=draws), torch.randint(0, 3, (count,), generator=draws))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))


@dataclass(frozen=True)
class Course:
    """A loop: how it gets its batches in an epoch, and what it does around its updates."""

    batches: Callable[[int], Iterator[Any]]
    before: Callable[[nn.Module], None] = lambda _: None
    behind: Callable[[nn.Module], None] = lambda _: None
    epochs: int = 2
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy

    def run(self) -> list[tuple[str, int]]:
        model = DistributedDataParallel(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        found: list[tuple[str, int]] = []

        def note(each: Violation) -> None:
            found.append((each.clause, each.step))

        torch.manual_seed(100 + dist.get_rank())
        with andon.watch(model, optimizer, action=note) as watch:
            for epoch in range(self.epochs):
                self.before(model)
                for x, y in self.batches(epoch):
                    self.loss(model(x), y).backward()
                    self.behind(model)
                    optimizer.step()
                    optimizer.zero_grad()
        return found + [(each.clause, each.step) for each in watch.findings if (each.clause, each.step) not in found]


def _dealt(data: Any, epoch: int, *, drop: bool = False, **options: Any) -> Iterator[Any]:
    sampler = DistributedSampler(data, seed=1, drop_last=drop)
    sampler.set_epoch(epoch)
    yield from DataLoader(data, **{"batch_size": 4, "sampler": sampler, **options})


def distributed(epoch: int) -> Iterator[Any]:
    yield from _dealt(rows(), epoch)


def padded(epoch: int) -> Iterator[Any]:
    """One row comes twice, because there is an odd number of them."""
    yield from _dealt(rows(45), epoch)


def dropped(epoch: int) -> Iterator[Any]:
    yield from _dealt(rows(45), epoch, drop=True)


def _with_workers(epoch: int, **options: Any) -> Iterator[Any]:
    # A rank of the tests is a daemon, which may else have no processes of its own.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    # Forked, as in a script: a rank's own default is a server, which would load all libraries again.
    yield from _dealt(rows(), epoch, num_workers=2, multiprocessing_context="fork", **options)


def from_workers(epoch: int) -> Iterator[Any]:
    yield from _with_workers(epoch)


def in_any_order(epoch: int) -> Iterator[Any]:
    yield from _with_workers(epoch, in_order=False)


def ahead(epoch: int) -> Iterator[Any]:
    """The next batch is read before the one at hand is used, as Accelerate does, and given to the model as a copy."""
    held: Any = None
    for batch in _dealt(rows(), epoch):
        if held is not None:
            yield [each.clone() for each in held]
        held = batch
    yield [each.clone() for each in held]


def cut_by_rank(epoch: int) -> Iterator[Any]:
    """All ranks read the same global batches, and each uses its part."""
    draws = torch.Generator().manual_seed(epoch)
    rank, world = dist.get_rank(), dist.get_world_size()
    for x, y in DataLoader(rows(), batch_size=8, sampler=RandomSampler(rows(), generator=draws)):
        yield x[rank::world], y[rank::world]


def own_shard(epoch: int) -> Iterator[Any]:
    """Every rank has its own part of the data, and shuffles it as the others do theirs."""
    x, y = rows().tensors
    rank, world = dist.get_rank(), dist.get_world_size()
    shard = TensorDataset(x[rank::world], y[rank::world])
    yield from DataLoader(shard, batch_size=4, sampler=RandomSampler(shard, generator=_seeded(epoch)))


def with_replacement(epoch: int) -> Iterator[Any]:
    draws = _seeded(10 * epoch + dist.get_rank())
    sampler = RandomSampler(rows(), replacement=True, generator=draws)
    yield from DataLoader(rows(), batch_size=4, sampler=sampler)


class RASampler(Sampler[int]):
    """Repeated augmentation: every row comes on several ranks, as torchvision's does it."""

    def __init__(self, count: int, repetitions: int, epoch: int) -> None:
        self.count, self.repetitions, self.epoch = count, repetitions, epoch

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.count, generator=_seeded(self.epoch)).tolist()
        repeated = [row for row in order for _ in range(self.repetitions)]
        yield from repeated[dist.get_rank() : self.count : dist.get_world_size()]


def repeated_on_purpose(epoch: int) -> Iterator[Any]:
    yield from DataLoader(rows(), batch_size=4, sampler=RASampler(ROWS, 3, epoch))


def oversampled(epoch: int) -> Iterator[Any]:
    """Rows of a rare class are in the list of rows several times."""
    order = torch.cat([torch.arange(ROWS), torch.arange(6).repeat(4)])
    order = order[torch.randperm(len(order), generator=_seeded(epoch))][dist.get_rank() :: dist.get_world_size()]
    yield from DataLoader(rows(), batch_size=4, sampler=order.tolist())


class InOrder:
    """A loader of the rows in their order, kept for all epochs."""

    def __init__(self) -> None:
        self.loader: Any = None

    def __call__(self, epoch: int) -> Iterator[Any]:
        if self.loader is None:
            self.loader = DataLoader(rows(), batch_size=4, sampler=DistributedSampler(rows(), shuffle=False))
        yield from self.loader


class Peeking:
    """Before the first epoch one batch is looked at, and its sampler is told of epochs from then on."""

    def __init__(self) -> None:
        self.loader: Any = None

    def __call__(self, epoch: int) -> Iterator[Any]:
        if self.loader is None:
            self.loader = DataLoader(rows(), batch_size=4, sampler=DistributedSampler(rows()))
            next(iter(self.loader))
        self.loader.sampler.set_epoch(epoch)
        yield from self.loader


class LooksFirst:
    """Looks at one batch before each epoch, as torch's tutorial of DDP does for its size, and then begins anew."""

    def __init__(self, *, tells: bool) -> None:
        self.loader: Any = None
        self.tells = tells

    def __call__(self, epoch: int) -> Iterator[Any]:
        if self.loader is None:
            self.loader = DataLoader(rows(), batch_size=4, sampler=DistributedSampler(rows()))
        next(iter(self.loader))
        if self.tells:
            self.loader.sampler.set_epoch(epoch)
        yield from self.loader


class Stream(IterableDataset[Any]):
    """Rows without indices, another part on each rank."""

    def __iter__(self) -> Iterator[Any]:
        yield from list(rows())[dist.get_rank() :: dist.get_world_size()]


def streamed(epoch: int) -> Iterator[Any]:
    yield from DataLoader(Stream(), batch_size=4)


def one_skipped(epoch: int) -> Iterator[Any]:
    for number, batch in enumerate(_dealt(rows(45), epoch)):
        if number != 1:
            yield batch


def freezes_batch_norm(model: nn.Module) -> None:
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()


def clips_and_reports(model: nn.Module) -> None:
    """The norm is clipped, and a loss averaged over the ranks behind that."""
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    dist.all_reduce(torch.ones(()))


def begins_anew(model: nn.Module) -> None:
    """A clipped gradient is thrown away, and another one computed."""
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    model.zero_grad()
    model(torch.randn(4, 6)).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clips_parts(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(list(model.parameters())[:2], 0.1)
    nn.utils.clip_grad_norm_(list(model.parameters())[2:], 0.1)


def clips_on_one_rank(model: nn.Module) -> None:
    """The others use the gradient as it is, which is small enough for them."""
    if dist.get_rank() == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 1e6)


class Following:
    """A copy of the model that follows it between updates: kept on these ranks, and kept up on those."""

    def __init__(self, kept: Sequence[int], followed: Sequence[int], form: str = "module") -> None:
        self.kept, self.followed, self.form = kept, followed, form
        self.held: Any = None

    def __call__(self, model: nn.Module) -> None:
        inner = model.module
        if self.held is None and dist.get_rank() in self.kept:
            assert isinstance(inner, nn.Module)
            shadows = {name: p.detach().clone() for name, p in inner.named_parameters()}
            forms = {"module": lambda: copy.deepcopy(inner), "table": lambda: shadows}
            self.held = forms.get(self.form, lambda: list(shadows.values()))()
        if dist.get_rank() in self.followed:
            tensors = self.held.parameters() if self.form == "module" else self.held
            tensors = tensors.values() if self.form == "table" else tensors
            with torch.no_grad():
                for one, parameter in zip(tensors, inner.parameters(), strict=True):  # type: ignore[operator]
                    one.lerp_(parameter, 0.5)


class Residual:
    """What each rank keeps of its own for each parameter, and adds to: the rest of a compression, say."""

    def __init__(self) -> None:
        self.held: list[Tensor] = []

    def __call__(self, model: nn.Module) -> None:
        self.held = self.held or [torch.zeros_like(p) for p in model.parameters()]
        for each in self.held:
            each.add_(torch.randn(each.shape, generator=_seeded(dist.get_rank())), alpha=1e-3)


class BestSoFar:
    """A copy of the weights that each rank takes when it finds them good, by what it saw itself."""

    def __init__(self) -> None:
        self.calls = 0
        self.best: Mapping[str, Tensor] = {}

    def __call__(self, model: nn.Module) -> None:
        self.calls += 1
        if self.calls % (2 + dist.get_rank()) == 0:
            self.best = copy.deepcopy({name: p.detach() for name, p in model.module.named_parameters()})  # type: ignore[union-attr, operator]


def evaluates_in_between(model: nn.Module) -> None:
    """Between backward pass and update, with gradients, on the same rows everywhere; and back into training mode."""
    model.eval()
    model(torch.ones(4, 6))
    model.train()


RIGHT = {
    "distributed sampler": Course(distributed),
    "padded": Course(padded),
    "last batch dropped": Course(dropped),
    "workers": Course(from_workers),
    "workers, in any order": Course(in_any_order),
    "one batch ahead, copied": Course(ahead),
    "global batch cut by rank": Course(cut_by_rank),
    "own shard of each rank, one seed": Course(own_shard),
    "with replacement": Course(with_replacement),
    "repeated augmentation": Course(repeated_on_purpose),
    "oversampled": Course(oversampled),
    "rows in order": Course(InOrder()),
    "a batch looked at first": Course(Peeking()),
    "a batch looked at before each epoch": Course(LooksFirst(tells=True)),
    "iterable data": Course(streamed),
    "a batch left out": Course(one_skipped),
    "batch norm frozen": Course(distributed, before=freezes_batch_norm),
    "clipped, and a loss reduced behind that": Course(distributed, behind=clips_and_reports),
    "clipped, thrown away, clipped": Course(distributed, behind=begins_anew),
    "parts clipped apart": Course(distributed, behind=clips_parts),
    "average of weights on all ranks": Course(distributed, behind=Following((0, 1), (0, 1))),
    "residuals of each rank's own": Course(distributed, behind=Residual()),
    "best weights by each rank's own measure": Course(distributed, behind=BestSoFar()),
    "average of weights on rank 0": Course(distributed, behind=Following((0,), (0,))),
    "copy of the start on all ranks": Course(distributed, behind=Following((0, 1), ())),
    "shadows on rank 0": Course(distributed, behind=Following((0,), (0,), "list")),
    "evaluation between backward pass and update": Course(distributed, behind=evaluates_in_between),
}


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def right_courses(names: Sequence[str]) -> dict[str, list[tuple[str, int]]]:
    return {name: RIGHT[name].run() for name in names}


@pytest.mark.parametrize("first", range(5))
def test_right_loops_that_look_like_faulty_ones_are_not_accused(first: int) -> None:
    """Every fifth loop shares one start of ranks."""
    names = list(RIGHT)[first::5]
    assert [o.get() for o in run_ranks(2, right_courses, names)] == [{name: [] for name in names}] * 2


def same_stream(epoch: int) -> Iterator[Any]:
    """All ranks read the same rows, which have no indices."""
    yield from DataLoader(Whole(), batch_size=4)


class Whole(IterableDataset[Any]):
    """All rows, on every rank."""

    def __iter__(self) -> Iterator[Any]:
        yield from rows()


def same_from_workers(epoch: int) -> Iterator[Any]:
    """Nothing deals out the rows, and workers draw ahead."""
    yield from _with_workers(epoch, sampler=RandomSampler(rows(), generator=_seeded(epoch)))


def one_split(epoch: int) -> Iterator[Any]:
    """A split that is seeded alike, dealt out: right, and of the same form as one that is not."""
    half = Subset(rows(), torch.randperm(ROWS, generator=_seeded(0))[:20].tolist())
    yield from _dealt(half, epoch)


def stays_in_evaluation(model: nn.Module) -> None:
    model.eval()


WRONG = {
    "the order of the first epoch, a batch looked at before each": (
        Course(LooksFirst(tells=False)),
        "order-renewed",
        7,
    ),
    "the same stream on all ranks": (Course(same_stream), "samples-once", 3),
    "the same rows from workers": (Course(same_from_workers, epochs=1), "samples-once", 1),
    "clipped on one rank": (Course(distributed, behind=clips_on_one_rank), "clip-placed", 1),
    "average kept up on one rank": (Course(distributed, behind=Following((0, 1), (0,))), "copies-agree", 2),
    "shadows kept up on one rank": (Course(distributed, behind=Following((0, 1), (0,), "list")), "copies-agree", 2),
    "table kept up on one rank": (Course(distributed, behind=Following((0, 1), (0,), "table")), "copies-agree", 2),
    "never in training mode": (Course(distributed, before=stays_in_evaluation), "training-mode", 2),
}


def every_wrong_course() -> dict[str, list[tuple[str, int]]]:
    right = {"one split": Course(one_split).run()}
    return right | {name: course.run() for name, (course, _, _) in WRONG.items()}


def test_what_has_no_index_and_no_way_back_is_suspected() -> None:
    """Rows that are given to the model alike on all ranks, and a model that was never put into training mode."""
    for outcome in run_ranks(2, every_wrong_course):
        found = outcome.get()
        assert found.pop("one split") == []
        assert {name: found[name][:1] for name in WRONG} == {
            name: [(clause, step)] for name, (_, clause, step) in WRONG.items()
        }


@pytest.mark.parametrize(
    ("apart", "updates", "alike"),
    [(2.0**-24, 2, True), (2.0**-23, 3, True), (1e-5, 2, False), (3e-6, 2, False), (1e-4, 512, False)],
)
def test_copies_that_were_rounded_apart_are_one(apart: float, updates: int, alike: bool) -> None:
    """Ranks whose averages differ by a rounding keep the same; of a step of an average one rank has, they do not."""
    drawn = [torch.randn(shape, generator=_seeded(0)) for shape in ((40, 7), (40,))]
    ranks = [drawn, [each * (1 + apart * torch.randn(each.shape, generator=_seeded(1))) for each in drawn], []]
    copies = [Copies(ModelProbe(nn.Linear(2, 2), [], None, [])) for _ in ranks]
    for each, held in zip(copies, ranks, strict=True):
        each._held = [held] if held else []
    none = {"copy 1": 0, "copy 2": 0, "copies changed": 0}
    said = [
        Observation(rank, 3, 9, "before", {"copy 0": (rank + 5) * bool(held), **none})
        for rank, held in enumerate(ranks)
    ]
    sketches = [Observation(rank, 3, 9, "copies", each.sketches()) for rank, each in enumerate(copies)]
    found = copies[0].without_roundings(said, sketches, updates)
    assert [each.values["copy 0"] for each in found] == [5, 5 if alike else 6, 0]
    assert (copies[0].apart > 0) == alike
    # A copy that only one of the ranks keeps up is another one, however near they are.
    kept_up = [replace(each, values={**each.values, "copies changed": int(each.rank == 0)}) for each in said]
    assert copies[0].without_roundings(kept_up, sketches, updates) == kept_up
    assert copies[0].apart == 0


@pytest.mark.parametrize("updates", [1, 3])
def test_a_process_that_never_joins_the_others_is_suspected_then_found(
    monkeypatch: pytest.MonkeyPatch, updates: int
) -> None:
    """A suspicion at the second update, a violation at the close; one update alone says nothing."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = andon.watch(model, optimizer, action=lambda _: None)
    for _ in range(updates):
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [(each.clause, each.step) for each in watch.findings] == [("ranks-joined", 2)] * (updates > 1)
    assert watch.violations == 0
    watch.close()
    assert watch.violations == (updates > 1)


def _leaves_its_group() -> tuple[int, int]:
    os.environ["WORLD_SIZE"] = "2"
    model = DistributedDataParallel(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = andon.watch(model, optimizer, action=lambda _: None)
    for step in range(3):
        model(torch.full((2, 3), 1.0 + dist.get_rank() + step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
    watch.close()
    return watch.violations, len(watch.findings)


def test_a_group_that_is_taken_down_before_the_close_was_joined() -> None:
    """As right scripts end, and a watch that is closed by the end of the process."""
    assert [outcome.get() for outcome in run_ranks(2, _leaves_its_group)] == [(0, 0), (0, 0)]


def test_a_process_that_is_to_be_alone_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Independent jobs under one launcher."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with andon.watch(model, optimizer, allow={"ranks-joined": "jobs of their own"}) as watch:
        for _ in range(2):
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert watch.violations == 0
    assert watch.findings == ()


@pytest.mark.parametrize(
    ("arguments", "filled"),
    [
        (
            ["train.py", "--lr", "1e-3", "--batch-size", "8", "--accum=2"],
            "--batch-size {local_batch} --accum={accumulation}'",
        ),
        (["train.py", "--accum", "2"], "--accum {accumulation}'; put {local_batch} where it takes them"),
        (["train.py", "--lr", "1e-3"], "--lr 1e-3'; put {local_batch} and {accumulation} where it takes them"),
    ],
)
def test_the_closing_lines_name_the_command_that_would_see_the_scale(arguments: list[str], filled: str) -> None:
    """The script's own arguments stand in it, with the places that the falsifier fills."""
    lines = [line for outcome in run_ranks(2, scale, arguments) for line in outcome.get()]
    assert len(lines) == 1, "the graph of this loss says nothing of it"
    assert lines[0].endswith(filled)


def scale(arguments: list[str]) -> list[str]:
    sys.argv = arguments
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        Course(distributed, epochs=1, loss=lambda logits, _: logits.square().sum()).run()
    return [line for line in text.getvalue().splitlines() if line.startswith("  gradient scale:")]


def closing(tmp: str) -> list[str]:
    """Of a pass that was filled up, and of one that was cut short."""
    lines = []
    for batches in (padded, dropped):
        text = io.StringIO()
        with contextlib.redirect_stderr(text):
            Course(batches, epochs=1).run()
        lines += [line for line in text.getvalue().splitlines() if line.startswith("  rows:")]
    return lines


def test_what_a_sampler_adds_or_leaves_out_is_a_closing_line() -> None:
    """Neither is a violation; both are said."""
    lines = run_ranks(2, closing, "")[0].get()
    assert lines == [
        "  rows: 1 rows more than the 45 of the data fill up a pass over them (DistributedSampler)",
        "  rows: 1 of the 45 rows of the data are left out of a pass over them (DistributedSampler)",
    ]


def test_a_batch_is_not_mistaken_for_what_got_its_memory() -> None:
    """A loop that copies its batches lets go of what was yielded, and the next tensors lie where that was."""
    iterator = iter(DataLoader(TensorDataset(torch.zeros(16, 4096)), batch_size=4))
    (batch,) = next(iterator)
    seen = yielded(iterator, [batch])
    assert places_of([batch[1:].detach()]) == seen.places
    assert not places_of([batch.clone()]) & seen.places
    del batch
    later = [torch.empty(4, 4096) for _ in range(50)]
    assert not any(places_of([each]) & seen.places for each in later)
