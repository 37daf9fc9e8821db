"""`andon.watch`: checks its arguments on all ranks, makes a separate process group, and opens a `Watch`.

It also finds what an optimizer trains: the wrappers of its model, and for `andon watch` the model itself.
"""

from __future__ import annotations

import datetime
import gc
import itertools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Never, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from andon_contracts.agree import GroupGather, own_group
from andon_contracts.liveness.halt import HaltSignal, PendingCollectives, own_store
from andon_contracts.liveness.store_link import SignedStore, new_secret, secret_from_ints, secret_to_ints
from andon_contracts.violation import first_line
from andon_contracts.watch.checks import sketch
from andon_contracts.watch.exchange import WIDTH, Exchange, Replicas, part_of, replicas_of
from andon_contracts.watch.ledger import open_ledger
from andon_contracts.watch.model_probe import ModelProbe, ModuleGroup, parameters_of, unwrap
from andon_contracts.watch.settings import Action, Plan, Reference, Scaler, Schedule, Settings, as_duration
from andon_contracts.watch.values import text_digest
from andon_contracts.watch.watcher import Watch

Kind = TypeVar("Kind")
_open: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Watch]] = weakref.WeakKeyDictionary()
"""The latest watch of each optimizer, by a weak reference: a strong one would keep the optimizer alive for ever."""
opened_so_far = [0]
"""How many watches this process has opened, those that are closed included."""
_halt_signals: Counter[str] = Counter()
"""By group of ranks, how many halt signals it has had in this process; the same number on all of its ranks."""


def watch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    action: Action = "warn",
    allow: Mapping[str, str] | None = None,
    log: Callable[[dict[str, object]], None] | None = None,
    group: dist.ProcessGroup | None = None,
    folder: str | None = None,
    ledger: str | os.PathLike[str] | None = None,
    trainable: Sequence[str] | None = None,
    tied: Sequence[tuple[str, str]] = (),
    clip: float | None = None,
    groups: Mapping[str, Mapping[str, Any]] | None = None,
    schedule: Schedule | None = None,
    scaler: Scaler | None = None,
    reference: Reference | None = None,
    every: int = 100,
    plan: Plan | None = None,
    rows: int | None = None,
    contents: Callable[[Sequence[int]], Sequence[Any]] | None = None,
    start: int = 0,
    updates: int | None = None,
    replicate: Any = None,
    hard_stop: bool = False,
    timeout: datetime.timedelta | float = Settings.timeout,
    patience: datetime.timedelta | float = Settings.patience,
    verbose: bool = False,
    budget: float | None = Settings.budget,
    **unknown: Never,
) -> Watch:
    """Check every update of a training loop. Collective: call it on every rank, after wrapping the model.

    action: what a violation does: "warn", "raise", or a function of it, which may raise. A suspicion only warns, but
    "strict" raises for it too, and a function is called with it too.
    allow: maps a clause to the reason why it is silenced; its findings are only counted.
    log: receives a dict for each finding. group: the data-parallel ranks (default: all). folder: bundles of violations
    are written there. ledger: where rank 0 writes a line for every update (default: the file that ANDON_LEDGER names).
    trainable: name patterns of the parameters to be trained. tied: pairs of names that must be one tensor.
    clip: the gradient norm that the loop clips to. groups: maps a name pattern to the hyperparameters of its group.
    schedule: maps the number of an update, 1 being the first, to its learning rate. scaler: the loss scaler.
    reference: computes, from the model and the ids of a global batch, the sum and the number of the losses. If given,
    every `every`-th gradient is recomputed and compared.
    plan: maps the number of an update to the ids of its global batch. rows: the number of rows of an epoch.
    contents: maps ids to the rows that `Watch.batch` receives for them.
    start: the number of updates made before. updates: the total number of updates at the end, with those before.
    replicate: the process group or one-dimensional device mesh of the ranks with the same parameters (default: all
    ranks, or as the mesh of the shards says). hard_stop: kill ranks that are blocked in native code when all halt.
    timeout: how long a rank waits for the others, in seconds or as a `timedelta`. patience: the same, how long the
    process of a rank may be stopped, or a rank on another machine may send no heartbeat, before all ranks halt.
    verbose: list every clause at the opening.
    budget: the largest share of a step that the watch may take after 64 updates. If it needs more, it reads weights,
    gradients and optimizer states in one of up to 64 updates; the closing lines say in how many. None: in each.

    Raises `ValueError` on every rank if any rank has a wrong argument. A fault of the model or of the ranks that exists
    at the start is a finding, and `action` applies to it.
    """
    settings = Settings(
        action=action, allow=dict(allow or {}) if isinstance(allow, Mapping | None) else allow, log=log, group=group,
        folder=folder, ledger=ledger, trainable=trainable, tied=tuple(tied), clip=clip, groups=dict(groups or {}),
        schedule=schedule, scaler=scaler, reference=reference, every=every, plan=plan, rows=rows, contents=contents,
        start=start, updates=updates, replicate=replicate, hard_stop=hard_stop, timeout=timeout, patience=patience,
        verbose=verbose, budget=budget, unknown=unknown,
    )  # fmt: skip
    return open_watch(model, list(optimizer) if isinstance(optimizer, Sequence) else [optimizer], settings)


