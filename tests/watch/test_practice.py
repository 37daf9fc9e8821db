"""Behaviour that a loop does not report: right loops that look like faulty ones get no finding, only closing lines."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
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
from andon_contracts.observe import Observer
from andon_contracts.watch.checks.copies import Copies, ModelCopies
from andon_contracts.watch.model_probe import ModelProbe
from andon_contracts.watch.values import text_digest
from tests.support.ranks import run_ranks

ROWS = 40


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(count: int = ROWS) -> TensorDataset:
    draws = _seeded(5)
    return TensorDataset(torch.randn(count, 6, generator=draws), torch.randint(0, 3, (count,), generator=draws))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))


@dataclass(frozen=True)
class Course:
    batches: Callable[[int], Iterator[Any]]
    before: Callable[[nn.Module], None] = lambda _: None
    behind: Callable[[nn.Module], None] = lambda _: None
    epochs: int = 2
    model: Callable[[], nn.Module] = net
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy

    def run(self) -> list[tuple[str, int]]:
        return [(each.clause, each.step) for each in self.watched().findings]

    def watched(self) -> andon.Watch:
        # A rank of the tests is a daemon, which may else have no processes of its own.
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        model = DistributedDataParallel(self.model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        torch.manual_seed(100 + dist.get_rank())
        with andon.watch(model, optimizer, action=lambda _: None) as watch:
            for epoch in range(self.epochs):
                self.before(model)
                for x, y in self.batches(epoch):
                    self.loss(model(x), y).backward()
                    self.behind(model)
                    optimizer.step()
                    optimizer.zero_grad()
        return watch


Batches = Callable[[int], Iterator[Any]]


def dealt(count: int = ROWS, *, drop: bool = False, **options: Any) -> Batches:
    def batches(epoch: int) -> Iterator[Any]:
        sampler = DistributedSampler(rows(count), seed=1, drop_last=drop)
        sampler.set_epoch(epoch)
        yield from DataLoader(rows(count), **{"batch_size": 4, "sampler": sampler, **options})

    return batches


def sampled(make: Callable[[int], Any], **options: Any) -> Batches:
    return lambda epoch: iter(DataLoader(rows(), batch_size=4, sampler=make(epoch), **options))


distributed, padded, dropped = dealt(), dealt(45), dealt(45, drop=True)
# Forked, as in a script: a rank's own default is a server, which would load all libraries again.
WORKERS: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}


def ahead(epoch: int) -> Iterator[Any]:
    """The next batch is read before the one at hand is used, as Accelerate does, and given to the model as a copy."""
    held: Any = None
    for batch in [*distributed(epoch), None]:
        if held is not None:
            yield [each.clone() for each in held]
        held = batch


def mine(rows: Any) -> Any:
    return rows[dist.get_rank() :: dist.get_world_size()]


def cut_by_rank(epoch: int) -> Iterator[Any]:
    for x, y in DataLoader(rows(), batch_size=8, sampler=RandomSampler(rows(), generator=_seeded(epoch))):
        yield mine(x), mine(y)


def own_shard(epoch: int) -> Iterator[Any]:
    shard = TensorDataset(*map(mine, rows().tensors))
    yield from DataLoader(shard, batch_size=4, sampler=RandomSampler(shard, generator=_seeded(epoch)))


def replacing(epoch: int) -> Sampler[int]:
    return RandomSampler(rows(), replacement=True, generator=_seeded(10 * epoch + dist.get_rank()))


class RASampler(Sampler[int]):
    """Repeated augmentation: every row comes on several ranks, as torchvision's does it."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(ROWS, generator=_seeded(self.epoch)).tolist()
        yield from mine([row for row in order for _ in range(3)][:ROWS])


def oversampled(epoch: int) -> list[int]:
    """Rows of a rare class are in the list of rows several times."""
    order = torch.cat([torch.arange(ROWS), torch.arange(6).repeat(4)])
    return mine(order[torch.randperm(len(order), generator=_seeded(epoch))]).tolist()


