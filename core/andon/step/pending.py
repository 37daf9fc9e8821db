"""One update from its launch to its result, and the values on a device that the host must read.

To read a value of a GPU, the host waits until everything before it is done, and then the GPU is idle until the host has
caught up. A late reading is copied into pinned memory after the work that computes it, and read a step later.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from andon.backend.base import Backend
from andon.step.micro_batch import Leaf
from andon.step.plan import GlobalBatch
from andon.step.reduce import fold
from andon_contracts.laws.update import LeafPlan, LeafReport
from andon_contracts.policy import clause, ensure
from andon_contracts.violation import Finding

UNSIGNED = 1 << 64
_LOSS_TOLERANCE = 0.01
"""Of F-DP-005. The falsifier compares whole runs, to the bit."""


def reads_late(backend: Backend) -> bool:
    """Whether all replicas of `backend` are on GPUs, so that no values are needed in the middle of a step.

    In `mixed` messages go through the CPU, where they are read at once.
    """
    return backend.name != "mixed" and all(device.type == "cuda" for device in backend.devices)


def _loss_of_one_process(losses: Sequence[float], terms: int) -> float:
    """Summed in another way than along the tree, to compare with."""
    return math.fsum(losses) / max(terms, 1)


def _explain_loss(losses: Sequence[float], terms: int, step: int, result: float) -> Finding:
    what = f"the loss is {result!r}, the loss sums of all micro-batches give {_loss_of_one_process(losses, terms)!r}"
    return Finding(what, step, (), "loss")


@clause("loss-equivalent", _explain_loss)
def _loss_is_that_of_one_process(losses: Sequence[float], terms: int, step: int, result: float) -> bool:
    off = abs(result - _loss_of_one_process(losses, terms))
    return off <= _LOSS_TOLERANCE * _loss_of_one_process([abs(loss) for loss in losses], terms)


@ensure(_loss_is_that_of_one_process)
def mean_loss(losses: Sequence[float], terms: int, step: int) -> float:
    """F-DP-005: the loss of the whole batch, whichever ranks computed its micro-batches.

    losses: the loss sum of each micro-batch. They are summed along the same tree as the gradients. step: for messages.
    """
    total: float = fold((0, len(losses)), losses.__getitem__, operator.add, float)
    return total / max(terms, 1)


@dataclass(frozen=True)
class StepResult:
    """What one update did. Reals are exact: equal bits on every backend and world size.

    digests: content, gradient, weights, optimizer; empty if contracts were off. ranks: the digests that each rank sent.
    stop, save: whether any rank requests to stop, or a checkpoint, after this update; the same on all ranks.
    """

    step: int
    rows: int
    terms: int
    loss: float
    grad_norm: float
    rate: float
    correct: int
    digests: Mapping[str, int]
    leaves: tuple[LeafReport, ...]
    ranks: tuple[Mapping[str, int], ...]
    stop: bool = False
    save: bool = False


@dataclass
class Pending:
    """One update under way: its plan, and what the host has read of it. `result` must be called once.

    late: whether everything is read in `result`. rows, terms: of the global batch and of its loss sum.
    """

    batch: GlobalBatch
    rate: float
    updates: int
    checked: bool
    late: bool
    rows: int = 0
    terms: int = 0
    plan: tuple[LeafPlan, ...] = ()
    leaves: Sequence[Leaf] = ()
    reports: tuple[LeafReport, ...] = ()
    stop: bool = False
    save: bool = False
    norm: float = 0.0
    gradients: tuple[int, ...] = ()
    ranks: tuple[Mapping[str, int], ...] = ()
    _waiting: list[tuple[torch.Tensor, Callable[[torch.Tensor], None]]] = field(default_factory=list)
    _copied: torch.cuda.Event | None = None

    def read(self, tensor: torch.Tensor, then: Callable[[torch.Tensor], None]) -> None:
        """Call `then` with the values of `tensor` on the CPU: now, or in `result`."""
        if not self.late:
            then(tensor.cpu())
        elif tensor.device.type != "cuda":
            # The next update may write into this memory before it is read.
            self._waiting.append((tensor.clone(), then))
        else:
            # Any copy but one into pinned memory makes the host wait.
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copy.copy_(tensor, non_blocking=True)
            self._waiting.append((copy, then))

    def end(self, device: torch.device) -> None:
        """Must be called after the last `read`: record an event on `device` for which `result` waits."""
        if device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(device))

    def result(self) -> StepResult:
        """Wait for the device, judge the update, and return what it did.

        Raises `Violation` on every rank alike, `RankFailed` where another rank raised, and a rank's own error there.
        """
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        waiting, self._waiting = self._waiting, []
        for values, then in waiting:
            then(values)
        content = sum(leaf.content for leaf in self.plan) % UNSIGNED
        return StepResult(
            step=self.batch.step,
            rows=self.rows,
            terms=self.terms,
            loss=mean_loss([report.loss_sum for report in self.reports], self.terms, self.batch.step),
            grad_norm=self.norm,
            rate=self.rate,
            correct=sum(report.correct for report in self.reports),
            digests={"content": content, **self.ranks[0]} if self.ranks else {},
            leaves=self.reports,
            ranks=self.ranks,
            stop=self.stop,
            save=self.save,
        )
