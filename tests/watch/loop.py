"""What right loops train: 37 rows in batches of 8, of which every fifth is ragged, and a small model with LoRA."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROWS, FEATURES, CLASSES, BATCH = 37, 8, 3, 8
PER_EPOCH = 5


class Model(nn.Module):
    """logits = head(tanh(base(x) + lora_B(lora_A(x)))), and a buffer with the running mean of the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(FEATURES, 8).requires_grad_(False)
        self.lora_A = nn.Linear(FEATURES, 8, bias=False)
        self.lora_B = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, CLASSES)
        nn.init.zeros_(self.lora_B.weight)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.base(x) + self.lora_B(self.lora_A(x)))
        if self.training and len(x):
            self.mean.mul_(0.9).add_(0.1 * hidden.detach().mean(0))
        return self.head(hidden)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, FEATURES, generator=generator)
    return x, torch.randint(0, CLASSES, (ROWS,), generator=generator)


def plan(step: int) -> list[int]:
    """The ids of the global batch of an update, 1 being the first."""
    epoch, place = divmod(step - 1, PER_EPOCH)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch)).tolist()
    return order[place * BATCH : (place + 1) * BATCH]
