"""The audit: the gradient of the whole batch in this one process, and how the reduced one differs from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from andon_contracts.agree import bits_of
from andon_contracts.watch.lane import Lane
from andon_contracts.watch.reading import plain
from andon_contracts.watch.settings import Reference

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_LOW = 2e-2


def draws(module: nn.Module) -> bool:
    """Whether the module has dropout that is on: its gradient cannot be recomputed without its random numbers."""
    return any(isinstance(m, _DROPOUT) and m.p > 0 and m.training for m in module.modules())


def law(lane: Lane, reference: Reference, ids: Sequence[int]) -> list[Tensor]:
    """The gradient of the mean loss over `ids` by one process; buffers, random state and `.grad` stay as they were."""
    module = lane.subject.inner
    parameters = list(lane.parameters.values())
    kept = [buffer.clone() for buffer in lane.subject.buffers()]
    lane.taps.muted = True
    try:
        with torch.random.fork_rng(), torch.enable_grad():
            loss_sum, count = reference(module, ids)
            found = torch.autograd.grad(loss_sum / max(count, 1), parameters, allow_unused=True)
    finally:
        lane.taps.muted = False
        with torch.no_grad():
            for buffer, value in zip(lane.subject.buffers(), kept, strict=True):
                buffer.copy_(value)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def compare(found: Sequence[Tensor], wanted: Sequence[Tensor], micro_batches: int) -> dict[str, int]:
    """How `found` differs from the law `wanted`: relative error, the best factor, and what no factor explains."""
    f = torch.cat([plain(t).double().reshape(-1) for t in found])
    w = torch.cat([plain(t).double().reshape(-1) for t in wanted])
    scale = max(float(torch.linalg.vector_norm(w)), 1e-300)
    ratio = float(f @ w) / scale**2
    error = float(torch.linalg.vector_norm(f - w)) / scale
    size = max(float(torch.linalg.vector_norm(f)), 1e-300)
    rest = float(torch.linalg.vector_norm(f - ratio * w)) / size
    tolerance = max(_TOLERANCE.get(t.dtype, _LOW) for t in found)
    return {
        "ratio": bits_of(ratio),
        "error": bits_of(error),
        "rest": bits_of(rest),
        "tolerance": bits_of(tolerance),
        "micro-batches": micro_batches,
    }
