"""Two checkpoints of one step, tensor by tensor: which differ, and at which element first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from andon.console.problems import InputError, Problem
from andon.run.checkpoint import Checkpoint, CheckpointError, load_checkpoint


def tensors_apart(one: Path, other: Path) -> Iterator[str]:
    """Lines on the tensors that differ between two checkpoints. Raises `InputError` for one that is damaged."""
    first, second = _loaded(one), _loaded(other)
    shared = sorted(first.tensors.keys() & second.tensors.keys())
    odd = [name for name in shared if not _same(first.tensors[name], second.tensors[name])]
    own = [len(each.tensors) - len(shared) for each in (first, second)]
    if any(own):
        both = f"{len(shared)} in both ({len(odd)} differ)" if odd else f"{len(shared)} in both (equal)"
        yield f"{one.name}: {own[0]} only in the first run, {own[1]} only in the second, {both}"
    if not odd:
        if not any(own):
            yield f"all {len(shared)} of {one.name} are the same"
        return
    # Weights before moments: what a reader looks for. Among equals, by name.
    name = min(odd, key=lambda name: (not name.startswith("weights/"), name))
    place = _first(first.tensors[name], second.tensors[name])
    yield f"{name} differs first ({len(odd)} of {len(shared)} tensors of {one.name} do), {place}"


def _loaded(path: Path) -> Checkpoint:
    try:
        return load_checkpoint(path)
    except CheckpointError as error:
        raise InputError([Problem("", str(error))]) from error


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _first(one: torch.Tensor, other: torch.Tensor) -> str:
    if one.dtype != other.dtype or one.shape != other.shape:
        return f"{one.dtype} {list(one.shape)} | {other.dtype} {list(other.shape)}"
    size = one.element_size()
    apart = (_bits(one) != _bits(other)).view(-1, size).any(dim=1)
    place = int(apart.nonzero()[0])
    index = [int(each) for each in torch.unravel_index(torch.tensor(place), one.shape)]
    values = [each.contiguous().view(-1)[place].item() for each in (one, other)]
    shown = " | ".join(value.hex() if isinstance(value, float) else str(value) for value in values)
    return f"at {index}: {shown} ({int(apart.sum())} of {one.numel()} elements)"
