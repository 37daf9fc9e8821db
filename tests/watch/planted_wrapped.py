"""The faults that silently take torch's own wrapper off, planted in the loop of `loop.py` under that wrapper."""

# ruff: noqa: D102 - an override does what its class says
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.watch.loop import Loop, Model


class Wrapped(Loop):
    """Right: the wrapper broadcasts the buffers and reduces the gradients, as means over the ranks."""

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return self.wrap(self.prepare(Model()))

    def wrap(self, model: nn.Module) -> nn.Module:
        """In torch's wrapper."""
        return DistributedDataParallel(model)

    def prepare(self, model: nn.Module) -> nn.Module:
        """What is done to the model before it is wrapped."""
        return model

    def broadcast_buffers(self) -> None:
        pass

    def backward(self, loss: Tensor) -> None:
        (loss * self.world).backward()  # type: ignore[no-untyped-call]

    def reduce(self, step: int) -> None:
        pass


class Bypassed(Wrapped):
    """The forward pass goes through the inner module."""

    def micro_batch(self, step: int, micro: int, ids: Sequence[int], rows: int) -> None:
        whole, self.model = self.model, self.model.get_submodule("module")
        super().micro_batch(step, micro, ids, rows)
        self.model = whole


class Double(Wrapped):
    """Right: cast before it is wrapped."""

    def prepare(self, model: nn.Module) -> nn.Module:
        return model.double()

    def load(self, step: int, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        x, y = super().load(step, ids)
        return x.double(), y


class CastLate(Double):
    """Cast after it is wrapped, which leaves the wrapper's hooks behind."""

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return DistributedDataParallel(Model()).double()


class HeadMadeAnew(Wrapped):
    """Right: the weight of the head is made anew before it is wrapped."""

    def wrap(self, model: nn.Module) -> nn.Module:
        # Without this the wrapper itself complains of a weight that got no gradient.
        return DistributedDataParallel(model, find_unused_parameters=True)

    def prepare(self, model: nn.Module) -> nn.Module:
        head = model.get_submodule("head")
        head.weight = nn.Parameter(model.get_parameter("head.weight").detach() * 0.5)
        return model


class HeadMadeAnewLate(HeadMadeAnew):
    """The same after it is wrapped."""

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        model = Model()
        wrapped = self.wrap(model)
        self.prepare(model)
        return wrapped
