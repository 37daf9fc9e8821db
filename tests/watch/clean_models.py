"""Small models whose training is right and unusual in some way: batch statistics, dropped layers, tied weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.watch.loop import CLASSES, FEATURES

WIDTH = 16


class Normed(nn.Module):
    """A model with batch statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.2), nn.Linear(WIDTH, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class LayerNormed(nn.Module):
    """Weights of 1.0, and one parameter of a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(FEATURES, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.first(x)))) * self.scale


class FromZero(nn.Module):
    """Residual blocks whose last norm begins at 0: what stands before it has next to no gradient at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, WIDTH, bias=False),
                nn.BatchNorm1d(WIDTH),
                nn.ReLU(),
                nn.Linear(WIDTH, WIDTH, bias=False),
                nn.BatchNorm1d(WIDTH),
            )
            for _ in range(2)
        )
        for block in self.blocks:
            nn.init.zeros_(block[4].weight)  # type: ignore[index, arg-type]

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        for block in self.blocks:
            hidden = torch.relu(hidden + block(hidden))
        return self.head(hidden)


class Caching(nn.Module):
    """Positions are computed as far as rows were ever seen, and kept; a checkpoint has none of them."""

    grown: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("grown", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > len(self.grown):
            self.grown = torch.arange(float(len(x)))
        return self.net(x) + 0 * self.grown[: len(x), None]


class WithUnused(Normed):
    """With a layer that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)


class LayerDrop(nn.Module):
    """Residual layers, each left out of half of the forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        for layer in self.layers:
            if not self.training or torch.rand(()) < 0.5:
                hidden = hidden + 0.1 * torch.tanh(layer(hidden))
        return self.head(hidden)


class Checkpointed(nn.Module):
    """Attention blocks whose activations are computed again in the backward pass, and two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.last.weight = self.first.weight
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(FEATURES, 2, WIDTH, batch_first=True) for _ in range(2))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)[:, None]
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return self.head(self.last(hidden).squeeze(1))


class SparseEmbedding(nn.Module):
    """The signs of the features are words whose embeddings have sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(2 * FEATURES, CLASSES, mode="sum", sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.words((x > 0).long() + 2 * torch.arange(FEATURES))


class Replying(nn.Module):
    """`Normed` as the Trainer of transformers wants it: labels in, a loss and logits out."""

    accepts_loss_kwargs = False

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
        logits = self.inner(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}
