"""torch's own gradient clipping, seen before it acts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.utils import clip_grad

Seen = Callable[[float | None], None]
"""Called before gradients are clipped: with their norm, or with None where they are clipped by value."""


@contextmanager
def clipping_seen(seen: Seen) -> Iterator[None]:
    """Inside, `seen` hears of each call of `clip_grad_norm_`, `clip_grads_with_norm_` and `clip_grad_value_`.

    What replaces the part of `clip_grad_norm_` that scales is also met by who imported the function earlier by name.
    """
    originals: list[tuple[Any, str, Any]] = []

    def replace(home: Any, name: str, around: Callable[[Callable[..., Any], Seen], Callable[..., Any]]) -> None:
        original = getattr(home, name)
        originals.append((home, name, original))
        setattr(home, name, around(original, seen))

    replace(clip_grad, "_clip_grads_with_norm_", _by_norm)
    replace(torch.nn.utils, "clip_grads_with_norm_", _by_norm)
    for home in (clip_grad, torch.nn.utils):
        replace(home, "clip_grad_value_", _by_value)
    try:
        yield
    finally:
        for home, name, original in originals:
            setattr(home, name, original)


def only_shrunk(given: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]) -> bool:
    """Whether `given` may be what clipping left of `before`: no element grew or changed its sign.

    True also where something is not finite, of which clipping makes anything.
    """
    if given.keys() != before.keys():
        return False
    pairs = [(given[name], held) for name, held in before.items()]
    if not all(bool(held.isfinite().all()) for _, held in pairs):
        return True
    return all(bool(((new * old >= 0) & (new.abs() <= old.abs() * (1 + 1e-5))).all()) for new, old in pairs)


def _by_norm(original: Callable[..., Any], seen: Seen) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(parameters: Any, max_norm: float, total_norm: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        norm = total_norm.full_tensor() if hasattr(total_norm, "full_tensor") else total_norm
        seen(float(norm))
        return original(parameters, max_norm, total_norm, *args, **kwargs)

    return clip


def _by_value(original: Callable[..., Any], seen: Seen) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(*args: Any, **kwargs: Any) -> Any:
        seen(None)
        return original(*args, **kwargs)

    return clip
