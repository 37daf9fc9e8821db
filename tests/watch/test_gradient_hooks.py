"""RawSummary gradients that are read in `grad` at the end of a pass are those that a hook on every parameter sees."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
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


def _hooks(parameters: Sequence[nn.Parameter], *, thin: bool, discarded: Any = lambda: None) -> GradientHooks:
    """thin: the loop has no post-accumulate hooks, which may change gradients; for those the watch keeps all hooks."""
    hooks = GradientHooks(parameters, discarded, (-1, lambda gradient: None), lambda: False)
    for parameter in () if thin else parameters:
        parameter.register_post_accumulate_grad_hook(lambda _: None)
    return hooks


class _Loop:
    """The parameters of a model under hooks; of one loop they may thin out, of the other never."""

    def __init__(self, *, thin: bool) -> None:
        torch.manual_seed(0)
        self.model = _Two()
        self.parameters = list(self.model.parameters())
        self.thrown: list[None] = []
        self.hooks = _hooks(self.parameters, thin=thin, discarded=lambda: self.thrown.append(None))

    def backward(self, heads: str, seed: int, poison: float | None = None) -> None:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
        if poison is not None:
            x[1, 2] = poison
        loss = self.model(x, heads)
        self.hooks.backward_called()
        try:
            loss.backward()
        finally:
            self.hooks.backward_ended()

    def zero(self, how: str) -> None:
        for parameter in self.parameters:
            if how == "none":
                parameter.grad = None
            elif how == "zeros" and parameter.grad is not None:
                parameter.grad.zero_()

    def window(self, passes: list[_Pass]) -> RawSummary:
        for each in passes:
            if each.thrown:
                self.zero("none")
            self.backward(each.heads, each.seed, each.poison)
        return self.read()

    def read(self) -> RawSummary:
        raw = self.hooks.read()
        self.hooks.reset()
        return raw

    def update(self, heads: str, seed: int = 1, poison: float | None = None) -> RawSummary:
        """A window of one pass, zeroed."""
        raw = self.window([_Pass(heads, seed, poison)])
        self.zero("none")
        return raw


@dataclass(frozen=True)
class _Pass:
    heads: str
    seed: int
    poison: float | None = None
    thrown: bool = False  # whether the gradients before it were set to None by hand


def _acquainted(*, thin: bool = True, heads: str = "AB") -> _Loop:
    loop = _Loop(thin=thin)
    for seed in range(2):
        loop.update(heads, seed)
    assert loop.hooks.reads_at_end == thin
    return loop


_passes = st.lists(
    st.builds(
        _Pass,
        st.sampled_from(["A", "B", "AB"]),
        st.integers(0, 9),
        st.sampled_from([None, None, None, float("nan"), float("inf")]),
        st.sampled_from([False, False, True]),
    ),
    min_size=1,
    max_size=3,
)


@given(
    st.sampled_from(["A", "AB"]),
    st.lists(st.tuples(_passes, st.sampled_from(["none", "none", "zeros", "left"])), min_size=1, max_size=6),
)
def test_a_window_shows_the_same_either_way(known: str, windows: list[tuple[list[_Pass], str]]) -> None:
    """Which parameters got a gradient, which is not finite or was not zeroed; one pass: every extreme, bit for bit.

    known: the heads that were used while the hooks thinned out; another one may begin a pass elsewhere later.
    """
    few, all_ = _acquainted(thin=True, heads=known), _acquainted(thin=False, heads=known)
    none = True
    for passes, zeroed in windows:
        one, other = few.window(passes), all_.window(passes)
        if any(each.thrown for each in passes):
            # With a hook on each, what came before the first that shows it goes too.
            assert one.received >= other.received
            break
        if none:
            assert one.received == {index for index, p in enumerate(few.parameters) if p.grad is not None}
        assert (one.received, one.stale, bool(one.nonfinite)) == (other.received, other.stale, bool(other.nonfinite))
        if len(passes) == 1:
            assert one.nonfinite == other.nonfinite
            assert str(sorted(one.extremes)) == str(sorted(other.extremes))  # a NaN is written like another
        assert few.thrown == all_.thrown
        for loop in (few, all_):
            loop.zero(zeroed)
        none = zeroed == "none"


def _second(first: str) -> Callable[[_Loop], None]:
    def passes(loop: _Loop) -> None:
        loop.backward(first, 1)
        loop.backward("A", 2, NAN)
        loop.model.trunk.weight.grad = torch.zeros_like(loop.model.trunk.weight)  # repaired by hand

    return passes


def _within(loop: _Loop) -> None:
    """As a checkpoint makes it that computes its activations again."""

    def within(gradient: Tensor) -> None:
        handle.remove()
        with torch.enable_grad():
            loop.model(torch.ones(1, 5), "AB").backward()

    handle = loop.model.trunk.register_forward_hook(lambda module, given, made: made.register_hook(within) and None)
    loop.backward("AB", 1)


def _hooked_later(loop: _Loop) -> None:
    """What the loop's hook repairs was not finite before."""
    loop.model.trunk.weight.register_hook(lambda gradient: gradient.nan_to_num(0.0, 0.0, 0.0))
    loop.backward("AB", 1, NAN)


def _hooked_between(loop: _Loop) -> None:
    loop.backward("AB", 1)
    loop.model.trunk.weight.register_hook(lambda gradient: None)
    loop.backward("AB", 2)


def _asks(loop: _Loop) -> None:
    """Gradients that a loop asks for are no part of the pass."""
    loop.backward("AB", 1)
    torch.autograd.grad(loop.model(torch.ones(1, 5), "AB"), loop.parameters[:6])


