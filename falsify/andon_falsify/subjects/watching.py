"""What is looked at in each update: the reduced gradient, what the update left, the bytes alive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from andon.model.adapter import trainable_parameters
from andon.step.plan import GlobalBatch
from andon.step.replica import Replica
from andon.step.step import Pending, StepResult
from andon.training.trainer import FolderJournal, Journal, Progress
from andon_contracts.record import Record, Step
from andon_falsify.subjects.assembly import Parts
from andon_falsify.subjects.meter import StorageMeter
from andon_falsify.subjects.trace import CutOff, Reported, Sightings, Tensors, Values, copied, digest


def watch_gradient(seen: Sightings, rank: int, replica: Replica, *, values: bool) -> None:
    """Note a replica's reduced gradient as it was set, and of rank 0 its `values`; after faults are planted."""
    inner = replica.set_gradient

    def set_gradient(pieces: Sequence[torch.Tensor], divisor: int) -> None:
        inner(pieces, divisor)
        held = replica.reduced_gradient()
        seen.of(rank, seen.at).gradient = digest(held)
        if rank == 0 and values:
            seen.values[seen.at] = Values(copied(held), {})

    replica.set_gradient = set_gradient  # type: ignore[method-assign]


def state_digests(replica: Replica) -> tuple[str, str]:
    """Digests of a replica's weights, as its model has them, and of its optimizer's state with the count of updates."""
    state = {name: value.reshape(-1) for name, value in replica.optimizer_state().items()}
    state["updates"] = torch.tensor([replica.updates])
    return digest(trainable_parameters(replica.model)), digest(state)


@dataclass(frozen=True)
class Left:
    """What an update left: digests of weights and optimizer by local rank, and the first replica's weights."""

    states: Mapping[int, tuple[str, str]]
    weights: Tensors


class WatchedStep:
    """The step of a run. Looks at what each update left before the next one is begun, and says which one is computed.

    Where updates are judged a step later, the next has been taken when the result of this one is there; it is noted
    with its result, and what was left by an update that has none is never told. To be made after faults are planted.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._inner = parts.step
        self._left: dict[int, Left] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, batch: GlobalBatch, *args: Any, **named: Any) -> StepResult:
        self._parts.seen.at = batch.step
        result = self._inner(batch, *args, **named)
        self._look(batch.step)
        return result

    def launch(self, batch: GlobalBatch, *args: Any, **named: Any) -> Pending:
        """See `TrainingStep.launch`. Waits for the device."""
        self._parts.seen.at = batch.step
        pending = self._inner.launch(batch, *args, **named)
        self._look(batch.step)
        return pending

    def _look(self, step: int) -> None:
        first = self._parts.replicas[0]
        weights = copied(first.parameters.weight_views()) if step in self._parts.seen.values else {}
        states = {rank: state_digests(replica) for rank, replica in self._parts.by_rank.items()}
        self._left[step] = Left(states, weights)

    def left_by(self, step: int) -> Left:
        """What update `step` left; once."""
        return self._left.pop(step)


class WatchedJournal(Journal):
    """Notes what was seen, and on the process of rank 0 has the trainer's own journal write its files."""

    def __init__(
        self, parts: Parts, step: WatchedStep, inner: FolderJournal | None, meters: Mapping[int, StorageMeter]
    ) -> None:
        self._parts = parts
        self._watched = step
        self._inner = inner
        self._meters = meters

    def step(self, batch: GlobalBatch, result: StepResult, record: Step) -> None:
        """One update was done: have its line written, note it, and end here if the case says so."""
        if self._inner is not None:
            self._inner.step(batch, result, record)
        seen = self._parts.seen
        note(seen, batch, result)
        left = self._watched.left_by(batch.step)
        for rank, state in left.states.items():
            sight = seen.of(rank, batch.step)
            sight.weights, sight.optimizer = state
            if rank in self._meters:
                seen.resting.setdefault(rank, []).append(self._meters[rank].live)
        if batch.step in seen.values:
            seen.values[batch.step] = Values(seen.values[batch.step].gradients, left.weights)
        if self._parts.case.stop_after == batch.step:
            raise CutOff

    def checkpoint(self, progress: Progress, *, best: bool) -> None:
        """The whole state, if the case keeps files."""
        if self._inner is not None and self._parts.case.folder is not None:
            self._inner.checkpoint(progress, best=best)

    def append(self, record: Record) -> None:
        """Any other line."""
        if self._inner is not None:
            self._inner.ledger.append(record)

    def close(self) -> None:
        """Give the files back."""
        if self._inner is not None:
            self._inner.close()


def note(seen: Sightings, batch: GlobalBatch, result: StepResult) -> None:
    """Enter what the trainer reported of an update."""
    seen.reported.append(
        Reported(
            batch.step,
            batch.epoch,
            batch.position,
            batch.ids,
            result.rows,
            result.correct,
            result.rate,
            result.loss,
            result.grad_norm,
        )
    )


def keep_weights(seen: Sightings, step: int, replica: Replica) -> None:
    """Copy the weights that the update left, where the gradient was copied."""
    if step in seen.values:
        seen.values[step] = Values(seen.values[step].gradients, copied(replica.parameters.weight_views()))
