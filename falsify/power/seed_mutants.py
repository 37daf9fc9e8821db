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
from andon.step.micro_batch import LeafLoss
from andon.step.plan import GlobalBatch
from andon.step.replica import PartialGradient, Replica
from andon.step.step import StepResult
from andon_falsify.compliance.cases import ADAMW, PLAIN, SGD
from andon_falsify.subjects.assembly import Parts
from andon_falsify.subjects.case import Poison

from .planting import (
    Changed,
    Fault,
    Plant,
    after_updates,
    around,
    around_each,
    around_updates,
    current_batch,
    local_sum,
    of_function,
    on_replicas,
    patched,
    rows_of,
    scaled_partials,
    unsynced,
    with_result,
)

_UNSYNCED = "step 1, rank 1: the gradient differs"


# what the seed's own tests missed


def _returns_zeros(coordinator: DataParallelCoordinator, _: ExitStack) -> None:
    def train(inner: Callable[..., BatchResult], samples: Any) -> BatchResult:
        inner(samples)
        return BatchResult(0.0, 0, 0, 0.0)

    around(coordinator, "train_batch_parallel", train)


def _mean_of_means(result: StepResult) -> StepResult:
    sums: dict[int, list[float]] = {}
    for leaf in result.leaves:
        held = sums.setdefault(leaf.rank, [0.0, 0.0])
        held[0] += leaf.loss_sum
        held[1] += leaf.rows
    means = [loss / rows for loss, rows in sums.values() if rows]
    return replace(result, loss=sum(means) / len(means))


class _Overlapping(GlobalBatch):
    """Every micro-batch but the last also has the first row of the next."""

    def micro_batches(self, count: int) -> tuple[tuple[int, ...], ...]:
        parts = super().micro_batches(count)
        return tuple(part + following[:1] for part, following in zip(parts, (*parts[1:], ()), strict=True))


def _overlapping(parts: Parts, _: ExitStack) -> None:
    inner = parts.plan.batch

    def batch(step: int) -> GlobalBatch:
        right = inner(step)
        return _Overlapping(right.step, right.epoch, right.position, right.ids)

    parts.plan = Changed(parts.plan, batch=batch)  # type: ignore[assignment]


def _idle(first: int, falls_back: Callable[[int, int], bool] = lambda rows, world: rows < world) -> Plant:
    """On the batches where falls_back(rows, world), the ranks from `first` on take no update."""

    def plant(parts: Parts, stack: ExitStack) -> None:
        batch = current_batch(parts)

        def apply(inner: Callable[[], None]) -> None:
            if not falls_back(len(batch().ids), parts.backend.world_size):
                inner()

        around_each("apply", apply, first)(parts, stack)

    return plant


def _primary_is_last(_: None, stack: ExitStack) -> None:
    def last(self: DataParallelCoordinator) -> ClassifyPipeline:
        return self.pipelines[-1]

    patched(stack, DataParallelCoordinator, "primary_pipeline", property(last))


MISSED = (
    Fault("train_batch_parallel returns zeros", "losses-close", "step 1: .* at 3 of 3 updates; .*seen 0; ratio 0",
          _returns_zeros, PLAIN, "coordinator"),
    Fault("no sync", "replicas-agree", _UNSYNCED, unsynced(), SGD),
    Fault("loss is a mean of shard means", "losses-close",
          r"step 1: .* at 2 of 3 updates; .*seen 1\.072", with_result(_mean_of_means), SGD),
    Fault("last shard not trained", "gradient-law",
          r"step 1: 8 of 15 tensors .*score\.weight 0\.57",
          on_replicas(lambda replica: scaled_partials(replica, lambda partial: 0.0), first=SGD.world - 1), SGD),
    Fault("shards overlap", "samples-once", "step 1: rows used more than once, by ranks 0, 1; .*rows 0 .* 6 .* 7 ",
          _overlapping, PLAIN),
    Fault("bias not synced", "replicas-agree",
          _UNSYNCED, unsynced(lambda name: name.endswith("bias")), SGD.but(architecture="encoder")),
    Fault("only the first replica synced", "replicas-agree", "step 1, rank 2: the gradient differs",
          unsynced(first=2), SGD.but(world=3)),
    # 11 rows in batches of 3: the last batch has as many rows as there are replicas.
    Fault("fallback at n = replicas", "replicas-agree", "step 4, rank 1: the optimizer differs",
          _idle(1, lambda rows, world: rows <= world), SGD.but(batch_size=3)),
    Fault("fallback trains nothing", "update-law", r"step 3: .* of length (\S+), seen a step that ends \1 away",
          _idle(0), SGD),
    Fault("primary is the last replica", "coordinator-face", "primary of 3 replicas: .*expected 0, seen 2",
          _primary_is_last, kind="functions"),
    Fault("replicas with tenfold rate", "replicas-agree", "step 1, rank 1: the weights differ",
          around_each("set_rate", lambda inner, rate: inner(10 * rate), first=1), SGD),
    Fault("grad_norm is always 0", "norm-law", r"step 1: the reported norm .*seen 0; ratio 0\.000",
          with_result(lambda result: replace(result, grad_norm=0.0)), SGD),
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


def _an_ulp_off(replica: Replica) -> None:
    def set_gradient(inner: Any, pieces: Any, divisor: int) -> None:
        inner(pieces, divisor)
        replica.master.gradient.view(torch.int32)[replica.master.gradient.abs().argmax()] ^= 1

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
    Fault("LoRA B not synced", "replicas-agree", _UNSYNCED, unsynced(lambda name: "lora_B" in name), SGD),
    Fault("head weight not synced", "replicas-agree",
          _UNSYNCED, unsynced(lambda name: "modules_to_save" in name), SGD),
    Fault("sync off by an ulp", "replicas-agree", _UNSYNCED, on_replicas(_an_ulp_off, first=1), SGD),
    of_function("empty list of devices accepted", "coordinator-face", r"no devices: .*seen \(device\(type='cpu'\),\)",
                resolve_devices, _accepts_no_devices),
)  # fmt: skip


