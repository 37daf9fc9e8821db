"""Our own trainer as a subject, on each of its backends."""

from __future__ import annotations

from importlib import import_module

import torch.distributed as dist

from andon.backend.base import Backend, GroupBackend, InlineBackend
from andon_falsify.ranks.pool import RankPools
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.drive import drive
from andon_falsify.subjects.placing import IN_A_GROUP, devices_of
from andon_falsify.subjects.trace import Observations, Trace, assemble_trace


class AndonTrainer:
    """Runs every case on the backend that it names; process groups on the ranks of `pools`.

    late: whether the ranks of `inline` judge an update one step later, as GPUs do. None: as their devices do.
    """

    name = "andon"

    def __init__(self, pools: RankPools, *, late: bool | None = None) -> None:
        self._pools = pools
        self._late = late

    def run(self, case: Case) -> Trace:
        """See `Subject.run`."""
        errors: dict[int, str] = {}
        try:
            if case.backend in IN_A_GROUP:
                answers = self._pools.of(case.world, case.backend).run("andon_falsify.ranks.trainer:train", case)
                parts = [answer.value for answer in answers if isinstance(answer.value, Observations)]
                errors = {rank: answer.error for rank, answer in enumerate(answers) if answer.error}
            else:
                parts = [_train(case, InlineBackend(devices_of(case.backend, case.world)), late=self._late)]
        except Exception as error:  # noqa: BLE001 -- an error of the subject is part of what is judged
            parts, errors = [], {0: f"{type(error).__name__}: {error}"}
        return assemble_trace(case, parts, errors, f"{self.name} {case.backend}")


def train(case: Case) -> Observations:
    """Run `case` as one rank of this process's group."""
    return _train(case, GroupBackend(case.backend, devices_of(case.backend, case.world)[dist.get_rank()]))


def _train(case: Case, backend: Backend, *, late: bool | None = None) -> Observations:
    if case.fault is None:
        return drive(case, backend, None, late=late)
    module, _, name = case.fault.partition(":")
    if not name:
        msg = f"the fault {case.fault!r} must be package.module:name"
        raise ValueError(msg)
    return drive(case, backend, import_module(module).named(name).plant, late=late)
