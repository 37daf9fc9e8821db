"""How many micro-batches each rank of a `mixed` group computes: in proportion to its speed, measured once.

Which device computes a micro-batch is part of its bits there, so a run that goes on, or is done again, on as many ranks
takes the numbers from its ledger, where every step says who computed what.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

import torch

from andon.backend.base import Backend
from andon.console.messages import say
from andon.console.problems import InputError, Problem
from andon.run.ledger import LedgerError, read_ledger
from andon.step.micro_batch import Leaf
from andon.step.plan import BatchPlan
from andon.step.replica import Replica
from andon.step.task import Task
from andon_contracts.record import Step

_TURNS = 3
"""Passes that are timed; the first of a device is slow, so the fastest counts."""


def shares_of(
    backend: Backend, replica: Replica, task: Task, plan: BatchPlan, micro_batches: int, ledger: Path | None
) -> tuple[int, ...] | None:
    """Micro-batches of each rank, those of `ledger` where it has steps on as many ranks; None: as many for each.

    Only a `mixed` group with a GPU has ranks of different speed. All ranks call alike and get the same. Raises
    `InputError` for a ledger that is damaged.
    """
    if backend.name != "mixed" or not _of_two_kinds(backend):
        return None
    recorded = None if ledger is None else recorded_shares(ledger, backend.world_size, micro_batches)
    if recorded is not None:
        _tell(backend, "as in the ledger", recorded)
        return recorded
    part = plan.batch(1).micro_batches(micro_batches)[0]
    mine = torch.tensor([_nanoseconds(replica, Leaf(0, 0, tuple(part)), task)], device=backend.devices[0])
    times = [int(each) for each in backend.gather([mine])]
    shares = fastest_shares(micro_batches, times)
    _tell(backend, f"by the time of one, {', '.join(f'{each / 1e6:.1f}' for each in times)} ms", shares)
    return shares


def fastest_shares(count: int, times: Sequence[int]) -> tuple[int, ...]:
    """How many of `count` equal pieces of work each worker does so that the last to end ends earliest.

    times: of one piece on each worker, above 0. Where several would end alike the first takes the piece.
    """
    shares = [0] * len(times)
    for _ in range(count):
        ends = [(share + 1) * each for share, each in zip(shares, times, strict=True)]
        shares[ends.index(min(ends))] += 1
    return tuple(shares)


def recorded_shares(ledger: Path, world_size: int, micro_batches: int) -> tuple[int, ...] | None:
    """Micro-batches of each rank in the last step of `ledger` on `world_size` ranks, if there is one.

    Raises `InputError` for a ledger that is damaged.
    """
    if not ledger.exists():
        return None
    found: tuple[int, ...] | None = None
    try:
        for record in read_ledger(ledger):
            if isinstance(record, Step) and len(record.ranks) == world_size:
                found = tuple(len(part.leaves) for part in sorted(record.ranks, key=attrgetter("rank")))
    except LedgerError as error:
        raise InputError([Problem("", f"{error}; who computed what cannot be read from it")]) from error
    return found if found is not None and sum(found) == micro_batches else None


def _of_two_kinds(backend: Backend) -> bool:
    kind = torch.tensor([int(backend.devices[0].type == "cuda")], device=backend.devices[0])
    return len({int(each) for each in backend.gather([kind])}) > 1


def _nanoseconds(replica: Replica, leaf: Leaf, task: Task) -> int:
    """Of forward and backward of one micro-batch, at least 1; changes nothing."""
    fastest = 0
    for _ in range(_TURNS):
        began = time.perf_counter_ns()
        replica.gradient_of(0, leaf, task).sum().item()  # waits for the device
        taken = max(1, time.perf_counter_ns() - began)
        fastest = min(fastest or taken, taken)
    return fastest


def _tell(backend: Backend, why: str, shares: tuple[int, ...]) -> None:
    if backend.ranks[0] == 0:
        say(f"mixed: micro-batches of each rank {why}: {', '.join(map(str, shares))}")