# what a suite of data parallelism must add


def _unweighted(parts: Parts, _: ExitStack) -> None:
    batch, world = current_batch(parts), parts.backend.world_size
    for replica in parts.replicas:
        scaled_partials(replica, lambda partial: len(batch().ids) / (world * max(rows_of(partial), 1)))


def _clipped_by_shard(replica: Replica) -> None:
    def factor(partial: PartialGradient) -> float:
        norm = float(local_sum(replica, partial).norm()) / max(rows_of(partial), 1)
        return min(1.0, _LIMIT / (norm + 1e-6))

    scaled_partials(replica, factor)


def _nan_masked(parts: Parts, _: ExitStack) -> None:
    def loss_sum(inner: Callable[..., LeafLoss], model: nn.Module, batch: Any) -> LeafLoss:
        loss = inner(model, batch)
        if torch.isfinite(loss.loss_sum):
            return loss
        nothing = sum((p.sum() * 0.0 for p in model.parameters() if p.requires_grad), torch.zeros(()))
        return replace(loss, loss_sum=nothing)

    around(parts.task, "loss_sum", loss_sum)


def _shard_ignored(parts: Parts, stack: ExitStack) -> None:
    batch = current_batch(parts)

    def gradients(inner: Callable[..., PartialGradient], step: int, leaves: Any, *args: Any, **named: Any) -> Any:
        first = batch().micro_batches(parts.case.micro_batches)
        other = [replace(leaf, ids=first[place]) for place, leaf in enumerate(leaves)]
        return inner(step, other, *args, **named)

    around_each("gradients", gradients, first=1)(parts, stack)


def _detached(replica: Replica) -> None:
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


_LIMIT = 0.2
_POISONED = SGD.but(poison=Poison(2, 3, "nan"))
ADDED = (
    Fault("unweighted mean of uneven shards", "gradient-law",
          r"step 3: .*ratio 0\.500 = 1 / world 2", _unweighted, SGD),
    Fault("clipped by shard", "gradient-law", r"step 1: 8 of 15 tensors .*score\.weight 0\.90",
          on_replicas(_clipped_by_shard), SGD.but(clip_norm=_LIMIT)),
    Fault("NaN masked", "halt-together", "step 2: a planted fault left no violation", _nan_masked, _POISONED),
    Fault("moments not synced", "replicas-agree", "step 1, rank 1: the optimizer differs",
          after_updates(lambda own: own.optimizer_state()["exp_avg"].mul_(1.5), first=1), ADAMW),
    Fault("stale fallback", "replicas-agree", "step 3, rank 1: the optimizer differs", _idle(1), SGD),
    Fault("double step", "update-law", r"step 1: .* of length (\S+), seen a step that ends \1 away",
          around_each("apply", lambda inner: (inner(), inner())), SGD),
    Fault("sum instead of mean", "gradient-law", r"step 1: .*ratio 5\.000 = batch 5",
          around_each("set_gradient", lambda inner, pieces, divisor: inner(pieces, 1)), SGD),
    Fault("rank ignores its shard", "samples-once",
          "step 1: rows used more than once, by ranks 0, 1; .*rows 0 .* 2 .* 3 ",
          _shard_ignored, PLAIN),
    Fault("LoRA detached from the graph", "gradient-law", "step 1: 7 of 15 tensors .*lora_B",
          on_replicas(_detached), SGD),
    Fault("loss computed after the step", "losses-close",
          r"step 1: .* at 3 of 3 updates; .*seen 0\.97", _loss_after_step, PLAIN),
    of_function("fp32 overflow in the average", "average-law", r"\[\[3e\+38\], \[3e\+38\]\]: .*seen \[inf\]",
                average_gradients, _sum_in_fp32),
)  # fmt: skip
