"""Small models and samples of this folder, looks at the state of replicas, and the law, written again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from andon.config.schema import Optimizer
from andon.coordinator import DataParallelCoordinator
from andon.pipeline import ClassifyConfig, ClassifyPipeline, SafetySample, TransformerConfig, build_model

SMALL = TransformerConfig(
    hidden_size=16,
    num_attention_heads=2,
    num_kv_heads=2,
    intermediate_size=32,
    num_hidden_layers=1,
    vocab_size=256,
    max_position_embeddings=32,
)
ENCODER = replace(SMALL, architecture="encoder")
CONFIG = ClassifyConfig(num_classes=2, lora_rank=2, learning_rate=1e-2)
SGD = Optimizer(name="sgd", weight_decay=0.0)
SEEDS = {"hidden_size": 32, "num_attention_heads": 4, "num_kv_heads": 4, "intermediate_size": 64, "vocab_size": 100}
FIXTURE = replace(SMALL, **SEEDS, num_hidden_layers=2, max_position_embeddings=64)
"""The model of the seed's own tests (1g)."""
FIXTURE_CONFIG = ClassifyConfig(num_classes=2, lora_rank=4)


def replicas(count: int, config: ClassifyConfig = CONFIG, **options: Any) -> DataParallelCoordinator:
    """A coordinator of `count` replicas of the small model on the CPU, with 4 micro-batches."""
    options = {"micro_batches": 4, "optimizer": SGD, "model_config": SMALL, **options}
    return DataParallelCoordinator(options.pop("model_config"), config, ["cpu"] * count, **options)


def sample(text: str, label: int) -> SafetySample:
    return SafetySample(text, label)


def sorted_samples(count: int) -> list[SafetySample]:
    """The first half of class 0 over {a, b, c}, the second of class 1 over {X, Y, Z}; of unequal lengths."""
    return [
        sample("".join(("abc", "XYZ")[2 * i >= count][(i + j) % 3] for j in range(3 + i % 4)), int(2 * i >= count))
        for i in range(count)
    ]


def mixed_samples(count: int) -> list[SafetySample]:
    return [sample(f"{'abcXYZ'[i % 6] * (1 + i % 5)} {i}", i % 2) for i in range(count)]


def state(pipeline: ClassifyPipeline) -> tuple[int, int, int, int]:
    """All that may differ between replicas: digests of trained and frozen weights and of moments; updates."""
    replica = pipeline.replica
    return replica.weights_digest(), replica.base_digest(), replica.optimizer_digest(), replica.updates


def states(coordinator: DataParallelCoordinator) -> list[tuple[int, int, int, int]]:
    return [state(pipeline) for pipeline in coordinator.pipelines]


def weights(pipeline: ClassifyPipeline) -> dict[str, torch.Tensor]:
    return {name: view.double().clone() for name, view in pipeline.replica.parameters.weight_views().items()}


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[name].reshape(-1) for name in sorted(tensors)])


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], start: dict[str, torch.Tensor]) -> float:
    """How far `found` is from `wanted`, relative to how far `wanted` went from `start` (L2)."""
    return float((flat(found) - flat(wanted)).norm() / (flat(wanted) - flat(start)).norm())


class Reference:
    """Trains on the mean of w[label] * cross entropy over the batch, clipped to the limit, by torch's own optimizer."""

    def __init__(
        self, model_config: TransformerConfig, config: ClassifyConfig, optimizer: Optimizer, seed: int = 0
    ) -> None:
        self.config = config
        self.model: Any = build_model(model_config, config, seed).double().train()
        self.parameters: dict[str, nn.Parameter] = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        kind: Any = torch.optim.AdamW if optimizer.name == "adamw" else torch.optim.SGD
        decays = {1: 0.0, 2: optimizer.weight_decay}  # of biases and matrices
        trained = self.parameters.values()
        groups = [{"params": [p for p in trained if p.dim() == n], "weight_decay": wd} for n, wd in decays.items()]
        self.optimizer = kind([group for group in groups if group["params"]], lr=config.learning_rate)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def step(self, samples: Sequence[SafetySample]) -> tuple[float, float]:
        self.optimizer.zero_grad()
        lengths = sorted({len(each.input) for each in samples})
        loss = sum(self.loss_sum([each for each in samples if len(each.input) == n]) for n in lengths) / len(samples)
        loss.backward()
        limit = self.config.gradient_clip_norm
        norm = nn.utils.clip_grad_norm_(list(self.parameters.values()), float("inf") if limit is None else limit)
        self.optimizer.step()
        return float(loss.detach()), float(norm)

    def loss_sum(self, samples: Sequence[SafetySample]) -> torch.Tensor:
        ids = torch.tensor([list(each.input.encode()) for each in samples])
        labels = torch.tensor([each.label for each in samples])
        logits = self.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        weights = torch.tensor(self.config.class_weights or [1.0] * self.config.num_classes, dtype=torch.float64)
        losses = torch.logsumexp(logits, 1) - logits.gather(1, labels[:, None])[:, 0]
        return (weights[labels] * losses).sum()
