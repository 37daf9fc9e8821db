"""Faults of saving, loading and planning (section I of the catalogue), and of evaluating and reporting (J)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from andon_falsify.peers.plain import PlainLoop
from andon_falsify.subjects.case import Case

from .fault import ADAMW, SGD, WATCHED, Inside, LoopFault, Outside, changed
from .right import Best, Loaded, Scheduled, Tracking
from .rows import DROPOUT

_State = dict[str, Any]
_Metrics = Mapping[str, float]


class Loading(PlainLoop):
    """It does not restore random states. What else it restores is a method, for faults to change."""

    def load(self, folder: Path) -> None:
        state = torch.load(folder / "state.pt", weights_only=True)
        self._restore(state)
        self.done = state["done"]

    def _restore(self, state: _State) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def _adapter_frozen(loop: PlainLoop, restore: Callable[[_State], None], state: _State) -> None:
    """The adapter is loaded for inference, and does not train."""
    restore(state)
    for name, parameter in loop.model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and "lora_" not in name)


def _head_lost(loop: PlainLoop, _: object, state: _State) -> None:
    held = {name: tensor for name, tensor in state["model"].items() if "lora_" in name}
    loop.model.load_state_dict(held, strict=False)
    loop.optimizer.load_state_dict(state["optimizer"])


def _prefixed(loop: PlainLoop, _: object, state: _State) -> None:
    loop.model.load_state_dict({f"module.{name}": held for name, held in state["model"].items()}, strict=False)
    loop.optimizer.load_state_dict(state["optimizer"])


def _permuted(loop: PlainLoop, restore: Callable[[_State], None], state: _State) -> None:
    """Two tensors of one shape exchange their moments."""
    restore(state)
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


def _padded(loop: PlainLoop, _: object) -> _Metrics:
    """Rows are repeated until every rank has as many, and the repeats are counted."""
    ids = list(range(len(loop.rows)))
    ids += ids[: -len(ids) % dist.get_world_size()]
    sums = loop._scores(loop._mine(ids))
    dist.all_reduce(sums)
    loss, accuracy = (sums / len(ids)).tolist()
    return {"loss": loss, "accuracy": accuracy}


def _own_rows(loop: PlainLoop) -> list[int]:
    return loop._mine(list(range(len(loop.rows))))


def _whole_numbers(loop: PlainLoop, _: object) -> _Metrics:
    """The number of right rows is averaged over the ranks as a whole number."""
    sums = loop._scores(_own_rows(loop))
    right = sums[1].to(torch.int64)
    dist.all_reduce(sums)
    dist.all_reduce(right)
    world = dist.get_world_size()
    right.copy_(right / world)
    return {"loss": float(sums[0]) / len(loop.rows), "accuracy": int(right) * world / len(loop.rows)}


def _one_reports_otherwise(loop: PlainLoop, evaluate: Callable[[], _Metrics]) -> _Metrics:
    """Rank 1 reports the sum over its own rows."""
    whole = evaluate()
    own = loop._scores(_own_rows(loop)) / len(loop.rows)
    return whole if dist.get_rank() == 0 else {"loss": float(own[0]), "accuracy": float(own[1])}


def _stepping(loop: PlainLoop, evaluate: Callable[[], _Metrics]) -> _Metrics:
    """The evaluation ends with a step of the optimizer, by left-over gradients."""
    found = evaluate()
    for parameter in loop.trained:
        parameter.grad = torch.ones_like(parameter)
    loop.optimizer.step()
    return found


def _tracking(loop: Tracking, evaluate: Callable[[], _Metrics]) -> _Metrics:
    """Running statistics change, as in a normalisation that stays in training mode."""
    found = evaluate()
    with torch.enable_grad():
        loop._loss_sum(range(len(loop.rows)))
    return found


def _own_metric(loop: PlainLoop, _: object) -> _Metrics:
    own = _own_rows(loop)
    loss, accuracy = (loop._scores(own) / len(own)).tolist()
    return {"loss": loss, "accuracy": accuracy}


def _own_loss(loop: PlainLoop, update: Callable[..., Tensor], batch: list[int]) -> Tensor:
    return update(batch) * len(batch) / len(loop._mine(batch))


def _part(by: str, case: Case = SGD, why: str = "") -> Outside:
    """The weights of the resumed run differ from the whole run's by the share `by` of their movement."""
    return Outside("resume-equal", f"step 3.*the weights differ by more than rounding explains{why}; .*seen {by}", case)


