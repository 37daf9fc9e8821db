"""Observes torch's own gradient clipping, before it changes the gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.utils import clip_grad


@contextmanager
def clipping_seen(seen: Callable[[float | None], None]) -> Iterator[None]:
    """Inside, `seen` is called before gradients are clipped: with their norm, or None if they are clipped by value.

    It replaces the part of `clip_grad_norm_` that scales, so that calls of a name that was imported earlier count too.
    """

    def by_norm(parameters: Any, max_norm: float, total_norm: torch.Tensor, *_: Any, **__: Any) -> None:
        seen(float(total_norm.full_tensor() if hasattr(total_norm, "full_tensor") else total_norm))

    def by_value(*_: Any, **__: Any) -> None:
        seen(None)

    def preceded(original: Callable[..., Any], first: Callable[..., None]) -> Callable[..., Any]:
        @functools.wraps(original)
        def clip(*args: Any, **kwargs: Any) -> Any:
            first(*args, **kwargs)
            return original(*args, **kwargs)

        return clip

    homes: list[tuple[Any, str, Callable[..., None]]] = [
        (clip_grad, "_clip_grads_with_norm_", by_norm),
        (torch.nn.utils, "clip_grads_with_norm_", by_norm),
        (clip_grad, "clip_grad_value_", by_value),
        (torch.nn.utils, "clip_grad_value_", by_value),
    ]
    with ExitStack() as stack:
        for home, name, first in homes:
            original = getattr(home, name)
            stack.callback(setattr, home, name, original)
            setattr(home, name, preceded(original, first))
        yield


def only_shrunk(given: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]) -> bool:
    """Whether `given` may be the result of clipping `before`: no element grew or changed its sign.

    True also if something in `before` is not finite, because clipping can make anything of that.
    """
    if given.keys() != before.keys():
        return False
    pairs = [(given[name], held) for name, held in before.items()]
    if not all(bool(held.isfinite().all()) for _, held in pairs):
        return True
    return all(bool(((new * old >= 0) & (new.abs() <= old.abs() * (1 + 1e-5))).all()) for new, old in pairs)
