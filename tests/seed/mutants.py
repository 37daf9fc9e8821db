"""Faults planted in the coordinator and the free functions: those that the seed's tests let live, and more."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from andon.coordinator import DataParallelCoordinator
from andon.gradients import average_gradients
from andon.pipeline import NOTHING, BatchResult, ClassifyPipeline, SafetySample
from andon.step.shard import shard_samples
from andon_contracts.policy import suspended

Samples = Sequence[SafetySample]


def nothing(*_: Any) -> None:
    """Takes the place of something that should happen."""


class ReturnsZeros(DataParallelCoordinator):
    """train_batch_parallel does nothing."""

    def train_batch_parallel(self, samples: Samples) -> BatchResult:
        """See the class."""
        return NOTHING


class LastShardUntrained(DataParallelCoordinator):
    """The last replica's samples are left out."""

    def train_batch_parallel(self, samples: Samples) -> BatchResult:
        """See the class."""
        return super().train_batch_parallel(samples[: len(samples) - len(samples) // self.num_gpus])


class MeanOfMeans(DataParallelCoordinator):
    """The loss is the plain mean of the replicas' means."""

    def train_batch_parallel(self, samples: Samples) -> BatchResult:
        """See the class."""
        result = super().train_batch_parallel(samples)
        assert self.last_step is not None
        leaves = self.last_step.leaves
        means = [
            math.fsum(leaf.loss_sum for leaf in leaves if leaf.rank == rank)
            / sum(leaf.rows for leaf in leaves if leaf.rank == rank)
            for rank in range(self.num_gpus)
        ]
        return replace(result, avg_loss=math.fsum(means) / len(means))


class NormIsZero(DataParallelCoordinator):
    """grad_norm is always 0."""

    def train_batch_parallel(self, samples: Samples) -> BatchResult:
        """See the class."""
        return replace(super().train_batch_parallel(samples), grad_norm=0.0)


class LossAfterTheStep(DataParallelCoordinator):
    """The loss is that of the weights behind the update."""

    def train_batch_parallel(self, samples: Samples) -> BatchResult:
        """See the class."""
        result = super().train_batch_parallel(samples)
        losses = [self.primary_pipeline.forward_only(each.input_ids(), each.label)[0] for each in samples]
        return replace(result, avg_loss=math.fsum(losses) / len(losses))


class Fallback(DataParallelCoordinator):
    """Few samples go to the primary alone; at equality too."""

    def train_batch_parallel(self, samples: Samples) -> BatchResult:
        """See the class."""
        if len(samples) <= self.num_gpus:
            return self.primary_pipeline.train_batch(samples)
        return super().train_batch_parallel(samples)


class FallbackTrainsNothing(DataParallelCoordinator):
    """Few samples are counted and not trained on."""

    def train_batch_parallel(self, samples: Samples) -> BatchResult:
        """See the class."""
        if len(samples) < self.num_gpus:
            return BatchResult(0.0, 0, len(samples), 0.0)
        return super().train_batch_parallel(samples)


class PrimaryIsLast(DataParallelCoordinator):
    """The primary is the last replica."""

    @property
    def primary_pipeline(self) -> ClassifyPipeline:
        """See the class."""
        return self.pipelines[-1]


class DoubleStep(DataParallelCoordinator):
    """Every batch is trained on twice."""

    def train_batch_parallel(self, samples: Samples) -> BatchResult:
        """See the class."""
        super().train_batch_parallel(samples)
        return super().train_batch_parallel(samples)


class NanMasked(DataParallelCoordinator):
    """What is not finite becomes zero on its way out of every layer."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        for pipeline in self.pipelines:
            base: Any = pipeline.model.get_base_model()  # type: ignore[operator]
            base.get_input_embeddings().register_forward_hook(_without_nan)


def _without_nan(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    return output.nan_to_num()


def patched(change: Callable[[DataParallelCoordinator], None]) -> type[DataParallelCoordinator]:
    """A coordinator that is changed once it is made."""

    class Patched(DataParallelCoordinator):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            change(self)

    return Patched


def only_first_replica_updated(coordinator: DataParallelCoordinator) -> None:
    """No update on replica 2 and beyond."""
    for pipeline in coordinator.pipelines[2:]:
        pipeline.replica.apply = nothing  # type: ignore[method-assign]


def no_replica_updated(coordinator: DataParallelCoordinator) -> None:
    """The update is the primary's alone."""
    for pipeline in coordinator.pipelines[1:]:
        pipeline.replica.apply = nothing  # type: ignore[method-assign]


def tenfold_rate(coordinator: DataParallelCoordinator) -> None:
    """Replicas behind the primary learn ten times as fast."""
    for pipeline in coordinator.pipelines[1:]:
        replica, apply = pipeline.replica, pipeline.replica.apply

        def fast(replica: Any = replica, apply: Callable[[], None] = apply) -> None:
            replica.set_rate(10 * replica.rate)
            apply()

        replica.apply = fast  # type: ignore[method-assign]


def tensor_kept(part: str) -> Callable[[DataParallelCoordinator], None]:
    """On replicas behind the primary the update skips the tensors whose name holds `part`."""

    def change(coordinator: DataParallelCoordinator) -> None:
        for pipeline in coordinator.pipelines[1:]:
            pipeline.replica.apply = _skipping(pipeline, part)  # type: ignore[method-assign]

    return change


def _skipping(pipeline: ClassifyPipeline, part: str) -> Callable[[], None]:
    apply, views = pipeline.replica.apply, pipeline.replica.parameters.weight_views()

    def skipping() -> None:
        kept = {name: view.clone() for name, view in views.items() if part in name}
        apply()
        for name, view in kept.items():
            views[name].copy_(view)

    return skipping


def off_by_an_ulp(coordinator: DataParallelCoordinator) -> None:
    """One weight of the last replica is off in its last digit after each update."""
    replica = coordinator.pipelines[-1].replica
    apply, weights = replica.apply, replica.parameters.weights.data

    def off() -> None:
        apply()
        weights[:1] = torch.nextafter(weights[:1], weights[:1] + 1)

    replica.apply = off  # type: ignore[method-assign]


def moments_of_their_own(coordinator: DataParallelCoordinator) -> None:
    """The last replica's first moments are forgotten after each update, its weights are right."""
    replica = coordinator.pipelines[-1].replica
    apply = replica.apply

    def forgetting() -> None:
        apply()
        replica.optimizer_state()["exp_avg"].zero_()

    replica.apply = forgetting  # type: ignore[method-assign]


def gradient_scaled(factor: Callable[[int, int], float]) -> Callable[[DataParallelCoordinator], None]:
    """The reduced gradient of every replica is multiplied by factor(rows, replicas) alike."""

    def change(coordinator: DataParallelCoordinator) -> None:
        for pipeline in coordinator.pipelines:
            replica, set_gradient = pipeline.replica, pipeline.replica.set_gradient

            def scaled(
                pieces: Sequence[torch.Tensor], rows: int, replica: Any = replica, set_gradient: Any = set_gradient
            ) -> None:
                set_gradient(pieces, rows)
                replica.parameters.gradient.mul_(factor(rows, coordinator.num_gpus))

            replica.set_gradient = scaled  # type: ignore[method-assign, assignment]

    return change


def sum_instead_of_mean(rows: int, _: int) -> float:
    """Not divided by the rows."""
    return float(rows)


def mean_over_replicas_too(_: int, replicas: int) -> float:
    """Divided by the replicas once more."""
    return 1.0 / replicas


class ClippedByShard(DataParallelCoordinator):
    """Each replica's part is clipped before the reduction."""

    def train_batch_parallel(self, samples: Samples) -> BatchResult:
        """See the class."""
        limit = self.config.gradient_clip_norm
        size = -(-len(samples) // self.num_gpus)
        parts = [samples[start : start + size] for start in range(0, len(samples), size)]
        total, norms, losses = torch.zeros(self.primary_pipeline.num_trainable_parameters), [], []
        for pipeline, part in zip(self.pipelines, parts, strict=False):
            losses.append(pipeline.accumulate_gradients(part).avg_loss * len(part))
            gradient = pipeline.collect_lora_gradients() / len(samples)
            pipeline.zero_gradients()
            norms.append(float(gradient.norm()))
            total += gradient if limit is None else gradient * min(1.0, limit / norms[-1])
        for pipeline in self.pipelines:
            pipeline.apply_lora_gradients(total)
        return BatchResult(math.fsum(losses) / len(samples), 0, len(samples), max(norms))


class UnweightedMean(DataParallelCoordinator):
    """The means of uneven shards are averaged alike, by the function that the seed provides for it."""

    def train_batch_parallel(self, samples: Samples) -> BatchResult:
        """See the class."""
        results, gradients = [], []
        for pipeline, part in zip(self.pipelines, shard_samples(samples, self.num_gpus), strict=True):
            results.append(pipeline.accumulate_gradients(part))
            gradients.append(pipeline.collect_lora_gradients() / max(len(part), 1))
            pipeline.zero_gradients()
        mean = average_gradients(gradients)
        norms = [pipeline.apply_lora_gradients(mean) for pipeline in self.pipelines]
        loss = math.fsum(each.avg_loss * each.total for each in results) / len(samples)
        return BatchResult(loss, 0, len(samples), norms[0])


class ShardIgnored(DataParallelCoordinator):
    """Every replica computes micro-batch 0 in place of its own, and nobody judges."""

    def train_batch_parallel(self, samples: Samples) -> BatchResult:
        """See the class."""
        size = len(samples) // self.num_gpus
        with suspended():
            return super().train_batch_parallel([*samples[:size]] * self.num_gpus)


def without_judges(change: Callable[[DataParallelCoordinator], None]) -> type[DataParallelCoordinator]:
    """A coordinator that is changed once it is made, and whose contracts are off: only the law can tell."""

    class Unjudged(patched(change)):  # type: ignore[misc]
        def train_batch_parallel(self, samples: Samples) -> BatchResult:
            """See above."""
            with suspended():
                result: BatchResult = super().train_batch_parallel(samples)
                return result

    return Unjudged


# The free functions.


def no_division(grads: Any) -> list[float]:
    """A sum."""
    return [math.fsum(column) for column in zip(*grads, strict=True)]


def nan_to_zero(grads: Any) -> list[float]:
    """NaN counts as 0."""
    return [math.fsum(0.0 if math.isnan(v) else v for v in c) / len(c) for c in zip(*grads, strict=True)]


def inf_skipped(grads: Any) -> list[float]:
    """Inf is left out."""
    return [math.fsum(v for v in c if not math.isinf(v)) / len(c) for c in zip(*grads, strict=True)]


def first_worker_only(grads: Any) -> list[float]:
    """The others do not count."""
    return list(grads[0]) if grads else []


def sum_in_fp32(grads: Any) -> list[float]:
    """Overflows."""
    values: list[float] = torch.tensor(grads, dtype=torch.float32).sum(0).div(len(grads)).tolist()
    return values


def sees_only_nan(values: Any) -> bool:
    """Inf is ignored."""
    return bool(torch.as_tensor(values).isnan().any())


def sees_only_the_first(values: Any) -> bool:
    """One element is looked at."""
    return not math.isfinite(values[0])


def remainder_dropped(samples: Any, num_workers: int) -> list[Any]:
    """All shards are floor(n / N)."""
    size = len(samples) // num_workers
    return [samples[i * size : (i + 1) * size] for i in range(num_workers)]


def shards_reversed(samples: Any, num_workers: int) -> list[Any]:
    """The order of the shards is turned round."""
    return shard_samples(samples, num_workers)[::-1]


class NoDevicesAccepted(DataParallelCoordinator):
    """An empty list of devices is one CPU."""

    def __init__(
        self, model_config: Any, classify_config: Any, devices: Sequence[Any], *rest: Any, **named: Any
    ) -> None:
        super().__init__(model_config, classify_config, devices or ["cpu"], *rest, **named)
