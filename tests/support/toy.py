"""A task of 37 rows and a model with frozen weights and dropout: small enough to run hundreds of steps a second."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from andon.backend.base import Backend
from andon.config.schema import Optimizer
from andon.step.micro_batch import Batch, LeafLoss, Task
from andon.step.plan import GlobalBatch
from andon.step.replica import Replica
from andon.step.step import StepResult, TrainingStep
from andon_contracts.digest import mix64

CPU = torch.device("cpu")
SEED = 5
ROWS = 37
FEATURES = 16
CLASSES = 3
DROPOUT = 0.2


class ToyModel(nn.Module):
    """frozen -> tanh -> dropout -> first -> tanh -> dropout -> second; sizes leave gaps in the flat buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(FEATURES, 20)
        self.frozen.requires_grad_(False)
        self.first = nn.Linear(20, 9)
        self.second = nn.Linear(9, CLASSES)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(torch.tanh(self.frozen(x)))
        logits: torch.Tensor = self.second(self.dropout(torch.tanh(self.first(hidden))))
        return logits


class ToyTask:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(ROWS, FEATURES, generator=generator)
        self.y = torch.randint(0, CLASSES, (ROWS,), generator=generator)

    def load(self, ids: Sequence[int], device: torch.device) -> Batch:
        index = torch.tensor(ids)
        return {"x": self.x[index].to(device), "y": self.y[index].to(device), "id": index.to(device)}

    def loss_sum(self, model: nn.Module, batch: Batch) -> LeafLoss:
        logits = model(batch["x"])
        loss = nn.functional.cross_entropy(logits, batch["y"], reduction="sum")
        return LeafLoss(loss, (logits.argmax(-1) == batch["y"]).sum())

    def content(self, batch: Batch) -> torch.Tensor:
        return mix64(batch["id"] * CLASSES + batch["y"])

    def planned_content(self, ids: Sequence[int]) -> torch.Tensor:
        index = torch.tensor(ids, dtype=torch.int64)
        return mix64(index * CLASSES + self.y[index])

    def planned_terms(self, ids: Sequence[int]) -> Sequence[int]:
        return (1,) * len(ids)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def replica(
    model: Callable[[], nn.Module] = ToyModel,
    optimizer: Optimizer | None = None,
    seed: int = SEED,
    kind: type[Replica] = Replica,
) -> Replica:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        own = model()
    return kind(own, trainable(own), optimizer or Optimizer(), seed, CPU)


@dataclass(frozen=True)
class Settings:
    micro_batches: int
    sizes: tuple[int, ...] = (10, 7, 3, 1)
    optimizer: Optimizer = field(default_factory=Optimizer)
    clip_norm: float | None = None
    seed: int = SEED

    def batches(self) -> list[GlobalBatch]:
        rows = [(7 * place + 3) % ROWS for place in range(ROWS)]
        starts = [sum(self.sizes[:index]) for index in range(len(self.sizes))]
        return [
            GlobalBatch(step, 0, start, tuple(rows[start : start + size]))
            for step, (start, size) in enumerate(zip(starts, self.sizes, strict=True), 1)
        ]


def rate(step: int) -> float:
    return 0.01 * step


def build(backend: Backend, settings: Settings, task: Task | None = None) -> tuple[TrainingStep, list[Replica]]:
    replicas = [replica(optimizer=settings.optimizer, seed=settings.seed) for _ in backend.ranks]
    return TrainingStep(backend, replicas, task or ToyTask(), settings.micro_batches, settings.clip_norm), replicas


def run(backend: Backend, settings: Settings) -> list[Mapping[str, object]]:
    """Train; one plain record a step with all that must be the same on every backend and world size."""
    step, replicas = build(backend, settings)
    step.attest_start({})
    base = replicas[0].base_digest()
    records = [record(step(batch, rate(batch.step), batch.step), replicas) for batch in settings.batches()]
    step.attest_base(len(records), base)
    return records


def record(result: StepResult, replicas: Sequence[Replica]) -> Mapping[str, object]:
    """What a step did, and what each local replica then holds; equal values from all of them, or an error."""
    states = {(r.weights_digest(), r.optimizer_digest(), r.updates) for r in replicas}
    (state,) = states
    return {
        "loss": result.loss.hex(),
        "norm": result.grad_norm.hex(),
        "rows": result.rows,
        "correct": result.correct,
        "digests": dict(result.digests),
        "state": state,
    }