class CannotWatch(ValueError):
    """`andon watch` cannot watch the model or optimizer that it found. Raised on all ranks; not a user's mistake."""


def open_watch(model: nn.Module, optimizers: Sequence[Any], settings: Settings) -> Watch:
    """Open a watch, as `watch` does. If any rank refuses, nothing stays open."""
    durations, problems = dict[str, Any](), list[str]()
    for name in ("timeout", "patience"):
        try:
            durations[name] = as_duration(name, getattr(settings, name))
        except ValueError as error:  # the ranks meet by the default, so that all of them raise
            durations[name] = getattr(Settings, name)
            problems.append(str(error))
    with ExitStack() as undo:
        gather = GroupGather(own_group(settings.group, durations["timeout"]), WIDTH)
        ranks = [int(os.environ.get("RANK", "0"))]  # global ranks; torchrun's number without a group
        if dist.is_initialized():
            ranks = dist.get_process_group_ranks(settings.group or dist.group.WORLD)
        exchange = Exchange(gather, ranks)
        undo.callback(exchange.close)
        optimizers = [_unwrapped(each) for each in optimizers]
        problems += [] if isinstance(model, nn.Module) else [f"model must be an nn.Module, not {type(model).__name__}"]
        if not optimizers:
            problems.append("optimizer is an empty list: name at least one")
        problems += [
            f"optimizer must be a torch optimizer, not {type(each).__name__}"
            for each in optimizers
            if not isinstance(each, torch.optim.Optimizer) or not hasattr(each, "_optimizer_step_pre_hooks")
        ]
        subject, file, part, copies = None, None, 0, 0
        if not problems:
            try:
                subject = ModelProbe(model, optimizers, reducers_of(model))
            except Exception as error:  # noqa: BLE001 - modules and parameters are the user's own: they may raise anything
                problems.append(f"the model cannot be read: {first_line(error)}")
        if subject is not None:
            problems += settings.problems(subject)
            if any(map(is_watched, optimizers)):
                problems.append("the optimizer is watched already: close that watch first")
            wrapped = vars(model).get("process_group")  # a module of the user's own may raise for a name that it lacks
            replicas = dist.get_world_size(wrapped) if isinstance(wrapped, dist.ProcessGroup) else exchange.world_size
            if replicas != exchange.world_size and not subject.sharded:
                problems.append(f"the group has {exchange.world_size} ranks, but the model's DDP group has {replicas}")
            try:
                part, copies = part_of(subject, settings.replicate, exchange.rank)
            except ValueError as error:
                problems.append(str(error))
        # The command has checked its options. So its user's only possible mistake is a ledger that cannot be opened.
        excused = len(problems) if settings.by_command else 0
        if exchange.rank == 0 and not problems:
            try:
                file = open_ledger(settings, ranks[0])
            except ValueError as error:
                problems.append(str(error))
            if file is not None:
                undo.callback(file.close)
        # Rank 0 sends the secret that signs heartbeats in this gather, so that it never comes into the ranks' store.
        compared = settings.compared()
        digests = {f"told {name}": text_digest(value) for name, value in compared.items()}
        values = {"problems": len(problems), **digests, "part": part, "copies": copies, **secret_to_ints(new_secret())}
        values |= {"records": int(file is not None), "sketch": int(sketch.requested() is not None)}
        values |= {"mistakes": len(problems) - excused}
        seen = exchange(0, "settings", values)
        if any(o.values["problems"] for o in seen):
            texts = enumerate(exchange.gather_texts(0, "; ".join(problems)))
            problems = problems or [f"rank {rank}: {text}" for rank, text in texts if text]
        differing = [name for name in digests if len({o.values[name] for o in seen}) > 1]
        if differing and not any(o.values["problems"] for o in seen):
            own = "; ".join(f"{name}={compared[name]}" for name in (each.removeprefix("told ") for each in differing))
            texts = enumerate(exchange.gather_texts(0, own))
            problems.append(f"the ranks watch with different settings: {', '.join(f'rank {r}: {t}' for r, t in texts)}")
        if problems:
            msg = "andon.watch: " + "; ".join(problems)
            mistaken = not settings.by_command or any(o.values["mistakes"] for o in seen)
            raise ValueError(msg) if mistaken else CannotWatch(msg)
        assert subject is not None
        try:
            parts = replicas_of([o.values["part"] for o in seen], [o.values["copies"] for o in seen])
            if settings.replicate is None:
                parts = replace(parts, whole=subject.held_whole(exchange.world_size))
        except ValueError:
            if settings.replicate is not None:
                raise
            # For example, pipeline stages have separate meshes: a shard cannot be recognized across stages.
            parts = Replicas(tuple(range(len(seen))))
        recording, sketching = bool(seen[0].values["records"]), bool(seen[0].values["sketch"])
        settings = replace(settings, recording=recording, sketching=recording and sketching)
        halt = None
        if exchange.world_size > 1:
            # The key of the halt signal is the same on all ranks of this watch, and unique to them.
            name = "all" if settings.group is None else "-".join(map(str, ranks))
            _halt_signals[name] += 1
            store = own_store(f"{name}/{_halt_signals[name]}")
            if store is not None:
                signed, pending = SignedStore(store, secret_from_ints(seen[0].values)), PendingCollectives(ranks)
                options = {"hard_stop": settings.hard_stop, "warns": settings.action == "warn"}
                patience_s = durations["patience"].total_seconds()
                size = exchange.world_size
                halt = HaltSignal(signed, exchange.rank, size, pending, patience_s=patience_s, **options)
                undo.push(halt.end_with)
        opened = Watch(subject, optimizers, settings, exchange, parts, halt, file)
        undo.pop_all()
    for each in optimizers:
        _open[each] = weakref.ref(opened)
    opened_so_far[0] += 1
    return opened


