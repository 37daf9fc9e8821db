"""Our trainer as a subject, on each of its backends."""

from __future__ import annotations

import torch

from andon.backend.inprocess import InlineBackend, ThreadsBackend
from andon_falsify.ranks.pool import RankPools
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.drive import drive
from andon_falsify.subjects.trace import Sightings, Trace, assemble_trace

CPU_BACKENDS = ("inline", "threads", "gloo")
GPU_BACKENDS = ("nccl", "mixed")


def why_not(backend: str) -> str:
    """Why `backend` cannot be tried here, or "" if it can."""
    if backend in GPU_BACKENDS and torch.cuda.device_count() == 0:
        return f"{backend} needs a GPU, and this machine has none that torch can use"
    if backend in GPU_BACKENDS:
        return f"{backend} is measured elsewhere: this suite has no ranks on GPUs yet"
    return ""


class AndonTrainer:
    """Runs cases on the backend that each of them names. `pools` are where the ranks of `gloo` live."""

    name = "andon"

    def __init__(self, pools: RankPools) -> None:
        self._pools = pools

    def run(self, case: Case) -> Trace:
        """See `Subject.run`."""
        name = f"{self.name} {case.backend}"
        if case.backend == "gloo":
            answers = self._pools.of(case.world).run("andon_falsify.ranks.duty:train", case)
            parts = [answer.value for answer in answers if isinstance(answer.value, Sightings)]
            errors = {rank: answer.error for rank, answer in enumerate(answers) if answer.error}
            return assemble_trace(case, parts, errors, name)
        backend = (InlineBackend if case.backend == "inline" else ThreadsBackend)([torch.device("cpu")] * case.world)
        try:
            return assemble_trace(case, [drive(case, backend)], {}, name)
        except Exception as error:  # noqa: BLE001 -- an error of the subject is part of what is judged
            return assemble_trace(case, [], {0: f"{type(error).__name__}: {error}"}, name)