class Kept:
    """A loader that is kept for all epochs. looks: the epochs before which one batch is looked at, as torch's tutorial
    of DDP does for its size. tells: whether the sampler is told of epochs.
    """

    def __init__(self, looks: Sequence[int] = (), *, tells: bool = True, shuffle: bool = True) -> None:
        self.looks, self.tells, self.shuffle = looks, tells, shuffle
        self.loader: Any = None

    def __call__(self, epoch: int) -> Iterator[Any]:
        if self.loader is None:
            sampler = DistributedSampler(rows(), shuffle=self.shuffle)
            self.loader = DataLoader(rows(), batch_size=4, sampler=sampler)
        if epoch in self.looks:
            next(iter(self.loader))
        if self.tells:
            self.loader.sampler.set_epoch(epoch)
        yield from self.loader


class Stream(IterableDataset[Any]):
    """Rows without indices: another part on each rank, or all on every rank."""

    def __init__(self, *, whole: bool = False) -> None:
        self.whole = whole

    def __iter__(self) -> Iterator[Any]:
        yield from rows() if self.whole else mine(list(rows()))


def streamed(**kind: bool) -> Batches:
    return lambda _: iter(DataLoader(Stream(**kind), batch_size=4))


def one_skipped(epoch: int) -> Iterator[Any]:
    yield from (batch for number, batch in enumerate(padded(epoch)) if number != 1)


def freezes_batch_norm(model: nn.Module) -> None:
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()


class Headed(nn.Module):
    """An encoder and a head. detached: in evaluation mode the gradient of the encoder is 0."""

    def __init__(self, *, detached: bool = False) -> None:
        super().__init__()
        self.encoder, self.detached = net(), detached
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        if self.detached and not self.encoder.training:
            hidden = hidden.detach() + 0.0 * hidden
        return self.head(hidden)


class FromEpoch:
    """From this epoch on, `change` is called with the model before each epoch, which begins in training mode."""

    def __init__(self, first: int, change: Callable[[Any], object]) -> None:
        self.first, self.change, self.epoch = first, change, 0

    def __call__(self, model: nn.Module) -> None:
        model.train()
        if self.epoch >= self.first:
            self.change(model)
        self.epoch += 1


def headed(first: int, change: Callable[[Any], object] = lambda m: m.module.encoder.eval(), **how: bool) -> Course:
    return Course(distributed, before=FromEpoch(first, change), model=lambda: Headed(**how))


def clips_and_reports(model: nn.Module) -> None:
    """The norm is clipped, and a loss averaged over the ranks behind that."""
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    dist.all_reduce(torch.ones(()))


def begins_anew(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    model.zero_grad()
    model(torch.randn(4, 6)).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clips_on_one_rank(model: nn.Module) -> None:
    """The others use the gradient as it is, which is small enough for them."""
    if dist.get_rank() == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 1e6)


class Following:
    """A copy of the model that follows it between updates: kept on these ranks, and kept up on those.

    noise: the size of the random numbers that each rank adds to its copy at the start.
    """

    def __init__(
        self, kept: Sequence[int], followed: Sequence[int], form: str = "module", rate: float = 0.5, noise: float = 0.0
    ) -> None:
        self.kept, self.followed, self.form, self.rate, self.noise = kept, followed, form, rate, noise
        self.held: Any = None

    def __call__(self, model: Any) -> None:
        if self.held is None and dist.get_rank() in self.kept:
            shadows = {name: p + self.noise * torch.randn_like(p) for name, p in model.module.named_parameters()}
            shadows = {name: shadow.detach() for name, shadow in shadows.items()}
            forms: dict[str, Callable[[], Any]] = {
                "module": lambda: copy.deepcopy(model.module),
                "table": lambda: shadows,
                "zeros": lambda: [torch.zeros_like(shadow) for shadow in shadows.values()],
            }
            self.held = forms.get(self.form, lambda: list(shadows.values()))()
        if dist.get_rank() in self.followed:
            tensors = {"module": "parameters", "table": "values"}.get(self.form, "__iter__")
            with torch.no_grad():
                for one, parameter in zip(getattr(self.held, tensors)(), model.module.parameters(), strict=True):
                    one.lerp_(parameter, self.rate)


