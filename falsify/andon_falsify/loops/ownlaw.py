"""The law of a loop over a model of its own: its own forward pass, in one process and float64."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn

from andon_falsify.loops.parameters import trained
from andon_falsify.loops.protocol import Recomputes
from andon_falsify.loops.sightings import LoopSightings
from andon_falsify.reference.training import RowGradients
from andon_falsify.subjects.case import Case


def own_law(loop: Recomputes, model: nn.Module, case: Case, seen: LoopSightings) -> dict[int, RowGradients]:
    """The law of every update from rank 0's weights before it; on rank 0 only, empty elsewhere. Collective."""
    (rank,) = seen.ranks
    mine = {step: list(seen.of(rank, step).leaves) for step in seen.made}
    everyone: list[dict[int, list[tuple[int, ...]]]] = [{} for _ in range(case.world)]
    dist.all_gather_object(everyone, mine)
    if rank or not case.values or seen.sharded:
        return {}
    exact = copy.deepcopy(model).double()
    exact.load_state_dict(seen.state, strict=False)
    found = {}
    for step in sorted(seen.values):
        rows = sorted({row for steps in everyone for leaf in steps.get(step, ()) for row in leaf})
        if step - 1 in seen.values:
            exact.load_state_dict(seen.values[step - 1].weights, strict=False)
        exact.load_state_dict(seen.moved.get(step, {}), strict=False)
        found[step] = _law(loop, exact, rows)
    return found


def _law(loop: Recomputes, model: nn.Module, rows: list[int]) -> RowGradients:
    parameters = trained(model)
    losses, parts = [], []
    for row in rows:
        total, count = loop.loss_sum(model, [row])
        if count != 1:
            msg = f"loss_sum of row {row} says that it is of {count} rows"
            raise ValueError(msg)
        given = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
        parts.append([torch.zeros_like(p) if g is None else g for p, g in zip(parameters.values(), given, strict=True)])
        losses.append(total.detach().double())
    columns = zip(*parts, strict=True)
    stacked = {name: torch.stack(column) for name, column in zip(parameters, columns, strict=False)}
    return RowGradients(tuple(rows), torch.stack(losses) if losses else torch.zeros(0), stacked)
