"""Trainable parameters as views of one flat fp32 buffer, their gradients as views of another, and their optimizer.

One buffer needs one reduction, one digest and one optimizer call, or two if some weights have no weight decay; these
come last. Every tensor starts at a multiple of 16 elements (64 bytes). The padding is always zero.

In a group of CPUs and GPUs (`mixed`) the optimizer uses copies of these buffers on the CPU, because a GPU rounds
divisions, sums and updates differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from andon.config.schema import Optimizer

_ALIGNMENT = 16
_MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
REPLACED = "weights of the model, or their gradients, were replaced by other tensors, which would not be trained"


@dataclass(frozen=True)
class Slot:
    name: str
    shape: tuple[int, ...]
    start: int
    end: int


def layout_of(parameters: Mapping[str, nn.Parameter]) -> tuple[tuple[Slot, ...], int]:
    """The slot of each parameter in the flat buffer, and the size of that buffer in elements."""
    slots: list[Slot] = []
    start = 0
    for name, parameter in parameters.items():
        slots.append(Slot(name, tuple(parameter.shape), start, start + parameter.numel()))
        start += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
    return tuple(slots), start


def undecayed(model: nn.Module, trainable: Mapping[str, nn.Parameter]) -> frozenset[str]:
    """Names of the parameters without weight decay: biases, those of norms, and all with fewer than two dimensions."""
    norms = (module for module in model.modules() if "Norm" in type(module).__name__)
    owned = {id(parameter) for norm in norms for parameter in norm.parameters(recurse=False)}
    return frozenset(
        name for name, each in trainable.items() if each.dim() < 2 or id(each) in owned or name.endswith("bias")
    )


class FlatParameters:
    """Owns the storage of a model's trainable parameters and gradients.

    `weights` [size] fp32 is a leaf parameter for the optimizer; backward adds into `gradient` [size] fp32. After
    construction the model's own parameters are views of these. Raises `ValueError` if there are no parameters, or if
    one is not on `device` or not fp32 (small updates would be rounded away: faults F44).
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
        for view, parameter in zip(self.weight_views().values(), self._parameters, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view  # not the parameter itself: modules and hooks refer to it
        self.attach_gradient()

    def attach_gradient(self) -> None:
        """Make every parameter's `.grad` a view of `gradient` again (user code may have set it to None)."""
        for view, parameter in zip(self._gradients, self._parameters, strict=True):
            if parameter.grad is not view:
                parameter.grad = view

    def attached(self) -> bool:
        """Whether every parameter and gradient is still a view of these buffers. `REPLACED` is the message if not."""
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
        """The number of trainable elements, without padding."""
        return sum(slot.end - slot.start for slot in self.slots)


@dataclass(frozen=True)
class Range:
    """A slice of the flat weights as a leaf parameter. It shares storage with the flat weights and gradient."""

    weights: nn.Parameter
    span: slice
    decays: bool


class Master:
    """The optimizer's view of the model: `weights`, a leaf parameter [size] fp32 whose `.grad` is `gradient`.

    device: holds copies of the model's buffers; None: shares these buffers (`separate` is false). decayed: the number
    of leading elements with weight decay. ranges: the slices with and without weight decay, if not empty.
    """

    def __init__(self, parameters: FlatParameters, device: torch.device | None, decayed: int) -> None:
        self.weights, self.gradient, size = parameters.weights, parameters.gradient, parameters.size
        self.separate = device is not None
        if self.separate:
            self.weights = nn.Parameter(self.weights.detach().to(device, copy=True))
            self.gradient = torch.zeros(size, device=device)
        self.weights.grad = self.gradient
        self.device = self.gradient.device
        self.ranges = [Range(self.weights, slice(0, size), decays=decayed > 0)]
        if 0 < decayed < size:
            spans = slice(0, decayed), slice(decayed, size)
            self.ranges = [Range(nn.Parameter(self.weights.data[s]), s, decays=not s.start) for s in spans]
        for each in self.ranges:
            each.weights.grad = self.gradient[each.span]

    def build_optimizer(self, settings: Optimizer) -> torch.optim.Optimizer:
        """Build the optimizer for all ranges (seed S12)."""
        decay = settings.weight_decay
        groups = [{"params": [each.weights], "weight_decay": decay if each.decays else 0.0} for each in self.ranges]
        if settings.name == "adamw":
            return torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)
        # On a GPU it must be fused: only then can the device skip an update (`Replica.gate`).
        fused = True if self.device.type == "cuda" else None
        return torch.optim.SGD(groups, lr=0.0, momentum=settings.momentum, fused=fused)

    def pull_weights(self, parameters: FlatParameters) -> None:
        """Copy the model's weights here, if this is a separate copy."""
        if self.separate:
            self.weights.data.copy_(parameters.weights.data)

    def push_weights(self, parameters: FlatParameters) -> None:
        """Copy these weights to the model, if this is a separate copy."""
        if self.separate:
            parameters.weights.data.copy_(self.weights.data)


def moments_of(settings: Optimizer) -> tuple[str, ...]:
    """The names of the flat moment tensors that the optimizer can have."""
    return _MOMENTS[settings.name]


def state_names(settings: Optimizer) -> frozenset[str]:
    """The names of all tensors in the optimizer's state after an update."""
    moments = moments_of(settings) if settings.name != "sgd" or settings.momentum else ()
    return frozenset((*moments, *(("step",) if counts_updates(settings) else ())))


def counts_updates(settings: Optimizer) -> bool:
    """Whether the optimizer counts its updates itself, in an fp32 `step`."""
    return settings.name == "adamw"
