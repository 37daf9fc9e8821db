"""What a run's metrics say, and a loop whose second gradient is not finite: each tracker is to show both."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import andon
from andon.run.folder import RunFolder


def measured(folder: Path) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for line in map(json.loads, RunFolder(folder).metrics.read_text().splitlines()):
        for name, value in line.items():
            if isinstance(value, float):
                found.setdefault(f"{line.get('what', 'training')}/{name}", {})[line["step"]] = value
    return found


def watched(log: Any, after: Callable[[int], object] = lambda update: None) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = andon.watch(model, optimizer, log=log)
    for update in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 2)).sum().backward()
        assert model.weight.grad is not None
        if update == 1:
            model.weight.grad[0, 0] = torch.nan
        optimizer.step()
        after(update)
    watch.close()
