"""Our trainer as a subject, on each of its backends."""

from __future__ import annotations

from importlib import import_module

import torch.distributed as dist

from andon.backend.base import Backend, GroupBackend, InlineBackend
from andon_falsify.ranks.pool import RankPools
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.drive import Plant, drive
from andon_falsify.subjects.placing import IN_A_GROUP, devices_of
from andon_falsify.subjects.trace import Sightings, Trace, assemble_trace


class AndonTrainer:
    """Runs cases on the backend that each of them names. `pools` are where the ranks of a process group live.

    late: whether ranks that share this process judge an update a step later, as GPUs do (None: as they do it).
    """

    name = "andon"

    def __init__(self, pools: RankPools, *, late: bool | None = None) -> None:
        self._pools = pools
        self._late = late

    def run(self, case: Case) -> Trace:
        """See `Subject.run`."""
        name = f"{self.name} {case.backend}"
        try:
            if case.backend in IN_A_GROUP:
                return self._in_a_group(case, name)
            backend = InlineBackend(devices_of(case.backend, case.world))
            return assemble_trace(case, [train_on(backend, case, late=self._late)], {}, name)
        except Exception as error:  # noqa: BLE001 -- an error of the subject is part of what is judged
            return assemble_trace(case, [], {0: f"{type(error).__name__}: {error}"}, name)

    def _in_a_group(self, case: Case, name: str) -> Trace:
        answers = self._pools.of(case.world, case.backend).run("andon_falsify.ranks.trainer:train", case)
        parts = [answer.value for answer in answers if isinstance(answer.value, Sightings)]
        errors = {rank: answer.error for rank, answer in enumerate(answers) if answer.error}
        return assemble_trace(case, parts, errors, name)


def train(case: Case) -> Sightings:
    """Run `case` as one rank of the process group that this process belongs to."""
    return train_on(GroupBackend(case.backend, devices_of(case.backend, case.world)[dist.get_rank()]), case)


def train_on(backend: Backend, case: Case, *, late: bool | None = None) -> Sightings:
    """Run `case`, with the fault that it names, on all ranks that `backend` has in this process."""
    return drive(case, backend, None if case.fault is None else _plant(case.fault), late=late)


def _plant(fault: str) -> Plant:
    module, _, name = fault.partition(":")
    if not name:
        msg = f"the fault {fault!r} must be package.module:name"
        raise ValueError(msg)
    plant: Plant = import_module(module).named(name).plant
    return plant
