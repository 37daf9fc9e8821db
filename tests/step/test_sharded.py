"""A divided optimizer: the bits of one worker, and faults in the slice that one rank alone has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from andon.backend.base import Backend, GroupBackend, InlineBackend, groups_of
from andon.config.schema import Contracts, Optimizer
from andon.step import flat
from andon.step.captured import CapturedPasses
from andon.step.flat import FlatParameters, Shards, layout_of
from andon.step.micro_batch import Batch, LeafLoss
from andon.step.reduce import TreeReduction
from andon.step.replica import Replica, restore_state, state_tensors
from andon.step.slices import SliceExchange, _Reads, layers_of
from andon.step.step import Pending, RankFailed, TrainingStep
from andon_contracts import observe
from andon_contracts.violation import Violation
from tests.step.test_cuda import PinnedTask
from tests.support.faults import FAULTS, Caught, cannot_read, ordinary, violation_of
from tests.support.ranks import run_ranks
from tests.support.toy import CLASSES, CPU, FEATURES, SEED, Settings, ToyTask, rate, record, trainable

pytestmark = pytest.mark.xdist_group("step_sharded")
BLOCK_HERE, WIDTH, CULPRIT = 1 << 12, 3_499, 1
SETTINGS = {
    "adamw-clipped": Settings(8, clip_norm=0.2),
    "sgd": Settings(5, optimizer=Optimizer(name="sgd", momentum=0.9)),
    # Fewer micro-batches than ranks: some ranks have nothing to compute and still have a slice.
    "plain": Settings(2, optimizer=Optimizer(name="sgd")),
}


def small_blocks() -> None:
    """In this process a block is small, so that small models have many."""
    flat.BLOCK = observe._PIECE = BLOCK_HERE
    flat.LEAST = 1


@pytest.fixture(autouse=True)
def _same_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat, "BLOCK", BLOCK_HERE)
    monkeypatch.setattr(flat, "LEAST", 1)
    monkeypatch.setattr(observe, "_PIECE", BLOCK_HERE)


class WideModel(nn.Module):
    """20.5 blocks of trained weights with gaps, a border between decayed and undecayed weights, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(FEATURES, 20)
        self.frozen.requires_grad_(False)
        self.first = nn.Linear(20, WIDTH)
        self.second = nn.Linear(WIDTH, CLASSES)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(torch.tanh(self.frozen(x)))
        logits: torch.Tensor = self.second(self.dropout(torch.tanh(self.first(hidden))))
        return logits


def made(
    backend: Backend, settings: Settings, contracts: Contracts | None = None, *, late: bool | None = None
) -> tuple[TrainingStep, Replica]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = WideModel()
    group = backend if isinstance(backend, GroupBackend) else None
    own = Replica(model, trainable(model), settings.optimizer, SEED, CPU, backend=group)
    audit = contracts or Contracts(audit_every=0)
    step = TrainingStep(backend, [own], ToyTask(), settings.micro_batches, settings.clip_norm, audit, late=late)
    return step, own


def trained(backend: Backend, settings: Settings, contracts: Contracts | None = None) -> list[Mapping[str, object]]:
    step, own = made(backend, settings, contracts)
    assert (own.shards is not None) == (backend.world_size > 1)
    step.attest_start({})
    return [record(step(batch, rate(batch.step), batch.step), [own]) for batch in settings.batches()]


def _trained_all() -> Mapping[str, list[Mapping[str, object]]]:
    small_blocks()
    audited = Contracts(audit_every=2, audit_coverage="all")
    return {name: trained(GroupBackend("gloo", CPU), settings, audited) for name, settings in SETTINGS.items()}


@pytest.fixture
def expected() -> Mapping[str, list[Mapping[str, object]]]:
    torch.set_num_threads(1)
    return {name: trained(InlineBackend([CPU]), settings) for name, settings in SETTINGS.items()}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_any_number_of_ranks_gives_the_bits_of_one(world: int, expected: object) -> None:
    for outcome in run_ranks(world, _trained_all):
        assert outcome.get() == expected


LATE = (SETTINGS["adamw-clipped"], Settings(2), Settings(7, sizes=(30, 5, 20)))
"""With several micro-batches per rank, with none on some ranks, and with an uneven number."""


def _early(settings: Settings) -> tuple[list[Mapping[str, object]], int]:
    """The records of a run that is checked late, and how many last passes were reduced bucket by bucket."""
    small_blocks()
    step, own = made(GroupBackend("gloo", CPU), settings, late=True)
    step.attest_start({})
    assert step._slices is not None
    lasts, reduce = list[object](), step._slices.reduce

    def counted(roots: Any, lefts: Sequence[torch.Tensor] = (), last: torch.Tensor | None = None) -> None:
        lasts.append(last)
        reduce(roots, lefts, last)

    step._slices.reduce = counted  # type: ignore[method-assign]
    records = [record(step(b, rate(b.step), b.step), [own]) for b in settings.batches()]
    return records, sum(last is own.parameters.gradient for last in lasts)


