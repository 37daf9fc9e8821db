"""Probes: what is read of tensors becomes plain integers here, before anything is judged."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from andon_contracts.digest import tensor_digest, tree_digest


def nonfinite(tensor: torch.Tensor) -> torch.Tensor:
    """0-dim bool on the tensor's device: whether any element is NaN or Inf. One pass, no wait for the device."""
    return torch.isfinite(tensor).all().logical_not()


def digest_of(tensor: torch.Tensor) -> int:
    """The 64-bit digest of one tensor."""
    return tensor_digest(tensor)


def digests_by_name(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The digest of each tensor: the second look, after a mismatch, that finds where replicas differ."""
    return {name: tensor_digest(tensor) for name, tensor in tensors.items()}


def digest_of_tree(tensors: Mapping[str, torch.Tensor]) -> int:
    """One digest of all tensors with their names."""
    return tree_digest(tensors)
