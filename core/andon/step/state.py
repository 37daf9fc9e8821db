"""A replica's whole trainable state as tensors by name: the same names and values whatever the flat layout or world."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from andon.step.replica import Replica

WEIGHTS = "weights"
OPTIMIZER = "optimizer"


def state_tensors(replica: Replica) -> dict[str, torch.Tensor]:
    """Weights as `weights/NAME`, moments as `optimizer/MOMENT/NAME`, scalars as `optimizer/NAME`; sharing storage."""
    flat = replica.parameters
    tensors = {f"{WEIGHTS}/{name}": view for name, view in flat.weight_views().items()}
    for kind, value in replica.optimizer_state().items():
        if value.numel() == flat.size:
            tensors |= {f"{OPTIMIZER}/{kind}/{name}": view for name, view in flat.views(value).items()}
        else:
            tensors[f"{OPTIMIZER}/{kind}"] = value
    return tensors


def restore_state(replica: Replica, tensors: Mapping[str, torch.Tensor], updates: int) -> None:
    """Put back what `state_tensors` gave, after `updates` updates.

    Raises `ValueError` naming every tensor that is missing, unexpected, or of another shape or dtype; nothing is
    changed then.
    """
    flat = replica.parameters
    kinds = {name.split("/")[1] for name in tensors if name.startswith(f"{OPTIMIZER}/")}
    wanted = {f"{WEIGHTS}/{slot.name}": slot.shape for slot in flat.slots}
    moments = {kind for kind in kinds if f"{OPTIMIZER}/{kind}" not in tensors}
    wanted |= {f"{OPTIMIZER}/{kind}/{slot.name}": slot.shape for kind in moments for slot in flat.slots}
    wanted |= {f"{OPTIMIZER}/{kind}": () for kind in kinds - moments}
    _check(tensors, wanted)
    state = {kind: _flattened(replica, tensors, f"{OPTIMIZER}/{kind}") for kind in sorted(moments)}
    state |= {kind: tensors[f"{OPTIMIZER}/{kind}"] for kind in sorted(kinds - moments)}
    replica.restore(_flattened(replica, tensors, WEIGHTS), state, updates)


def _check(tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
    faults = [f"{name} is missing" for name in wanted if name not in tensors]
    faults += [f"{name} is not part of this model's state" for name in tensors if name not in wanted]
    faults += [
        f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not torch.float32 {wanted[name]}"
        for name, tensor in tensors.items()
        if name in wanted and (tuple(tensor.shape) != wanted[name] or tensor.dtype != torch.float32)
    ]
    if faults:
        raise ValueError("; ".join(faults))


def _flattened(replica: Replica, tensors: Mapping[str, torch.Tensor], prefix: str) -> torch.Tensor:
    flat = torch.zeros_like(replica.parameters.weights.data)
    for name, view in replica.parameters.views(flat).items():
        view.copy_(tensors[f"{prefix}/{name}"])
    return flat
