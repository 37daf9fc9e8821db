"""The law of a gradient: that of the whole batch in this one process, and how a reduced one differs from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from andon_contracts.agree import bits_of
from andon_contracts.observe import plain
from andon_contracts.watch.model_probe import ForwardTap, restore_random
from andon_contracts.watch.optimizer_probe import OptimizerProbe
from andon_contracts.watch.settings import Reference

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_LOW = 2e-2
_ADDITIVE = 1e-3


@dataclass(frozen=True)
class ForwardPass:
    """Rows that one forward pass had together, and the random state with which it began; None: as it is."""

    ids: Sequence[int]
    random: Tensor | None = None


def law(probe: OptimizerProbe, reference: Reference, parts: Sequence[ForwardPass]) -> list[Tensor]:
    """The gradient of the mean loss over the rows of `parts` by one process, each part by itself and as it was drawn.

    Buffers, random state and `.grad` stay as they were.
    """
    parameters = list(probe.parameters.values())
    total = [torch.zeros_like(p) for p in parameters]
    rows = 0.0
    with _aside(probe), torch.enable_grad():
        for part in parts:
            loss_sum, count = _loss(probe, reference, part)
            rows += count
            found = torch.autograd.grad(loss_sum, parameters, allow_unused=True)
            total = [t if g is None else t + g for t, g in zip(total, found, strict=True)]
    return [t / max(rows, 1) for t in total]


def additive(probe: OptimizerProbe, reference: Reference, parts: Sequence[ForwardPass]) -> bool:
    """Whether the mean loss over all rows is that over the parts, where nothing is random and no row sees another."""
    module = probe.subject.inner
    modes = [(each, each.training) for each in module.modules()]
    with _aside(probe), torch.no_grad():
        module.eval()
        try:
            whole, rows = reference(module, [row for part in parts for row in part.ids])
            each = [reference(module, part.ids) for part in parts]
        finally:
            for one, training in modes:
                one.training = training
    mean = float(sum(loss for loss, _ in each)) / max(sum(count for _, count in each), 1)
    return math.isclose(mean, float(whole) / max(rows, 1), rel_tol=_ADDITIVE, abs_tol=_ADDITIVE**2)


@contextmanager
def _aside(probe: OptimizerProbe) -> Iterator[None]:
    """What happens within leaves no trace: buffers and random state are put back, and nobody watches."""
    kept = [buffer.clone() for buffer in probe.subject.buffers()]
    device = next(iter(probe.parameters.values())).device
    probe.taps.muted = True
    try:
        # Of this device alone: by default it is of all GPUs, and each would be given a context of this process.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        probe.taps.muted = False
        with torch.no_grad():
            for buffer, value in zip(probe.subject.buffers(), kept, strict=True):
                buffer.copy_(value)


def _loss(probe: OptimizerProbe, reference: Reference, part: ForwardPass) -> tuple[Tensor, int]:
    """The reference's loss of the part, whose forward pass begins with the part's random state."""
    waiting = [] if part.random is None else [part.random]
    device = next(iter(probe.parameters.values())).device
    hook = probe.subject.inner.register_forward_pre_hook(
        ForwardTap(lambda: restore_random(waiting.pop(), device) if waiting else None)
    )
    try:
        return reference(probe.subject.inner, part.ids)
    finally:
        hook.remove()


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
