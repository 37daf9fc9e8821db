"""Two loops as the documentation of Accelerate teaches accumulation: `accumulate`, and by the count of tokens.

(https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation; the second is its section on causal language
models, whose loss is to be summed and divided by the tokens of all micro-batches and processes.)
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader

from benchmarks.causal_peers.job import IGNORED, UPDATES, Layout, collator, features, optimizer


def _prepared(model: Any, layout: Layout, accumulation: int) -> tuple[Accelerator, Any, Any, Any]:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    loader = DataLoader(features(layout.trained), batch_size=layout.local(), shuffle=True, collate_fn=collator())
    return accelerator, *accelerator.prepare(model, optimizer(model), loader)


def accumulate(model: Any, layout: Layout) -> None:
    """The quick way: the model's own mean loss under `accumulate`, which divides it by the accumulation."""
    accelerator, wrapped, steps, loader = _prepared(model, layout, layout.accumulation)
    for _ in range(UPDATES):
        for batch in loader:
            with accelerator.accumulate(wrapped):
                accelerator.backward(wrapped(**batch).loss)
                steps.step()
                steps.zero_grad()


def by_count(model: Any, layout: Layout) -> None:
    """The way for samples of variable size: a sum, times processes, over the targets of the whole update.

    What is counted are the targets of the loss, hence not a row's first token, which labels before the shift have too.
    """
    accelerator, wrapped, steps, loader = _prepared(model, layout, layout.accumulation)
    for _ in range(UPDATES):
        window = list(loader)
        local = torch.stack([(batch["labels"][:, 1:] != IGNORED).sum() for batch in window]).sum()
        count = accelerator.gather(local).sum().item()
        for place, batch in enumerate(window, start=1):
            last = place == len(window) or accelerator.num_processes == 1
            with nullcontext() if last else wrapped.no_sync():
                logits = wrapped(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
                targets = batch["labels"][:, 1:].flatten()
                loss = torch.nn.functional.cross_entropy(
                    logits[:, :-1].flatten(0, 1), targets, ignore_index=IGNORED, reduction="sum"
                )
                # Both factors undo a division: DDP's by processes, and that of `backward` by the accumulation.
                accelerator.backward(loss * accelerator.num_processes * layout.accumulation / count)
        steps.step()
        steps.zero_grad()
