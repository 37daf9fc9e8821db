"""`andon.watch` for the `Trainer` of transformers.

    callback = WatchCallback(action="raise")
    Trainer(model, arguments, callbacks=[callback], ...)

Callbacks do not see batches. For a dataset with a column of row ids, the collator passes the ids to the watch:
`Trainer(..., data_collator=callback.collator(inner), callbacks=[callback])`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from andon_contracts.watch import Watch, watch
from andon_contracts.watch.opening import outermost

_BATCH_KEY = "andon_ids"


@dataclass(frozen=True)
class WithIds:
    """A collator that adds the ids of the rows to the batch. Can be pickled if `inner` can."""

    inner: Callable[[list[dict[str, Any]]], Mapping[str, Any]]
    column: str

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        plain = [{name: value for name, value in row.items() if name != self.column} for row in rows]
        return {**self.inner(plain), _BATCH_KEY: torch.tensor([int(row[self.column]) for row in rows])}


class WatchCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Watches every update of `Trainer.train`. `watch` is the open watch; None before and after training."""

    def __init__(self, *, ids: str | None = None, **options: Any) -> None:
        """ids: the column that holds the id of a row, for `collator`. options: passed to `andon.watch`."""
        self.watch: Watch | None = None
        self._ids = ids
        self._options = options

    def collator(self, inner: Callable[[list[dict[str, Any]]], Mapping[str, Any]]) -> WithIds:
        """Wrap `inner` so that the watch receives the ids of the rows. Raises `ValueError` without `ids`."""
        if self._ids is None:
            raise ValueError("WatchCallback(ids=) must name the column that holds the id of a row")
        return WithIds(inner, self._ids)

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Register a forward pre-hook that removes the ids from a batch, as the model does not accept them."""
        if self._ids is None:
            return
        if args.remove_unused_columns:
            raise ValueError(f"the column {self._ids!r} is removed: TrainingArguments(remove_unused_columns=False)")
        model: nn.Module = kwargs["model"]
        model.register_forward_pre_hook(self._pop_ids, with_kwargs=True)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the watch on every rank. Its `start` is `state.global_step`, the number of earlier updates."""
        start = {"start": state.global_step} if state.global_step else {}
        self.watch = watch(outermost(kwargs["model"]), kwargs["optimizer"], **{**start, **self._options})

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.watch is not None:
            self.watch.close()
            self.watch = None

    def _pop_ids(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        ids = kwargs.pop(_BATCH_KEY, None)
        if ids is None:
            return None
        if self.watch is not None and model.training and torch.is_grad_enabled():
            self.watch.batch(ids)
        return args, kwargs
