"""Faults that hide: behind hooks that were there first, below torch's counters, before the reduction."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import andon
from andon_contracts.laws.loop import BEFORE
from andon_contracts.violation import Halted
from tests.watch.small import answers, clauses, loss_of, net, sgd, watched

# behind a hook


def _repaired(gradient: Tensor) -> Tensor:
    return gradient.nan_to_num(0.0, 0.0, 0.0)


@pytest.mark.parametrize("first", [True, False])
def test_a_hook_that_repairs_a_gradient_hides_nothing(first: bool) -> None:
    """Whether the loop's hook was there before the watch or came after it; and the hooks still do what they do."""
    model = net()
    optimizer = sgd(model)
    if first:
        handles = [p.register_hook(_repaired) for p in model.parameters()]
    watch = andon.watch(model, optimizer, action=lambda found: None)
    if not first:
        handles = [p.register_hook(_repaired) for p in model.parameters()]
    (loss_of(model) * float("nan")).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    optimizer.step()
    watch.close()
    assert [(found.clause, found.tensor) for found in watch.findings] == [("finite", "0.weight")]
    for handle in handles:
        handle.remove()
    optimizer.zero_grad()
    (loss_of(model) * float("nan")).backward()
    assert all(p.grad.isnan().all() for p in model.parameters())


# below the counters


def _frozen_run(end: Callable[[nn.Sequential], None]) -> andon.Watch:
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=1e-2)
    watch = andon.watch(model, optimizer)
    for _ in range(3):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    end(model)
    watch.close()
    return watch


def _written_below_torch(model: nn.Sequential) -> None:
    model[0].weight.data.mul_(1.5)  # type: ignore[operator]


def test_a_base_that_changed_in_a_short_run_is_found_at_the_close() -> None:
    found = _frozen_run(_written_below_torch).findings
    assert [(each.clause, each.step) for each in found] == [("base-frozen", 3)]
    assert "at the close" in str(found[0])
    held = _frozen_run(lambda model: None)
    assert not held.findings
    rows = sum(law.clause == "base-frozen" for law in BEFORE)
    assert held.evaluations["base-frozen"] == 3 * rows + 1


def _merged(model: nn.Sequential) -> None:
    model[0].merged = True
    _written_below_torch(model)


def _unloaded(model: nn.Sequential) -> None:
    model[0] = nn.Linear(4, 5)


@torch.no_grad()
def _merged_by_hand(model: nn.Sequential) -> None:
    model[0].weight += 1.0  # type: ignore[operator, assignment]


@pytest.mark.parametrize("end", [_merged, _unloaded, nn.Module.half, _merged_by_hand])
def test_what_is_done_with_a_model_after_its_training_is_no_fault(
    end: Callable[[nn.Sequential], None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert not _frozen_run(end).findings
    assert "base-frozen: not read once more at the end, because" in capsys.readouterr().err


# before the reduction


def _clipping_loop(where: str) -> list[str]:
    """Ranks whose gradients have one direction and other lengths: the mean of what each clips has the norm allowed."""
    model = net()

    def reduce(_: int) -> None:
        if where == "local":
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        if where == "reduced":
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    watch = watched(model, sgd(model), 2, reduce, lambda m: loss_of(m) * (1.0 + 9.0 * dist.get_rank()), clip=0.01)
    return [f"{found.clause}: {found}" for found in watch.findings]


def test_a_clip_of_each_ranks_own_gradient_is_seen_by_its_norms() -> None:
    """The optimizer gets the limit's norm either way; only the norms by which the ranks clipped say it."""
    assert answers(2, _clipping_loop, "reduced") == [[], []]
    local, other = answers(2, _clipping_loop, "local")
    assert local == other
    # That the call is misplaced (`clip-placed`) stands under it.
    assert [said.partition(":")[0] for said in local] == ["clip-once"]
    assert "each its own gradient, before the reduction" in local[0]


# what is frozen, and when


class _Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.maker, self.judge = nn.Linear(4, 4), nn.Linear(4, 1)
        self.base = nn.Linear(2, 2).requires_grad_(False)


def _rounds(model: _Adversaries, odd: nn.Module | None) -> tuple[str, ...]:
    """Two turns of each optimizer with the other one's parameters frozen; in the second `odd` is toggled too."""
    pairs = [(each, torch.optim.Adam(each.parameters())) for each in (model.maker, model.judge)]
    watch = andon.watch(model, [optimizer for _, optimizer in pairs], action=lambda found: None)
    for turn in range(2):
        for (_, optimizer), (other, _) in (pairs, pairs[::-1]):
            other.requires_grad_(False)
            model.judge(model.maker(torch.ones(3, 4))).mean().backward()
            if turn and odd is not None:
                odd.requires_grad_(not next(odd.parameters()).requires_grad)
            optimizer.step()
            optimizer.zero_grad()
            other.requires_grad_(True)
    watch.close()
    return tuple(found.clause for found in watch.findings)


def test_what_waits_for_the_turn_of_its_optimizer_may_be_frozen() -> None:
    assert _rounds(_Adversaries(), None) == ()
    for odd in ("maker", "base"):
        model = _Adversaries()
        assert _rounds(model, getattr(model, odd)) == ("parameters-kept",), odd


def test_a_weight_that_is_thawed_is_no_frozen_one() -> None:
    """The change of the set is one finding; that the thawed weight is trained is no second one."""
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=1e-2)

    def thaw(step: int) -> None:
        if step == 2:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters())})

    watch = watched(model, optimizer, 4, thaw)
    assert (clauses(watch), watch.violations) == (["parameters-kept"], 0)


