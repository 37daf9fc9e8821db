"""Mutants of the seed (seed 5.1): twelve that its own 25 tests missed, twelve that they caught, and eleven to add.

A suite of data parallelism must see them all. Most of those that were caught are in the seed's free functions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from andon.coordinator import DataParallelCoordinator, resolve_devices
from andon.gradients import average_gradients, has_non_finite, shard_samples
from andon.pipeline import BatchResult, ClassifyPipeline
from andon.step.plan import GlobalBatch
from andon.step.replica import PartialGradient
from andon.step.step import StepResult
from andon.step.task import LeafLoss
from andon_falsify.compliance.cases import ADAMW, PLAIN, SGD
from andon_falsify.subjects.assembly import Parts
from andon_falsify.subjects.case import Poison

from .planting import (
    Fault,
    Plant,
    after_updates,
    around,
    around_updates,
    current_batch,
    followers,
    local_sum,
    of_function,
    patched,
    rows_of,
    scaled_partials,
    unsynced,
    with_plan,
    with_result,
)

_UNSYNCED = "step 1, rank 1: the gradient differs"


# what the seed's own tests missed


def _unsynced(keeps: Callable[[str], bool] = lambda name: True, first: int = 1) -> Plant:
    """The ranks from `first` on keep their own gradient of the tensors whose names `keeps` accepts."""

    def plant(parts: Parts, _: ExitStack) -> None:
        for rank, replica in followers(parts).items():
            if rank >= first:
                unsynced(replica, keeps)

    return plant


def _returns_zeros(coordinator: DataParallelCoordinator, _: ExitStack) -> None:
    def train(inner: Callable[..., BatchResult], samples: Any) -> BatchResult:
        inner(samples)
        return BatchResult(0.0, 0, 0, 0.0)

    around(coordinator, "train_batch_parallel", train)


def _mean_of_means(parts: Parts, _: ExitStack) -> None:
    def change(result: StepResult) -> StepResult:
        sums: dict[int, list[float]] = {}
        for leaf in result.leaves:
            held = sums.setdefault(leaf.rank, [0.0, 0.0])
            held[0] += leaf.loss_sum
            held[1] += leaf.rows
        means = [loss / rows for loss, rows in sums.values() if rows]
        return replace(result, loss=sum(means) / len(means))

    with_result(parts, change)


def _last_shard_untrained(parts: Parts, _: ExitStack) -> None:
    last = parts.by_rank.get(parts.backend.world_size - 1)
    if last is not None:
        scaled_partials(last, lambda partial: 0.0)


class _Overlapping(GlobalBatch):
    """Every micro-batch but the last also has the first row of the next."""

    def micro_batches(self, count: int) -> tuple[tuple[int, ...], ...]:
        """See the class."""
        parts = super().micro_batches(count)
        return tuple(part + following[:1] for part, following in zip(parts, (*parts[1:], ()), strict=True))


def _overlapping(parts: Parts, _: ExitStack) -> None:
    with_plan(parts, lambda batch: _Overlapping(batch.step, batch.epoch, batch.position, batch.ids))


def _idle(parts: Parts, ranks: Callable[[int], bool], falls_back: Callable[[int, int], bool]) -> None:
    """On the batches where falls_back(rows, world), the replicas of `ranks` take no update."""
    batch = current_batch(parts)

    def apply(inner: Callable[[], None]) -> None:
        if not falls_back(len(batch().ids), parts.backend.world_size):
            inner()

    for rank, replica in parts.by_rank.items():
        if ranks(rank):
            around(replica, "apply", apply)


def _fallback_at_equality(parts: Parts, _: ExitStack) -> None:
    _idle(parts, lambda rank: rank > 0, lambda rows, world: rows <= world)


def _fallback_trains_nothing(parts: Parts, _: ExitStack) -> None:
    _idle(parts, lambda rank: True, lambda rows, world: rows < world)


def _primary_is_last(_: None, stack: ExitStack) -> None:
    def last(self: DataParallelCoordinator) -> ClassifyPipeline:
        return self.pipelines[-1]

    patched(stack, DataParallelCoordinator, "primary_pipeline", property(last))


def _tenfold_rate(parts: Parts, _: ExitStack) -> None:
    for replica in followers(parts).values():
        around(replica, "set_rate", lambda inner, rate: inner(10 * rate))


def _no_norm(parts: Parts, _: ExitStack) -> None:
    with_result(parts, lambda result: replace(result, grad_norm=0.0))


MISSED = (
    Fault("train_batch_parallel returns zeros", "losses-close", "step 1: .* at 3 of 3 updates; .*seen 0; ratio 0",
          _returns_zeros, PLAIN, "coordinator"),
    Fault("no sync", "replicas-agree", _UNSYNCED, _unsynced(), SGD),
    Fault("loss is a mean of shard means", "losses-close",
          r"step 1: .* at 2 of 3 updates; .*seen 1\.072", _mean_of_means, SGD),
    Fault("last shard not trained", "gradient-law",
          r"step 1: 8 of 15 tensors .*score\.weight 0\.57", _last_shard_untrained, SGD),
    Fault("shards overlap", "samples-once", "step 1: rows used more than once, by ranks 0, 1; .*rows 0 .* 6 .* 7 ",
          _overlapping, PLAIN),
    Fault("bias not synced", "replicas-agree",
          _UNSYNCED, _unsynced(lambda name: name.endswith("bias")), SGD.but(architecture="encoder")),
    Fault("only the first replica synced", "replicas-agree", "step 1, rank 2: the gradient differs",
          _unsynced(first=2), SGD.but(world=3)),
    # 11 rows in batches of 3: the last batch has as many rows as there are replicas.
    Fault("fallback at n = replicas", "replicas-agree", "step 4, rank 1: the optimizer differs",
          _fallback_at_equality, SGD.but(batch_size=3)),
    Fault("fallback trains nothing", "update-law", r"step 3: .* of length (\S+), seen a step that ends \1 away",
          _fallback_trains_nothing, SGD),
    Fault("primary is the last replica", "coordinator-face", "primary of 3 replicas: .*expected 0, seen 2",
          _primary_is_last, kind="functions"),
    Fault("replicas with tenfold rate", "replicas-agree", "step 1, rank 1: the weights differ", _tenfold_rate, SGD),
    Fault("grad_norm is always 0", "norm-law", r"step 1: the reported norm .*seen 0; ratio 0\.000", _no_norm, SGD),
)  # fmt: skip


# what they caught: bodies run in the place, and with the globals, of the function that they replace


def _sum(grads: Any) -> Any:
    return [sum(values) for values in zip(*grads, strict=True)]


def _nan_to_zero(grads: Any) -> Any:
    return [sum(0.0 if v != v else v for v in values) / len(grads) for values in zip(*grads, strict=True)]


def _inf_skipped(grads: Any) -> Any:
    finite = [[v for v in values if abs(v) != float("inf")] for values in zip(*grads, strict=True)]
    return [sum(values) / max(1, len(values)) for values in finite]


def _first_worker_only(grads: Any) -> Any:
    return [values[0] / len(grads) for values in zip(*grads, strict=True)]


def _sees_no_inf(values: Any) -> bool:
    return any(float(value) != float(value) for value in values)


def _sees_only_the_first(values: Any) -> bool:
    return any(not abs(float(value)) < float("inf") for value in values[:1])


def _remainder_dropped(samples: Any, num_workers: int) -> Any:
    size = len(samples) // num_workers
    return [list(samples[at * size : (at + 1) * size]) for at in range(num_workers)]


def _reversed(samples: Any, num_workers: int) -> Any:
    size = len(samples) // num_workers
    shards = [list(samples[at * size : (at + 1) * size]) for at in range(num_workers - 1)]
    return [*shards, list(samples[(num_workers - 1) * size :])][::-1]


def _accepts_no_devices(devices: Any, *, cpu_fallback: bool = False) -> Any:
    return tuple(torch.device("cpu") for _ in devices or ["cpu"])


def _an_ulp_off(parts: Parts, _: ExitStack) -> None:
    for replica in followers(parts).values():

        def set_gradient(inner: Any, pieces: Any, divisor: int, own: Any = replica) -> None:
            inner(pieces, divisor)
            own.master.gradient.view(torch.int32)[own.master.gradient.abs().argmax()] ^= 1

        around(replica, "set_gradient", set_gradient)


CAUGHT = (
    of_function("average without division", "average-law", r"\[\[1\.0, 2\.0\], \[3\.0, 6\.0\]\]: .*seen \[4\.0, 8\.0\]",
                average_gradients, _sum),
    of_function("NaN averaged as 0", "average-law", r"\[\[nan, 2\.0, 3\.0\], .*seen \[0\.666\d+, 2\.0, 3\.0\]",
                average_gradients, _nan_to_zero),
    of_function("Inf skipped in the average", "average-law", r"\[\[inf, 2\.0, 3\.0\], .*seen \[1\.0, 2\.0, 3\.0\]",
                average_gradients, _inf_skipped),
    of_function("only worker 0 averaged", "average-law", r"\[\[1\.0, 2\.0\], \[3\.0, 6\.0\]\]: .*seen \[0\.5, 1\.0\]",
                average_gradients, _first_worker_only),
    of_function("has_non_finite ignores Inf", "non-finite-seen",
                r"search \[inf\]: .*seen False", has_non_finite, _sees_no_inf),
    of_function("only the first element", "non-finite-seen", r"search \[1\.0, nan, 1\.0, 1\.0, 1\.0\]: .*seen False",
                has_non_finite, _sees_only_the_first),
    of_function("remainder dropped", "shards-law",
                r"10 samples for 3: .*seen .*\[6, 7, 8\]\]", shard_samples, _remainder_dropped),
    of_function("shard order reversed", "shards-law",
                r"10 samples for 3: .*seen \[\[6, 7, 8, 9\]", shard_samples, _reversed),
    Fault("LoRA B not synced", "replicas-agree", _UNSYNCED, _unsynced(lambda name: "lora_B" in name), SGD),
    Fault("head weight not synced", "replicas-agree",
          _UNSYNCED, _unsynced(lambda name: "modules_to_save" in name), SGD),
    Fault("sync off by an ulp", "replicas-agree", _UNSYNCED, _an_ulp_off, SGD),
    of_function("empty list of devices accepted", "coordinator-face", r"no devices: .*seen \(device\(type='cpu'\),\)",
                resolve_devices, _accepts_no_devices),
)  # fmt: skip


# what a suite of data parallelism must add


def _unweighted(parts: Parts, _: ExitStack) -> None:
    batch = current_batch(parts)

    def factor(partial: PartialGradient) -> float:
        return len(batch().ids) / (parts.backend.world_size * max(rows_of(partial), 1))

    for replica in parts.replicas:
        scaled_partials(replica, factor)


def _clipped_by_shard(parts: Parts, _: ExitStack) -> None:
    limit = parts.case.clip_norm
    assert limit is not None
    for replica in parts.replicas:

        def factor(partial: PartialGradient, own: Any = replica) -> float:
            norm = float(local_sum(own, partial).norm()) / max(rows_of(partial), 1)
            return min(1.0, limit / (norm + 1e-6))

        scaled_partials(replica, factor)


def _nan_masked(parts: Parts, _: ExitStack) -> None:
    def loss_sum(inner: Callable[..., LeafLoss], model: nn.Module, batch: Any) -> LeafLoss:
        loss = inner(model, batch)
        if torch.isfinite(loss.loss_sum):
            return loss
        nothing = sum((p.sum() * 0.0 for p in model.parameters() if p.requires_grad), torch.zeros(()))
        return replace(loss, loss_sum=nothing)

    around(parts.task, "loss_sum", loss_sum)


def _own_moments(parts: Parts, _: ExitStack) -> None:
    after_updates(followers(parts).values(), lambda own: own.optimizer_state()["exp_avg"].mul_(1.5))


def _stale_fallback(parts: Parts, _: ExitStack) -> None:
    _idle(parts, lambda rank: rank > 0, lambda rows, world: rows < world)


def _double_step(parts: Parts, _: ExitStack) -> None:
    def apply(inner: Callable[[], None]) -> None:
        inner()
        inner()

    for replica in parts.replicas:
        around(replica, "apply", apply)


def _sum_not_mean(parts: Parts, _: ExitStack) -> None:
    for replica in parts.replicas:
        around(replica, "set_gradient", lambda inner, pieces, divisor: inner(pieces, 1))


def _shard_ignored(parts: Parts, _: ExitStack) -> None:
    batch = current_batch(parts)

    def gradients(inner: Callable[..., PartialGradient], step: int, leaves: Any, *args: Any, **named: Any) -> Any:
        first = batch().micro_batches(parts.case.micro_batches)
        other = [replace(leaf, ids=first[place]) for place, leaf in enumerate(leaves)]
        return inner(step, other, *args, **named)

    for replica in followers(parts).values():
        around(replica, "gradients", gradients)


def _detached(parts: Parts, _: ExitStack) -> None:
    for replica in parts.replicas:
        for name, module in replica.model.named_modules():
            if name.endswith("lora_B.default"):
                module.register_forward_hook(lambda module, given, output: output.detach())


def _loss_after_step(parts: Parts, _: ExitStack) -> None:
    def change(batch: GlobalBatch, result: StepResult) -> StepResult:
        task, model = parts.task.inner, parts.replicas[0].model
        with torch.no_grad():
            loss = task.loss_sum(model, task.load(batch.ids, parts.replicas[0].device)).loss_sum
        return replace(result, loss=float(loss) / len(batch.ids))

    around_updates(parts, lambda batch: None, change)


def _sum_in_fp32(grads: Any) -> Any:
    total = torch.tensor(grads[0], dtype=torch.float32)
    for gradient in grads[1:]:
        total = total + torch.tensor(gradient, dtype=torch.float32)
    return (total / len(grads)).tolist()


_POISONED = SGD.but(poison=Poison(2, 3, "nan"))
ADDED = (
    Fault("unweighted mean of uneven shards", "gradient-law",
          r"step 3: .*ratio 0\.500 = 1 / world 2", _unweighted, SGD),
    Fault("clipped by shard", "gradient-law", r"step 1: 8 of 15 tensors .*score\.weight 0\.90",
          _clipped_by_shard, SGD.but(clip_norm=0.2)),
    Fault("NaN masked", "halt-together", "step 2: a planted fault left no violation", _nan_masked, _POISONED),
    Fault("moments not synced", "replicas-agree", "step 1, rank 1: the optimizer differs", _own_moments, ADAMW),
    Fault("stale fallback", "replicas-agree", "step 3, rank 1: the optimizer differs", _stale_fallback, SGD),
    Fault("double step", "update-law", r"step 1: .* of length (\S+), seen a step that ends \1 away", _double_step, SGD),
    Fault("sum instead of mean", "gradient-law", r"step 1: .*ratio 5\.000 = batch 5", _sum_not_mean, SGD),
    Fault("rank ignores its shard", "samples-once",
          "step 1: rows used more than once, by ranks 0, 1; .*rows 0 .* 2 .* 3 ",
          _shard_ignored, PLAIN),
    Fault("LoRA detached from the graph", "gradient-law", "step 1: 7 of 15 tensors .*lora_B", _detached, SGD),
    Fault("loss computed after the step", "losses-close",
          r"step 1: .* at 3 of 3 updates; .*seen 0\.97", _loss_after_step, PLAIN),
    of_function("fp32 overflow in the average", "average-law", r"\[\[3e\+38\], \[3e\+38\]\]: .*seen \[inf\]",
                average_gradients, _sum_in_fp32),
)  # fmt: skip
