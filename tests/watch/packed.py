"""A tensor that is stored in parts, as quantized weights are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Packed(Tensor):
    """A wrapper of two tensors that has no memory of its own and lets itself only be detached, as quantized ones do."""

    @staticmethod
    def __new__(cls, whole: Tensor, scale: Tensor) -> Packed:
        made: Packed = torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=torch.float32)
        made.whole, made.scale = whole, scale
        return made

    whole: Tensor
    scale: Tensor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].whole, args[0].scale)
        raise NotImplementedError(str(function))


def packed(*shape: int) -> Packed:
    return Packed(torch.ones(shape, dtype=torch.int8), torch.ones(1))
