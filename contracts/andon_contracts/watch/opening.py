"""`andon.watch`: what was said is checked on all ranks, a group of our own is made, and the hooks are set."""

from __future__ import annotations

import datetime
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from andon_contracts.agree import GroupGather, Observation, own_group
from andon_contracts.causes import first_line
from andon_contracts.ledger import LedgerFile
from andon_contracts.liveness.halt import HaltSignal, own_store
from andon_contracts.liveness.pending_collectives import PendingCollectives
from andon_contracts.liveness.signed import Signed, drawn, secret_in, words_of
from andon_contracts.watch.discovery import reducers_of
from andon_contracts.watch.exchange import WIDTH, Exchange
from andon_contracts.watch.ledger import ledger_path, open_ledger
from andon_contracts.watch.model_probe import ModelProbe
from andon_contracts.watch.replicas import Replicas, Replicate, part_of, replicas_of
from andon_contracts.watch.settings import Action, Plan, Reference, Scaler, Schedule, Settings
from andon_contracts.watch.watcher import Watch

_open: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Watch]] = weakref.WeakKeyDictionary()
"""The latest watch of each optimizer, by a weak reference: it holds the optimizer, which would else never end."""
_opened_so_far: list[int] = [0]
_cords: dict[str, int] = {}
_TIMEOUT = datetime.timedelta(minutes=30)
_PATIENCE = datetime.timedelta(seconds=30)


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
    timeout: datetime.timedelta = _TIMEOUT,
    patience: datetime.timedelta = _PATIENCE,
    verbose: bool = False,
) -> Watch:
    """Check every update of a training loop. Collective: call it on every rank, after wrapping the model.

    action: what a violation does: "warn", "raise", or a function of the `Violation`. A suspicion only ever warns.
    allow: from a clause to the reason why it is silenced; its findings are only counted.
    log: receives a dict for each finding. group: the data-parallel ranks (default: all).
    folder: where bundles of violations are written; None writes none.
    ledger: the file where rank 0 writes a line for every update; None: the file that ANDON_LEDGER names, if any.
    trainable: name patterns of the parameters to be trained. tied: pairs of names that must be one tensor.
    clip: the gradient norm that the loop clips to. groups: from a name pattern to hyperparameters.
    schedule: from the number of an update, 1 being the first, to its learning rate. scaler: the loss scaler.
    reference: from the model and the ids of a global batch to the sum and the number of their losses. It alone decides
    about audits: with it every `every`-th gradient is computed again, without it none is.
    plan: from the number of an update to the ids of its global batch. rows: the number of rows of an epoch.
    contents: from ids to the rows that `Watch.batch` receives for them.
    start: the updates made before. updates: how many updates there are in all at the end.
    replicate: the group, or the device mesh of one dimension, of the ranks that hold what this rank holds, if not all
    do; shards tell that by their own mesh. hard_stop: end ranks that are blocked where no Python runs.
    timeout: how long a rank waits for the others. patience: how long the process of a rank may be stopped, or a rank on
    another machine may give no sign of life, before all ranks halt.
    verbose: list every clause at the opening, and how it is checked.

    Raises `ValueError` on every rank if any rank has a wrong argument. What is wrong with the model or the ranks at the
    start already is a finding, which `action` decides about.
    """
    settings = Settings(
        action=action, allow=dict(allow or {}), log=log, folder=folder, trainable=trainable,
        tied=tuple(tied), clip=clip, groups=dict(groups or {}), schedule=schedule, scaler=scaler, reference=reference,
        every=every, plan=plan, rows=rows, contents=contents, start=start,
        updates=updates, hard_stop=hard_stop, verbose=verbose,
    )  # fmt: skip
    place = _Place(group, replicate, timeout, patience)
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    return _opened(model, optimizers, settings, place, ledger)


