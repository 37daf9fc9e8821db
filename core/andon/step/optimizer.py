"""The optimizer of one flat parameter: which one it is, what it keeps, and its state as facts and as a digest."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import torch

from andon.config.schema import Optimizer
from andon.step.flat import Range
from andon_contracts.digest import join, mix_integer, seal, signed
from andon_contracts.laws.law import Rule

_FP32_BITS = 0xFFFFFFFF
_NO_COUNT = -1
_MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


def build_optimizer(settings: Optimizer, ranges: Sequence[Range]) -> torch.optim.Optimizer:
    """The optimizer of the ranges of one flat parameter; what `undecayed` names has no weight decay (seed S12)."""
    groups = [{"params": [r.weights], "weight_decay": settings.weight_decay if r.decays else 0.0} for r in ranges]
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)
    # Only a fused one can be kept from updating by its device, which a GPU needs.
    fused = True if ranges[0].weights.is_cuda else None
    return torch.optim.SGD(groups, lr=0.0, momentum=settings.momentum, fused=fused)


def moments_of(settings: Optimizer) -> tuple[str, ...]:
    """The names of the flat tensors that the optimizer may keep."""
    return _MOMENTS[settings.name]


def state_names(settings: Optimizer) -> frozenset[str]:
    """The names of all tensors in the optimizer's state after an update."""
    moments = moments_of(settings) if settings.name != "sgd" or settings.momentum else ()
    return frozenset((*moments, *(("step",) if counts_updates(settings) else ())))


def counts_updates(settings: Optimizer) -> bool:
    """Whether the optimizer counts its updates itself, in an fp32 `step`."""
    return settings.name == "adamw"


def update_facts(settings: Optimizer) -> tuple[str, ...]:
    """The names of the facts that `Replica.after_update` returns."""
    return ("weights", *moments_of(settings), "updates")


def rules_for_facts(settings: Optimizer, rules: Mapping[str, int]) -> dict[str, int]:
    """`rules` of what `read_state` gives as those of the facts that it reads, which a device has in their place."""
    found = {name: rules[name] for name in ("weights",) if name in rules}
    if "optimizer" in rules:
        # Its digest is of the moments, and of the count, which has a rule of its own.
        found |= dict.fromkeys(moments_of(settings), rules["optimizer"])
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


def read_state(settings: Optimizer, size: int, raw: Mapping[str, int]) -> dict[str, int]:
    """The digests `weights` and `optimizer` and the count `updates`, which are judged, from the values of
    `update_facts`. size: of the flat weights.
    """
    shape = (size,)
    bits = raw["updates"] & _FP32_BITS
    count = float(struct.unpack("<f", struct.pack("<I", bits))[0])
    parts = {name: seal(raw[name], torch.float32, shape) for name in moments_of(settings) if raw[name]}
    if counts_updates(settings) and bits:
        parts["step"] = seal(mix_integer(bits), torch.float32, ())
    return {
        "weights": signed(seal(raw["weights"], torch.float32, shape)),
        "optimizer": signed(join(parts)),
        "updates": int(count) if count.is_integer() else _NO_COUNT,
    }