@pytest.mark.parametrize("number", range(len(LATE)))
@pytest.mark.parametrize("world", [2, 4])
def test_a_last_pass_that_is_reduced_bucket_by_bucket_has_the_same_bits(world: int, number: int) -> None:
    torch.set_num_threads(1)
    expected = trained(InlineBackend([CPU]), LATE[number])
    for rank, outcome in enumerate(run_ranks(world, _early, LATE[number])):
        records, passes = outcome.get()
        assert records == expected
        assert passes == len(records) * (rank < LATE[number].micro_batches)


class _Failing(ToyTask):
    def loss_sum(self, model: nn.Module, batch: Batch) -> LeafLoss:
        """Fails in the backward pass."""
        hidden = model.first.weight * 1.0  # type: ignore[operator]
        hidden.register_hook(lambda _: cannot_read())
        found = super().loss_sum(model, batch)
        return replace(found, loss_sum=found.loss_sum + hidden.sum())


def _failing(bucket: int | None) -> str:
    """What a rank raises if the culprit fails in its pass, or before it sends a `bucket`."""
    small_blocks()
    flat._BUCKET_BLOCKS = 4
    backend = GroupBackend("gloo", CPU)
    step, _ = made(backend, LATE[0], late=True)
    sent, exchange = [0], step._reduce.exchange

    def failing(*args: Any) -> list[torch.Tensor]:
        sent[0] += 1
        return cannot_read() if sent[0] == bucket else exchange(*args)

    if backend.ranks[0] == CULPRIT:
        step.task = step.task if bucket else _Failing()
        step._reduce.exchange = failing  # type: ignore[method-assign]
    with pytest.raises((OSError, RankFailed)) as caught:
        ordinary(step, LATE[0].batches()[0])
    return type(caught.value).__name__


@pytest.mark.parametrize("bucket", [None, 1, 3])
def test_a_rank_that_fails_leaves_no_other_waiting(bucket: int | None) -> None:
    assert [outcome.get() for outcome in run_ranks(3, _failing, bucket)] == ["RankFailed", "OSError", "RankFailed"]


@pytest.mark.parametrize("world", [2, 3, 4, 5])
@pytest.mark.parametrize("blocks", [5, 16, 37])
@pytest.mark.parametrize("missing", [0, 16, BLOCK_HERE - 16])
def test_slices_cover_a_buffer_once_in_whole_blocks(world: int, blocks: int, missing: int) -> None:
    size = blocks * BLOCK_HERE - missing
    every = [Shards(size, rank, world) for rank in range(world)]
    spans = sorted((span.start, span.stop) for each in every for span in each.spans)
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
    assert spans[-1][1] == size
    assert all(start % BLOCK_HERE == 0 for start, _ in spans)
    assert all(0 < each.length <= every[0].longest * BLOCK_HERE for each in every)
    places = every[0].places_of_blocks()
    assert len(set(places)) == len(places) == blocks


def _flipped(method: str, tensor: Callable[[Replica], torch.Tensor]) -> Callable[[Replica], None]:
    """Plant: one bit of the largest element of `tensor` flips after `method`; "": at once."""

    def flip(own: Replica) -> None:
        values = tensor(own)
        values.view(torch.int32)[values.abs().argmax()] ^= 1

    def plant(own: Replica) -> None:
        at: Any = own.exchange if method == "gather" else own
        inner = getattr(at, method)
        setattr(at, method, lambda *args: (inner(*args), flip(own)))

    return plant if method else flip


def _moment(name: str) -> Callable[[Replica], torch.Tensor]:
    return lambda own: own.optimizer_state()[name]


def _weights(own: Replica) -> torch.Tensor:
    return own.parameters.weights.data


PLANTED: Mapping[str, tuple[Callable[[Replica], None], str, str, bool]] = {
    **{
        name: (FAULTS[name].plant, FAULTS[name].clause, FAULTS[name].tensor, FAULTS[name].early)
        for name in FAULTS
        if name not in ("moment flipped", "reduced gradient flipped", "micro-batch computed twice")
    },
    "average": (_flipped("", _moment("exp_avg")), "optimizers-agree", "exp_avg", True),
    "square": (_flipped("", _moment("exp_avg_sq")), "optimizers-agree", "exp_avg_sq", True),
    "gradient": (_flipped("set_gradient", lambda own: own.master.gradient), "gradients-agree", "gradient", True),
    "gathered": (_flipped("gather", _weights), "replicas-agree", "first.weight", False),
}
"""The fault, then the clause and tensor that every rank must name, and whether nothing may have been applied."""
FAULTY = Settings(8, sizes=(10, 10, 10), clip_norm=0.2)