def watch_script(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    action: Action = "warn",
    allow: Mapping[str, str] | None = None,
    folder: str | None = None,
    hard_stop: bool = False,
    verbose: bool = False,
) -> Watch:
    """As `watch` with these options, for the command `andon watch`: messages name the command's own options."""
    settings = Settings(
        action=action, allow=dict(allow or {}), folder=folder, hard_stop=hard_stop, verbose=verbose, by_command=True
    )
    return _opened(model, optimizers, settings, _Place(None, None, _TIMEOUT, _PATIENCE), None)


class CannotLook(ValueError):
    """`andon watch` cannot watch what it found, on any rank. The user made no mistake."""


@dataclass(frozen=True)
class _Place:
    """The ranks of a watch, those that hold the same of them, and how long they wait for each other."""

    group: dist.ProcessGroup | None
    replicate: Replicate | None
    timeout: datetime.timedelta
    patience: datetime.timedelta


def _opened(
    model: nn.Module, given: Sequence[Any], settings: Settings, place: _Place, ledger: str | os.PathLike[str] | None
) -> Watch:
    """A watch as `watch` describes it, with `settings`. Where that is refused, nothing stays open."""
    with ExitStack() as undo:
        exchange = Exchange(GroupGather(own_group(place.group, place.timeout), WIDTH))
        undo.callback(exchange.close)
        path = ledger_path(ledger, _first_rank(place.group)) if exchange.rank == 0 else None
        optimizers = [_unwrapped(each) for each in given]
        problems = _wrong_types(model, optimizers)
        subject = None if problems else _subject(model, optimizers, settings, problems)
        if subject is not None:
            problems = settings.problems(subject) + _conflicts(model, optimizers, exchange)
        part = _part(subject, place.replicate, exchange.rank, problems)
        of_the_model = len(problems)
        file = _opened_ledger(path, settings.start, problems)
        if file is not None:
            undo.callback(file.close)
        # What signs the ranks' signs of life goes from rank 0 to the others here, and not through their store.
        told = {"records": int(file is not None), **part, **words_of(drawn())}
        # All that the user tells the command is checked before this, but for the ledger.
        told["mistakes"] = len(problems) - (of_the_model if settings.by_command else 0)
        seen = _agreed(exchange, problems, settings.digests(), told)
        replicas = _replicas(seen, place.replicate)
        assert subject is not None
        settings = replace(settings, recording=bool(seen[0].values["records"]))
        cord = _cord(exchange, settings, place, secret_in(seen[0].values))
        if cord is not None:
            undo.push(cord.end_with)
        opened = Watch(subject, optimizers, settings, exchange, replicas, cord, file)
        undo.pop_all()
    for each in optimizers:
        _open[each] = weakref.ref(opened)
    _opened_so_far[0] += 1
    return opened


def _first_rank(group: dist.ProcessGroup | None) -> int:
    """The rank in the world of rank 0 of `group`, which writes; torchrun's number where there is no group at all."""
    if not dist.is_available() or not dist.is_initialized():
        return int(os.environ.get("RANK", "0"))
    return 0 if group is None else dist.get_process_group_ranks(group)[0]


def _part(subject: ModelProbe | None, replicate: Replicate | None, rank: int, problems: list[str]) -> dict[str, int]:
    """Which part of the model this rank holds, for the others; what is wrong with `replicate` joins `problems`."""
    part, copies = 0, 0
    if subject is not None:
        try:
            part, copies = part_of(subject, replicate, rank)
        except ValueError as error:
            problems.append(str(error))
    return {"part": part, "copies": copies}


def _subject(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], settings: Settings, problems: list[str]
) -> ModelProbe | None:
    """What is watched; None if the model cannot even be looked through, which joins `problems`."""
    try:
        return ModelProbe(model, optimizers, settings.trainable, settings.tied, reducers_of(model))
    except Exception as error:  # noqa: BLE001 - modules and parameters are the user's own, and may raise anything
        problems.append(f"the model cannot be looked through: {first_line(error)}")
        return None


