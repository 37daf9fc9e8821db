"""Hooks on the leaves: every raw local gradient is seen before it is added, averaged, clipped or repaired.

A hook computes one norm and waits for nothing; the norms are looked at together, just before the update.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from andon_contracts.watch.reading import plain


@dataclass(frozen=True)
class Raw:
    """What one window of backward passes showed. Indices are those of the parameters, plus one; 0: none."""

    nonfinite: int
    stale: int
    touched: frozenset[int]
    """Parameters that got a gradient."""
    nonzero: frozenset[int]
    """Parameters that got one that is not all zero."""


def _norm(gradient: Tensor) -> Tensor:
    # The largest element: finite where all are, whatever their squares are, and zero where all are.
    found = plain(gradient)
    norm: Tensor = torch.linalg.vector_norm(found, ord=float("inf")) if found.numel() else found.new_zeros(())
    return norm


def _nothing() -> None:
    """Nobody pulled anything."""


class LeafTaps:
    """The raw gradients of `parameters` since the last update of their optimizer."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], discarded: Callable[[], None]) -> None:
        """discarded: called when a gradient turns out to have been set to None within a window."""
        self.muted = False
        self.heed: Callable[[], None] = _nothing
        self.spent = 0.0
        self.backward_seen = False
        self._discarded = discarded
        self._count = len(parameters)
        self._norms: list[Tensor] = []
        self._owners: list[int] = []
        self._left: list[tuple[int, Tensor]] = []
        self._started = bytearray(self._count)
        self._handles: list[RemovableHandle] = [
            parameter.register_hook(self._hook(index, parameter))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters)
        ]

    def _hook(self, index: int, parameter: torch.nn.Parameter) -> Callable[[Tensor], None]:
        def see(gradient: Tensor) -> None:
            if self.muted:
                return
            began = time.perf_counter()
            self.heed()
            held = parameter.grad
            if not self._started[index]:
                self._started[index] = True
                if held is not None:
                    self._left.append((index, _norm(held)))
            elif held is None:
                self._forget(index)
            self.backward_seen = True
            self._owners.append(index)
            self._norms.append(_norm(gradient))
            self.spent += time.perf_counter() - began

        return see

    @property
    def started(self) -> bool:
        """Whether a backward pass of this window has reached a parameter."""
        return bool(self._owners)

    def _forget(self, index: int) -> None:
        # Somebody threw the window away by hand; with the first parameter that shows it, all of it goes.
        if index in self._owners:
            self.discard()
            self._started[index] = True

    def discard(self) -> None:
        """The gradients so far were thrown away: what they showed is of no concern."""
        self._norms.clear()
        self._owners.clear()
        self._left.clear()
        self._started = bytearray(b"\x01" * self._count)
        self.backward_seen = False
        self._discarded()

    def read(self) -> Raw:
        """What the window showed. One wait for the device."""
        norms = torch.stack([n.float().to(self._norms[0].device) for n in self._norms]).tolist() if self._norms else []
        left = torch.stack([norm.float() for _, norm in self._left]).tolist() if self._left else []
        bad = [owner for owner, norm in zip(self._owners, norms, strict=True) if not norm < float("inf")]
        stale = [index for (index, _), norm in zip(self._left, left, strict=True) if norm != 0]
        nonzero = frozenset(owner for owner, norm in zip(self._owners, norms, strict=True) if norm != 0)
        return Raw(min(bad, default=-1) + 1, min(stale, default=-1) + 1, frozenset(self._owners), nonzero)

    def reset(self) -> None:
        """A new window begins: the optimizer has taken what there was."""
        self._norms.clear()
        self._owners.clear()
        self._left.clear()
        self._started = bytearray(self._count)
        self.backward_seen = False

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
