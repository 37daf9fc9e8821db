"""The law, written again: one process, float64, no padding, plain torch, nothing of the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from andon.pipeline import ClassifyConfig, SafetySample, TransformerConfig, build_model
from andon.step.optimizer import OptimizerSpec


class Reference:
    """Trains on the mean of w[label] * cross entropy over the batch, clipped to the limit, by torch's own optimizer."""

    def __init__(
        self, model_config: TransformerConfig, config: ClassifyConfig, optimizer: OptimizerSpec, seed: int = 0
    ) -> None:
        self.config = config
        self.model: Any = build_model(model_config, config, seed).double().train()
        self.parameters: dict[str, nn.Parameter] = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        kind: Any = torch.optim.AdamW if optimizer.name == "adamw" else torch.optim.SGD
        trained = list(self.parameters.values())
        self.optimizer = kind(trained, lr=config.learning_rate, weight_decay=optimizer.weight_decay)

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of the trainable weights by name."""
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def step(self, samples: Sequence[SafetySample]) -> tuple[float, float]:
        """One update; returns the mean loss before it and the norm of the gradient before clipping."""
        self.optimizer.zero_grad()
        lengths = sorted({len(each.input) for each in samples})
        loss = sum(self.loss_sum([each for each in samples if len(each.input) == n]) for n in lengths) / len(samples)
        assert isinstance(loss, torch.Tensor)
        loss.backward()  # type: ignore[no-untyped-call]
        limit = self.config.gradient_clip_norm
        norm = nn.utils.clip_grad_norm_(list(self.parameters.values()), float("inf") if limit is None else limit)
        self.optimizer.step()
        return float(loss.detach()), float(norm)

    def loss_sum(self, samples: Sequence[SafetySample]) -> torch.Tensor:
        """Sum of w[label] * cross entropy over samples of one length, so that nothing is padded."""
        ids = torch.tensor([list(each.input.encode()) for each in samples])
        labels = torch.tensor([each.label for each in samples])
        logits = self.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        weights = torch.tensor(self.config.class_weights or [1.0] * self.config.num_classes, dtype=torch.float64)
        losses = torch.logsumexp(logits, 1) - logits.gather(1, labels[:, None])[:, 0]
        total: torch.Tensor = (weights[labels] * losses).sum()
        return total