def is_watched(optimizer: torch.optim.Optimizer) -> bool:
    return optimizer in _open and (latest := _open[optimizer]()) is not None and not latest.closed


def _unwrapped(optimizer: Any) -> Any:
    while True:
        # A subclass that never called `Optimizer.__init__` has no hooks: it steps by another optimizer.
        delegates = isinstance(optimizer, torch.optim.Optimizer) and not hasattr(optimizer, "_optimizer_step_pre_hooks")
        names = ("optimizer", "optim") if delegates else ("optimizer",)
        inside = (getattr(optimizer, name, None) for name in names)
        inner = next((each for each in inside if isinstance(each, torch.optim.Optimizer)), None)
        if inner is None:
            return optimizer
        optimizer = inner


# what an optimizer trains, if the script does not pass its model (`andon watch`)

# The garbage collector lists the objects, once for each optimizer that makes its first update, so torch needs no patch.
# The result does not depend on the order of that list, so that ranks agree.


def optimizer_of(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer | None:
    """The living optimizer that holds the earliest of `parameters`; of several, the one with most of them.

    None if no optimizer holds any, or if two cannot be distinguished: the first update shows which one the loop uses.
    """
    ranked = _ranked(_index(parameters))
    return ranked[0][0] if ranked and len(ranked[0]) == 1 else None


def trained_by(optimizer: torch.optim.Optimizer) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """The outermost module that holds what `optimizer` trains, and all optimizers that share in its parameters.

    If no single module holds all of it, or a parameter lies in no module, the model is a `ModuleGroup`. Raises
    `ValueError` if several modules hold it and nothing that all processes see distinguishes them.
    """
    wanted = parameters_of([optimizer])
    missing = _index(wanted)
    roots, chosen = _roots(missing), list[nn.Module]()
    while roots:
        chosen.append(_best(roots, missing))
        for parameter in chosen[-1].parameters():
            missing.pop(id(parameter), None)
        roots = [root for root in roots if any(id(parameter) in missing for parameter in root.parameters())]
    loose = [p for p in wanted if id(p) in missing and isinstance(p, nn.Parameter)]
    model = chosen[0] if len(chosen) == 1 and not loose else ModuleGroup(chosen, loose)
    index = _index(model.parameters())
    optimizers, taken = [optimizer], set(map(id, wanted))
    for group in _ranked(index, but=optimizer):
        own = set(map(id, parameters_of(group[:1])))
        # If two cannot be distinguished, the script has dropped one of them. The first update shows which.
        if len(group) == 1 and not own & taken:
            optimizers.append(group[0])
            taken |= own
    return model, sorted(optimizers, key=lambda each: min(_positions(each, index), default=len(index)))


def outermost(model: nn.Module) -> nn.Module:
    """The outermost module that contains `model`. If there are several, the one that reduces its gradients.

    Raises `ValueError` if several remain that cannot be distinguished.
    """
    index = _index(model.parameters())
    roots = _roots(index)
    return _best(roots, index) if roots else model


def reducers_of(model: nn.Module) -> list[DistributedDataParallel]:
    """The DDP wrappers of parameters of `model`: those inside it, in order, then those around it or its parts.

    If a module has several wrappers, it returns all of them, because the loop may call any.
    """
    inside = [each for each in model.modules() if isinstance(each, DistributedDataParallel)]
    known, held = set(map(id, inside)), _index(model.parameters())
    around = [each for each in _living(DistributedDataParallel) if id(each) not in known and "_modules" in vars(each)]
    around = [each for each in around if any(id(parameter) in held for parameter in each.parameters())]
    index = {id(module): position for position, module in enumerate(model.modules())}
    return inside + sorted(around, key=lambda each: index.get(id(unwrap(each)[0]), len(index)))


def _index(parameters: Iterable[torch.Tensor]) -> dict[int, int]:
    return {id(parameter): position for position, parameter in enumerate(parameters)}


def _positions(optimizer: torch.optim.Optimizer, index: Mapping[int, int]) -> list[int]:
    return sorted(index[id(p)] for p in parameters_of([optimizer]) if id(p) in index)


def _ranked(index: Mapping[int, int], but: object = None) -> list[list[torch.optim.Optimizer]]:
    """The living optimizers that hold parameters in `index`, alike on all ranks. Equal ones share a list."""

    def order(optimizer: torch.optim.Optimizer) -> tuple[int, int, list[int], str, int]:
        held = _positions(optimizer, index)
        return held[0], -len(held), held, type(optimizer).__qualname__, len(optimizer.state)

    # A wrapper that only forwards `param_groups` of another optimizer lacks the attribute.
    living = [each for each in _living(torch.optim.Optimizer) if "param_groups" in vars(each) and each is not but]
    holders = sorted((each for each in living if _positions(each, index)), key=order)
    return [list(group) for _, group in itertools.groupby(holders, key=order)]


def _living(kind: type[Kind]) -> list[Kind]:
    # `type` instead of `isinstance`, because a proxy may run any code for `__class__`. There may be a million objects,
    # so every type is checked once.
    objects = gc.get_objects()
    wanted = {each for each in set(map(type, objects)) if issubclass(each, kind)}
    return [each for each in objects if type(each) in wanted] if wanted else []


def _best(roots: Sequence[nn.Module], index: Mapping[int, int]) -> nn.Module:
    """The root that is most likely the model of the parameters in `index`.

    It holds most of them, reduces their gradients, holds few others and has the most wrappers. Then its type's name
    decides, its first parameter, and the names of its modules. Raises `ValueError` if several modules remain.
    """

    def merit(root: nn.Module) -> tuple[int, bool, int, int, str, int]:
        held = {id(parameter) for parameter in root.parameters()}
        wrappers = unwrap(root)[1]
        reduces = any(isinstance(wrapper, DistributedDataParallel) for wrapper in wrappers)
        own = [index[key] for key in held if key in index]
        return len(own), reduces, -len(held), len(wrappers), type(root).__qualname__, -min(own, default=len(index))

    def shape(root: nn.Module) -> list[str]:
        modules = [f"{name} {type(each).__module__}.{type(each).__qualname__}" for name, each in root.named_modules()]
        buffers = [f"{name} {tuple(each.shape)}" for name, each in root.named_buffers()]
        return [*modules, *(name for name, _ in root.named_parameters()), *buffers]

    most = max(map(merit, roots))
    first = [root for root in roots if merit(root) == most]
    if len(first) > 1:
        least = min(map(shape, first))
        first = [root for root in first if shape(root) == least]
    if len({id(unwrap(root)[0]) for root in first}) > 1:
        kinds = f"{len(first)} identical modules of type {type(first[0]).__qualname__}"
        msg = f"{kinds} hold the optimizer's parameters: pass the one to watch to andon.watch(model, optimizer)"
        raise ValueError(msg)
    return first[0]


def _roots(wanted: Collection[int]) -> list[nn.Module]:
    """The modules that hold a parameter with an `id` in `wanted`, at any depth, and lie in no other module."""
    modules = [each for each in _living(nn.Module) if "_modules" in vars(each) and not isinstance(each, ModuleGroup)]
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in module._modules.values():
            parents.setdefault(id(child), []).append(module)
    waiting = [m for m in modules if any(id(p) in wanted for p in vars(m).get("_parameters", {}).values())]
    holders: dict[int, nn.Module] = {}
    while waiting:
        module = waiting.pop()
        if id(module) not in holders:
            holders[id(module)] = module
            waiting.extend(parents.get(id(module), ()))
    return [module for key, module in holders.items() if key not in parents]
