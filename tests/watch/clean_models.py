"""Small models whose training is right and unusual in some way: batch statistics, dropped layers, tied weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.watch.loop import CLASSES, FEATURES

WIDTH = 16


def _first() -> nn.Linear:
    return nn.Linear(FEATURES, WIDTH)


def _head() -> nn.Linear:
    return nn.Linear(WIDTH, CLASSES)


class Apply(nn.Module):
    """A function of what the layer before gives."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(_first(), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.2), _head())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class WithUnused(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)


class LayerNormed(nn.Module):
    """Weights of 1.0, and one parameter of a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = _first(), nn.LayerNorm(WIDTH), _head()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.first(x)))) * self.scale


class Residual(nn.Sequential):
    """A block whose last norm begins at 0: what stands before that has next to no gradient at first."""

    def __init__(self) -> None:
        norms = [nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)]
        one, other = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        super().__init__(one, norms[0], nn.ReLU(), other, norms[1])
        nn.init.zeros_(norms[1].weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + super().forward(x))


def from_zero() -> nn.Module:
    return nn.Sequential(_first(), nn.ReLU(), Residual(), Residual(), _head())


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


class LayerDrop(nn.Sequential):
    """Residual layers, each left out of half of the forward passes."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            if not self.training or torch.rand(()) < 0.5:
                x = x + 0.1 * torch.tanh(layer(x))
        return x


def layer_drop() -> nn.Module:
    layers = LayerDrop(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    return nn.Sequential(_first(), nn.Tanh(), layers, _head())


class Checkpointed(nn.TransformerEncoderLayer):
    """Its activations are computed again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return checkpoint(super().forward, x, use_reentrant=False)


def tied() -> nn.Module:
    """Checkpointed attention between two layers that have one weight."""
    first, last = (nn.Linear(FEATURES, FEATURES) for _ in range(2))
    last.weight = first.weight
    blocks = [Checkpointed(FEATURES, 2, WIDTH, batch_first=True) for _ in range(2)]
    return nn.Sequential(first, nn.Unflatten(1, (1, -1)), *blocks, last, nn.Flatten(1), nn.Linear(FEATURES, CLASSES))


def sparse_embedding() -> nn.Module:
    """The signs of the features are words whose embeddings have sparse gradients."""
    words = Apply(lambda x: (x > 0).long() + 2 * torch.arange(FEATURES))
    return nn.Sequential(words, nn.EmbeddingBag(2 * FEATURES, CLASSES, mode="sum", sparse=True))


class Replying(nn.Module):
    """`Normed` as the Trainer of transformers wants it: labels in, a loss and logits out."""

    accepts_loss_kwargs = False

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
        logits = self.inner(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(FEATURES, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=True)
        self.blocks, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), _head()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x[:, :, None] * self.place).mean(1))


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(FEATURES, 2)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(1)
        made = torch.stack([expert(x) for expert in self.experts], 1)
        return (made * (weights * (weights == weights.max(1, keepdim=True)[0]))[:, :, None]).sum(1)


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(FEATURES, FEATURES)
        self.pairs = nn.Bilinear(FEATURES, FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.both(x))
        return self.pairs(hidden, torch.tanh(self.both(hidden)))


class Evaluated(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> Evaluated:
        return super().train(False)


def _convolved() -> nn.Module:
    last = torch.channels_last
    image = Apply(lambda x: x.view(len(x), 1, 2, FEATURES // 2).contiguous(memory_format=last))
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 2))
    return nn.Sequential(image, net.to(memory_format=last), nn.Flatten(1), nn.Linear(4 * 3, CLASSES))


def _recurrent() -> nn.Module:
    cells = nn.LSTM(1, 6, num_layers=2, dropout=0.1)
    return nn.Sequential(
        Apply(lambda x: x.t()[:, :, None]), cells, Apply(lambda out: out[0][-1]), nn.Linear(6, CLASSES)
    )


def _worded() -> nn.Module:
    words = Apply(lambda x: (x * 2).round().long().clamp(0, 4))
    return nn.Sequential(words, nn.Embedding(5, WIDTH, padding_idx=0), Apply(lambda x: x.mean(1)), _head())


def _between(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(_first(), *(make() for make in layers), _head())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "convolutions, channels last": _convolved,
    "LSTM": _recurrent,
    "transformer encoder": Attending,
    "embedding with padding": _worded,
    "experts by a gate": Chosen,
    "frozen statistics": lambda: nn.Sequential(
        _first().requires_grad_(False), Evaluated(WIDTH), nn.ReLU(), _head()
    ).train(),
    "group norm": _between(lambda: nn.GroupNorm(4, WIDTH), nn.Tanh),
    "RMS norm": _between(lambda: nn.RMSNorm(WIDTH), nn.Tanh),
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(_first()), _head()),
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(_first()), _head()),
    "orthogonal": lambda: nn.Sequential(parametrizations.orthogonal(_first()), _head()),
    "PReLU": _between(nn.PReLU),
    "GELU, dropout": _between(nn.GELU, lambda: nn.Dropout(0.3)),
    "batch norm without statistics": _between(lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False), nn.Tanh),
    "instance norm": _between(lambda: nn.Unflatten(1, (4, 4)), lambda: nn.InstanceNorm1d(4, affine=True), nn.Flatten),
    "a layer called twice": Squared,
}
