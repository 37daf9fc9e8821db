"""Forward hooks of a watch: they see a module being called, and nothing of its copies or of compiled code."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class ForwardTap:
    """A hook before or after a forward pass. Copies of the model (an average of weights, say) are not watched."""

    def __init__(self, see: Callable[[], None] | None) -> None:
        self._see = see

    def __call__(self, module: nn.Module, *seen: object) -> None:
        """The module's forward pass begins, or ends."""
        if self._see is not None and not torch.compiler.is_compiling():
            self._see()

    def __deepcopy__(self, memo: object) -> ForwardTap:
        return ForwardTap(None)

    def __reduce__(self) -> tuple[type[ForwardTap], tuple[None]]:
        return ForwardTap, (None,)
