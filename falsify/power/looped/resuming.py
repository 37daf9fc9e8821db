"""Faults of saving, loading and planning: section I of the catalogue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from andon_falsify.peers.plain import PlainLoop
from andon_falsify.subjects.case import Case

from .fault import ADAMW, SGD, WATCHED, Inside, LoopFault, Outside, changed
from .right import Best, Scheduled
from .rows import DROPOUT

_State = dict[str, Any]


class Loading(PlainLoop):
    """It does not restore random states; what it loads besides is a method of its own."""

    def load(self, folder: Path) -> None:
        state = torch.load(folder / "state.pt", weights_only=True)
        self._take(state)
        self.done = state["done"]

    def _take(self, state: _State) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def _adapter_frozen(loop: PlainLoop, take: Callable[[_State], None], state: _State) -> None:
    """What was loaded is for inference: the adapter does not train."""
    take(state)
    for name, parameter in loop.model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and "lora_" not in name)


def _head_lost(loop: PlainLoop, _: object, state: _State) -> None:
    held = {name: tensor for name, tensor in state["model"].items() if "lora_" in name}
    loop.model.load_state_dict(held, strict=False)
    loop.optimizer.load_state_dict(state["optimizer"])


def _prefixed(loop: PlainLoop, _: object, state: _State) -> None:
    loop.model.load_state_dict({f"module.{name}": held for name, held in state["model"].items()}, strict=False)
    loop.optimizer.load_state_dict(state["optimizer"])


def _permuted(loop: PlainLoop, take: Callable[[_State], None], state: _State) -> None:
    """Two tensors of one shape have got each other's moments."""
    take(state)
    held = loop.optimizer.state
    first = loop.trained[0]
    other = next(p for p in loop.trained[1:] if p.shape == first.shape)
    held[first], held[other] = held[other], held[first]


def _schedule_restarts(loop: Any, load: Callable[[Path], None], folder: Path) -> None:
    load(folder)
    loop.resumed = loop.done
    for group in loop.optimizer.param_groups:
        group["lr"] = loop.rate(1)


def _one_skipped(loop: PlainLoop, load: Callable[[Path], None], folder: Path) -> None:
    load(folder)
    loop.done += 1


def _one_too_many(_: PlainLoop, batches: Callable[[], Any]) -> list[list[int]]:
    planned = list(batches())
    return [*planned, planned[0]]


def _loaded_on_one(loop: PlainLoop, _: object, state: _State) -> None:
    if dist.get_rank() == 0:
        loop.model.load_state_dict(state["model"])
    loop.optimizer.load_state_dict(state["optimizer"])


def _part(by: str, case: Case = SGD) -> Outside:
    """The weights of the resumed run part from those of the whole one by the share `by` of their movement."""
    return Outside("resume-equal", f"step 3, .*: the weights part by more than rounding explains; .*seen {by}", case)


_END = Outside("replicas-agree", "step 4, rank 1: the weights differs? between ranks")
_NUMBER = "another number of updates than planned; expected 4, seen"
_READ = Inside("checkpoint-whole", 4, ("saved", "loaded"), resumed=3)
_BEHIND = "weights are taken up behind the last update, and a watch reads them at an update"
FAULTS = (
    LoopFault("F70", "adapter frozen after load", changed(Loading, _take=_adapter_frozen),
              Inside("parameters-kept", 0, ("trainable",), resumed=0),
              Outside("resume-equal", r"other tensors train.*lora_")),
    LoopFault("F73", "head not restored", changed(Loading, _take=_head_lost), _READ, _part(r"5\.78e-01")),
    LoopFault("F74", "nothing loaded for a prefix", changed(Loading, _take=_prefixed), _READ, _part(r"6\.07e-01")),
    LoopFault("F76", "moments permuted", changed(Loading, _take=_permuted), _READ, _part(r"7\.99e-02", ADAMW)),
    LoopFault("F77", "schedule restarts",
              changed(Scheduled, load=_schedule_restarts,
                      _counted=lambda loop, counted: counted() - getattr(loop, "resumed", 0)),
              _READ, Outside("resume-equal", r"step 3, .*: another learning rate; .*seen 0\.0452")),
    LoopFault("F79", "batch skipped on resume", changed(Loading, load=_one_skipped),
              Inside("samples-once", 4, ("batch", "plan"), resumed=3),
              Outside("resume-equal", "step 3, .*: the rows differ first")),
    LoopFault("F80", "random state not restored", Loading, replace(_READ, case=WATCHED.but(dropout=0.1)),
              _part(r"7\.73e-02", DROPOUT)),
    LoopFault("F82", "one update too few", changed(_batches=lambda _, batches: list(batches())[:-1]),
              Inside("updates-planned", 6, ("updates",)), Outside("samples-once", f"{_NUMBER} 3")),
    LoopFault("F82", "one update too many", changed(_batches=_one_too_many), Inside("updates-planned", 7, ("updates",)),
              Outside("samples-once", f"{_NUMBER} 5")),
    LoopFault("F83", "best checkpoint by a local metric", changed(Best, _metric=lambda loop, _: loop.own), _BEHIND,
              _END),
    LoopFault("F83", "only one rank reloads",
              changed(Best, _take_best=lambda _, take: None if dist.get_rank() else take()), _BEHIND, _END),
    LoopFault("F83", "only one rank loads", changed(Loading, _take=_loaded_on_one),
              replace(_READ, alone="replicas-agree"), _part(r"6\.52e-02")),
)  # fmt: skip
