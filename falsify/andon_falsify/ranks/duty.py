"""What a rank is asked to do; runs in the rank's process."""

from __future__ import annotations

import torch.distributed as dist

from andon.backend.base import Backend
from andon.backend.group import GroupBackend
from andon_falsify.faults.registry import named
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.drive import drive
from andon_falsify.subjects.placing import devices_of
from andon_falsify.subjects.trace import Sightings


def train(case: Case) -> Sightings:
    """Run `case` as one rank of the process group that this process belongs to."""
    return train_on(GroupBackend(case.backend, devices_of(case.backend, case.world)[dist.get_rank()]), case)


def train_on(backend: Backend, case: Case, *, late: bool | None = None) -> Sightings:
    """Run `case`, with the fault that it names, on all ranks that `backend` has in this process."""
    return drive(case, backend, None if case.fault is None else named(case.fault).plant, late=late)
