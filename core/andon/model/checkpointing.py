"""Activation checkpointing: what a layer keeps for its backward pass is computed again there, with the same bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from andon.console.problems import InputError, Problem
from andon.step.keyed import replaying

Contexts = Callable[[], tuple[AbstractContextManager[object], AbstractContextManager[object]]]


def checkpoint_layers(model: nn.Module, device: torch.device, contexts: Contexts = replaying) -> None:
    """Have every layer of `model`, which trains on `device`, keep its input alone and compute the rest again.

    On a CPU the draws are replayed from the micro-batch's own generator, on a GPU from the device's. contexts: what
    each of the two passes of a layer is in on a CPU. Only training passes are changed. Raises `InputError` for a model
    whose layers cannot do this.
    """
    able = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    if not able:
        what = f"{type(model).__name__} has no layers that can compute their activations again"
        raise InputError([Problem("training.activation_checkpointing", what)])
    again = functools.partial(checkpoint, use_reentrant=False)
    if device.type != "cuda":
        again = functools.partial(again, preserve_rng_state=False, context_fn=contexts)
    # Not `gradient_checkpointing_enable`: it has the embeddings ask for gradients that nobody needs here.
    for module in able:
        module._gradient_checkpointing_func = again  # type: ignore[assignment]
        module.gradient_checkpointing = True  # type: ignore[assignment]