def _replicas(seen: Sequence[Observation], given: Replicate | None) -> Replicas:
    """The replicas of each part. Raises `ValueError` if those that the user named are not a partition of the ranks."""
    try:
        return replicas_of([o.values["part"] for o in seen], [o.values["copies"] for o in seen])
    except ValueError:
        if given is not None:
            raise
        # Meshes of their own in several pipeline stages, say: which shards are alike is not known.
        return Replicas(tuple(range(len(seen))))


def _opened_ledger(path: Path | None, start: int, problems: list[str]) -> LedgerFile | None:
    """The ledger, if one is to be written and nothing is wrong yet; what is wrong with it joins `problems`."""
    if path is None or problems:
        return None
    try:
        return open_ledger(path, start)
    except ValueError as error:
        problems.append(str(error))
        return None


def opened_so_far() -> int:
    """How many watches were opened in this process, closed ones too."""
    return _opened_so_far[0]


def is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a watch of this optimizer is open."""
    latest = _open[optimizer]() if optimizer in _open else None
    return latest is not None and not latest.closed


def _wrong_types(model: object, optimizers: Sequence[object]) -> list[str]:
    found = [] if isinstance(model, nn.Module) else [f"model must be a module, not {type(model).__name__}"]
    if not optimizers:
        found.append("optimizer is an empty list: name at least one")
    return found + [
        f"optimizer must be a torch optimizer, not {type(each).__name__}"
        for each in optimizers
        if not isinstance(each, torch.optim.Optimizer) or not hasattr(each, "_optimizer_step_pre_hooks")
    ]


def _cord(exchange: Exchange, settings: Settings, place: _Place, secret: bytes) -> HaltSignal | None:
    """What any rank may pull to stop all; its name in the store is one on the ranks of the group and on no others."""
    if exchange.world_size == 1:
        return None
    ranks = dist.get_process_group_ranks(place.group or dist.group.WORLD)
    name = "all" if place.group is None else "-".join(map(str, ranks))
    number = _cords[name] = _cords.get(name, 0) + 1
    store = own_store(f"{name}/{number}")
    if store is None:
        return None
    return HaltSignal(
        Signed(store, secret),
        exchange.rank,
        exchange.world_size,
        PendingCollectives(ranks),
        hard_stop=settings.hard_stop,
        patience_s=place.patience.total_seconds(),
        warns=settings.action == "warn",
    )


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer inside a wrapper that delegates: Accelerate's, Fabric's, torch's `PostLocalSGDOptimizer`."""
    while True:
        # What never came to `Optimizer.__init__` has no hooks of its own, whatever its type: another one steps for it.
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
    if isinstance(wrapped, dist.ProcessGroup) and dist.get_world_size(wrapped) != exchange.world_size:
        found.append(
            f"the group has {exchange.world_size} ranks, but the model's replicas are {dist.get_world_size(wrapped)}"
        )
    return found


def _agreed(
    exchange: Exchange, problems: Sequence[str], settings: Mapping[str, int], values: Mapping[str, int]
) -> tuple[Observation, ...]:
    """What every rank says of `values`.

    Raises `ValueError` on every rank where any rank has problems, or where the ranks were told different things.
    """
    told = {f"told {name}": digest for name, digest in settings.items()}
    seen = exchange(0, "settings", {"problems": len(problems), **told, **values})
    found = list(problems)
    others = [str(o.rank) for o in seen if o.values["problems"] and o.rank != exchange.rank]
    if others and not found:
        found.append(f"rank {', '.join(others)} was told something wrong; its own message says what")
    differing = [name for name in settings if len({o.values[f"told {name}"] for o in seen}) > 1]
    if differing and not any(o.values["problems"] for o in seen):
        found.append(f"the ranks watch with different settings: {', '.join(differing)}")
    if found:
        msg = "andon.watch: " + "; ".join(found)
        raise ValueError(msg) if any(o.values["mistakes"] for o in seen) else CannotLook(msg)
    return seen