_END = Outside("replicas-agree", "step 4, rank 1: the weights differs? between ranks")
_NUMBER = "a different number of updates than planned; expected 4, seen"
_READ = Inside("checkpoint-whole", 4, ("saved", "loaded"), resumed=3, alone="resume-exact", continued=3)
_BEHIND = "weights are restored after the last update, and a watch reads weights at an update"
_TOLD = Inside("evaluation-once", 6, ("evaluated",))
_ONCE = "the evaluation loss is not that of every row once"
FAULTS = (
    LoopFault("F70", "adapter frozen after load", changed(Loading, _restore=_adapter_frozen),
              Inside("parameters-kept", 0, ("trainable",), resumed=0, alone="resume-exact", alone_by=4, continued=3),
              Outside("resume-equal", r"different tensors.*lora_")),
    LoopFault("F73", "head not restored", changed(Loading, _restore=_head_lost), _READ, _part(r"5\.78e-01")),
    LoopFault("F74", "nothing loaded for a prefix", changed(Loading, _restore=_prefixed), _READ, _part(r"6\.07e-01")),
    LoopFault("F76", "moments permuted", changed(Loading, _restore=_permuted),
              replace(_READ, alone="", says="its optimizer state has other bits"), _part("7.99e", ADAMW, ".*optim.*")),
    LoopFault("F77", "schedule restarts",
              changed(Scheduled, load=_schedule_restarts,
                      _counted=lambda loop, counted: counted() - getattr(loop, "resumed", 0)),
              _READ, Outside("resume-equal", r"step 3, .*: a different learning rate; .*seen 0\.0452")),
    LoopFault("F79", "batch skipped on resume", changed(Loading, load=_one_skipped),
              Inside("samples-once", 4, ("batch", "plan"), resumed=3),
              Outside("resume-equal", "step 3, .*: the rows differ first")),
    LoopFault("F79", "window of a data loader skipped on resume", changed(Loaded, load=_one_skipped),
              Inside("resume-exact", 3, continued=2), "the row above shows it"),
    LoopFault("F80", "random state not restored", Loading, replace(_READ, clause="randomness-declared",
              case=WATCHED.but(dropout=0.1), alone="", says="torch is not that of step"), _part(r"7\.73e-02", DROPOUT)),
    LoopFault("F82", "one update too few", changed(_batches=lambda _, batches: list(batches())[:-1]),
              Inside("updates-planned", 6, ("updates",)), Outside("samples-once", f"{_NUMBER} 3")),
    LoopFault("F82", "one update too many", changed(_batches=_one_too_many), Inside("updates-planned", 7, ("updates",)),
              Outside("samples-once", f"{_NUMBER} 5")),
    LoopFault("F83", "best checkpoint by a local metric", changed(Best, _metric=lambda loop, _: loop.own), _BEHIND,
              _END),
    LoopFault("F83", "only one rank reloads",
              changed(Best, _restore_best=lambda _, restore: None if dist.get_rank() else restore()), _BEHIND, _END),
    LoopFault("F83", "only one rank loads", changed(Loading, _restore=_loaded_on_one),
              replace(_READ, alone="replicas-agree", continued=None), _part(r"6\.52e-02")),
    LoopFault("F83", "best checkpoint by a metric of own rows", changed(evaluate=_own_metric), _TOLD,
              Outside("evaluation-law", rf"{_ONCE}; .*ratio 1\.025")),
    LoopFault("F85", "evaluation pads with repeats", changed(evaluate=_padded), _TOLD,
              Outside("evaluation-law", rf"{_ONCE}; .*ratio 0\.993")),
    LoopFault("F86", "metric from whole numbers", changed(evaluate=_whole_numbers),
              replace(_TOLD, case=WATCHED.but(seed=1)),
              Outside("evaluation-law", r"the accuracy is not that of every row once; .*11 of 13\), seen 0\.769")),
    LoopFault("F88", "evaluation of one rank reported", changed(evaluate=_one_reports_otherwise), _TOLD,
              Outside("evaluation-law", rf"rank 1: {_ONCE}; .*ratio 0\.448")),
    LoopFault("F89", "weights changed by the evaluation", changed(evaluate=_stepping),
              "a watch reads the weights at an update, and none comes after it",
              Outside("evaluation-law", "the evaluation changed 15 tensors of the model")),
    LoopFault("F58", "running statistics follow the evaluation", changed(Tracking, evaluate=_tracking),
              "it computes gradients in training mode, and a watch takes that for training",
              Outside("evaluation-law", r"the evaluation changed 1 tensors of the model.*running_mean")),
    LoopFault("F88", "loss of one rank reported",
              changed(_update=_own_loss, _add_over_ranks=lambda _, add, total: add(total.clone())),
              Inside("loss-reported", 1, ("loss",)),
              Outside("losses-close", r"step 1: the reported loss is not that of the float64.*; .*seen 1\.0662")),
)  # fmt: skip
