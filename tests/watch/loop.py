"""A small data-parallel loop by hand, right in all that it does, with a place for each thing that can be done wrong.

37 rows, global batch 8 (so every fifth batch is ragged), two micro-batches on each rank, a frozen base with LoRA whose
B starts at 0, batch statistics, AdamW, clipping. The gradient is the sum over all rows divided once by their number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import andon
from andon_contracts.observe import flat_digest
from andon_contracts.violation import Violation
from andon_contracts.watch import Watch
from andon_contracts.watch.values import state_digest

ROWS, FEATURES, CLASSES, BATCH, STEPS = 37, 8, 3, 8, 11
PER_EPOCH = 5
RATE, CLIP = 1e-2, 0.05


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
        """[rows, FEATURES] to [rows, CLASSES]."""
        hidden = torch.tanh(self.base(x) + self.adapter(x))
        if self.training and len(x):
            self.mean.mul_(0.9).add_(0.1 * hidden.detach().mean(0))
        logits: Tensor = self.head(hidden)
        return logits

    def adapter(self, x: Tensor) -> Tensor:
        """What the adapter adds to the base."""
        added: Tensor = self.lora_B(self.lora_A(x))
        return added


def data() -> tuple[Tensor, Tensor]:
    """The rows: features and labels."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, FEATURES, generator=generator)
    return x, torch.randint(0, CLASSES, (ROWS,), generator=generator)


def plan(step: int) -> list[int]:
    """The ids of the global batch of an update, 1 being the first."""
    epoch, place = divmod(step - 1, PER_EPOCH)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch)).tolist()
    return order[place * BATCH : (place + 1) * BATCH]


def schedule(step: int) -> float:
    """A decay, so that a schedule that is out of step shows."""
    return RATE / (1 + 0.01 * step)


@dataclass
class Trace:
    """What a run left at each step on this rank, and what its watch found."""

    states: list[tuple[object, ...]] = field(default_factory=list)
    found: list[tuple[str, int, str]] = field(default_factory=list)
    evaluations: Mapping[str, int] = field(default_factory=dict)


