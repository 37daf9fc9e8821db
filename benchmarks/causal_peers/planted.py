"""Loops by hand whose verdict is known: a right one, and three that are wrong on purpose."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.causal_peers.job import IGNORED, UPDATES, Layout, collator, features, optimizer


def _own(layout: Layout) -> list[Any]:
    """This rank's micro-batches: rows dealt out in turn."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    rows = features(layout.trained)[rank :: layout.world]
    size = layout.local()
    return [collator()(rows[start : start + size]) for start in range(0, len(rows), size)]


def _total(value: torch.Tensor) -> torch.Tensor:
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def _sum(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    targets = batch["labels"][:, 1:].flatten()
    flat = logits[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(flat, targets, ignore_index=IGNORED, reduction="sum")
    return loss, (targets != IGNORED).sum()


def _loop(model: Any, layout: Layout, weigh: Any) -> None:
    steps, batches = optimizer(model), _own(layout)
    for _ in range(UPDATES):
        counted = torch.stack([(batch["labels"][:, 1:] != IGNORED).sum() for batch in batches]).sum()
        whole = _total(counted)
        for batch in batches:
            loss, tokens = _sum(model, batch)
            weigh(loss, tokens, whole).backward()
        for parameter in model.parameters():
            _total(parameter.grad)
        steps.step()
        steps.zero_grad()


def right(model: Any, layout: Layout) -> None:
    """The sum of all ranks' losses over the count of all ranks' trained tokens."""
    _loop(model, layout, lambda loss, _, whole: loss / whole)


def mean_of_means(model: Any, layout: Layout) -> None:
    """Each micro-batch by its own count."""
    _loop(model, layout, lambda loss, tokens, _: loss / tokens / (layout.world * layout.accumulation))


def twice(model: Any, layout: Layout) -> None:
    """Twice the right gradient, on more ranks than one."""
    _loop(model, layout, lambda loss, _, whole: loss * (2 if layout.world > 1 else 1) / whole)


def leaking(model: Any, layout: Layout) -> None:
    """The rows of a micro-batch one behind the other, each seeing those before it."""
    steps, batches = optimizer(model), _own(layout)
    for _ in range(UPDATES):
        lines = []
        for batch in batches:
            kept = batch["attention_mask"].bool()
            positions = torch.arange(kept.shape[1]).expand_as(kept)[kept]
            ids, labels = batch["input_ids"][kept], batch["labels"][kept].where(positions > 0, IGNORED)
            lines.append((ids[None], labels[None], positions[None]))
        whole = _total(torch.stack([(labels != IGNORED).sum() for _, labels, _ in lines]).sum())
        for ids, labels, positions in lines:
            seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()[None, None]
            logits = model(input_ids=ids, position_ids=positions, attention_mask=seen).logits
            loss = torch.nn.functional.cross_entropy(
                logits[0, :-1], labels[0, 1:], ignore_index=IGNORED, reduction="sum"
            )
            (loss / whole).backward()
        for parameter in model.parameters():
            _total(parameter.grad)
        steps.step()
        steps.zero_grad()
