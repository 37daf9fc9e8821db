"""Faults of memory: what is kept that need not be (issue 2, item 10)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from andon.step.task import LeafLoss
from andon_falsify.faults.planting import BIG, Fault, around, patched
from andon_falsify.subjects.assembly import Parts


def _every_leaf_kept(parts: Parts, _: ExitStack) -> None:
    for replica in parts.replicas:
        kept: list[torch.Tensor] = []

        def leaf(inner: Callable[..., Any], *args: Any, held: Any = kept, own: Any = replica, **named: Any) -> Any:
            report = inner(*args, **named)
            held.append(own.parameters.gradient.clone())
            return report

        def gradients(inner: Callable[..., Any], *args: Any, held: Any = kept, **named: Any) -> Any:
            held.clear()
            return inner(*args, **named)

        around(replica, "_leaf", leaf)
        around(replica, "gradients", gradients)


def _graph_kept(parts: Parts, stack: ExitStack) -> None:
    backward = torch.Tensor.backward

    def keeping(self: torch.Tensor, *args: Any, **named: Any) -> None:
        backward(self, *args, **{**named, "retain_graph": True})  # type: ignore[no-untyped-call]

    patched(stack, torch.Tensor, "backward", keeping)
    kept: dict[int, list[torch.Tensor]] = {id(replica.model): [] for replica in parts.replicas}

    def loss_sum(inner: Callable[..., LeafLoss], model: nn.Module, batch: Any) -> LeafLoss:
        loss = inner(model, batch)
        kept[id(model)].append(loss.loss_sum)
        return loss

    def gradients(inner: Callable[..., Any], *args: Any, held: Any, **named: Any) -> Any:
        held.clear()
        return inner(*args, **named)

    around(parts.task, "loss_sum", loss_sum)
    for replica in parts.replicas:
        held = kept[id(replica.model)]
        around(replica, "gradients", lambda inner, *a, own=held, **k: gradients(inner, *a, held=own, **k))


def _kept_after_update(parts: Parts, make: Callable[[Any], list[torch.Tensor]], *, once: bool) -> None:
    """After the update every replica holds what `make` makes of it: anew each time, or more and more."""
    for replica in parts.replicas:
        kept: list[torch.Tensor] = []

        def apply(inner: Callable[[], None], held: Any = kept, own: Any = replica) -> None:
            inner()
            if once:
                held.clear()
            held += make(own)

        around(replica, "apply", apply)


def _double_moments(parts: Parts, _: ExitStack) -> None:
    _kept_after_update(parts, lambda own: [moment.double() for moment in own.optimizer_state().values()], once=True)


def _second_base(parts: Parts, _: ExitStack) -> None:
    _kept_after_update(parts, lambda own: [tensor.clone() for tensor in own.frozen().values()], once=True)


def _growth(parts: Parts, _: ExitStack) -> None:
    _kept_after_update(parts, lambda own: [own.parameters.gradient[:64].clone()], once=False)


_SOURCE = "issue 2, memory"
_CLAIM = "memory-budget"
FAULTS = (
    Fault("every leaf's gradient kept", _SOURCE, _CLAIM, _every_leaf_kept, BIG),
    Fault("graphs retained", _SOURCE, _CLAIM, _graph_kept, BIG),
    Fault("moments in fp64", _SOURCE, _CLAIM, _double_moments, BIG),
    Fault("second copy of the base", _SOURCE, _CLAIM, _second_base, BIG),
    Fault("growth with every step", _SOURCE, _CLAIM, _growth, BIG),
)