def _caught(name: str, plant: Callable[[Replica], None], contracts: Contracts | None = None) -> Caught:
    backend = GroupBackend("gloo", CPU)
    step, own = made(backend, FAULTY, contracts)
    step.attest_start({})
    first, second, third = FAULTY.batches()
    ordinary(step, first)
    if backend.ranks[0] == CULPRIT:
        plant(own)

    def go_on() -> None:
        ordinary(step, second)
        ordinary(step, third)

    return violation_of(go_on, [own])


def _all_caught() -> Mapping[str, Caught]:
    small_blocks()
    return {name: _caught(name, planted[0]) for name, planted in PLANTED.items()}


@pytest.fixture(scope="module")
def seen() -> list[Mapping[str, Caught]]:
    return [outcome.get() for outcome in run_ranks(3, _all_caught)]


@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_of_one_rank_is_named_at_its_step(name: str, seen: list[Mapping[str, Caught]]) -> None:
    _, clause, tensor, early = PLANTED[name]
    for caught in (each[name] for each in seen):
        assert (caught.clause, caught.step, caught.ranks, caught.tensor) == (clause, 2, (CULPRIT,), tensor)
        assert caught.applied is not early


def _flipped_in_an_update(audit_every: int) -> Mapping[str, Caught]:
    small_blocks()
    found = {}
    for name in ("exp_avg", "exp_avg_sq"):
        plant = _flipped("apply", _moment(name))
        found[name] = _caught(name, plant, Contracts(audit_every=audit_every, audit_coverage="all"))
    return found


def test_a_moment_that_changes_within_an_update_is_found_by_the_next_one() -> None:
    for outcome in run_ranks(2, _flipped_in_an_update, 0):
        for name, caught in outcome.get().items():
            assert (caught.clause, caught.step, caught.ranks) == ("optimizers-agree", 3, (CULPRIT,))
            assert caught.tensor == name


def test_an_audit_finds_a_wrong_update_at_its_step() -> None:
    for outcome in run_ranks(3, _flipped_in_an_update, 1):
        for name, caught in outcome.get().items():
            assert (caught.clause, caught.step, caught.tensor) == ("audit", 2, name)
            assert CULPRIT in caught.ranks


Tensors = Mapping[str, torch.Tensor]


def _saved(settings: Settings, plant: bool) -> dict[str, torch.Tensor] | str:
    """The state after two updates, as rank 0 saves it. plant: a moment changes after the last one."""
    small_blocks()
    backend = GroupBackend("gloo", CPU)
    step, own = made(backend, settings)
    step.attest_start({})
    for batch in settings.batches()[:2]:
        ordinary(step, batch)
    if plant and backend.ranks[0] == CULPRIT:
        _flipped("", _moment("exp_avg"))(own)
    try:
        step.gather_state(2)
    except Violation as violation:
        return f"{violation.clause} {violation.finding.ranks}"
    return {name: tensor.clone() for name, tensor in state_tensors(own).items()} if backend.ranks[0] == 0 else {}


def _resumed(settings: Settings, state: Tensors) -> list[Mapping[str, object]]:
    small_blocks()
    step, own = made(GroupBackend("gloo", CPU), settings)
    restore_state(own, state, 2)
    step.attest_start({})
    return [record(step(batch, rate(batch.step), batch.step), [own]) for batch in settings.batches()[2:]]


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 1), (1, 3)])
def test_a_checkpoint_is_whole_and_goes_on_with_any_number_of_ranks(before: int, after: int) -> None:
    settings = SETTINGS["adamw-clipped"]
    torch.set_num_threads(1)
    expected = trained(InlineBackend([CPU]), settings)[2:]
    state = run_ranks(before, _saved, settings, False)[0].get()
    assert {tuple(tensor.shape) for name, tensor in state.items() if "second.weight" in name} == {(CLASSES, WIDTH)}
    for outcome in run_ranks(after, _resumed, settings, state):
        assert outcome.get() == expected


def test_a_moment_that_changed_is_not_saved() -> None:
    outcomes = [outcome.get() for outcome in run_ranks(3, _saved, SETTINGS["adamw-clipped"], True)]
    assert outcomes == [f"optimizers-agree ({CULPRIT},)"] * 3


