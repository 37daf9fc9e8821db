"""`andon.watch`: checks its arguments on all ranks, makes a separate process group, and opens a `Watch`."""

from __future__ import annotations

import datetime
import os
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from andon_contracts.agree import GroupGather, Observation, own_group
from andon_contracts.causes import first_line
from andon_contracts.liveness.halt import HaltSignal, own_store
from andon_contracts.liveness.pending_collectives import PendingCollectives
from andon_contracts.liveness.store_link import SignedStore, new_secret, secret_from_ints, secret_to_ints
from andon_contracts.watch.discovery import reducers_of
from andon_contracts.watch.exchange import WIDTH, Exchange
from andon_contracts.watch.ledger import ledger_path, open_ledger
from andon_contracts.watch.model_probe import ModelProbe
from andon_contracts.watch.replicas import Replicas, Replicate, part_of, replicas_of
from andon_contracts.watch.settings import PATIENCE, TIMEOUT, Action, Plan, Reference, Scaler, Schedule, Settings
from andon_contracts.watch.watcher import Watch

_open: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Watch]] = weakref.WeakKeyDictionary()
"""The latest watch of each optimizer. A strong reference to the watch would keep its optimizer alive for ever."""
_opened = [0]
"""How many watches this process has opened, those that are closed included."""
_halt_signals: Counter[str] = Counter()
"""How many halt signals each group of ranks has had in this process, which is the same number on all of its ranks."""


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
    replicate: Replicate | None = None,
    hard_stop: bool = False,
    timeout: datetime.timedelta = TIMEOUT,
    patience: datetime.timedelta = PATIENCE,
    verbose: bool = False,
) -> Watch:
    """Check every update of a training loop. Collective: call it on every rank, after wrapping the model.

    action: what a violation does: "warn", "raise", or a function of the `Violation`. A suspicion only ever warns.
    allow: from a clause to the reason why it is silenced; its findings are only counted.
    log: receives a dict for each finding. group: the data-parallel ranks (default: all). folder: where bundles of
    violations are written, if any. ledger: where rank 0 writes a line for every update (default: the file that
    ANDON_LEDGER names, if any).
    trainable: name patterns of the parameters to be trained. tied: pairs of names that must be one tensor.
    clip: the gradient norm that the loop clips to. groups: from a name pattern to hyperparameters.
    schedule: from the number of an update, 1 being the first, to its learning rate. scaler: the loss scaler.
    reference: from the model and the ids of a global batch to the sum and the number of their losses. It alone decides
    about audits: with it every `every`-th gradient is computed again, without it none is.
    plan: from the number of an update to the ids of its global batch. rows: the number of rows of an epoch.
    contents: from ids to the rows that `Watch.batch` receives for them.
    start: the updates made before. updates: how many updates there are in all at the end.
    replicate: the process group or one-dimensional device mesh of the ranks with the same parameters (default: all
    ranks, or as the mesh of the shards says). hard_stop: end ranks that are blocked while no Python runs.
    timeout: how long a rank waits for the others. patience: how long the process of a rank may be stopped, or a rank on
    another machine may give no sign of life, before all ranks halt. verbose: list every clause at the opening.

    Raises `ValueError` on every rank if any rank has a wrong argument. What is wrong with the model or the ranks at the
    start already is a finding, which `action` decides about.
    """
    settings = Settings(
        action=action, allow=dict(allow or {}), log=log, group=group, folder=folder, ledger=ledger, trainable=trainable,
        tied=tuple(tied), clip=clip, groups=dict(groups or {}), schedule=schedule, scaler=scaler, reference=reference,
        every=every, plan=plan, rows=rows, contents=contents, start=start, updates=updates, replicate=replicate,
        hard_stop=hard_stop, timeout=timeout, patience=patience, verbose=verbose,
    )  # fmt: skip
    return open_watch(model, list(optimizer) if isinstance(optimizer, Sequence) else [optimizer], settings)


class CannotLook(ValueError):
    """`andon watch` cannot watch what it found, on any rank. The user made no mistake."""


def open_watch(model: nn.Module, given: Sequence[Any], settings: Settings) -> Watch:
    """Open a watch of the optimizers `given`, as `watch` does. If any rank refuses, nothing stays open."""
    with ExitStack() as undo:
        exchange = Exchange(GroupGather(own_group(settings.group, settings.timeout), WIDTH))
        undo.callback(exchange.close)
        optimizers = [_unwrapped(each) for each in given]
        problems = _wrong_types(model, optimizers)
        subject, file, part, copies = None, None, 0, 0
        if not problems:
            try:
                subject = ModelProbe(model, optimizers, settings.trainable, settings.tied, reducers_of(model))
            except Exception as error:  # noqa: BLE001 - modules and parameters are the user's own: they may raise anything
                problems.append(f"the model cannot be looked through: {first_line(error)}")
        if subject is not None:
            problems += settings.problems(subject) + _conflicts(model, optimizers, exchange)
            try:
                part, copies = part_of(subject, settings.replicate, exchange.rank)
            except ValueError as error:
                problems.append(str(error))
        # The command has checked its own options. So only a ledger that cannot be opened is a mistake of its user.
        excused = len(problems) if settings.by_command else 0
        path = ledger_path(settings.ledger, _first_rank(settings.group)) if exchange.rank == 0 else None
        if path is not None and not problems:
            try:
                file = open_ledger(path, settings.start)
                undo.callback(file.close)
            except ValueError as error:
                problems.append(str(error))
        # The secret that signs heartbeats goes from rank 0 to the others in this gather, and never into their store.
        told = {"records": int(file is not None), "part": part, "copies": copies, **secret_to_ints(new_secret())}
        seen = _agreed(exchange, problems, settings, {**told, "mistakes": len(problems) - excused})
        assert subject is not None
        try:
            replicas = replicas_of([o.values["part"] for o in seen], [o.values["copies"] for o in seen])
        except ValueError:
            if settings.replicate is not None:
                raise
            # Pipeline stages with separate meshes, for example: the same shard cannot be recognized across stages.
            replicas = Replicas(tuple(range(len(seen))))
        settings = replace(settings, recording=bool(seen[0].values["records"]))
        halt = _halt_signal(exchange, settings, secret_from_ints(seen[0].values))
        if halt is not None:
            undo.push(halt.end_with)
        opened = Watch(subject, optimizers, settings, exchange, replicas, halt, file)
        undo.pop_all()
    for each in optimizers:
        _open[each] = weakref.ref(opened)
    _opened[0] += 1
    return opened


