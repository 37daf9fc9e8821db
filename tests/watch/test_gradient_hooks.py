"""Raw gradients that are read in `grad` at the end of a pass are those that a hook on every parameter sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from andon_contracts.watch.gradient_hooks import GradientHooks, Raw
from tests.support.ranks import run_ranks

HEADS = ("A", "B", "AB")


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


class _Loop:
    """The parameters of a model under hooks; of one loop they may thin out, of the other never."""

    def __init__(self, *, thin: bool) -> None:
        torch.manual_seed(0)
        self.model = _Two()
        self.parameters = list(self.model.parameters())
        self.thrown = 0
        self.hooks = GradientHooks(self.parameters, self._discarded, (-1, lambda gradient: None))
        if not thin:
            self.hooks._found_in_grad.never()

    def _discarded(self) -> None:
        self.thrown += 1

    def backward(self, heads: str, seed: int, poison: float | None = None) -> None:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
        if poison is not None:
            x[1, 2] = poison
        self.model(x, heads).backward()

    def zero(self, how: str) -> None:
        for parameter in self.parameters:
            if how == "none":
                parameter.grad = None
            elif how == "zeros" and parameter.grad is not None:
                parameter.grad.zero_()

    def window(self, passes: list[_Pass]) -> Raw:
        for each in passes:
            if each.thrown:
                self.zero("none")
            self.backward(each.heads, each.seed, each.poison)
        raw = self.hooks.read()
        self.hooks.reset()
        return raw


@dataclass(frozen=True)
class _Pass:
    heads: str
    seed: int
    poison: float | None = None
    thrown: bool = False
    """Whether what came before was set to None by hand."""


def _acquainted(*, thin: bool, heads: tuple[str, ...] = ("A", "B")) -> _Loop:
    loop = _Loop(thin=thin)
    for head in heads:
        loop.window([_Pass(head, 1)])
        loop.zero("none")
    assert loop.hooks.at_end == thin
    return loop


_passes = st.lists(
    st.builds(
        _Pass,
        st.sampled_from(HEADS),
        st.integers(0, 9),
        st.sampled_from([None, None, None, float("nan"), float("inf")]),
        st.sampled_from([False, False, True]),
    ),
    min_size=1,
    max_size=3,
)


@given(st.lists(st.tuples(_passes, st.sampled_from(["none", "none", "zeros", "left"])), min_size=1, max_size=6))
def test_a_window_shows_the_same_either_way(windows: list[tuple[list[_Pass], str]]) -> None:
    """Which parameters got a gradient, which is not finite or was not zeroed; one pass: every extreme, bit for bit."""
    few, all_ = _acquainted(thin=True), _acquainted(thin=False)
    none, left = True, False
    for passes, zeroed in windows:
        one, other = few.window(passes), all_.window(passes)
        if none:
            assert one.touched == {index for index, p in enumerate(few.parameters) if p.grad is not None}
        if any(each.thrown for each in passes):
            # With a hook on each, what came before the first that shows it goes too.
            assert one.touched >= other.touched
            break
        assert (one.touched, one.stale) == (other.touched, other.stale)
        assert bool(one.nonfinite) == bool(other.nonfinite) or left  # what is left makes the sum so
        if none and len(passes) == 1:
            assert one.nonfinite == other.nonfinite
            assert str(sorted(one.extremes)) == str(sorted(other.extremes))  # a NaN is written like another
        assert few.thrown == all_.thrown
        for loop in (few, all_):
            loop.zero(zeroed)
        none, left = zeroed == "none", zeroed == "left"


def test_few_parameters_keep_a_hook() -> None:
    """Those at which passes began."""
    loop = _acquainted(thin=True)
    assert 0 < len(loop.hooks._handles) < len(loop.parameters) / 2


def test_a_pass_that_begins_elsewhere_brings_all_hooks_back() -> None:
    """For good, and from the next window on nothing is missed."""
    loop = _acquainted(thin=True, heads=("A", "A"))
    assert loop.window([_Pass("B", 1)]).touched == set()
    assert not loop.hooks.at_end
    for seed in range(4):
        loop.zero("none")
        assert {0, 1} < loop.window([_Pass("B", seed)]).touched
        assert not loop.hooks.at_end


def test_a_hook_that_the_loop_adds_later_is_seen_through() -> None:
    """What it repairs was not finite before, also in the first pass that has it."""
    loop = _acquainted(thin=True)
    loop.model.trunk.weight.register_hook(lambda gradient: gradient.nan_to_num(0.0, 0.0, 0.0))
    raw = loop.window([_Pass("A", 1, float("nan"))])
    assert raw.nonfinite == 1  # the trunk's weight, which is the first
    assert not loop.hooks.at_end


def test_a_window_now_and_then_has_all_hooks() -> None:
    """Of 64, and then few have one again."""
    loop = _acquainted(thin=True)
    few = []
    for _ in range(70):
        loop.window([_Pass("A", 1)])
        loop.zero("none")
        few.append(loop.hooks.at_end)
    assert few.count(False) == 1
    assert few[-1]


def _of_a_wrapper(views: bool) -> tuple[bool, list[int], list[int]]:
    """Whether hooks thin out under DDP, the sign of this rank's windows, and those of a loop that keeps all."""
    signs: list[list[int]] = []
    for thin in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views)
        hooks = GradientHooks(list(model.parameters()), lambda: None, (-1, lambda gradient: None))
        if not thin:
            hooks._found_in_grad.never()
        signs.append([])
        for step in range(5):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            wrapped(x).square().mean().backward()
            signs[-1].append(hooks.read().sign)
            hooks.reset()
            if thin:
                thinned = hooks.at_end
            model.zero_grad()
        hooks.close()
    return thinned, signs[0], signs[1]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("views", [False, True])
def test_what_a_wrapper_reduces_is_seen_before(world: int, views: bool) -> None:
    """Each rank's own gradients; where they lie in a wrapper's buckets every parameter keeps its hook."""
    found: list[Any] = [outcome.get() for outcome in run_ranks(world, _of_a_wrapper, views)]
    for thinned, few, all_ in found:
        assert thinned == (not views)
        assert few == all_
    assert all(len(set(signs)) == world for signs in zip(*(few for _, few, _ in found), strict=True))


def test_gradients_that_a_loop_reduces_within_the_pass_keep_their_hooks() -> None:
    """A hook of the loop's own, behind the sum, may put another in its place."""
    loop = _Loop(thin=True)

    def double(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2)

    for parameter in loop.parameters:
        parameter.register_post_accumulate_grad_hook(double)
    for seed in range(5):
        loop.window([_Pass("A", seed)])
        loop.zero("none")
        assert not loop.hooks.at_end


def test_gradients_that_are_changed_unseen_keep_their_hooks() -> None:
    """Where torch's own node is hooked, which no parameter shows, what is found is not what came."""
    loop = _Loop(thin=True)
    weight = loop.model.trunk.weight
    node = weight.view_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]

    def double(*_: Any) -> None:
        assert weight.grad is not None
        weight.grad.mul_(2)

    node.register_hook(double)
    for seed in range(5):
        loop.window([_Pass("A", seed)])
        loop.zero("none")
        assert not loop.hooks.at_end
