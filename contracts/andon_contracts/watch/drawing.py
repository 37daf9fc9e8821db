"""The random state from which a model draws, and whether its rows depend on each other."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def random_state(device: torch.device) -> Tensor | None:
    """The random state from which a model on `device` draws, as int64 words; None for devices that are not known."""
    if device.type not in ("cpu", "cuda"):
        return None
    own = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return torch.cat([*own, torch.get_rng_state()]).view(torch.int64)


def restore_random(state: Tensor, device: torch.device) -> None:
    """Draw from the `state` that `random_state` gave."""
    found = state.contiguous().view(torch.uint8)
    size = torch.get_rng_state().numel()
    # Clones, because a generator reads the memory in which a tensor lies from its beginning.
    torch.set_rng_state(found[-size:].clone())
    if device.type == "cuda":
        torch.cuda.set_rng_state(found[:-size].clone(), device)


def mixes_rows(module: nn.Module) -> bool:
    """Whether a row's result depends on the rows beside it, as with batch statistics."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in module.modules())
