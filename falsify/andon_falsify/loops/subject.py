"""Anyone's training loop as a subject: run on ranks, and its observations from all ranks as one trace.

A rank makes the loop, observes its training, evaluates, and restores what it has changed.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import math
import os
import pickle
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from andon_falsify.history import read_lines
from andon_falsify.loops.observer import Observer
from andon_falsify.loops.parameters import constant, copied, is_sharded, plain_values, trained, unwrapped, whole
from andon_falsify.loops.sightings import LoopSightings
from andon_falsify.loops.task import distinct
from andon_falsify.ranks.pool import RankPools
from andon_falsify.ranks.server import environment
from andon_falsify.reference.training import RowGradients
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.trace import CutOff, RankUpdate, Reported, Trace, bytes_of, digest, lines_of

_OFFERS = {
    "evaluates": ("evaluate",),
    "restores": ("save", "load"),
    "recomputes": ("loss_sum",),
    "schedules": ("rate",),
    "decays": ("decay",),
    "tunes": ("tuned",),
}
"""What a loop offers (see `LoopSightings.claims`), and its methods for that (see `protocol.FurtherMethods`)."""


class LoopSubject:
    """Runs cases on the ranks of `pools`, with the loop that `make` returns on each of them.

    make: `package.module:function`. name: what reports call the subject, by default `make`.
    """

    def __init__(self, make: str, name: str = "", pools: RankPools | None = None) -> None:
        self.make = make
        self.name = name or make
        self._pools = RankPools() if pools is None else pools

    def run(self, case: Case) -> Trace:
        """See `Subject.run`. Equal rows are made distinct first: `Trace.case` has the rows as they were used.

        `Trace.errors` has, by rank, errors of the loop and of its import, and ranks that died or did not answer.
        Raises `ValueError` if the rows cannot be made distinct.
        """
        case = case.but(rows=distinct(case.rows, case.longest), backend="nccl" if case.backend == "nccl" else "gloo")
        search = dict.fromkeys(os.path.abspath(folder) for folder in (*sys.path, os.getcwd()))
        job = (self.make, case, tuple(search))
        answers = self._pools.of(case.world, case.backend).run("andon_falsify.loops.subject:train", job)
        parts = [answer.value for answer in answers if isinstance(answer.value, LoopSightings)]
        errors = {rank: answer.error for rank, answer in enumerate(answers) if answer.error}
        parts = [] if errors else parts
        name = f"{self.name} world {case.world} accumulation {case.accumulation}"
        return Trace(case, tuple(parts), read_lines(witnessed(case, parts), name), None, errors)


def witnessed(case: Case, parts: Sequence[LoopSightings]) -> list[bytes]:
    """The lines of the witness, see `trace.lines_of`. parts: by rank."""
    size, updates = case.global_batch, []
    plan = {"batch_size": size, "micro_batches": case.accumulation * case.world, "steps": case.updates(size)}
    of_epoch = case.updates_of_epoch(size)
    for first in parts[:1]:
        if case.max_steps is None and first.updates and first.updates % case.epochs == 0:
            of_epoch = first.updates // case.epochs  # the loop has made another number of updates than planned
        for step, made in sorted(first.made.items()):
            rows = _in_order([part.of(part.ranks[0], step) for part in parts])
            numbers = {"step": step, "ids": rows, "epoch": (step - 1) // of_epoch, "count": len(rows)}
            reals = {"lr": made.rate, "loss": first.told_losses.get(step), "grad_norm": made.norm}
            updates.append({**numbers, **reals})
    return lines_of(case, parts, updates, plan)


def _in_order(sights: Sequence[RankUpdate]) -> list[int]:
    """The different rows of an update: by micro-batch, by place in it, by rank, as a strided sampler deals them."""
    visits = sorted(
        (leaf, place, rank, row)
        for rank, sight in enumerate(sights)
        for leaf, rows in enumerate(sight.leaves)
        for place, row in enumerate(rows)
    )
    return list(dict.fromkeys(row for *_, row in visits))


class LoopError(RuntimeError):
    """What a loop raised, with the end of what it printed."""


def train(job: tuple[str, Case, Sequence[str]]) -> LoopSightings:
    """Run a loop as one rank of this process's group. job: `module:function`, case, more folders for its imports.

    Raises `LoopError` for whatever the loop raises, unless the case is poisoned and the loop stopped as it should.
    The environment is that of a rank of torch's launcher; it, `sys.path` and torch's settings are restored.
    """
    make, case, search = job
    rank, world, printed = dist.get_rank(), dist.get_world_size(), io.StringIO()
    ours: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    # Libraries join the group that exists, so its address only has to be set.
    ours |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "andon"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(environment(**{name: str(value) for name, value in ours.items()}))
        stack.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.callback(sys.path.__setitem__, slice(None), list(sys.path))
        sys.path += [folder for folder in search if folder not in sys.path]
        # Ranks must not be equal only because they happened to draw the same numbers.
        random.seed(f"{case.seed} {rank}")
        torch.manual_seed(1000 * case.seed + rank)
        stack.enter_context(contextlib.redirect_stdout(printed))
        stack.enter_context(contextlib.redirect_stderr(printed))
        try:
            seen = _run(make, case, rank)
        except (Exception, SystemExit) as error:
            said = printed.getvalue()[-2000:].strip()
            msg = f"{type(error).__name__}: {error}" + (f"\nthe loop printed: {said}" if said else "")
            raise LoopError(msg) from error
    return seen


def _run(make: str, case: Case, rank: int) -> LoopSightings:
    seen = LoopSightings((rank,))
    loop = _loop_of(make, case)
    offers = {name for name, methods in _OFFERS.items() if all(callable(getattr(loop, each, None)) for each in methods)}
    seen.claims = frozenset(offers | {name for name in ("halts", "to_the_bit") if getattr(loop, name, False)})
    saved = sorted(Path(case.folder).glob("step-*")) if case.folder is not None else []
    if saved and "restores" in seen.claims:
        loop.load(saved[-1])
        seen.resumed_from = int(saved[-1].name.removeprefix("step-"))
    _describe(unwrapped(loop.model), seen, rank)
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


def _loop_of(make: str, case: Case) -> Any:
    module, _, name = make.partition(":")
    found = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        raise ValueError(f"{make!r} names no function: write package.module:make")
    loop: Any = found(case)
    problems = []
    if not hasattr(loop, "model"):
        problems.append("it has no attribute `model`")
    elif not isinstance(loop.model, nn.Module):
        problems.append(f"its `model` is {loop.model!r}, not a torch module")
    problems += [] if callable(getattr(loop, "train", None)) else ["it has no method `train(told)`"]
    if problems:
        needed = "needed are `model`, a torch module, wrapped (DDP, FSDP) or not, and `train(told)`"
        msg = f"{type(loop).__name__} is not a loop: {'; '.join(problems)} ({needed}; its optimizer is found)"
        raise ValueError(msg)
    if not trained(unwrapped(loop.model)):
        raise ValueError("no parameter of the loop's `model` trains")
    if case.backend == "nccl" and not all(each.is_cuda for each in trained(unwrapped(loop.model)).values()):
        raise ValueError('the loop\'s `model` is not on the GPU of its rank: move it with .to("cuda")')
    return loop


def _describe(model: Any, seen: LoopSightings, rank: int) -> None:
    """The model before training. Collective if it is sharded."""
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
        seen.reported.append(Reported(step, 0, (), 0, made.rate, loss, norm))
    if "recomputes" in seen.claims and seen.violation is None:
        seen.recomputed = _recomputed(loop, model, case, seen, rank)


def _digests(model: nn.Module) -> dict[str, str]:
    inner = unwrapped(model)
    return {name: digest({"": whole(each)}) for name, each in (*inner.named_parameters(), *inner.named_buffers())}


def _recomputed(loop: Any, model: nn.Module, case: Case, seen: LoopSightings, rank: int) -> dict[int, RowGradients]:
    """The law of every update from rank 0's weights before it; empty on other ranks. Collective."""
    everyone = _gathered({step: list(seen.of(rank, step).leaves) for step in seen.made})
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


def _gathered(own: dict[int, list[tuple[int, ...]]]) -> list[dict[int, list[tuple[int, ...]]]]:
    """`own` of every rank. `all_gather_object` needs numpy, which torch does not require."""
    data = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)]))
    parts = [torch.zeros(int(max(sizes)), dtype=torch.uint8) for _ in sizes]
    dist.all_gather(parts, nn.functional.pad(data, (0, len(parts[0]) - len(data))))
    return [pickle.loads(bytes_of(part)) for part in parts]


def _law(loop: Any, model: nn.Module, rows: list[int]) -> RowGradients:
    parameters = trained(model)
    losses, parts = [], []
    for row in rows:
        total, count = loop.loss_sum(model, [row])
        if count != 1:
            raise ValueError(f"loss_sum of row {row} says that it is of {count} rows")
        given = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
        parts.append([torch.zeros_like(p) if g is None else g for p, g in zip(parameters.values(), given, strict=True)])
        losses.append(total.detach().double().cpu())
    columns = zip(*parts, strict=True)
    stacked = {name: torch.stack(column).cpu() for name, column in zip(parameters, columns, strict=False)}
    return RowGradients(tuple(rows), torch.stack(losses) if losses else torch.zeros(0), stacked)
