"""The optimizer of one flat parameter: which one it is, what it keeps, and its state as facts and as a digest."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from andon.step.flat import Range
from andon_contracts.digest import join, mix_integer, seal, signed
from andon_contracts.laws.law import Rule

_FP32_BITS = 0xFFFFFFFF
_NO_COUNT = -1
_MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
_COUNTING = ("adamw",)


@dataclass(frozen=True)
class OptimizerSpec:
    """Which torch optimizer, and its hyperparameters. Weight decay leaves alone what `undecayed` names (seed S12)."""

    name: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    momentum: float = 0.0

    def build(self, ranges: Sequence[Range]) -> torch.optim.Optimizer:
        """The optimizer of the ranges of one flat parameter. Raises `ValueError` for an unknown name."""
        groups = [{"params": [r.weights], "weight_decay": self.weight_decay if r.decays else 0.0} for r in ranges]
        if self.name == "adamw":
            return torch.optim.AdamW(groups, lr=0.0, betas=self.betas, eps=self.eps, fused=True)
        if self.name == "sgd":
            # Only a fused one can be kept from updating by its device, which a GPU needs.
            fused = True if ranges[0].weights.is_cuda else None
            return torch.optim.SGD(groups, lr=0.0, momentum=self.momentum, fused=fused)
        msg = f"unknown optimizer {self.name!r}; there are adamw and sgd"
        raise ValueError(msg)

    @property
    def moments(self) -> tuple[str, ...]:
        """The flat tensors that it may keep, by name."""
        return _MOMENTS[self.name]

    @property
    def kept(self) -> frozenset[str]:
        """The names of all that it keeps once it has made an update."""
        moments = self.moments if self.name != "sgd" or self.momentum else ()
        return frozenset((*moments, *(("step",) if self.counts else ())))

    @property
    def counts(self) -> bool:
        """Whether it counts its updates itself, in an fp32 `step`."""
        return self.name in _COUNTING

    @property
    def facts(self) -> tuple[str, ...]:
        """The names of what `Replica.after_update` says."""
        return ("weights", *self.moments, "updates")


def rules_for_facts(spec: OptimizerSpec, rules: Mapping[str, int]) -> dict[str, int]:
    """`rules` of what `read_state` gives as those of the facts that it reads, which a device has in their place."""
    found = {name: rules[name] for name in ("weights",) if name in rules}
    if "optimizer" in rules:
        # Its digest is of the moments, and of the count, which has a rule of its own.
        found |= dict.fromkeys(spec.moments, rules["optimizer"])
    if "updates" in rules:
        updates = rules["updates"]
        known = not isinstance(updates, Rule)
        found["updates"] = int(struct.unpack("<I", struct.pack("<f", updates))[0]) if known else updates
    return found


def read_reduced(size: int, raw: Mapping[str, int]) -> dict[str, int]:
    """From what replicas say before an update what is judged: digests of the flat gradient and weights in the place of
    word sums.
    """
    return {**raw, **{name: signed(seal(raw[name], torch.float32, (size,))) for name in ("gradient", "weights")}}


def read_state(spec: OptimizerSpec, size: int, raw: Mapping[str, int]) -> dict[str, int]:
    """From the values of `spec.facts` what is judged: the digests `weights` and `optimizer`, and the count `updates`.

    size: of the flat weights.
    """
    shape = (size,)
    bits = raw["updates"] & _FP32_BITS
    count = float(struct.unpack("<f", struct.pack("<I", bits))[0])
    parts = {name: seal(raw[name], torch.float32, shape) for name in spec.moments if raw[name]}
    if spec.counts and bits:
        parts["step"] = seal(mix_integer(bits), torch.float32, ())
    return {
        "weights": signed(seal(raw["weights"], torch.float32, shape)),
        "optimizer": signed(join(parts)),
        "updates": int(count) if count.is_integer() else _NO_COUNT,
    }
