"""What a rank does for a foreign loop: make it, watch it train, evaluate and save, and leave no trace of it."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import math
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from andon_falsify.loops.observer import Observer
from andon_falsify.loops.parameters import is_sharded, kept, named_digests, plain_values, trained, unwrapped, whole
from andon_falsify.loops.protocol import Decays, Evaluates, Loop, Recomputes, Restores, Schedules, Tunes
from andon_falsify.loops.sightings import LoopSightings
from andon_falsify.reference.training import RowGradients
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.trace import CutOff, Reported, digest

_SHOWN = 2000


@dataclass(frozen=True)
class Job:
    """make: `module:function`. search: folders in which a rank looks for modules besides its own."""

    make: str
    case: Case
    search: tuple[str, ...] = ()


class LoopError(RuntimeError):
    """What a loop raised, with the end of what it printed."""


def train(request: Job) -> LoopSightings:
    """Run the loop of `request` as one rank of the group that this process belongs to.

    Raises `LoopError` for whatever the loop raises, except where it was to stop and did.
    """
    sys.path += [folder for folder in request.search if folder not in sys.path]
    printed = io.StringIO()
    with _undone(request.case), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            return _run(request)
        except (Exception, SystemExit) as error:
            said = printed.getvalue()[-_SHOWN:].strip()
            msg = f"{type(error).__name__}: {error}" + (f"\nthe loop printed: {said}" if said else "")
            raise LoopError(msg) from error


def _run(request: Job) -> LoopSightings:
    case, rank = request.case, dist.get_rank()
    seen = LoopSightings((rank,))
    loop: Loop = _named(request.make)(case)
    _check(loop)
    _restore(loop, case, seen)
    _describe(loop, seen, rank)
    observer = Observer(loop, case, seen)
    try:
        with observer.watching():
            loop.train(observer)
            observer.finished()
    except CutOff:
        seen.updates = len(seen.made)
        return seen
    except Exception as error:
        if case.poison is None:
            raise
        # It was to stop; whether it did so in time, and everywhere, is judged from what was seen.
        seen.violation = ("finite", len(seen.made) + seen.resumed_from + 1, f"{type(error).__name__}: {error}")
    _finish(loop, case, seen)
    if isinstance(loop, Evaluates) and seen.violation is None:
        before = named_digests(unwrapped(loop.model))
        with observer.watching():
            seen.evaluation = {name: float(value) for name, value in loop.evaluate().items()}
        seen.around_evaluation = (before, named_digests(unwrapped(loop.model)))
    return seen


def _named(make: str) -> Any:
    module, _, name = make.partition(":")
    found = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        msg = f"{make!r} names no function: write package.module:make"
        raise ValueError(msg)
    return found


def _check(loop: Any) -> None:
    problems = []
    if not hasattr(loop, "model"):
        problems.append("it has no attribute `model`")
    elif not isinstance(loop.model, torch.nn.Module):
        problems.append(f"its `model` is {loop.model!r}, not a torch module")
    problems += [] if callable(getattr(loop, "train", None)) else ["it has no method `train(told)`"]
    if problems:
        needed = "needed are `model`, a torch module, wrapped (DDP, FSDP) or not, and `train(told)`"
        msg = f"{type(loop).__name__} is no loop: {'; '.join(problems)} ({needed}; its optimizer is found)"
        raise ValueError(msg)
    if not trained(unwrapped(loop.model)):
        msg = "no parameter of the loop's `model` trains"
        raise ValueError(msg)


def _restore(loop: Loop, case: Case, seen: LoopSightings) -> None:
    """From the newest folder that the loop saved, where the case keeps files."""
    found = sorted(Path(case.folder).glob("step-*")) if case.folder is not None else []
    if found and isinstance(loop, Restores):
        loop.load(found[-1])
        seen.resumed_from = int(found[-1].name.removeprefix("step-"))


def _describe(loop: Loop, seen: LoopSightings, rank: int) -> None:
    model: Any = unwrapped(loop.model)
    parameters = trained(model)
    seen.sharded = any(is_sharded(parameter) for parameter in model.parameters())
    seen.layouts[rank] = tuple((name, tuple(p.shape), str(p.dtype)) for name, p in parameters.items())
    seen.start[rank] = digest({name: whole(parameter) for name, parameter in parameters.items()})
    seen.frozen[rank] = (digest(kept(model)), "")
    offers = {"evaluates": Evaluates, "restores": Restores, "recomputes": Recomputes, "schedules": Schedules}
    claims = {name for name, offer in offers.items() if isinstance(loop, offer)}
    seen.claims = frozenset(claims | {name for name in ("halts", "to_the_bit") if getattr(loop, name, False)})
    state = {name: whole(tensor) for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    if rank == 0:
        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        seen.state = state
        config = getattr(base, "config", None)
        seen.config = config.to_dict() if config is not None else {}


def _finish(loop: Loop, case: Case, seen: LoopSightings) -> None:
    (rank,) = seen.ranks
    model = unwrapped(loop.model)
    last = max((step for (_, step), sight in seen.steps.items() if sight.weights), default=0)
    weights = {name: whole(parameter) for name, parameter in trained(model).items()}
    seen.final[rank] = (digest(weights), seen.of(rank, last).optimizer if last else "")
    seen.frozen[rank] = (seen.frozen[rank][0], digest(kept(model)))
    if isinstance(loop, Schedules):
        seen.rates = {step: float(loop.rate(step)) for step in seen.made}
    if isinstance(loop, Decays):
        seen.decays = {name: float(loop.decay(name)) for name in weights}
    if isinstance(loop, Tunes):
        seen.tuned = {step: plain_values(loop.tuned(step)) for step in seen.made}
    seen.reported = [_reported(seen, step) for step in sorted(seen.made)]
    if isinstance(loop, Recomputes) and seen.violation is None:
        seen.recomputed = _recomputed(loop, model, case, seen)


def _reported(seen: LoopSightings, step: int) -> Reported:
    """What the loop said of an update; what it did not say is NaN."""
    norm = seen.made[step].norm
    loss = seen.told_losses.get(step, math.nan)
    return Reported(step, 0, 0, (), 0, 0, seen.made[step].rate, loss, math.nan if norm is None else norm)


@contextlib.contextmanager
def _undone(case: Case) -> Iterator[None]:
    """Inside, the environment of a rank that torch's launcher started; after it, everything as before."""
    rank, world = dist.get_rank(), dist.get_world_size()
    environment, path = dict(os.environ), list(sys.path)
    threads, strict, kind = (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
    )
    grad = torch.is_grad_enabled()
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in own.items()})
    # Ranks that are equal only because they happened to draw the same are not equal.
    random.seed(f"{case.seed} {rank}")
    torch.manual_seed(1000 * case.seed + rank)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = path
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict)
        torch.set_default_dtype(kind)
        torch.set_grad_enabled(grad)


def _recomputed(loop: Recomputes, model: nn.Module, case: Case, seen: LoopSightings) -> dict[int, RowGradients]:
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
