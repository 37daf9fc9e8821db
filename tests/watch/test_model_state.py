"""Frozen weights, read part by part; buffers; what an optimizer keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import andon
from andon_contracts.watch.model_state import ROUND, SMALL_BYTES, Buffers, FrozenBase
from andon_contracts.watch.optimizer_state import OptimizerState
from tests.watch.small import answers, clauses, loss_of, net, sgd, watched

# frozen weights


@pytest.mark.parametrize("sizes", [[3], [5, 700_000, 2], [10] * 200])
def test_a_frozen_weight_that_changes_below_torch_is_seen_within_a_round(sizes: list[int]) -> None:
    """No version counter moves; every weight is read again within `ROUND` looks, wherever the round is."""
    for late in (0, 7):
        frozen = [nn.Parameter(torch.ones(size), requires_grad=False) for size in sizes]
        base = FrozenBase(frozen)
        assert all(base.digest() == base.first for _ in range(ROUND + late))
        frozen[-1].data.view(torch.int32)[-1] ^= 1
        assert [base.digest() for _ in range(ROUND)][-1] != base.first


def _in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight[0] += 1


def _replaced(weight: nn.Parameter) -> None:
    weight.data = weight.data + 1


@pytest.mark.parametrize("change", [_in_place, _replaced])
def test_a_frozen_weight_that_torch_changes_is_seen_at_once(change: Callable[[nn.Parameter], None]) -> None:
    frozen = [nn.Parameter(torch.ones(size), requires_grad=False) for size in (4, 400_000)]
    base = FrozenBase(frozen)
    before = frozen[1].data.clone()
    change(frozen[1])
    assert base.digest() != base.first
    frozen[1].data = before
    assert base.digest() == base.first


# buffers


@pytest.mark.parametrize(("elements", "looks"), [(5, 1), (SMALL_BYTES // 4 + 1, ROUND), (2_000_000, ROUND)])
def test_a_buffer_that_changes_below_torch_is_seen(elements: int, looks: int) -> None:
    """No version counter moves. A small buffer is seen at the next look, a large one within `ROUND` updates."""
    pairs = [[torch.ones(3), torch.zeros(0), torch.ones(elements)] for _ in range(2)]
    ranks = [Buffers(), Buffers()]
    assert all(ranks[0].digest(pairs[0], update) == ranks[1].digest(pairs[1], update) for update in range(9))
    pairs[1][-1].data.view(torch.int32)[-1] ^= 1
    seen = [ranks[0].digest(pairs[0], update) != ranks[1].digest(pairs[1], update) for update in range(9, 9 + looks)]
    assert any(seen)


def test_ranks_that_miss_looks_compare_the_same_parts_of_buffers() -> None:
    """A rank without rows has no forward pass; what is read at an update depends on the update alone."""
    made = [[torch.ones(2_000_000)], [torch.ones(2_000_000)]]
    ranks = [Buffers(), Buffers()]
    for update in range(1, 12):
        for (buffer,) in made:
            buffer.data[:] = float(update)  # alike on both, below every counter
        digests = [
            rank.digest(own, update) for rank, own in zip(ranks, made, strict=True) if update != 4 or own is made[0]
        ]
        assert len(set(digests)) == 1, update


# what an optimizer keeps


def test_any_difference_in_what_an_optimizer_keeps_is_seen() -> None:
    """A moment, a count, a name: each is another digest, as is nothing at all; the order of insertion is not."""
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    optimizer = torch.optim.AdamW(parameters)
    kept = OptimizerState(optimizer, parameters)
    empty = kept.look().digest
    sum(p.sum() for p in parameters).backward()  # type: ignore[union-attr]
    optimizer.step()
    first = kept.look().digest
    state = optimizer.state[parameters[1]]
    optimizer.state[parameters[1]] = dict(reversed(copy.deepcopy(state).items()))
    assert kept.look().digest == first
    found = {empty, first}
    for name, value in (("exp_avg", torch.zeros(2, 2)), ("step", torch.tensor(2.0)), ("more", 1), ("step", 1.0)):
        optimizer.state[parameters[1]] = {**state, name: value}
        found.add(kept.look().digest)
    optimizer.state[parameters[1]] = {"steps" if name == "step" else name: value for name, value in state.items()}
    found.add(kept.look().digest)
    assert len(found) == 7


def _touched_before(update: int) -> list[tuple[str, int]]:
    """What is found where all ranks change a frozen weight alike, just before the forward pass of `update`."""
    model, steps = net(), [0]
    model[0].requires_grad_(False)

    def loss(wrapped: nn.Module) -> Tensor:
        if len(steps) == update:
            with torch.no_grad():
                model[0].weight.mul_(1.5)
        return loss_of(wrapped)

    watch = watched(DistributedDataParallel(model), sgd(model[2]), 3, steps.append, loss)
    return [(found.clause, found.step) for found in watch.findings]


@pytest.mark.parametrize("update", [1, 2])
def test_a_base_that_changes_alike_without_a_merge_is_seen_from_the_first_update_on(update: int) -> None:
    """A merge writes what is trained as well; before the first update nothing was left that could be written over."""
    assert answers(2, _touched_before, update) == [[("base-frozen", update)]] * 2


def test_a_model_that_is_saved_whole_under_a_watch_loads_without_a_word_of_it(tmp_path: Path) -> None:
    model, rows = nn.Linear(3, 2), torch.ones(4, 3)
    optimizer = sgd(model)
    with andon.watch(model, optimizer):
        loss_of(model).backward()
        optimizer.step()
        torch.save(model, tmp_path / "model.pt")
        with torch.serialization.safe_globals([nn.Linear]):
            loaded = torch.load(tmp_path / "model.pt", weights_only=True)
        assert torch.equal(loaded(rows), model(rows))


class _Contrast(nn.Module):
    """Two encoders alike; the second follows the first before each forward pass, and is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(3, 2), nn.Linear(3, 2)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        with torch.no_grad():
            for own, trained in zip(self.key.parameters(), self.query.parameters(), strict=True):
                own.data = own.data * 0.9 + trained.data * 0.1
        return (self.query(rows) - self.key(2 * rows)).square().mean()


@pytest.mark.parametrize("which", ["all", "trained"])
def test_a_momentum_encoder_that_the_optimizer_was_given_too_follows_all_the_same(which: str) -> None:
    """Optimizers pass over what has no gradient, so loops give them `model.parameters()`, as MoCo's does."""
    model = _Contrast()
    optimizer = sgd(model if which == "all" else model.query)
    assert clauses(watched(model, optimizer, 4, loss=lambda model: model(torch.ones(2, 3)))) == []
