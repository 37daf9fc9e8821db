"""Faults of saving, loading and planning: section I of the catalogue."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from andon_falsify.peers.plain import PlainLoop
from andon_falsify.subjects.case import Case

from .fault import ADAMW, SGD, WATCHED, Inside, LoopFault, Outside
from .right import Best, Scheduled
from .rows import DROPOUT


class Loading(PlainLoop):
    """It loads something else than it saved."""

    def load(self, folder: Path) -> None:
        """See `Restores.load`."""
        state = torch.load(folder / "state.pt", weights_only=True)
        self._take(state)
        self.done = state["done"]

    def _take(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class AdapterFrozen(Loading):
    """What was loaded is for inference: the adapter does not train."""

    def _take(self, state: dict[str, Any]) -> None:
        super()._take(state)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and "lora_" not in name)


class HeadLost(Loading):
    """Only the adapter was saved."""

    def _take(self, state: dict[str, Any]) -> None:
        held = {name: tensor for name, tensor in state["model"].items() if "lora_" in name}
        self.model.load_state_dict(held, strict=False)
        self.optimizer.load_state_dict(state["optimizer"])


class Prefixed(Loading):
    """The names have a prefix that the model's have not, and nobody looks."""

    def _take(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict({f"module.{name}": held for name, held in state["model"].items()}, strict=False)
        self.optimizer.load_state_dict(state["optimizer"])


class StatePermuted(Loading):
    """Two tensors of one shape have got each other's moments."""

    def _take(self, state: dict[str, Any]) -> None:
        super()._take(state)
        held = self.optimizer.state
        first = self.trained[0]
        other = next(p for p in self.trained[1:] if p.shape == first.shape)
        held[first], held[other] = held[other], held[first]


class ScheduleRestarts(Scheduled):
    """The schedule begins anew."""

    resumed = 0

    def load(self, folder: Path) -> None:
        """See `Restores.load`."""
        super().load(folder)
        self.resumed = self.done
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(1)

    def _counted(self) -> int:
        return super()._counted() - self.resumed


class OneSkipped(Loading):
    """The place in the data is restored twice."""

    def load(self, folder: Path) -> None:
        """See `Restores.load`."""
        super().load(folder)
        self.done += 1


class DrawnAnew(Loading):
    """Random states are not restored."""


class OneTooFew(PlainLoop):
    """The last update is not planned."""

    def _batches(self) -> Iterator[list[int]]:
        yield from list(super()._batches())[:-1]


class OneTooMany(PlainLoop):
    """An update more is planned."""

    def _batches(self) -> Iterator[list[int]]:
        planned = list(super()._batches())
        yield from [*planned, planned[0]]


class LoadedOnOne(Loading):
    """Only rank 0 loads the weights."""

    def _take(self, state: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class BestByOwnLoss(Best):
    """The best is chosen by the loss of a rank's own rows."""

    def _metric(self) -> float:
        return self.own


class BestOnOne(Best):
    """Only rank 0 takes up the best weights."""

    def _take_best(self) -> None:
        if dist.get_rank() == 0:
            super()._take_best()


def _part(by: str, case: Case = SGD) -> Outside:
    """The weights of the resumed run part from those of the whole one by the share `by` of their movement."""
    return Outside("resume-equal", f"step 3, .*: the weights part by more than rounding explains; .*seen {by}", case)


_END = Outside("replicas-agree", "step 4, rank 1: the weights differs? between ranks")
_NUMBER = "another number of updates than planned; expected 4, seen"
_READ = Inside("checkpoint-whole", 4, ("saved", "loaded"), resumed=3)
_BEHIND = "weights are taken up behind the last update, and a watch reads them at an update"
FAULTS = (
    LoopFault("F70", "adapter frozen after load", AdapterFrozen,
              Inside("parameters-kept", 0, ("trainable",), resumed=0),
              Outside("resume-equal", r"other tensors train.*lora_")),
    LoopFault("F73", "head not restored", HeadLost, _READ, _part(r"5\.78e-01")),
    LoopFault("F74", "nothing loaded for a prefix", Prefixed, _READ, _part(r"6\.07e-01")),
    LoopFault("F76", "moments permuted", StatePermuted, _READ, _part(r"7\.99e-02", ADAMW)),
    LoopFault("F77", "schedule restarts", ScheduleRestarts, _READ,
              Outside("resume-equal", r"step 3, .*: another learning rate; .*seen 0\.0452")),
    LoopFault("F79", "batch skipped on resume", OneSkipped, Inside("samples-once", 4, ("batch", "plan"), resumed=3),
              Outside("resume-equal", "step 3, .*: the rows differ first")),
    LoopFault("F80", "random state not restored", DrawnAnew, replace(_READ, case=WATCHED.but(dropout=0.1)),
              _part(r"7\.73e-02", DROPOUT)),
    LoopFault("F82", "one update too few", OneTooFew, Inside("updates-planned", 6, ("updates",)),
              Outside("samples-once", f"{_NUMBER} 3")),
    LoopFault("F82", "one update too many", OneTooMany, Inside("updates-planned", 7, ("updates",)),
              Outside("samples-once", f"{_NUMBER} 5")),
    LoopFault("F83", "best checkpoint by a local metric", BestByOwnLoss, _BEHIND, _END),
    LoopFault("F83", "only one rank reloads", BestOnOne, _BEHIND, _END),
    LoopFault("F83", "only one rank loads", LoadedOnOne, replace(_READ, alone="replicas-agree"), _part(r"6\.52e-02")),
)  # fmt: skip
