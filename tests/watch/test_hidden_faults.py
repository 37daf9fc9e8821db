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
from tests.support.ranks import run_ranks


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def _backward(model: nn.Module, factor: float = 1.0) -> None:
    (model(torch.ones(3, 4)).square().sum() * factor).backward()


# behind a hook


def _repaired(gradient: Tensor) -> Tensor:
    return gradient.nan_to_num(0.0, 0.0, 0.0)


@pytest.mark.parametrize("first", [True, False])
def test_a_hook_that_repairs_a_gradient_hides_nothing(first: bool) -> None:
    """Whether the loop's hook was there before the watch or came after it; and the hooks still do what they do."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if first:
        handles = [p.register_hook(_repaired) for p in model.parameters()]  # type: ignore[no-untyped-call]
    watch = andon.watch(model, optimizer, action=lambda found: None)
    if not first:
        handles = [p.register_hook(_repaired) for p in model.parameters()]  # type: ignore[no-untyped-call]
    _backward(model, float("nan"))
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    optimizer.step()
    watch.close()
    assert [(found.clause, found.tensor) for found in watch.findings] == [("finite", "0.weight")]
    for handle in handles:
        handle.remove()
    optimizer.zero_grad()
    _backward(model, float("nan"))
    assert all(p.grad is not None and p.grad.isnan().all() for p in model.parameters())


# below the counters


def _frozen_run(end: Callable[[nn.Sequential], None], updates: int = 3) -> andon.Watch:
    model = _model()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=1e-2)
    watch = andon.watch(model, optimizer)
    for _ in range(updates):
        _backward(model)
        optimizer.step()
        optimizer.zero_grad()
    end(model)
    watch.close()
    return watch


def _written_below_torch(model: nn.Sequential) -> None:
    model[0].weight.data.mul_(1.5)  # type: ignore[operator]


def test_a_base_that_changed_in_a_short_run_is_found_at_the_close() -> None:
    """Its part of a round had not come, and no counter moved; an untouched base is evaluated and holds."""
    found = _frozen_run(_written_below_torch).findings
    assert [(each.clause, each.step) for each in found] == [("base-frozen", 3)]
    assert "at the close" in str(found[0])
    held = _frozen_run(lambda model: None)
    assert not held.findings
    rows = sum(law.clause == "base-frozen" for law in BEFORE)
    assert held.evaluations["base-frozen"] == 3 * rows + 1


def _merged(model: nn.Sequential) -> None:
    model[0].merged = True  # type: ignore[assignment]
    _written_below_torch(model)


def _unloaded(model: nn.Sequential) -> None:
    merged = nn.Linear(4, 5)
    model[0] = merged


def _halved(model: nn.Sequential) -> None:
    model.half()


@torch.no_grad()
def _merged_by_hand(model: nn.Sequential) -> None:
    model[0].weight += 1.0  # type: ignore[operator, assignment]


@pytest.mark.parametrize("end", [_merged, _unloaded, _halved, _merged_by_hand])
def test_what_is_done_with_a_model_after_its_training_is_no_fault(
    end: Callable[[nn.Sequential], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """A merge, another dtype, other layers before the watch is closed: it says that it did not read again, and why."""
    assert not _frozen_run(end).findings
    assert "base-frozen: not read once more at the end, because" in capsys.readouterr().err


# before the reduction


def _clipping_loop(where: str) -> list[str]:
    """Ranks whose gradients have one direction and other lengths: the mean of what each clips has the norm allowed."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with andon.watch(model, optimizer, clip=0.01, action=lambda found: None) as watch:
        for _ in range(2):
            _backward(model, 1.0 + 9.0 * dist.get_rank())
            if where == "local":
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            for p in model.parameters():
                assert p.grad is not None
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
            if where == "reduced":
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    return [f"{found.clause}: {found}" for found in watch.findings]


def test_a_clip_of_each_ranks_own_gradient_is_seen_by_its_norms() -> None:
    """The optimizer gets the limit's norm either way; only the norms by which the ranks clipped say it."""
    local, right = [[o.get() for o in run_ranks(2, _clipping_loop, where)] for where in ("local", "reduced")]
    assert right == [[], []]
    assert local[0] == local[1]
    # That the call is misplaced (`clip-placed`) stands under it.
    assert [said.partition(":")[0] for said in local[0]] == ["clip-once"]
    assert "each its own gradient, before the reduction" in local[0][0]


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
    """Adversaries take turns; what steps now, and what no optimizer holds, must stay as it was."""
    assert _rounds(_Adversaries(), None) == ()
    for odd in ("maker", "base"):
        model = _Adversaries()
        assert _rounds(model, getattr(model, odd)) == ("parameters-kept",), odd


def test_a_weight_that_is_thawed_is_no_frozen_one() -> None:
    """The change of the set is one finding; that the thawed weight is trained is no second one."""
    model = _model()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=1e-2)
    watch = andon.watch(model, optimizer, action=lambda found: None)
    for update in range(4):
        if update == 2:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters())})
        _backward(model)
        optimizer.step()
        optimizer.zero_grad()
    watch.close()
    assert [found.clause for found in watch.findings] == ["parameters-kept"]
    assert watch.violations == 0


