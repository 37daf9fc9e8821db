"""An update that one rank leaves out: all halt at once, by what each has begun; ranks that are slow are left alone."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import andon
from andon_contracts.liveness.end_messages import POINTS, Teller, Whereabouts
from andon_contracts.liveness.pending_collectives import (
    BACKWARD,
    REDUCTION,
    Counts,
    PendingCollectives,
    Waiting,
    stuck,
)
from andon_contracts.violation import Violation
from tests.support.ranks import run_ranks
from tests.watch.small import answers, clauses, loss_of, net, sgd

UPDATES = 4
SEVERAL_LOOKS_S = 1.2
"""A rank that waits looks twice a second at why; how often it does here decides nothing but how much is shown."""


class _Loop:
    """A loop by DDP, or by hand with one reduction for each gradient."""

    def __init__(self, *, wrapped: bool) -> None:
        self.model = DistributedDataParallel(net()) if wrapped else net()
        self.optimizer = sgd(self.model)
        self.wrapped, self.rank = wrapped, dist.get_rank()

    def backward(self) -> None:
        self.model(torch.full((2, 4), self.rank + 1.0)).sum().backward()
        for p in () if self.wrapped else self.model.parameters():
            dist.all_reduce(p.grad)


def _leaves_out(wrapped: bool) -> None:
    """Rank 1 leaves out update 2."""
    loop = _Loop(wrapped=wrapped)
    with andon.watch(loop.model, loop.optimizer):
        for update in range(1, UPDATES + 1):
            loop.backward()
            if (update, loop.rank) != (2, 1):
                loop.optimizer.step()
            loop.optimizer.zero_grad()


@pytest.mark.parametrize(("world", "wrapped"), [(2, True), (3, False)])
def test_all_halt_at_the_update_that_one_rank_leaves_out(world: int, wrapped: bool) -> None:
    """Long before any timeout, with one message on all ranks, which names that rank and the update."""
    errors = [outcome.error for outcome in run_ranks(world, _leaves_out, wrapped)]
    found = [error for error in errors if type(error) is Violation]
    # In a backward pass of DDP the connection that breaks may be the error that the loop sees.
    assert all(type(errors[rank]) is Violation for rank in range(world) if rank != 1 or not wrapped), errors
    assert errors[1] is not None
    assert len({str(error) for error in found}) == 1
    assert {(error.clause, error.step, error.finding.ranks) for error in found} == {("halt-together", 2, (1,))}
    assert str(found[0]).startswith(f"rank 1 of {world} went past update 2, at which rank ")
    assert (BACKWARD if wrapped else REDUCTION) in str(found[0])
    assert "state    last state known equal: step 1" in str(found[0])


def test_of_three_ranks_the_one_that_waits_alone_is_named() -> None:
    """The two others left nothing out: it makes an update too many, or makes a call that they do not make."""
    for point, words in ((POINTS[2], "makes an update"), (POINTS[0], "makes a call")):
        teller = Teller(0, 3, Whereabouts(3, point, last_equal=2))
        alone = teller.passed({1: BACKWARD, 2: BACKWARD}, waiting=0)
        assert (alone.ranks, alone.step, alone.kind) == ((0,), 3, "violation")
        assert f"rank 0 {words} that the others do not make" in alone.text
        assert teller.passed({1: BACKWARD, 2: BACKWARD}, waiting=1).ranks == (1, 2)


# what keeps the others waiting, and is right


def _evaluates(loop: _Loop, group: dist.ProcessGroup) -> None:
    loss_of(loop.model)
    with torch.no_grad():
        loss_of(loop.model)


def _accumulates(loop: _Loop, group: dist.ProcessGroup) -> None:
    """Micro-batches that the others do not have, and that are not reduced."""
    with loop.model.no_sync():
        loss_of(loop.model).backward()


def _reduces_alone(loop: _Loop, group: dist.ProcessGroup) -> None:
    for _ in range(3):
        dist.all_reduce(torch.ones(1), group=group)


def _be_slow(between: Callable[[_Loop, dist.ProcessGroup], None], wrapped: bool) -> list[str]:
    loop = _Loop(wrapped=wrapped)
    group, _ = dist.new_subgroups(1)
    with andon.watch(loop.model, loop.optimizer, action=lambda found: None) as w:
        for update in range(UPDATES):
            loop.backward()
            if update == 1 and loop.rank == 1:
                between(loop, group)
                threading.Event().wait(SEVERAL_LOOKS_S)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    return clauses(w)


@pytest.mark.parametrize(
    ("between", "wrapped", "found"),
    [
        (_evaluates, True, []),
        (_accumulates, True, ["gradients-agree"]),  # that the weights part is of the same cause
        (_reduces_alone, False, []),
    ],
)
def test_a_rank_that_others_wait_for_is_not_accused(
    between: Callable[[_Loop, dist.ProcessGroup], None], wrapped: bool, found: list[str]
) -> None:
    """Whatever it does meanwhile that needs none of them. A micro-batch of its own alters its gradient, no more."""
    assert answers(2, _be_slow, between, wrapped) == [found, found]


# counted


def _told(backwards: int, gathers: int, inside: tuple[str, int] = ("", 0)) -> dict[int, Counts]:
    return {1: Counts(gathers, backwards, *inside)}


def _in_gather(gathers: int, *, armed: bool = False) -> Waiting:
    begun = PendingCollectives([0, 1])
    for _ in range(gathers):
        begun.gathering()
    begun.armed = armed
    begun.gathering()
    assert begun.waiting is not None
    return begun.waiting


@pytest.mark.parametrize(
    ("told", "found"),
    [
        (_told(1, 2), {1: BACKWARD}),
        (_told(1, 3), {}),  # it has come to the gather since
        (_told(0, 2), {}),
        (_told(0, 2, ("0", 1)), {1: REDUCTION}),
        (_told(0, 3, ("0", 1)), {}),
        ({}, {}),  # it has told nothing yet
    ],
)
def test_a_rank_waits_in_vain_for_one_that_began_more_in_fewer_gathers(
    told: dict[int, Counts], found: dict[int, str]
) -> None:
    """Of a rank in its third gather, which has begun nothing."""
    assert stuck(_in_gather(2), told) == found


def test_a_forward_pass_without_a_backward_pass_accuses_nobody() -> None:
    """The backward pass that another rank has begun may be the one that this rank has still to come to."""
    waiting = _in_gather(2, armed=True)
    assert stuck(waiting, _told(1, 2)) == {}
    assert stuck(waiting, _told(2, 2)) == {1: BACKWARD}


def _opened_apart(how: str) -> str:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5 if how == "frozen" else 5 + dist.get_rank(), 2))
    if how == "frozen" and dist.get_rank() == 1:
        model[2].weight.requires_grad = False
    if how == "width" and dist.get_rank() == 1:
        model[0] = nn.Linear(4, 6)
    with pytest.raises(Violation) as found:
        andon.watch(model, sgd(model), action="raise")
    return str(found.value)


@pytest.mark.parametrize(("how", "tensor"), [("frozen", "2.weight"), ("width", "0.weight")])
def test_what_is_trained_and_its_shapes_are_compared_before_the_loop_reduces(how: str, tensor: str) -> None:
    """A parameter that is frozen, or wider, on one rank ends the collectives of a loop that reduces by hand in a crash:
    the watch says so as it opens, with the tensor, before there is one."""
    for said in answers(2, _opened_apart, how):
        assert said.startswith("parameters-kept broken at the start"), said
        assert f"where    {tensor} (" in said
        assert "the tensors differ in name, shape, dtype, order or in which are trained" in said
