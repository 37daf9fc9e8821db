"""Which ranks hold the same is known: on a mesh with replicas the shards are compared with their own replicas only."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import andon
from andon_contracts.violation import Violation
from andon_contracts.watch.replicas import Replicas, replicas_of
from tests.support.ranks import run_ranks


def test_ranks_are_held_to_their_own_part() -> None:
    """Equal within each part is equal everywhere; a rank that parts from two others is odd, of two both are."""
    three = Replicas((0, 1, 0, 1, 0, 1))
    assert three.aligned([5, 6, 5, 6, 5, 6]) == (0,) * 6
    assert three.aligned([5, 6, 7, 6, 5, 6]) == (0, 0, 2, 0, 0, 0)
    two = Replicas((0, 1, 0, 1))
    odd = two.aligned([5, 6, 5, 7])
    assert odd[0] == odd[2] == 0
    assert odd[1] == odd[3] != 0
    assert Replicas((0, 0, 0)).aligned([5, 6, 5]) == (5, 6, 5)
    assert Replicas((0, 1, 2)).aligned([5, 6, 7]) == (5, 6, 7)
    assert [each.cut for each in (three, two, Replicas((0, 0)), Replicas((0, 1)), Replicas((0, 0, 1)))] == [
        True, True, False, False, False,
    ]  # fmt: skip


def test_what_is_no_partition_is_refused() -> None:
    """A rank that names other replicas than they name is a mistake of who said so."""
    assert replicas_of([0, 1, 0, 1], [2, 2, 2, 2]).copies == 2
    with pytest.raises(ValueError, match="rank 1 names 2 replicas"):
        replicas_of([0, 1, 0, 3], [2, 2, 2, 2])


def _ignore(_: Violation) -> None:
    """Collected by the watch."""


def _hybrid(replicas: int) -> tuple[list[tuple[str, int, tuple[int, ...]]], int]:
    """What is found where rank 1 flips a bit of its shard before update 3; and how often replicas were compared."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (replicas, 4 // replicas), mesh_dim_names=("replicate", "shard")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with andon.watch(model, optimizer, action=_ignore) as w:
        for step in range(1, 5):
            if step == 3 and dist.get_rank() == 1:
                model[0].weight.to_local().data.view(torch.int32)[0, 0] ^= 1 << 20  # type: ignore[operator, union-attr]
            model(torch.full((1, 4), float(step + dist.get_rank()))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [(each.clause, each.step, each.finding.ranks) for each in w.findings], w.evaluations.get("replicas-agree", 0)


def _experts() -> list[list[str]]:
    """Ranks 0, 2 hold one expert and 1, 3 another; told so, and not told."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    found = []
    for replicate in (mesh["data"], mesh["data"].get_group(), None):
        torch.manual_seed(mesh["expert"].get_local_rank())
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with andon.watch(model, optimizer, action=_ignore, replicate=replicate) as w:
            for _step in range(2):
                model(torch.ones(1, 3)).sum().backward()
                for p in model.parameters():
                    dist.all_reduce(p.grad, group=mesh["data"].get_group())  # type: ignore[arg-type]
                optimizer.step()
                optimizer.zero_grad()
        found.append([each.clause for each in w.findings])
    with pytest.raises(ValueError, match="one dimension, not of 2"):
        andon.watch(model, optimizer, replicate=mesh)
    with pytest.raises(ValueError, match="a process group or a device mesh, not int"):
        andon.watch(model, optimizer, replicate=2)
    return found


def _meshes() -> tuple[object, object, object]:
    return _hybrid(2), _hybrid(1), _experts()


def test_shards_are_compared_with_their_replicas() -> None:
    """On a 2 x 2 mesh the flipped bit is found after its update; on one dimension nothing can be compared, or is.

    Parts that are replicated otherwise are named by `replicate=`; without it they are found to differ.
    """
    answers = [outcome.get() for outcome in run_ranks(4, _meshes)]
    assert all(one == other for one, other in pairwise(answers))
    (hybrid, compared), flat, (by_mesh, by_group, untold) = answers[0]
    assert [(clause, step) for clause, step, _ in hybrid][:1] == [("replicas-agree", 3)]
    assert compared == 1 + 2 * 4
    assert flat == ([], 0)
    assert by_mesh == by_group == []
    assert "replicas-agree" in untold