def residual() -> Callable[[nn.Module], None]:
    """What each rank keeps of its own for each parameter, and adds to: the rest of a compression, say."""
    held: list[Tensor] = []

    def behind(model: nn.Module) -> None:
        held[:] = held or [torch.zeros_like(p) for p in model.parameters()]
        for each in held:
            each.add_(torch.randn(each.shape, generator=_seeded(dist.get_rank())), alpha=1e-3)

    return behind


def best_so_far() -> Callable[[nn.Module], None]:
    """A copy of the weights that each rank takes when it finds them good, by what it saw itself."""
    calls, best = itertools.count(1), {}

    def behind(model: Any) -> None:
        if next(calls) % (2 + dist.get_rank()) == 0:
            best["held"] = copy.deepcopy({name: p.detach() for name, p in model.module.named_parameters()})

    return behind


def evaluates_in_between(model: nn.Module) -> None:
    """Between backward pass and update, with gradients, on the same rows everywhere; and back into training mode."""
    model.eval()
    model(torch.ones(4, 6))
    model.train()


RIGHT = {
    "distributed sampler": Course(distributed),
    "padded": Course(padded),
    "last batch dropped": Course(dropped),
    "workers": Course(dealt(**WORKERS)),
    "workers, in any order": Course(dealt(**WORKERS, in_order=False)),
    "one batch ahead, copied": Course(ahead),
    "global batch cut by rank": Course(cut_by_rank),
    "own shard of each rank, one seed": Course(own_shard),
    "with replacement": Course(sampled(replacing)),
    "repeated augmentation": Course(sampled(RASampler)),
    "oversampled": Course(sampled(oversampled)),
    "rows in order": Course(Kept(tells=False, shuffle=False)),
    "a batch looked at first": Course(Kept([0])),
    "a batch looked at before each epoch": Course(Kept([0, 1])),
    "iterable data": Course(streamed()),
    "a batch left out": Course(one_skipped),
    "batch norm frozen": Course(distributed, before=freezes_batch_norm),
    "batch norm frozen in the second epoch": Course(distributed, before=FromEpoch(1, freezes_batch_norm)),
    "encoder in evaluation mode from the start": headed(0),
    "encoder with zero gradients in the second epoch": headed(1, detached=True),
    "clipped, and a loss reduced behind that": Course(distributed, behind=clips_and_reports),
    "clipped, thrown away, clipped": Course(distributed, behind=begins_anew),
    "average of weights on all ranks": Course(distributed, behind=Following((0, 1), (0, 1))),
    "residuals of each rank's own": Course(distributed, behind=residual()),
    "best weights by each rank's own measure": Course(distributed, behind=best_so_far()),
    "average of weights on rank 0": Course(distributed, behind=Following((0,), (0,))),
    "average that begins at 0 on all ranks": Course(distributed, behind=Following((0, 1), (0, 1), "zeros", 0.01)),
    "copy of the start on all ranks": Course(distributed, behind=Following((0, 1), ())),
    "shadows on rank 0": Course(distributed, behind=Following((0,), (0,), "list")),
    "evaluation between backward pass and update": Course(distributed, behind=evaluates_in_between),
}


def right_courses(names: Sequence[str]) -> dict[str, list[tuple[str, int]]]:
    return {name: RIGHT[name].run() for name in names}


@pytest.mark.parametrize("first", range(5))
def test_right_loops_that_look_like_faulty_ones_are_not_accused(first: int) -> None:
    names = list(RIGHT)[first::5]
    assert [o.get() for o in run_ranks(2, right_courses, names)] == [{name: [] for name in names}] * 2


# Nothing deals out the rows, and workers draw ahead.
same_from_workers = sampled(lambda epoch: RandomSampler(rows(), generator=_seeded(epoch)), **WORKERS)