RETURNS: dict[str, tuple[Callable[[_Loop], None], bool]] = {
    "a second pass": (_second("A"), True),
    "a second pass of another head": (_second("AB"), True),
    "a pass within a pass": (_within, False),
    "a hook that the loop adds": (_hooked_later, True),
    "a hook between two passes": (_hooked_between, False),
    "gradients that the loop asks for": (_asks, False),
}


@pytest.mark.parametrize("name", RETURNS)
def test_what_is_out_of_the_ordinary_brings_all_hooks_back(name: str) -> None:
    """What it gives is seen as it comes, and what came before in the window was not left over."""
    passes, poisoned = RETURNS[name]
    loop = _acquainted()
    passes(loop)
    assert not loop.hooks.reads_at_end
    raw = loop.hooks.read()
    assert raw.received >= {0, 1, 2, 3}
    assert (raw.nonfinite, raw.stale) == (int(poisoned), 0)


@pytest.mark.parametrize("frozen", ["trunk", "A"])
def test_a_part_that_is_frozen_later_is_no_error(frozen: str) -> None:
    """It has no hook while it is frozen, and one again when it is not."""
    loop = _acquainted()
    part = loop.model.get_submodule(frozen).requires_grad_(False)
    for seed in range(70):
        loop.update("AB", seed)
    part.requires_grad_(True)
    loop.update("AB")
    assert loop.update("AB").received == {0, 1, 2, 3, 4, 5}


def test_a_pass_that_failed_is_none_that_runs() -> None:
    """What it left is let go, and what the loop tries again is seen."""
    loop = _acquainted()

    def fail(gradient: Tensor) -> None:
        raise ZeroDivisionError

    handle = loop.model.trunk.register_forward_hook(lambda module, given, made: made.register_hook(fail) and None)
    with pytest.raises(ZeroDivisionError):
        loop.backward("AB", 1)
    handle.remove()
    left = [weakref.ref(p.grad) for p in loop.parameters if p.grad is not None]
    assert left
    loop.zero("none")
    assert [each() for each in left] == [None] * len(left)
    raw = loop.update("AB", poison=NAN)
    assert (raw.received, raw.nonfinite) == ({0, 1, 2, 3, 4, 5}, 1)


def test_what_is_reduced_behind_a_pass_is_no_part_of_it() -> None:
    loop = _acquainted()
    loop.backward("AB", 1)
    loop.hooks.reducing(gradient=True)
    assert loop.hooks.reads_at_end


def test_a_window_now_and_then_has_all_hooks() -> None:
    """One of 64, and then few have one again."""
    loop = _acquainted()
    few = []
    for _ in range(70):
        loop.update("AB")
        few.append(loop.hooks.reads_at_end)
    assert few.count(False) == 1
    assert few[-1]


def _of_a_wrapper(views: bool) -> tuple[bool, list[int], list[int]]:
    """Whether hooks thin out under DDP, the sign of this rank's windows, and those of a loop that keeps all."""
    signs: list[list[int]] = []
    for thin in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views)
        hooks = _hooks(list(model.parameters()), thin=thin)
        signs.append([])
        for step in range(5):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            loss = wrapped(x).square().mean()
            hooks.backward_called()
            loss.backward()
            hooks.backward_ended()
            signs[-1].append(hooks.read().fingerprint)
            hooks.reset()
            if thin:
                thinned = hooks.reads_at_end
            model.zero_grad()
        hooks.close()
    return thinned, signs[0], signs[1]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("views", [False, True])
def test_what_a_wrapper_reduces_is_seen_before(world: int, views: bool) -> None:
    """Each rank's own gradients; where they lie in a wrapper's buckets every parameter keeps its hook."""
    found = answers(world, _of_a_wrapper, views)
    for thinned, few, all_ in found:
        assert thinned == (not views)
        assert few == all_
    assert all(len(set(signs)) == world for signs in zip(*(few for _, few, _ in found), strict=True))


def _counted_outside() -> tuple[bool, list[int]]:
    """Whether hooks thin out where a head outside of DDP comes first, and the reducing passes counted by update."""
    torch.manual_seed(0)
    trunk, head = DistributedDataParallel(nn.Linear(5, 7)), nn.Linear(7, 3)
    hooks = _hooks([*trunk.parameters(), *head.parameters()], thin=True)
    begun = PendingCollectives([0, 1])
    (followed,) = begun.follow(trunk)
    hooks.halt = SimpleNamespace(pending=begun, cause=None, raise_if_halted=lambda: None)  # that nobody pulls
    counts = []
    for _ in range(5):
        begun.forward(followed)
        loss = head(torch.tanh(trunk(torch.ones(2, 5)))).square().mean()
        hooks.backward_called()
        loss.backward()
        hooks.backward_ended()
        counts.append(begun.counts().backwards)
        hooks.read()
        hooks.reset()
        trunk.zero_grad()
        head.zero_grad()
    return hooks.reads_at_end, counts


def test_a_pass_that_reduces_is_counted_where_another_part_comes_first() -> None:
    """On every rank alike, with few hooks and with all: by these counts a rank knows who waits for it."""
    assert answers(2, _counted_outside) == [(True, [1, 2, 3, 4, 5])] * 2


@pytest.mark.parametrize("seen", [True, False])
def test_gradients_that_are_changed_after_they_came_keep_their_hooks(seen: bool) -> None:
    """By a post-accumulate hook, or by a hook on the accumulate-grad node, which no parameter lists."""
    loop = _Loop(thin=True)
    weight = loop.model.trunk.weight

    def double(*_: Any) -> None:
        assert weight.grad is not None
        weight.grad.mul_(2)

    node = weight.view_as(weight).grad_fn.next_functions[0][0]
    if seen:
        weight.register_post_accumulate_grad_hook(double)
    else:
        node.register_hook(double)
    for seed in range(5):
        loop.update("A", seed)
        assert not loop.hooks.reads_at_end
