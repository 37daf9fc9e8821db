"""The loop's own calls are seen while a watch is open: each way to clip, and by each who listens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import andon
from andon_contracts.violation import Violation
from andon_contracts.watch import Watch
from andon_contracts.watch.intercept import listen, unlisten

LIMIT = 0.5


def _ignore(_: Violation) -> None:
    """Collected by the watch."""


def _by_norm(parameters: Sequence[nn.Parameter], norm: Tensor) -> None:
    nn.utils.clip_grads_with_norm_(parameters, LIMIT, norm)


def _by_the_module(parameters: Sequence[nn.Parameter], norm: Tensor) -> None:
    nn.utils.clip_grad._clip_grads_with_norm_(parameters, LIMIT, norm)


@pytest.mark.parametrize("clip", [_by_norm, _by_the_module])
@pytest.mark.parametrize(("factor", "found"), [(1.0, []), (4.0, ["clip-once"])])
def test_a_clip_by_a_norm_of_the_loops_own_is_held_to_the_limit(
    clip: Callable[[Sequence[nn.Parameter], Tensor], None], factor: float, found: list[str]
) -> None:
    """A norm that is not the gradient's, as one of other gradients, is seen; the gradient's own norm is right."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with andon.watch(model, optimizer, clip=LIMIT, action=_ignore) as w:
        model(torch.ones(4, 3)).square().sum().backward()
        parameters = list(model.parameters())
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        assert norm > LIMIT
        clip(parameters, norm * factor)
        optimizer.step()
    assert [each.clause for each in w.findings] == found


class _Long(nn.Module):
    """One tensor, whose gradient is what it is given."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


@pytest.mark.parametrize(("factor", "found"), [(1.0, []), (4.0, ["clip-once"])])
def test_a_clip_by_torch_of_a_long_tensor_is_right(factor: float, found: list[str]) -> None:
    """torch's fp32 norm of 25 million elements is off by more than 1e-3 on a CPU, and so is what it clips to."""
    model = _Long(25_000_000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with andon.watch(model, optimizer, clip=LIMIT, action=_ignore) as w:
        model(torch.full_like(model.weight, 1.1)).backward()
        assert model.weight.grad is not None
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT * factor)
        clipped = float(torch.linalg.vector_norm(model.weight.grad, dtype=torch.float64))
        optimizer.step()
    assert abs(clipped / (LIMIT * factor) - 1) > 1e-3
    assert [each.clause for each in w.findings] == found


class _Ear:
    """Hears of clipping; the others are of no concern."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.heard = 0
        self._then = then

    def clipping(self, parameters: Sequence[Tensor], norm: Tensor | None) -> None:
        self.heard += 1
        self._then()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def test_who_begins_or_ends_to_listen_in_a_call_changes_nothing_for_the_others() -> None:
    """A watch that is opened or closed by a clip call neither hears that call twice nor keeps it from the next one."""
    late = _Ear(lambda: None)

    def change() -> None:
        unlisten(first)
        listen(late)

    first = _Ear(change)
    second = _Ear(lambda: None)
    listen(first)
    listen(second)
    try:
        weight = nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        nn.utils.clip_grad_norm_([weight], 1.0)
    finally:
        for each in (first, second, late):
            unlisten(each)
    assert (first.heard, second.heard, late.heard) == (1, 1, 0)


def test_with_the_last_watch_all_is_as_it_was() -> None:
    """Each function that was replaced is torch's own again."""
    before = (nn.utils.clip_grads_with_norm_, nn.utils.clip_grad_value_, torch.amp.GradScaler.step)
    model = nn.Linear(3, 2)
    w: Watch = andon.watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert nn.utils.clip_grads_with_norm_ is not before[0]
    w.close()
    assert (nn.utils.clip_grads_with_norm_, nn.utils.clip_grad_value_, torch.amp.GradScaler.step) == before
