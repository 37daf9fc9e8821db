"""The callback for the Trainer of transformers: what it tells of rows, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from transformers import TrainerControl, TrainerState, TrainingArguments, default_data_collator

from andon.integrations.transformers import WatchCallback


class Asked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.given: list[dict[str, Any]] = []

    def forward(self, **inputs: Any) -> torch.Tensor:
        self.given.append(inputs)
        total: torch.Tensor = self.layer(inputs["x"]).sum()
        return total


def arguments(**changes: Any) -> TrainingArguments:
    return TrainingArguments(use_cpu=True, report_to="none", **changes)


ROWS = [{"id": 7, "x": torch.ones(2)}, {"id": 3, "x": torch.zeros(2)}]


def test_rows_are_told_and_the_model_sees_none_of_it() -> None:
    callback = WatchCallback(ids="id", action="raise")
    model = Asked()
    state = TrainerState()
    callback.on_init_end(arguments(remove_unused_columns=False), state, TrainerControl(), model=model)
    batch = callback.collator(default_data_collator)(ROWS)
    assert batch["x"].shape == (2, 2)
    assert "id" not in batch
    model(**batch)  # before training
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callback.on_train_begin(arguments(), state, TrainerControl(), model=model, optimizer=optimizer)
    assert callback.watch is not None
    told: list[list[int]] = []
    inner = callback.watch.batch
    callback.watch.batch = lambda ids, content=None: (told.append(ids.tolist()), inner(ids, content))  # type: ignore
    model(**batch).backward()
    optimizer.step()
    model.eval()
    model(**batch)
    with torch.no_grad():
        model.train()(**batch)
    assert told == [[7, 3]]
    assert [list(given) for given in model.given] == [["x"]] * 4
    assert callback.watch.evaluations["samples-once"] == 1
    callback.on_train_end(arguments(), state, TrainerControl())
    assert callback.watch is None


def test_a_column_that_would_be_removed_is_refused() -> None:
    """The Trainer drops columns that the model does not take: the id would be gone before the collator."""
    callback = WatchCallback(ids="id")
    with pytest.raises(ValueError, match="remove_unused_columns=False"):
        callback.on_init_end(arguments(), TrainerState(), TrainerControl(), model=Asked())
    with pytest.raises(ValueError, match="must name the column"):
        WatchCallback().collator(default_data_collator)


def test_a_resumed_run_is_watched_from_its_step() -> None:
    model = Asked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    callback = WatchCallback()
    state = TrainerState(global_step=5)
    callback.on_train_begin(arguments(), state, TrainerControl(), model=model, optimizer=optimizer)
    assert callback.watch is not None
    assert callback.watch.settings.start == 5
    callback.on_train_end(arguments(), state, TrainerControl())
