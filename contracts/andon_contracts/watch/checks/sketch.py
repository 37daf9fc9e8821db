"""What `andon falsify` requests by the variable ANDON_PROBE: a sketch of the first gradient, and perturbed weights.

ANDON_PROBE is "SEED:BITS". The sketch is written beside the ledger. If SEED is not 0, the trained weights are changed
before the first forward pass by one rounding to BITS significant bits: this shows what rounding does to the gradient.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from andon_contracts.digest import GOLDEN, mix64, signed
from andon_contracts.laws.law import Observations
from andon_contracts.observe import plain
from andon_contracts.watch.check import Check, Context, OptimizerProbe
from andon_contracts.watch.intercept import tensors_in
from andon_contracts.watch.values import text_digest

SUMS = 4093
"""A prime, so that the columns of a matrix spread over all sums."""
_BLOCK = 1 << 20
_EXACT = 53
_EACH = 12
"""A rounding error has a variance of 1/12 of a squared unit: so one element in 12 is changed, by one unit."""


def requested() -> tuple[int, int] | None:
    """Seed and bits of ANDON_PROBE; None without it, and for any other text."""
    seed, _, bits = os.environ.get("ANDON_PROBE", "").partition(":")
    return (int(seed), int(bits)) if seed.isdecimal() and bits.isdecimal() else None


class Forwards:
    """Hooks of torch on all forward passes: they perturb weights, and find the coarsest dtype that a module returns.

    A parameter's dtype shows neither autocast nor a mixed-precision policy of FSDP2.
    """

    def __init__(self) -> None:
        self.bits = _EXACT
        self._done: set[int] = set()

    def listen(self) -> list[Callable[[], None]]:
        hooks = nn.modules.module
        before = hooks.register_module_forward_pre_hook(lambda module, args: self.perturb(module.parameters()))
        return [before.remove, hooks.register_module_forward_hook(lambda *args: self._after(args[-1])).remove]

    def _after(self, output: object) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.bits = min([self.bits, *map(_bits_of, tensors_in(output))])

    def perturb(self, parameters: Iterable[Tensor]) -> None:
        seed, bits = requested() or (0, 0)
        for each in parameters if seed and torch.is_grad_enabled() and not torch.compiler.is_compiling() else ():
            if each.requires_grad and id(each) not in self._done:
                self._done.add(id(each))
                local = plain(each).data  # autograd does not see the change
                drawn = torch.Generator(local.device).manual_seed(1_000_003 * seed + len(self._done))
                units = torch.empty_like(local, dtype=torch.int8).random_(0, 2 * _EACH, generator=drawn)
                exact = local.double()
                unit = torch.ldexp((exact != 0).double(), torch.frexp(exact)[1] - bits)
                local.copy_(exact + ((units == 0).double() - (units == 1).double()) * unit)


forwards = Forwards()


def _bits_of(tensor: Tensor) -> int:
    return 1 - round(math.log2(torch.finfo(tensor.dtype).eps)) if tensor.is_floating_point() else _EXACT


class GradientSketch(Check):
    """A linear sketch of the gradient of the first update, reduced and not clipped: `SUMS` float64 sums.

    Each element is added to one sum, with a sign. Both follow from the name of its parameter and its index in the
    whole tensor. So the sketches of shards add up to that of the whole, and the product of two sketches estimates that
    of the gradients a and b, with an error of |a| |b| / sqrt(SUMS).
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._sums: Tensor | None = None
        self._written = False

    def ranks_met(self) -> None:
        forwards.perturb(self.context.subject.trainable.values())

    def hooks(self) -> list[Callable[[], None]]:
        return [] if self.context.settings.by_command else forwards.listen()

    def reduced(self, probe: OptimizerProbe) -> None:
        if self._written or self._sums is not None:
            return
        names, self._sums = self.context.subject.names_by_id(), torch.zeros(SUMS, dtype=torch.float64, device="cpu")
        # All tensors of the optimizer: fp32 masters of bf16 weights are no parameters of the model.
        held = [parameter for group in probe.optimizer.param_groups for parameter in group["params"]]
        for number, each in enumerate(held):
            if each.grad is not None:
                self._sums += self._of(names.get(id(each), f"#{number}"), each.grad).cpu()

    def _of(self, name: str, gradient: Tensor) -> Tensor:
        local, mesh, key = plain(gradient), getattr(gradient, "device_mesh", None), text_digest(name)
        sums = torch.zeros(SUMS, dtype=torch.float64, device=local.device)
        first, mine = (0,) * local.ndim, self.context.exchange.rank == 0
        if mesh is not None:
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            places, at = gradient.placements, mesh.get_coordinate()  # type: ignore[attr-defined]
            first = tuple(compute_local_shape_and_global_offset(gradient.shape, mesh, places)[1])
            mine = not any(place.is_replicate() and index for place, index in zip(places, at, strict=True))
        flat = local.reshape(-1)
        for start in range(0, len(flat) if mine else 0, _BLOCK):  # of replicas, the first
            values = flat[start : start + _BLOCK].double()
            rest, stride = torch.arange(start, start + len(values), device=flat.device), 1
            index = torch.zeros_like(rest)
            for size, offset, whole in zip(local.shape[::-1], first[::-1], gradient.shape[::-1], strict=True):
                index += (rest % size + offset) * stride
                rest, stride = rest // size, stride * whole
            odd = mix64(index * signed(GOLDEN) + key) < 0
            sums.index_add_(0, (index + key) % SUMS, torch.where(odd, -values, values))
        return sums

    def look(self, probe: OptimizerProbe) -> list[list[Tensor]]:
        self.reduced(probe)
        return []

    def judge(self, probe: OptimizerProbe, said: Observations, aligned: Observations) -> None:
        if not self._written and self._sums is not None:
            self._written = True
            bits = min([forwards.bits, self._of_products(), *map(_bits_of, self.context.subject.trainable.values())])
            payload = self._sums.view(torch.int64)
            seen = self.context.exchange(probe.updates + 1, "sketch", {"bits": bits}, payload)
            parts = [o.payload.view(torch.float64) for o in seen if o.payload is not None]
            self.context.recorder.sketched(torch.stack(parts).sum(0).tolist(), min(o.values["bits"] for o in seen))

    def _of_products(self) -> int:
        with suppress(RuntimeError):  # torch refuses to answer a script that set both of its interfaces
            if self.context.subject.gpu() is not None:
                convolves = any(isinstance(each, _ConvNd) for each in self.context.subject.modules)
                tf32 = 11 if convolves and torch.backends.cudnn.allow_tf32 else _EXACT
                return {"highest": tf32, "high": 11}.get(torch.get_float32_matmul_precision(), 8)
        return _EXACT

    def discarded(self, probe: OptimizerProbe) -> None:
        self._sums = None

    new_window = discarded
