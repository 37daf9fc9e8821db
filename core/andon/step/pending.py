"""One update from its launch to its result, and what a device computes of it that the host is to read.

Reading a value of a GPU makes the host wait until everything before it is done, and the GPU is idle until the host has
caught up. A late reading is copied into pinned memory behind the work that computes it, and read a step later.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from andon.backend.base import Backend
from andon.step.micro_batch import Leaf
from andon.step.plan import GlobalBatch
from andon.step.tree import fold
from andon_contracts.laws.update import LeafPlan, LeafReport

UNSIGNED = 1 << 64


def reads_late(backend: Backend) -> bool:
    """Whether the replicas of `backend` are all on GPUs, so that nobody has to wait for values in the middle of a step.

    In `mixed` what ranks tell each other goes through the CPU, where it is read at once.
    """
    return backend.name != "mixed" and all(device.type == "cuda" for device in backend.devices)


@dataclass(frozen=True)
class StepResult:
    """What one update did. Reals are exact: equal bits on every backend and world size."""

    step: int
    rows: int
    terms: int
    loss: float
    grad_norm: float
    rate: float
    correct: int
    digests: Mapping[str, int]
    """content, gradient, weights, optimizer; empty where the contracts are off."""
    leaves: tuple[LeafReport, ...]
    ranks: tuple[Mapping[str, int], ...]
    """By rank: its digests, as it saw them."""
    stop: bool = False
    """Whether any rank was asked to stop after this update; all ranks know it alike."""
    save: bool = False
    """Whether any rank requests a checkpoint after this update; the same on all ranks."""


@dataclass
class Pending:
    """One update under way: what it is to be, and what has been read of it so far. `result` says what it did, once;
    until then the next one may be launched.

    late: whether what is to be read is read in `result` alone. rows, terms: of the global batch and of its loss sum, by
    which that is divided; once they are planned.
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
        """Call `then` with the values of `tensor`, on the CPU: now, or in `result`; it raises what `then` raises."""
        if not self.late:
            then(tensor.cpu())
        elif tensor.device.type != "cuda":
            # The next update may write into this memory before it is read.
            self._waiting.append((tensor.clone(), then))
        else:
            # Only a copy into pinned memory does not make the host wait.
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copy.copy_(tensor, non_blocking=True)
            self._waiting.append((copy, then))

    def end(self, device: torch.device) -> None:
        """After the last reading: mark how far `device` has to come."""
        if device.type == "cuda":
            # One for all readings: a stream does its work in order.
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(device))

    def result(self) -> StepResult:
        """Wait for the device to have come to the last reading, judge the update, and say what it did.

        Raises `Violation` on every rank alike, `RankFailed` where another rank raised, and a rank's own error there.
        """
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        waiting, self._waiting = self._waiting, []
        for values, then in waiting:
            then(values)
        content = sum(leaf.content for leaf in self.plan) % UNSIGNED
        # Losses are summed along the same tree as the gradients of their micro-batches.
        losses = [report.loss_sum for report in self.reports]
        loss: float = fold((0, len(losses)), losses.__getitem__, operator.add, float)
        return StepResult(
            step=self.batch.step,
            rows=self.rows,
            terms=self.terms,
            loss=loss / max(self.terms, 1),
            grad_norm=self.norm,
            rate=self.rate,
            correct=sum(report.correct for report in self.reports),
            digests={"content": content, **self.ranks[0]} if self.ranks else {},
            leaves=self.reports,
            ranks=self.ranks,
            stop=self.stop,
            save=self.save,
        )