def _held() -> tuple[int, int, int]:
    """Elements that a rank holds after updates and an audit, those of its slice, and those of a whole buffer."""
    small_blocks()
    settings = Settings(4, clip_norm=0.2)
    step, own = made(GroupBackend("gloo", CPU), settings, Contracts(audit_every=1))
    for batch in settings.batches():
        ordinary(step, batch)
    assert own.shards is not None
    held = [own.parameters.storage, own.parameters.gradient, own.master.gradient, *own._spare]
    held += own.optimizer_state().values()
    return sum(each.numel() for each in held), own.shards.length, own.shards.capacity


def test_a_rank_with_one_micro_batch_holds_two_buffers_and_three_slices() -> None:
    for outcome in run_ranks(4, _held):
        held, length, capacity = outcome.get()
        assert held == 2 * capacity + 3 * length + 1  # the count of updates
        assert length <= (capacity + BLOCK_HERE) // 4 + BLOCK_HERE


class LayeredModel(nn.Module):
    """Layers in a list. early: the weight of the last one is also read before it is entered."""

    def __init__(self, *, early: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 256), nn.Linear(256, CLASSES)
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))
        self.dropout, self.early = nn.Dropout(0.2), early

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if self.early:
            hidden = hidden * (1 + self.layers[-1].weight.mean())  # type: ignore[operator]
        for layer in self.layers:
            hidden = self.dropout(torch.tanh(layer(hidden)))
        logits: torch.Tensor = self.second(hidden)
        return logits


@pytest.mark.parametrize("early", [False, True])
def test_weights_are_gathered_in_the_order_in_which_they_are_read(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat, "_BUCKET_BLOCKS", 4)
    model = LayeredModel(early=early)
    parameters, shards = FlatParameters(trainable(model), CPU), Shards(layout_of(trainable(model))[1], 0, 2)
    reduction = TreeReduction(2, parameters.size, InlineBackend([CPU]))
    gradient = torch.zeros(shards.length)
    layers = layers_of(model)
    exchange = SliceExchange(reduction, InlineBackend([CPU]), parameters, shards, gradient, layers, overlapping=True)
    assert list(model.layers) == layers
    assert sorted(exchange._turns) == [*range(len(shards.buckets))]
    for owner, slot in zip(exchange._owners, parameters.slots, strict=True):
        turns = [exchange._turns.index(bucket) for bucket in shards.buckets_of(slot.start, slot.end)]
        assert max(turns) <= exchange._awaited[owner]
    assert exchange._awaited[-1] <= exchange._awaited[0] <= exchange._awaited[4]
    reads = _Reads(parameters, exchange._owners)
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, number=number: reads.entered.add(number))
    with reads:
        model(torch.randn(2, FEATURES))
    assert (reads.early, reads.seen) == ({5} if early else set(), True)


def _on_gpus(world: int, *, captured: bool, early: bool) -> tuple[list[Mapping[str, int]], bool]:
    """The digests of a run, whose next update is launched before the last one is read, and whether it was captured.
    Each gathered bucket and each backward pass is delayed: a wait that is missing would be seen."""
    small_blocks()
    flat._BUCKET_BLOCKS = 4
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = LayeredModel(early=early).to(device)
    passes = CapturedPasses(device) if captured else None
    backend: Backend = InlineBackend([device])
    if world > 1:
        backend = GroupBackend("nccl", device)
        fill = backend.fill
        backend.fill = lambda rows: (torch.cuda._sleep(2_000_000), fill(rows))  # type: ignore[method-assign]
        model.first.register_full_backward_pre_hook(lambda *_: torch.cuda._sleep(5_000_000))
    own = Replica(model, trainable(model), Optimizer(), SEED, device, captured=passes, backend=backend)
    step = TrainingStep(backend, [own], PinnedTask(), 4, 0.2, Contracts(audit_every=0))
    step.attest_start({})
    ahead, digests = list[Pending](), list[Mapping[str, int]]()
    for batch in Settings(4, sizes=(3,) * 12).batches():
        ahead.append(step.launch(batch, rate(batch.step), batch.step))
        digests += [ahead.pop(0).result().digests] if len(ahead) > 1 else []
    digests.append(ahead.pop().result().digests)
    return digests, bool(passes and len(passes))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("captured", [False, True])
def test_passes_wait_for_the_weights_that_they_read(captured: bool, early: bool) -> None:
    (alone,) = run_ranks(1, partial(_on_gpus, 1, captured=False, early=early))
    for outcome in run_ranks(2, partial(_on_gpus, 2, captured=captured, early=early), backend=groups_of("nccl")):
        assert outcome.get() == (alone.get()[0], captured)
