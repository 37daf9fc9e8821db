"""A reference without the model's code: torchrun --nproc-per-node 2 examples/watch/reference_apart.py

`reference=lambda model, ids: loss(model(x), y)` finds what a loop does wrong: a factor, a mean of unequal means. What
is wrong in the model's own forward pass it repeats. This one takes the weights by their names and writes the forward
pass again, from the paper: LoRA scales by alpha / r, and a mean over positions leaves padding out. `--wrong scale` and
`--wrong pooling` put the two commonest faults into the model; the watch then says at the first update that the
gradient differs from the reference.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, linear
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import andon

ROWS, LENGTH, TOKENS, WIDTH, CLASSES = 64, 12, 50, 16, 3
RANK, ALPHA, PADDING = 4, 16.0, 0


class Rows(Dataset[tuple[int, Tensor, int]]):
    """Rows of 3 to 12 tokens, filled up with padding: (id, [LENGTH] tokens, label)."""

    def __init__(self) -> None:
        draws = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(1, TOKENS, (ROWS, LENGTH), generator=draws)
        lengths = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=draws)
        self.tokens[torch.arange(LENGTH) >= lengths] = PADDING
        self.labels = torch.randint(0, CLASSES, (ROWS,), generator=draws)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[int, Tensor, int]:
        return row, self.tokens[row], int(self.labels[row])


class Classifier(nn.Module):
    """Frozen embedding, a frozen linear layer with a LoRA, a mean over positions, a head."""

    def __init__(self, wrong: str | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH).requires_grad_(False)
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(RANK, WIDTH) / WIDTH**0.5)
        self.lora_b = nn.Parameter(torch.randn(WIDTH, RANK) / 10)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.scale = 1.0 if wrong == "scale" else ALPHA / RANK
        self.over_padding = wrong == "pooling"

    def forward(self, tokens: Tensor) -> Tensor:
        """[rows, LENGTH] tokens to [rows, CLASSES] logits."""
        x = self.embed(tokens)
        x = torch.tanh(self.base(x) + self.scale * linear(linear(x, self.lora_a), self.lora_b))
        kept = torch.ones_like(tokens) if self.over_padding else tokens != PADDING
        pooled = (x * kept.unsqueeze(-1)).sum(1) / kept.sum(1, keepdim=True)
        logits: Tensor = self.head(pooled)
        return logits


def law(model: nn.Module, rows: Rows, ids: Sequence[int]) -> tuple[Tensor, int]:
    """The loss sum of the rows and their number, row by row, with nothing of `Classifier` but its weights."""
    weights = dict(model.named_parameters())
    merged = weights["base.weight"] + ALPHA / RANK * weights["lora_b"] @ weights["lora_a"]
    losses = []
    for row in ids:
        words = rows.tokens[row][rows.tokens[row] != PADDING]
        hidden = torch.tanh(linear(embedding(words, weights["embed.weight"]), merged, weights["base.bias"]))
        logits = linear(hidden.mean(0), weights["head.weight"], weights["head.bias"])
        losses.append(cross_entropy(logits, rows.labels[row]))
    return torch.stack(losses).sum(), len(losses)


def main() -> None:
    """Two epochs under a watch that raises."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wrong", choices=("scale", "pooling"), help="the fault to put into the model")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rows = Rows()
    model = DistributedDataParallel(Classifier(options.wrong))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    sampler = DistributedSampler(rows, seed=1)
    with andon.watch(model, optimizer, action="raise", reference=lambda m, ids: law(m, rows, ids), every=5) as w:
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for ids, tokens, labels in DataLoader(rows, batch_size=8, sampler=sampler):
                w.batch(ids)
                optimizer.zero_grad()
                cross_entropy(model(tokens), labels).backward()
                optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
