"""What the seed does, on Andon's parts: each of its violations as a small change, for the tests to catch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from andon.console.problems import InputError
from andon.coordinator import DataParallelCoordinator
from andon.model.batches import predictions
from andon.pipeline import BatchResult, ClassifyConfig, ClassifyPipeline, SafetySample
from andon_contracts.policy import suspended
from tests.seed.subject import Subject


class Panicked(RuntimeError):
    """Where the seed's process panics."""


class SeedCoordinator(DataParallelCoordinator):
    """Trains each replica alone on its floor shard, then copies the primary's weights over the others (R16 to R25)."""

    def __init__(
        self, model_config: Any, classify_config: Any, devices: Sequence[Any], *rest: Any, **named: Any
    ) -> None:
        """V15: devices are counted and else ignored. V16: what cannot be built panics."""
        if not devices:
            raise InputError("At least one GPU index required")
        try:
            super().__init__(model_config, classify_config, ["cpu"] * len(devices), *rest, **named)
        except InputError as error:
            raise Panicked(str(error)) from error

    def train_batch_parallel(self, samples: Sequence[SafetySample]) -> BatchResult:
        """V1, V3 to V10, V14, V17, V20: see the class."""
        with suspended():
            if self.num_gpus == 1 or len(samples) < self.num_gpus:
                return self.pipelines[0].train_batch(samples)
            results = [p.train_batch(part) for p, part in zip(self.pipelines, self._shards(samples), strict=True)]
            self._sync()
        total = sum(result.total for result in results)
        return BatchResult(
            sum(result.avg_loss * result.total for result in results) / total,
            sum(result.correct for result in results),
            total,
            sum(result.grad_norm for result in results) / len(results),
        )

    def _shards(self, samples: Sequence[SafetySample]) -> list[Sequence[SafetySample]]:
        size, last = len(samples) // self.num_gpus, self.num_gpus - 1
        return [samples[i * size : len(samples) if i == last else (i + 1) * size] for i in range(self.num_gpus)]

    def _sync(self) -> None:
        """V5, V18, V26: weights only; neither moments nor counts nor the base."""
        for pipeline in self.pipelines[1:]:
            pipeline.replica.parameters.weights.data.copy_(self.pipelines[0].replica.parameters.weights.data)


class OverlappingShards(SeedCoordinator):
    """V27: the mutant that the seed's tests of its free function do not notice."""

    def _shards(self, samples: Sequence[SafetySample]) -> list[Sequence[SafetySample]]:
        size = len(samples) // self.num_gpus
        return [samples[i * size : (i + 1) * size + 1] for i in range(self.num_gpus)]


class SeedPipeline(ClassifyPipeline):
    """The head alone learns, NaN becomes a loss of 23.03, and any gradient fits."""

    def __init__(self, *given: Any, **named: Any) -> None:
        """V28: what the head gets has no graph."""
        super().__init__(*given, **named)
        head = next(m for n, m in self.model.named_modules() if n.endswith("modules_to_save.default"))
        head.register_forward_pre_hook(_cut)

    def train_batch(self, samples: Sequence[SafetySample]) -> BatchResult:
        """V30: the first label that is no class panics. V29: what is not finite does not stop it."""
        if any(not 0 <= int(each.label) < self.config.num_classes for each in samples):
            raise Panicked("index out of bounds")
        with suspended():
            return super().train_batch([replace(each, label=int(each.label)) for each in samples])

    def forward_only(self, ids: Sequence[int], label: int) -> tuple[float, int]:
        """V29: -ln(max(p, 1e-10)), where the maximum of NaN and x is x."""
        batch = self._encoder.of_ids([ids], [label]).load([0], self.device)
        probability = float(predictions(self.model, batch).softmax(1)[0, label])
        return -math.log(max(1e-10, probability) if probability == probability else 1e-10), 0

    def apply_lora_gradients(self, flat: torch.Tensor | Sequence[float]) -> float:
        """V31: as much as there is, without a look or a limit."""
        given = torch.zeros(self.num_trainable_parameters)
        values = torch.as_tensor(flat)[: self.num_trainable_parameters]
        given[: values.numel()] = values
        limit, self.config = self.config, replace(self.config, gradient_clip_norm=None)
        try:
            with suspended():
                return super().apply_lora_gradients(given)
        finally:
            self.config = limit


def _cut(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(each.detach() for each in inputs)


class HoardingPipeline(ClassifyPipeline):
    """V23: a second copy of the base, which a formula about the configuration does not see."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.hoard = [2.0 * parameter.detach() for parameter in self.model.parameters()]


class SelfMadeHidden(ClassifyPipeline):
    """V25: hidden states from another forward pass than the one that is trained."""

    def forward_hidden(self, ids: Sequence[int]) -> torch.Tensor:
        """The base alone, without the adapter."""
        with self.model.disable_adapter():  # type: ignore[operator]
            return super().forward_hidden(ids)


@dataclass(frozen=True)
class UncheckedConfig(ClassifyConfig):
    """V16: takes any value."""

    def __post_init__(self) -> None:
        """Nothing is looked at."""


def seed_shards(samples: Sequence[Any], num_workers: int) -> list[Sequence[Any]]:
    """R26 with V13: no workers and no samples both give one shard."""
    if num_workers <= 0 or not samples:
        return [samples]
    size, last = len(samples) // num_workers, num_workers - 1
    return [samples[i * size : len(samples) if i == last else (i + 1) * size] for i in range(num_workers)]


def seed_average(grads: Sequence[Sequence[float]]) -> list[float]:
    """R27 with V11 and V12: fp32, and only as far as both lists go."""
    if not grads:
        return []
    average = torch.zeros(len(grads[0]), dtype=torch.float32)
    for gradient in grads:
        if len(gradient) > len(grads[0]):
            raise Panicked("index out of bounds")
        average[: len(gradient)] += torch.tensor(gradient, dtype=torch.float32)
    values: list[float] = (average / len(grads)).tolist()
    return values


def no_look(pipelines: Sequence[ClassifyPipeline]) -> None:
    """V19, V21: the seed never compares what it starts from."""


SEED = Subject(
    coordinator=SeedCoordinator,
    pipeline=SeedPipeline,
    config=UncheckedConfig,
    shard_samples=seed_shards,
    average_gradients=seed_average,
    attest_alike=no_look,
    patience_s=0.3,
)
"""The seed, as far as its violations go."""