def one_split(epoch: int) -> Iterator[Any]:
    """A split that is seeded alike, dealt out: right, and of the same form as one that is not."""
    half = Subset(rows(), torch.randperm(ROWS, generator=_seeded(0))[:20].tolist())
    yield from DataLoader(half, batch_size=4, sampler=DistributedSampler(half, seed=1))


WRONG = {
    # Before the others, whose averages live on: more than three copies are not compared.
    "average from other weights": (
        Course(distributed, behind=Following((0, 1), (0, 1), "list", 0.01, 1.0)),
        "copies-agree",
        2,
    ),
    "the order of the first epoch, begun anew": (Course(Kept([0, 1], tells=False)), "order-renewed", 7),
    "the same stream on all ranks": (Course(streamed(whole=True)), "samples-once", 3),
    "the same rows from workers": (Course(same_from_workers, epochs=1), "samples-once", 1),
    "clipped on one rank": (Course(distributed, behind=clips_on_one_rank), "clip-placed", 1),
    "average kept up on one rank": (Course(distributed, behind=Following((0, 1), (0,))), "copies-agree", 2),
    "shadows kept up on one rank": (Course(distributed, behind=Following((0, 1), (0,), "list")), "copies-agree", 2),
    "table kept up on one rank": (Course(distributed, behind=Following((0, 1), (0,), "table")), "copies-agree", 2),
    "encoder left in evaluation mode": (headed(1), "training-mode", 7),
}


def every_wrong_course() -> dict[str, list[tuple[str, int]]]:
    right = {"one split": Course(one_split).run()}
    return right | {name: course.run() for name, (course, _, _) in WRONG.items()}


def test_what_has_no_index_and_no_way_back_is_suspected() -> None:
    for outcome in run_ranks(2, every_wrong_course):
        found = outcome.get()
        assert found.pop("one split") == []
        assert {name: found[name][:1] for name in WRONG} == {
            name: [(clause, step)] for name, (_, clause, step) in WRONG.items()
        }


def _windows(kind: str) -> tuple[list[tuple[str, int]], list[str]]:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = rows().tensors
    text = io.StringIO()
    with contextlib.redirect_stderr(text), andon.watch(model, optimizer, action=lambda _: None) as watch:
        number = 0
        for _ in range(3):
            if kind == "leftovers discarded":
                optimizer.zero_grad()
            for micro in range(10):
                (nn.functional.cross_entropy(model(x[4 * micro :][:4]), y[4 * micro :][:4]) / 4).backward()
                number += 1
                if (number if kind == "windows across epochs" else micro + 1) % 4:
                    continue
                for _ in range(1 + (kind == "applied twice")):
                    if kind == "clipped before and after":
                        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                if kind in ("clipped after", "clipped before and after"):
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if kind == "measured after":
                    nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
                (model if kind == "clipped after" else optimizer).zero_grad()
    lines = [line for line in text.getvalue().splitlines() if "accumulation:" in line]
    return [(each.clause, each.step) for each in watch.findings], lines


_LOST = "  accumulation: {} computed and never applied: {} ended after fewer than 4"
_LONGER = (
    "  accumulation: 4 backward passes, but 2 updates of more (up to 6): are backward passes left over from an epoch?"
)


@pytest.mark.parametrize(
    ("kind", "found", "lines"),
    [
        ("windows across epochs", [], [_LOST.format("2 backward passes", "1 window")]),
        ("leftovers discarded", [], [_LOST.format("6 backward passes", "3 windows")]),
        ("leftovers kept", [], [_LOST.format("2 backward passes", "1 window"), _LONGER]),
        ("applied twice", [("gradient-fresh", 4)], None),
        ("clipped after", [("clip-placed", 3)], None),
        ("clipped before and after", [], None),
        ("measured after", [], None),
    ],
)
def test_every_backward_pass_is_applied_once_and_clipped_before(kind: str, found: Any, lines: Any) -> None:
    """Two leftovers of each epoch: discarded, or added to the next window of 4. A second clip may be there to measure.

    The second time is reported: the fourth step that repeats one, and the third that comes after two late clips.
    """
    seen, said = _windows(kind)
    assert seen == found
    assert lines is None or said == lines


