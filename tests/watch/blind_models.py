"""What the loops of `blind` train: small models and data, and who has which rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 8
HALVES = 2


Opens = Callable[..., Any]
"""`andon.watch`, or what stands for it: of a model, an optimizer, and what is told once."""


class Unwatched:
    """A watch that sees nothing: a loop is proved right without any."""

    def __init__(self, model: nn.Module, optimizer: Any, **lines: Any) -> None:
        pass

    def batch(self, ids: Any) -> None:
        pass

    def close(self) -> None:
        pass


def halves() -> range:
    """The halves of a global batch that are this process's: one on each of two ranks, both in one process alone.

    What depends on which rows are seen together (batch norm, a mean over a batch, compression of a rank's gradient)
    or is drawn by each rank is then the same function of the rows in one process.
    """
    each = HALVES // dist.get_world_size()
    return range(dist.get_rank() * each, (dist.get_rank() + 1) * each)


def mine(rows: Tensor) -> Tensor:
    return rows[dist.get_rank() :: dist.get_world_size()]


def local_batch() -> int:
    return BATCH // dist.get_world_size()


def drawn(step: int, rows: int, size: int = BATCH) -> Tensor:
    """The rows of the global batch of a step: passes over all rows, each in an order of its own."""
    a_pass = rows // size
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(step // a_pass))
    return order[step % a_pass * size :][:size]


def dealt(*tensors: Tensor, seed: int = 0) -> DataLoader[Any]:
    dataset = TensorDataset(*tensors)
    return DataLoader(dataset, batch_size=local_batch(), sampler=DistributedSampler(dataset, seed=seed))


def batches(loader: DataLoader[Any]) -> Iterator[Any]:
    """Pass after pass; the sampler is told each pass."""
    for epoch in count():
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        yield from loader


def mean_over_ranks(tensors: list[Tensor]) -> None:
    """Each tensor becomes its mean over all ranks, through one flat message."""
    flat = torch.cat([each.reshape(-1) for each in tensors])
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat / dist.get_world_size(), tensors)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def summed(*values: float) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def table(rows: int, features: int = 10, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Rows with labels that a linear rule gave them."""
    made = torch.Generator().manual_seed(5)
    x = torch.randn(rows, features, generator=made)
    return x, (x @ torch.randn(features, classes, generator=made)).argmax(1)


def pictures(rows: int = 32, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Pictures of 3 x 12 x 12 with a bright quarter, which is their label."""
    made = torch.Generator().manual_seed(6)
    x = torch.randn(rows, 3, 12, 12, generator=made)
    y = torch.randint(classes, (rows,), generator=made)
    for row, label in enumerate(y.tolist()):
        top, left = 6 * (label // 2), 6 * (label % 2)
        x[row, :, top : top + 6, left : left + 6] += 1
    return x, y


def texts(rows: int = 40, longest: int = 9, words: int = 30) -> tuple[Tensor, Tensor]:
    """Rows of words, of 3 to `longest` of them and padded with 0, and their lengths."""
    made = torch.Generator().manual_seed(7)
    lengths = torch.randint(3, longest + 1, (rows,), generator=made)
    x = torch.randint(1, words, (rows, longest), generator=made)
    x[torch.arange(longest)[None] >= lengths[:, None]] = 0
    return x, lengths


def perceptron(*widths: int) -> nn.Sequential:
    """Linear layers with GELU in between."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.GELU()]
    return nn.Sequential(*layers[:-1])


class Convolutions(nn.Module):
    """Two convolutions of any picture size, each with the norm that is made for it, and a head."""

    def __init__(self, norm: Any, convolution: type[nn.Conv2d] = nn.Conv2d) -> None:
        super().__init__()
        self.body = nn.Sequential(
            convolution(3, 8, 3, padding=1), norm(8), nn.ReLU(), nn.MaxPool2d(2), convolution(8, 12, 3), norm(12)
        )
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu().mean((2, 3)))


class Standardised(nn.Conv2d):
    """A convolution whose filters have mean 0 and variance 1."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, w, self.bias, padding=self.padding)


class Attention(nn.Module):
    """Causal self-attention of two heads, its projections made by `linear`."""

    def __init__(self, width: int, linear: Any) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention and a perceptron, each with a residual path and dropout."""

    def __init__(self, width: int, linear: Any, dropout: float) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, linear)
        self.feed = nn.Sequential(nn.LayerNorm(width), *perceptron(width, 2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm(x)))
        return x + self.dropout(self.feed(x))


class Language(nn.Module):
    """A decoder whose output layer is its embedding."""

    def __init__(self, linear: Any = nn.Linear, dropout: float = 0.0, checkpointed: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(30, 16), nn.Embedding(9, 16)
        self.blocks = nn.ModuleList(Block(16, linear, dropout) for _ in range(2))
        self.norm = nn.LayerNorm(16)
        self.output = nn.Linear(16, 30, bias=False)
        self.output.weight = self.words.weight
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.words(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.checkpointed else block(hidden)
        return self.output(self.norm(hidden))


def next_words(logits: Tensor, x: Tensor) -> Tensor:
    """The loss sum over the words that are there."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten(), ignore_index=0, reduction="sum")
