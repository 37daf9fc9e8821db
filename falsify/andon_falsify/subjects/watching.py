"""Watchers around a trainer's backend, task and step. They change nothing, except to plant the poison of a case."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from andon.backend.base import Backend, InlineBackend
from andon.model.adapter import trainable_parameters
from andon.step.micro_batch import Batch, LeafLoss, Task
from andon.step.plan import BatchPlan, GlobalBatch
from andon.step.replica import Replica
from andon_falsify.subjects.case import Case
from andon_falsify.subjects.masks import MaskRecorder
from andon_falsify.subjects.meter import StorageMeter
from andon_falsify.subjects.trace import LeafMasks, Observations, Reported, Values, copied, digest


class Proxy:
    """Forwards to `inner`, except for the given attributes. The attribute `call` replaces calls of the object."""

    def __init__(self, inner: Any, **attributes: Any) -> None:
        self.inner = inner
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__.get("call", self.inner)(*args, **kwargs)


class Loaded(dict[str, torch.Tensor]):
    """A batch with the ids of its rows."""

    ids: tuple[int, ...] = ()


class Watcher:
    """Notes in `seen` the rows and dropout masks of every micro-batch, and plants the poison of `case` in one of them.

    rank: the rank whose work is done now. With `meters`, bytes of ranks that share this process are counted during it.
    """

    def __init__(self, case: Case, seen: Observations, plan: BatchPlan, meters: Mapping[int, StorageMeter]) -> None:
        self.rank = 0
        self._case = case
        self._seen = seen
        self._meters = meters
        self._recorders: dict[int, MaskRecorder] = {}
        poison, leaves = case.poison, case.micro_batches
        self._poisoned = plan.batch(poison.step).micro_batches(leaves)[poison.leaf][:1] if poison else ()

    def record_masks(self, model: nn.Module) -> None:
        """Record the dropout masks of `model` from now on."""
        self._recorders[id(model)] = MaskRecorder(model)

    def backend(self, inner: Backend) -> Any:
        """`inner`, so that `rank` is set while it works on a replica."""

        def run(work: Callable[[int], object]) -> list[object]:
            def watched(index: int) -> object:
                self.rank = inner.ranks[index]
                with self._meters[self.rank] if self._meters and isinstance(inner, InlineBackend) else nullcontext():
                    return work(index)

            return inner.map(watched)

        return Proxy(inner, map=run)

    def task(self, inner: Task) -> Any:
        """`inner`, whose micro-batches are noted."""

        def load(ids: Sequence[int], device: torch.device) -> Batch:
            batch = Loaded(inner.load(ids, device))
            batch.ids = tuple(ids)
            return batch

        def loss_sum(model: nn.Module, batch: Batch) -> LeafLoss:
            recorder = self._recorders.get(id(model))
            none: dict[str, torch.Tensor] = {}
            with recorder.recording() if recorder else nullcontext(none) as masks:
                loss = inner.loss_sum(model, batch)
            step, poison = self._seen.at, self._case.poison
            if not step:  # the builder's trial of the model
                return loss
            ids = batch.ids if isinstance(batch, Loaded) else ()
            self._seen.of(self.rank, step).leaves.append(ids)
            if self._case.values:
                hidden = recorder.hidden if recorder else ""
                self._seen.masks[step, ids] = LeafMasks(batch["input_ids"].shape[1], masks, hidden)
            if poison is None or step != poison.step or not {*self._poisoned} & {*ids}:
                return loss
            if poison.kind == "gradient":
                # The root of 0 is 0 and its slope infinite: a finite loss with a gradient of 0 * inf = NaN.
                weight = next(parameter for parameter in model.parameters() if parameter.requires_grad)
                return LeafLoss(loss.loss_sum + (0 * weight.sum()).sqrt(), loss.correct, loss.terms)
            return LeafLoss(loss.loss_sum * float(poison.kind), loss.correct, loss.terms)

        return Proxy(inner, load=load, loss_sum=loss_sum)


def watched_step(seen: Observations, inner: Any, by_rank: Mapping[int, Replica]) -> Any:
    """The step `inner`; the state that each update leaves is noted before the next one begins.

    If updates are judged a step later, the next one has been launched by the time the result of this one is known.
    """

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(batch: GlobalBatch, *args: Any, **named: Any) -> Any:
            seen.at = batch.step
            result = method(batch, *args, **named)
            note_state(seen, batch.step, by_rank)
            return result

        return call

    return Proxy(inner, call=watched(inner), launch=watched(inner.launch))


def watch_gradient(seen: Observations, rank: int, replica: Replica, *, values: bool) -> None:
    """Note a replica's reduced gradient as it was set, and of rank 0 its `values`. Call it after faults are planted."""
    inner = replica.set_gradient

    def set_gradient(pieces: Sequence[torch.Tensor], divisor: int) -> None:
        inner(pieces, divisor)
        held = replica.reduced_gradient()
        seen.of(rank, seen.at).gradient = digest(held)
        if rank == 0 and values:
            seen.values[seen.at] = Values(copied(held), {})

    replica.set_gradient = set_gradient  # type: ignore[method-assign]


def note_start(seen: Observations, rank: int, model: nn.Module) -> None:
    """Note the order of a rank's weights in memory, and digests of its tensors before the first update."""
    named = trainable_parameters(model)
    # By address, which is the order of the flat buffer whatever its owner says.
    in_flat_order = sorted(named.items(), key=lambda item: item[1].data_ptr())
    seen.layouts[rank] = tuple((name, tuple(p.shape), str(p.dtype)) for name, p in in_flat_order)
    seen.start[rank] = digest(named)
    seen.frozen[rank] = (digest(_frozen(model)), "")


def note_state(seen: Observations, step: int, by_rank: Mapping[int, Replica]) -> None:
    """Note the state of every replica after update `step`, and rank 0's weights if its gradient was copied."""
    for rank, replica in by_rank.items():
        update = seen.of(rank, step)
        update.weights, update.optimizer = _state_digests(replica)
    if step in seen.values:
        seen.values[step] = replace(seen.values[step], weights=copied(by_rank[0].parameters.weight_views()))


def note_result(seen: Observations, batch: GlobalBatch, count: int, *reals: float) -> None:
    """Note what the trainer reported of an update; `reals` are rate, loss and gradient norm."""
    seen.reported.append(Reported(batch.step, batch.epoch, batch.ids, count, *reals))


def note_end(seen: Observations, by_rank: Mapping[int, Replica]) -> None:
    """Note the state at the end, and forget the state after an update whose result was never read."""
    for rank, replica in by_rank.items():
        seen.final[rank] = _state_digests(replica)
        seen.frozen[rank] = (seen.frozen[rank][0], digest(_frozen(replica.model)))
    done = {reported.step for reported in seen.reported}
    for (_, step), update in seen.steps.items():
        if step not in done:
            update.weights = update.optimizer = ""
    for step in seen.values.keys() - done:
        seen.values[step] = replace(seen.values[step], weights={})


def _state_digests(replica: Replica) -> tuple[str, str]:
    state = {name: value.reshape(-1) for name, value in replica.optimizer_state().items()}
    state["updates"] = torch.tensor([replica.updates])
    return digest(trainable_parameters(replica.model)), digest(state)


def _frozen(model: nn.Module) -> dict[str, torch.Tensor]:
    frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    return frozen | dict(model.named_buffers())
