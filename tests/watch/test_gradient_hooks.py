"""The raw gradients of a window: what arrived, what was not finite, and what was left over from before."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from andon_contracts.liveness.halt import PendingCollectives
from andon_contracts.watch.gradient_hooks import GradientHooks, RawSummary
from tests.watch.small import answers

NAN = float("nan")


class _Two(nn.Module):
    """A trunk and two heads, each of which a loss may leave out; `unused` never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 7)
        self.A, self.B = nn.Linear(7, 3), nn.Linear(7, 2)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor, heads: str) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        return torch.stack([self.get_submodule(head)(hidden).square().sum() for head in heads]).sum()


def _hooks(parameters: Sequence[nn.Parameter], discarded: Callable[[], None] = lambda: None) -> GradientHooks:
    return GradientHooks(parameters, discarded, (-1, lambda gradient: None), lambda: False)


class _Loop:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = _Two()
        self.parameters = list(self.model.parameters())
        self.thrown: list[None] = []
        self.hooks = _hooks(self.parameters, lambda: self.thrown.append(None))

    def backward(self, heads: str, seed: int, poison: float | None = None) -> None:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
        if poison is not None:
            x[1, 2] = poison
        try:
            self.model(x, heads).backward()
        finally:
            self.hooks.pass_ended()

    def update(self, heads: str, seed: int = 1, poison: float | None = None, *, next_reads: bool = True) -> RawSummary:
        """A window of one pass, zeroed."""
        self.backward(heads, seed, poison)
        raw = self.hooks.read()
        self.hooks.reset(reads=next_reads)
        self.model.zero_grad()
        return raw


def test_a_window_says_what_arrived() -> None:
    """Of every pass, even if the loop repairs the sum; what the loop left over; and what it threw away by hand."""
    loop = _Loop()
    loop.backward("A", 1)
    loop.backward("AB", 2, NAN)
    loop.model.trunk.weight.grad = torch.zeros_like(loop.model.trunk.weight)
    raw = loop.hooks.read()
    assert (raw.received, {*raw.nonfinite}, raw.stale) == ({*range(6)}, {*range(6)}, 0)
    assert {*raw.nonfinite[-2:]} == {0, 1}  # the backward pass reaches the trunk last
    loop.hooks.reset()
    loop.backward("A", 3)
    assert loop.hooks.read().stale == 2  # the bias of the trunk, whose weight was set to zero
    loop.hooks.reset()
    for parameter in loop.parameters:
        parameter.grad = None
    loop.backward("AB", 1, NAN)
    for parameter in loop.parameters:
        parameter.grad = None
    loop.backward("AB", 2)
    assert (loop.thrown, loop.hooks.read().nonfinite) == ([None], [])


def test_a_window_that_is_not_read_says_that_gradients_arrive() -> None:
    """Also of a part that has no hook then. The next window is read as if every window were."""
    loop, other = _Loop(), _Loop()
    expected = other.update("AB", 7)
    loop.update("AB", 1, next_reads=False)
    assert not loop.hooks.started
    for heads in ("A", "B"):
        loop.hooks.gradient_arrived = False
        loop.backward(heads, 2, NAN)
        assert loop.hooks.gradient_arrived
    loop.hooks.reset()
    loop.model.zero_grad()
    assert loop.update("AB", 7) == expected


@pytest.mark.parametrize("frozen", ["trunk", "A"])
def test_a_part_that_is_frozen_later_is_no_error(frozen: str) -> None:
    """It has no hook while it is frozen, and one again when it is not."""
    loop = _Loop()
    part = loop.model.get_submodule(frozen).requires_grad_(False)
    loop.update("AB")
    part.requires_grad_(True)
    loop.update("AB")
    assert loop.update("AB").received == {0, 1, 2, 3, 4, 5}


def test_a_pass_that_failed_is_none_that_runs() -> None:
    """What it left is let go, and what the loop tries again is seen."""
    loop = _Loop()

    def fail(gradient: Tensor) -> None:
        raise ZeroDivisionError

    handle = loop.model.trunk.register_forward_hook(lambda module, given, made: made.register_hook(fail) and None)
    with pytest.raises(ZeroDivisionError):
        loop.backward("AB", 1)
    handle.remove()
    left = [weakref.ref(p.grad) for p in loop.parameters if p.grad is not None]
    assert left
    loop.model.zero_grad()
    assert [each() for each in left] == [None] * len(left)
    raw = loop.update("AB", poison=NAN)
    assert (raw.received, {*raw.nonfinite}) == ({*range(6)}, {*range(6)})


def _counted_outside() -> list[int]:
    torch.manual_seed(0)
    trunk, head = DistributedDataParallel(nn.Linear(5, 7)), nn.Linear(7, 3)
    hooks = _hooks([*trunk.parameters(), *head.parameters()])
    begun = PendingCollectives([0, 1])
    (followed,) = begun.follow(trunk)
    hooks.halt = SimpleNamespace(pending=begun, cause=None, raise_if_halted=lambda: None)  # type: ignore[assignment]
    counts = []
    for reads in (True, False, False, True, True):
        begun.forward(followed)
        head(torch.tanh(trunk(torch.ones(2, 5)))).square().mean().backward()
        counts.append(begun.counts().backwards)
        hooks.reset(reads=reads)
        trunk.zero_grad()
        head.zero_grad()
    return counts


def test_a_pass_that_reduces_is_counted_where_another_part_comes_first() -> None:
    """On every rank alike, in windows that are read and in others: by these counts a rank knows who waits for it."""
    assert answers(2, _counted_outside) == [[1, 2, 3, 4, 5]] * 2
