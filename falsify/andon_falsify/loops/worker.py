"""A rank's part in running a loop: make it, observe its training, evaluate, and restore what it has changed."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import math
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
from andon_falsify.loops.parameters import constant, copied, is_sharded, plain_values, trained, unwrapped, whole
from andon_falsify.loops.sightings import LoopSightings
from andon_falsify.ranks.server import environment
from andon_falsify.reference.training import RowGradients
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.trace import CutOff, Reported, digest

_SHOWN = 2000
_OFFERS = {
    "evaluates": ("evaluate",),
    "restores": ("save", "load"),
    "recomputes": ("loss_sum",),
    "schedules": ("rate",),
    "decays": ("decay",),
    "tunes": ("tuned",),
}
"""What a loop offers (see `LoopSightings.claims`), and its methods for that (see `protocol.FurtherMethods`)."""


@dataclass(frozen=True)
class Job:
    """make: `module:function`. search: more folders in which a rank looks for modules."""

    make: str
    case: Case
    search: tuple[str, ...] = ()


class LoopError(RuntimeError):
    """What a loop raised, with the end of what it printed."""


def train(job: Job) -> LoopSightings:
    """Run the loop of `job` as one rank of this process's group.

    Raises `LoopError` for whatever the loop raises, unless the case is poisoned and the loop stopped as it should.
    """
    printed = io.StringIO()
    with _restored(job), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            return _run(job)
        except (Exception, SystemExit) as error:
            said = printed.getvalue()[-_SHOWN:].strip()
            msg = f"{type(error).__name__}: {error}" + (f"\nthe loop printed: {said}" if said else "")
            raise LoopError(msg) from error


@contextlib.contextmanager
def _restored(job: Job) -> Iterator[None]:
    """Inside, the environment is that of a rank of torch's launcher. Restores it, `sys.path` and torch's settings."""
    rank, world, path = dist.get_rank(), dist.get_world_size(), list(sys.path)
    settings: list[tuple[Any, Any]] = [
        (torch.set_num_threads, torch.get_num_threads()),
        (torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled()),
        (torch.set_default_dtype, torch.get_default_dtype()),
        (torch.set_grad_enabled, torch.is_grad_enabled()),
    ]
    ours = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    with environment(**{name: str(value) for name, value in ours.items()}):
        sys.path += [folder for folder in job.search if folder not in sys.path]
        # Ranks must not be equal only because they happened to draw the same numbers.
        random.seed(f"{job.case.seed} {rank}")
        torch.manual_seed(1000 * job.case.seed + rank)
        try:
            yield
        finally:
            sys.path[:] = path
            for restore, value in settings:
                restore(value)


def _run(job: Job) -> LoopSightings:
    case, rank = job.case, dist.get_rank()
    seen = LoopSightings((rank,))
    loop = _named(job.make)(case)
    _check(loop)
    offers = {name for name, methods in _OFFERS.items() if all(callable(getattr(loop, each, None)) for each in methods)}
    seen.claims = frozenset(offers | {name for name in ("halts", "to_the_bit") if getattr(loop, name, False)})
    saved = sorted(Path(case.folder).glob("step-*")) if case.folder is not None else []
    if saved and "restores" in seen.claims:
        loop.load(saved[-1])
        seen.resumed_from = int(saved[-1].name.removeprefix("step-"))
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
        # It was to stop. Whether it did so in time, and on every rank, is judged from the observations.
        seen.violation = ("finite", len(seen.made) + seen.resumed_from + 1, f"{type(error).__name__}: {error}")
    _finish(loop, case, seen, rank)
    if "evaluates" in seen.claims and seen.violation is None:
        before = _digests(loop.model)
        seen.evaluation = {name: float(value) for name, value in loop.evaluate().items()}
        seen.around_evaluation = (before, _digests(loop.model))
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
        msg = f"{type(loop).__name__} is not a loop: {'; '.join(problems)} ({needed}; its optimizer is found)"
        raise ValueError(msg)
    if not trained(unwrapped(loop.model)):
        msg = "no parameter of the loop's `model` trains"
        raise ValueError(msg)


def _describe(loop: Any, seen: LoopSightings, rank: int) -> None:
    """The model before training. Collective if it is sharded."""
    model: Any = unwrapped(loop.model)
    parameters = trained(model)
    seen.sharded = is_sharded(model)
    seen.layouts[rank] = tuple((name, tuple(p.shape), str(p.dtype)) for name, p in parameters.items())
    seen.start[rank] = digest(copied(parameters))
    seen.frozen[rank] = (digest(constant(model)), "")
    state = {name: whole(tensor) for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    if rank == 0:
        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        config = getattr(base, "config", None)
        seen.state, seen.config = state, config.to_dict() if config is not None else {}


def _finish(loop: Any, case: Case, seen: LoopSightings, rank: int) -> None:
    """The model after training, and what the loop declares. Collective if the model is sharded, or the loop's own."""
    model = unwrapped(loop.model)
    weights = copied(trained(model))
    last = max((step for (_, step), sight in seen.steps.items() if sight.weights), default=0)
    seen.final[rank] = (digest(weights), seen.of(rank, last).optimizer if last else "")
    seen.frozen[rank] = (seen.frozen[rank][0], digest(constant(model)))
    if "schedules" in seen.claims:
        seen.rates = {step: float(loop.rate(step)) for step in seen.made}
    if "decays" in seen.claims:
        seen.decays = {name: float(loop.decay(name)) for name in weights}
    if "tunes" in seen.claims:
        seen.tuned = {step: plain_values(loop.tuned(step)) for step in seen.made}
    for step, made in sorted(seen.made.items()):
        norm, loss = math.nan if made.norm is None else made.norm, seen.told_losses.get(step, math.nan)
        seen.reported.append(Reported(step, 0, 0, (), 0, 0, made.rate, loss, norm))
    if "recomputes" in seen.claims and seen.violation is None:
        seen.recomputed = _recomputed(loop, model, case, seen, rank)


def _digests(model: nn.Module) -> dict[str, str]:
    inner = unwrapped(model)
    return {name: digest({"": whole(each)}) for name, each in (*inner.named_parameters(), *inner.named_buffers())}


def _recomputed(loop: Any, model: nn.Module, case: Case, seen: LoopSightings, rank: int) -> dict[int, RowGradients]:
    """The law of every update from rank 0's weights before it; empty on other ranks. Collective."""
    everyone: list[dict[int, list[tuple[int, ...]]]] = [{} for _ in range(case.world)]
    dist.all_gather_object(everyone, {step: list(seen.of(rank, step).leaves) for step in seen.made})
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


def _law(loop: Any, model: nn.Module, rows: list[int]) -> RowGradients:
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