def _toggling(how: str) -> tuple[list[str], int]:
    """A layer is unfrozen, or frozen, behind the first update: what was found, and how much of it is certain."""
    model = net()
    model[0].requires_grad_(how == "frozen")
    wrapped = DistributedDataParallel(model) if how == "wrapped" else model
    updates = []

    def loss(wrapped: nn.Module) -> Tensor:
        if updates and (how != "one rank" or dist.get_rank() == 1):
            model[0].requires_grad_(how != "frozen")
        return loss_of(wrapped)

    watch = watched(wrapped, sgd(model[2] if how == "no optimizer" else model, 1e-2), 2, updates.append, loss)
    return clauses(watch), watch.violations


@pytest.mark.parametrize("how", ["wrapped", "one rank", "no optimizer", "frozen"])
def test_what_is_unfrozen_and_nobody_reduces_or_trains_is_a_violation(how: str) -> None:
    """What all ranks freeze alike a loop may mean, which makes it a suspicion."""
    for found, violations in answers(2, _toggling, how):
        assert found[0] == "parameters-kept"
        assert (violations > 0) == (how != "frozen")


# what is said of it


def _cached(lengths: tuple[int, int]) -> list[str]:
    """A cache of a length of the rank's own after each update; with equal ones, a gradient that differs at update 2."""
    model = net()
    model.register_buffer("cache", torch.zeros(1))
    optimizer = sgd(model)
    with andon.watch(model, optimizer) as watch:
        for update in range(2):
            loss_of(model).backward()
            if update == 1 and lengths == (1, 1):
                model[0].weight.grad.add_(dist.get_rank())
            optimizer.step()
            optimizer.zero_grad()
            model.cache = torch.ones(lengths[dist.get_rank()])
    return [str(found) for found in watch.findings]


def test_a_message_says_shapes_and_what_was_applied() -> None:
    """A buffer of another length is named as that, after the update that left it; under "warn" the loop goes on."""
    (shapes,) = answers(2, _cached, (2, 3))[0]
    lines = shapes.splitlines()
    assert lines[0] == "buffers-agree broken after step 1: ranks 0 and 1 differ."
    assert "  where    cache" in lines
    assert "have not the same shapes on all ranks" in lines[2]
    assert not any(line.startswith("  likely") for line in lines)
    assert "  state    step 1 was applied; last state known equal: step 1" in lines
    gradient = answers(2, _cached, (1, 1))[0][0]
    assert "  state    step 2 was not applied yet, and the loop goes on; last state known equal: step 1" in gradient


def _generators(seeds: tuple[int, int], must: Literal["agree", "differ"]) -> list[str]:
    model = net()
    optimizer = sgd(model)
    with andon.watch(model, optimizer, action=lambda found: None) as watch:
        watch.rng("augmentation", must, torch.Generator().manual_seed(seeds[dist.get_rank()]))
        loss_of(model).backward()
        optimizer.step()
    return clauses(watch)


def _all_generators() -> list[list[str]]:
    return [_generators((4, 4), "agree"), _generators((4, 5), "agree"), _generators((4, 4), "differ")]


def test_a_generator_is_judged_by_its_state() -> None:
    """Equal seeds agree although the objects are two, other seeds do not."""
    assert answers(2, _all_generators)[0] == [[], ["randomness-declared"], ["randomness-declared"]]


def _left_out() -> str:
    """Rank 1 leaves out its second update, and goes on to a reduction for which nobody comes, and that is not seen."""
    reduce = dist.all_reduce  # as a name that a script imported before
    short = dist.new_group(timeout=datetime.timedelta(seconds=4))
    model = net()
    optimizer = sgd(model)
    try:
        with andon.watch(model, optimizer):
            for update in range(4):
                loss_of(model).backward()
                for p in model.parameters():
                    reduce(p.grad, group=short)
                if update != 1 or dist.get_rank() == 0:
                    optimizer.step()
                optimizer.zero_grad()
    except Halted as halted:
        return str(halted)
    except RuntimeError:  # its timeout, which nobody but this rank saw
        return "timeout"
    return ""


# Deep, for the timeout that it waits for: test_left_out has the same where the reduction is seen.
@pytest.mark.deep
def test_an_update_that_one_rank_left_out_is_told_by_where_the_ranks_are() -> None:
    first, second = answers(2, _left_out)
    assert second == "timeout"
    assert "rank 1 of 2 waited in vain at step 2, in its forward or backward pass" in first
    assert "while rank 0 has been at step 2, at its update for" in first


def _tagged() -> list[str]:
    model = net()
    optimizer = torch.optim.SGD([{"params": list(model.parameters()), "tag": f"rank {dist.get_rank()}"}], lr=0.1)
    return [str(found) for found in watched(model, optimizer, 1).findings]


def test_the_hyperparameter_that_differs_is_named() -> None:
    (found,) = answers(2, _tagged)[0]
    assert "the hyperparameters of the optimizers are not the same: tag of group 0 (rank 0:" in found


@pytest.mark.parametrize(("elements", "suspicions"), [(0, []), (1, ["gradient-present"])])
def test_a_parameter_without_elements_needs_no_gradient(elements: int, suspicions: list[str]) -> None:
    model = net()
    model[0].register_parameter("spare", nn.Parameter(torch.zeros(elements)))
    assert clauses(watched(model, sgd(model), 3)) == suspicions