@pytest.mark.parametrize(
    ("apart", "updates", "alike"),
    [(2.0**-24, 2, True), (2.0**-23, 3, True), (1e-5, 2, False), (3e-6, 2, False), (1e-4, 512, False)],
)
def test_copies_that_were_rounded_apart_are_one(apart: float, updates: int, alike: bool) -> None:
    """Ranks whose averages differ by a rounding keep the same; of a step of an average one rank has, they do not."""
    drawn = [torch.randn(shape, generator=_seeded(0)) for shape in ((40, 7), (40,))]
    ranks = [drawn, [each * (1 + apart * torch.randn(each.shape, generator=_seeded(1))) for each in drawn], []]
    copies = [Copies(ModelProbe(nn.Linear(2, 2), [])) for _ in ranks]
    for each, held in zip(copies, ranks, strict=True):
        each._tensors = [held] if held else []
    none = {"copy 1": 0, "copy 2": 0, "copies changed": 0}
    said = [
        Observation(rank, 3, 9, "before", {"copy 0": (rank + 5) * bool(held), **none})
        for rank, held in enumerate(ranks)
    ]
    sketches = [Observation(rank, 3, 9, "copies", {}, each.sketches()) for rank, each in enumerate(copies)]
    found = copies[0].merge_rounded(said, sketches, updates)
    assert [each.values["copy 0"] for each in found] == [5, 5 if alike else 6, 0]
    # A copy that only one of the ranks keeps up is another one, however near they are.
    kept_up = [replace(each, values={**each.values, "copies changed": int(each.rank == 0)}) for each in said]
    assert copies[0].merge_rounded(kept_up, sketches, updates) == kept_up


@pytest.mark.parametrize("differ", [False, True])
def test_copies_of_ranks_on_other_devices_have_portable_states(monkeypatch: pytest.MonkeyPatch, differ: bool) -> None:
    """A GPU gives the sums of words for them; among CPUs alone a checksum is faster."""
    model = nn.Linear(6, 4)
    with andon.watch(model, torch.optim.SGD(model.parameters(), lr=0.1)) as watch, monkeypatch.context() as patch:
        patch.setattr(watch._context, "portable", differ)
        watch._context.check(ModelCopies).ranks_met()
    shadows = [p.detach().clone() for p in model.parameters()]
    sums = Observer(portable=differ).look(shadows).digest
    assert watch._context.check(ModelCopies)._copies.values(2)["copy 0"] == (sums + text_digest("list")) >> 2


def _open_behind(updates: int, model: nn.Module, rank: int = 0, **told: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = andon.watch(model, optimizer, action=lambda _: None, **told)
    for step in range(updates):
        model(torch.full((2, 3), 1.0 + rank + step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return watch


@pytest.mark.parametrize(("updates", "told"), [(1, {}), (3, {}), (2, {"allow": {"ranks-joined": "jobs of their own"}})])
def test_a_process_that_never_joins_the_others_is_suspected_then_found(
    monkeypatch: pytest.MonkeyPatch, updates: int, told: Any
) -> None:
    """A suspicion at the second update, a violation at the close; one update says nothing, nor does an allowed one."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    watch = _open_behind(updates, nn.Linear(3, 2), **told)
    found = updates > 1 and not told
    assert [(each.clause, each.step) for each in watch.findings] == [("ranks-joined", 2)] * found
    assert watch.violations == 0
    watch.close()
    assert watch.violations == found


def _leaves_its_group() -> tuple[int, int]:
    os.environ["WORLD_SIZE"] = "2"
    watch = _open_behind(3, DistributedDataParallel(nn.Linear(3, 2)), dist.get_rank())
    dist.destroy_process_group()
    watch.close()
    return watch.violations, len(watch.findings)


def test_a_group_that_is_taken_down_before_the_close_was_joined() -> None:
    """As right scripts end, and a watch that is closed by the end of the process."""
    assert [outcome.get() for outcome in run_ranks(2, _leaves_its_group)] == [(0, 0), (0, 0)]