class Loop:
    """The loop. A fault is a subclass that does one thing wrong; `lines` are what it says to the watch."""

    lines: frozenset[str] = frozenset()
    steps = STEPS
    micro_batches = 2

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.x, self.y = data()
        self.trace = Trace()
        self.notes: list[object] = []

    # what there is

    def build(self) -> nn.Module:
        """The same weights on every rank."""
        torch.manual_seed(0)
        return Model()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """No weight decay on biases."""
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for n, p in named if "bias" not in n], "weight_decay": 0.1},
            {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=schedule(1))

    def options(self) -> dict[str, Any]:
        """What the watch is told once, of all that it could be told."""
        known: dict[str, Any] = {
            "plan": plan,
            "rows": ROWS,
            "contents": self.contents,
            "reference": self.reference,
            "every": 1,
            "clip": CLIP,
            "groups": {"*bias": {"weight_decay": 0.0}, "*weight": {"weight_decay": 0.1}},
            "schedule": schedule,
            "trainable": ["lora_*", "head.*"],
            "tied": [],
            "updates": self.steps,
        }
        wanted = self.lines | ({"every"} if "reference" in self.lines else set())
        return {name: value for name, value in known.items() if name in wanted}

    def contents(self, ids: Sequence[int]) -> list[Any]:
        """The data set's rows."""
        return [(self.x[i], self.y[i]) for i in ids]

    def reference(self, model: nn.Module, ids: Sequence[int]) -> tuple[Tensor, int]:
        """The law: one process, all rows."""
        x, y = data()
        index = torch.tensor(list(ids))
        return nn.functional.cross_entropy(model(x[index]), y[index], reduction="sum"), len(ids)

    # the loop

    def run(self) -> Trace:
        """All steps, with a watch that collects."""
        self.model = self.build()
        self.opt = self.optimizer(self.model)
        self.before_watch()
        self.watch: Watch = andon.watch(self.model, self.opt, action=self.collect, **self.options())
        for w in self.watch.findings:
            self.note(w)
        for step in range(1, self.steps + 1):
            self.step(step)
            self.trace.states.append(self.state())
        self.finish()
        self.watch.close()
        self.trace.evaluations = self.watch.evaluations
        return self.trace

    def collect(self, found: Violation) -> None:
        """The action of the watch."""
        self.note(found)

    def note(self, found: Violation) -> None:
        """Remember a finding."""
        entry = (found.clause, found.step, str(found))
        if entry not in self.trace.found:
            self.trace.found.append(entry)

    def before_watch(self) -> None:
        """After the optimizer was made."""

    def step(self, step: int) -> None:
        """One update."""
        self.broadcast_buffers()
        ids = self.global_batch(step)
        for micro, mine in enumerate(self.share(ids)):
            self.micro_batch(step, micro, mine, len(ids))
        self.reduce(step)
        if "reduced" in self.lines:
            self.watch.reduced()
        self.clip(step)
        self.set_rate(step)
        self.before_update(step)
        self.update()
        self.after_update(step)
        self.zero()

    def global_batch(self, step: int) -> list[int]:
        """The rows of the update."""
        return plan(step)

    def share(self, ids: Sequence[int]) -> list[list[int]]:
        """This rank's micro-batches."""
        parts = torch.tensor(list(ids)).tensor_split(self.world * self.micro_batches)
        return [p.tolist() for p in parts[self.rank * self.micro_batches : (self.rank + 1) * self.micro_batches]]

    def load(self, step: int, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The features and labels that the model is given."""
        index = torch.tensor(list(ids), dtype=torch.int64)
        return self.x[index], self.y[index]

    def micro_batch(self, step: int, micro: int, ids: Sequence[int], rows: int) -> None:
        """Forward and backward of one micro-batch."""
        x, y = self.load(step, ids)
        if "batch" in self.lines:
            content = [(x[i], y[i]) for i in range(len(ids))] if "content" in self.lines else None
            self.watch.batch(ids, content)
        loss = self.loss(self.model(x), y, rows)
        if "loss" in self.lines:
            self.watch.loss(float(loss) * rows, len(ids), self.reported(step, micro, float(loss) * rows, rows))
        self.backward(loss)

    def reported(self, step: int, micro: int, loss_sum: float, rows: int) -> float | None:
        """The loss that is logged: the mean over all ranks' rows, known with the last micro-batch."""
        self.notes = [*self.notes, loss_sum] if micro else [loss_sum]
        if micro < self.micro_batches - 1:
            return None
        total = torch.tensor(sum(float(str(n)) for n in self.notes), dtype=torch.float64)
        dist.all_reduce(total)
        return float(total) / rows

    def loss(self, logits: Tensor, y: Tensor, rows: int) -> Tensor:
        """The share of these rows in the mean over the global batch."""
        return nn.functional.cross_entropy(logits, y, reduction="sum") / rows

    def backward(self, loss: Tensor) -> None:
        """Into `.grad`."""
        loss.backward()

    def gradients(self) -> list[Tensor]:
        """All gradients, in the order of the names."""
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def reduce(self, step: int) -> None:
        """Sum over ranks: each rank's loss is its share already."""
        for gradient in self.gradients():
            dist.all_reduce(gradient)

    def clip(self, step: int) -> None:
        """Once, after the reduction."""
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)

    def set_rate(self, step: int) -> None:
        """The schedule's rate of this update."""
        for group in self.opt.param_groups:
            group["lr"] = schedule(step)

    def before_update(self, step: int) -> None:
        """Nothing."""

    def update(self) -> None:
        """The optimizer's."""
        self.opt.step()

    def after_update(self, step: int) -> None:
        """Nothing."""

    def zero(self) -> None:
        """Gradients away."""
        self.opt.zero_grad()

    def broadcast_buffers(self) -> None:
        """Rank 0's, as DDP does before a forward pass."""
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0)

    def finish(self) -> None:
        """After the last update."""

    def state(self) -> tuple[object, ...]:
        """All that a fault can change, as digests."""
        kept = [state_digest(self.opt.state.get(p, {})) for g in self.opt.param_groups for p in g["params"]]
        rates = [(g["lr"], g["weight_decay"]) for g in self.opt.param_groups]
        tensors = [flat_digest(self.model.parameters()), flat_digest(self.model.buffers())]
        return (*tensors, tuple(kept), tuple(rates), repr(self.notes))
