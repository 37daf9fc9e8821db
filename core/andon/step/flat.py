"""Trainable parameters as views of one flat fp32 buffer, their gradients as views of another.

One buffer makes one reduction, one digest and one optimizer call, or two if some weights do not decay; these come last.
Every tensor starts at a multiple of 16 elements (64 bytes). The gaps always hold zeros.

In a group of CPUs and GPUs (`mixed`) the optimizer sees copies of these buffers on the CPU, because a GPU divides, sums
and updates with other roundings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

_ALIGNMENT = 16
REPLACED = "weights of the model, or their gradients, were replaced by other tensors, which would not be trained"


@dataclass(frozen=True)
class Slot:
    name: str
    shape: tuple[int, ...]
    start: int
    end: int


def layout_of(parameters: Mapping[str, nn.Parameter]) -> tuple[tuple[Slot, ...], int]:
    slots: list[Slot] = []
    start = 0
    for name, parameter in parameters.items():
        slots.append(Slot(name, tuple(parameter.shape), start, start + parameter.numel()))
        start += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
    return tuple(slots), start


def undecayed(model: nn.Module, trainable: Mapping[str, nn.Parameter]) -> frozenset[str]:
    """The names of parameters that weight decay leaves alone: biases, those of norms, and all of one dimension."""
    norms = (module for module in model.modules() if "Norm" in type(module).__name__)
    owned = {id(parameter) for norm in norms for parameter in norm.parameters(recurse=False)}
    return frozenset(
        name for name, each in trainable.items() if each.dim() < 2 or id(each) in owned or name.endswith("bias")
    )


class FlatParameters:
    """Owns the storage of a model's trainable parameters and gradients.

    `weights` [size] fp32 is a leaf parameter for the optimizer; backward adds into `gradient` [size] fp32. After
    construction the model's own parameters are views of these. Raises `ValueError` without parameters, and for one that
    is not on `device` or not fp32 (its updates would be rounded away: faults F44).
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], device: torch.device) -> None:
        if not parameters:
            raise ValueError("the model has no trainable parameters")
        for name, parameter in parameters.items():
            if parameter.dtype != torch.float32 or parameter.device != device:
                msg = f"{name} is {parameter.dtype} on {parameter.device}; trainable weights must be fp32 on {device}"
                raise ValueError(msg)
        self.slots, self.size = layout_of(parameters)
        self.weights = nn.Parameter(torch.zeros(self.size, device=device))
        self.gradient = torch.zeros(self.size, device=device)
        self._parameters = tuple(parameters.values())
        self._gradients = tuple(self.views(self.gradient).values())
        with torch.no_grad():
            for slot, parameter in zip(self.slots, self._parameters, strict=True):
                view = self.weights.data[slot.start : slot.end].view(slot.shape)
                view.copy_(parameter)
                # Only its data: modules and hooks hold the parameter itself.
                parameter.data = view
        self.attach_gradient()

    def attach_gradient(self) -> None:
        """Make every parameter's `.grad` a view of `gradient` again (user code may have set it to None)."""
        for view, parameter in zip(self._gradients, self._parameters, strict=True):
            if parameter.grad is not view:
                parameter.grad = view

    def attached(self) -> bool:
        """Whether every parameter and gradient is still a view of these buffers; if not, they are `REPLACED`."""
        pairs = zip(self._gradients, self._parameters, strict=True)
        return all(parameter.grad is view for view, parameter in pairs) and self.weights_attached()

    def weights_attached(self) -> bool:
        start = self.weights.data_ptr()
        return all(p.data_ptr() == start + 4 * slot.start for slot, p in zip(self.slots, self._parameters, strict=True))

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        return {slot.name: flat[slot.start : slot.end].view(slot.shape) for slot in self.slots}

    def weight_views(self) -> dict[str, torch.Tensor]:
        return self.views(self.weights.data)

    @property
    def count(self) -> int:
        """Trainable elements, padding not counted."""
        return sum(slot.end - slot.start for slot in self.slots)


@dataclass(frozen=True)
class Range:
    """A part of the flat weights as a leaf parameter that shares their storage and their gradient's."""

    weights: nn.Parameter
    span: slice
    decays: bool


@dataclass(frozen=True)
class Master:
    """What the optimizer sees: `weights`, a leaf parameter [size] fp32 whose `.grad` is `gradient`.

    apart: whether these are copies, and not the model's own buffers.
    """

    weights: nn.Parameter
    gradient: torch.Tensor
    device: torch.device
    apart: bool

    @classmethod
    def of(cls, parameters: FlatParameters, device: torch.device | None) -> Master:
        """Copies on `device`; None: the buffers of `parameters`."""
        weights, gradient = parameters.weights, parameters.gradient
        if device is not None:
            weights = nn.Parameter(weights.detach().to(device, copy=True))
            gradient = torch.zeros(parameters.size, device=device)
        weights.grad = gradient
        return cls(weights, gradient, gradient.device, device is not None)

    def ranges(self, split: int) -> tuple[Range, ...]:
        """The weights before element `split`, which decay, and those after it, which do not; no empty ranges."""
        size = self.weights.numel()
        if split in (0, size):
            return (Range(self.weights, slice(0, size), decays=split > 0),)
        spans = slice(0, split), slice(split, size)
        found = tuple(Range(nn.Parameter(self.weights.data[span]), span, decays=not span.start) for span in spans)
        for each in found:
            each.weights.grad = self.gradient[each.span]
        return found

    def take(self, parameters: FlatParameters) -> None:
        """Copy the model's weights to these."""
        if self.apart:
            self.weights.data.copy_(parameters.weights.data)

    def give(self, parameters: FlatParameters) -> None:
        """Copy these to the model's weights."""
        if self.apart:
            parameters.weights.data.copy_(self.weights.data)
