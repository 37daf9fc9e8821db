"""Faults that hide: behind hooks that were there first, below torch's counters, before the reduction."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import andon
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", andon.AndonWarning)
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
    assert held.evaluations["base-frozen"] == 4


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
    """Ranks whose gradients are one direction in different lengths: the mean of what each clips has the limit for norm."""
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
    assert len(local[0]) == 1
    assert local[0][0].startswith("clip-once")
    assert "each its own gradient, before the reduction" in local[0][0]