def _toggling(how: str) -> tuple[list[str], int]:
    """A layer is unfrozen, or frozen, behind the first update: what was found, and how much of it is certain."""
    model = _model()
    model[0].requires_grad_(how == "frozen")
    watched = DistributedDataParallel(model) if how == "wrapped" else model
    optimizer = torch.optim.SGD((model[2] if how == "no optimizer" else model).parameters(), lr=1e-2)
    watch = andon.watch(watched, optimizer, action=lambda found: None)
    for update in range(2):
        if update and (how != "one rank" or dist.get_rank() == 1):
            model[0].requires_grad_(how != "frozen")
        _backward(watched)
        optimizer.step()
        optimizer.zero_grad()
    watch.close()
    return [found.clause for found in watch.findings], watch.violations


@pytest.mark.parametrize("how", ["wrapped", "one rank", "no optimizer", "frozen"])
def test_what_is_unfrozen_and_nobody_reduces_or_trains_is_a_violation(how: str) -> None:
    """A wrapper reduces what was trained when it was made, an optimizer trains what it holds, and one rank alone means
    nothing by it. What all freeze alike a loop may mean: a suspicion."""
    for outcome in run_ranks(2, _toggling, how):
        clauses, violations = outcome.get()
        assert clauses[0] == "parameters-kept"
        assert (violations > 0) == (how != "frozen")


# what is said of it


def _cached(size_of: Callable[[int], int]) -> list[str]:
    """A cache as long as the rows that a rank has seen, and a watch that only warns."""
    model = _model()
    model.register_buffer("cache", torch.zeros(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with andon.watch(model, optimizer) as watch:
        for update in range(2):
            _backward(model)
            if update == 1 and size_of(1) == 1:
                p = next(model.parameters())
                assert p.grad is not None
                p.grad.add_(dist.get_rank())
            optimizer.step()
            optimizer.zero_grad()
            model.cache = torch.ones(size_of(dist.get_rank()))
    return [str(found) for found in watch.findings]


def _length(rank: int) -> int:
    return 2 + rank


def _one(rank: int) -> int:
    return 1


def test_a_message_says_shapes_and_what_was_applied() -> None:
    """A buffer of another length is named as that, after the update that left it; under "warn" the loop goes on."""
    (shapes,) = run_ranks(2, _cached, _length)[0].get()
    lines = shapes.splitlines()
    assert lines[0] == "buffers-agree broken after step 1: ranks 0 and 1 differ."
    assert "  where    cache" in lines
    assert "have not the same shapes on all ranks" in lines[2]
    assert not any(line.startswith("  likely") for line in lines)
    assert "  state    step 1 was applied; last state known equal: step 1" in lines
    gradient = run_ranks(2, _cached, _one)[0].get()[0]
    assert "  state    step 2 was not applied yet, and the loop goes on; last state known equal: step 1" in gradient


def _generators(seeds: tuple[int, int], must: Literal["agree", "differ"]) -> list[str]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with andon.watch(model, optimizer, action=lambda found: None) as watch:
        watch.rng("augmentation", must, torch.Generator().manual_seed(seeds[dist.get_rank()]))
        _backward(model)
        optimizer.step()
    return [found.clause for found in watch.findings]


def _all_generators() -> list[list[str]]:
    return [_generators((4, 4), "agree"), _generators((4, 5), "agree"), _generators((4, 4), "differ")]


def test_a_generator_is_judged_by_its_state() -> None:
    """Equal seeds agree although the objects are two, other seeds do not."""
    assert run_ranks(2, _all_generators)[0].get() == [[], ["randomness-declared"], ["randomness-declared"]]


def _left_out() -> str:
    """Rank 1 leaves out its second update, and goes on to a reduction for which nobody comes, and that is not seen."""
    reduce = dist.all_reduce  # as a name that a script imported before
    short = dist.new_group(timeout=datetime.timedelta(seconds=4))
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with andon.watch(model, optimizer):
            for update in range(4):
                _backward(model)
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
    """The rank in the loop's collective is the first whose timeout ends; it says where the other one waits."""
    first, second = [outcome.get() for outcome in run_ranks(2, _left_out)]
    assert second == "timeout"
    assert "rank 1 of 2 waited in vain at step 2, in its forward or backward pass" in first
    assert "while rank 0 has been at step 2, at its update for" in first


def _tagged() -> list[str]:
    model = _model()
    optimizer = torch.optim.SGD([{"params": list(model.parameters()), "tag": f"rank {dist.get_rank()}"}], lr=0.1)
    with andon.watch(model, optimizer, action=lambda found: None) as watch:
        _backward(model)
        optimizer.step()
    return [str(found) for found in watch.findings]


def test_the_hyperparameter_that_differs_is_named() -> None:
    """By its key and its group, also one that is no number."""
    (found,) = run_ranks(2, _tagged)[0].get()
    assert "the hyperparameters of the optimizers are not the same: tag of group 0 (rank 0:" in found


def test_a_parameter_without_elements_needs_no_gradient() -> None:
    """Nothing can come of it; one with elements that is not used is suspicious after two updates."""
    for elements, suspicions in ((0, []), (1, ["gradient-present"])):
        model = _model()
        model[0].register_parameter("spare", nn.Parameter(torch.zeros(elements)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watch = andon.watch(model, optimizer)
        for _ in range(3):
            _backward(model)
            optimizer.step()
            optimizer.zero_grad()
        watch.close()
        assert [found.clause for found in watch.findings] == suspicions