def opened_so_far() -> int:
    return _opened[0]


def is_watched(optimizer: torch.optim.Optimizer) -> bool:
    latest = _open[optimizer]() if optimizer in _open else None
    return latest is not None and not latest.closed


def _first_rank(group: dist.ProcessGroup | None) -> int:
    """The global rank of rank 0 of `group`, which writes the ledger; torchrun's number if no group was made."""
    if not dist.is_available() or not dist.is_initialized():
        return int(os.environ.get("RANK", "0"))
    return 0 if group is None else dist.get_process_group_ranks(group)[0]


def _wrong_types(model: object, optimizers: Sequence[object]) -> list[str]:
    found = [] if isinstance(model, nn.Module) else [f"model must be a module, not {type(model).__name__}"]
    if not optimizers:
        found.append("optimizer is an empty list: name at least one")
    return found + [
        f"optimizer must be a torch optimizer, not {type(each).__name__}"
        for each in optimizers
        if not isinstance(each, torch.optim.Optimizer) or not hasattr(each, "_optimizer_step_pre_hooks")
    ]


def _halt_signal(exchange: Exchange, settings: Settings, secret: bytes) -> HaltSignal | None:
    """The signal by which any rank stops all. All ranks of this watch, and no others, use its key in the store."""
    if exchange.world_size == 1:
        return None
    ranks = dist.get_process_group_ranks(settings.group or dist.group.WORLD)
    name = "all" if settings.group is None else "-".join(map(str, ranks))
    _halt_signals[name] += 1
    store = own_store(f"{name}/{_halt_signals[name]}")
    if store is None:
        return None
    return HaltSignal(
        SignedStore(store, secret),
        exchange.rank,
        exchange.world_size,
        PendingCollectives(ranks),
        hard_stop=settings.hard_stop,
        patience_s=settings.patience.total_seconds(),
        warns=settings.action == "warn",
    )


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer inside a wrapper that delegates: Accelerate's, Fabric's, torch's `PostLocalSGDOptimizer`."""
    while True:
        # A subclass that never called `Optimizer.__init__` has no hooks: it steps by another optimizer.
        delegates = isinstance(optimizer, torch.optim.Optimizer) and not hasattr(optimizer, "_optimizer_step_pre_hooks")
        names = ("optimizer", "optim") if delegates else ("optimizer",)
        found = (getattr(optimizer, name, None) for name in names)
        inner = next((each for each in found if isinstance(each, torch.optim.Optimizer)), None)
        if inner is None:
            return optimizer
        optimizer = inner


def _conflicts(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], exchange: Exchange) -> list[str]:
    found = []
    if any(map(is_watched, optimizers)):
        found.append("the optimizer is watched already: close that watch first")
    wrapped = vars(model).get("process_group")  # a module of the user's own may raise for a name that it lacks
    replicas = dist.get_world_size(wrapped) if isinstance(wrapped, dist.ProcessGroup) else exchange.world_size
    if replicas != exchange.world_size:
        found.append(f"the group has {exchange.world_size} ranks, but the model's replicas are {replicas}")
    return found


def _agreed(
    exchange: Exchange, problems: Sequence[str], settings: Settings, values: Mapping[str, int]
) -> tuple[Observation, ...]:
    """Gather `values` from every rank, with the settings and the number of `problems`.

    Raises `ValueError` on every rank if any rank has problems, or if the ranks have different settings.
    """
    digests = settings.digests()
    told = {f"told {name}": digest for name, digest in digests.items()}
    seen = exchange(0, "settings", {"problems": len(problems), **told, **values})
    found = list(problems)
    others = [str(o.rank) for o in seen if o.values["problems"] and o.rank != exchange.rank]
    if others and not found:
        found.append(f"rank {', '.join(others)} was told something wrong; its own message says what")
    differing = [name for name in digests if len({o.values[f"told {name}"] for o in seen}) > 1]
    if differing and not any(o.values["problems"] for o in seen):
        found.append(f"the ranks watch with different settings: {', '.join(differing)}")
    if found:
        msg = "andon.watch: " + "; ".join(found)
        raise ValueError(msg) if any(o.values["mistakes"] for o in seen) else CannotLook(msg)
    return seen
