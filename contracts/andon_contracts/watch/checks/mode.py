"""How the loop runs its model: in training mode, in the same modes on all ranks, together with the other processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from operator import or_
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from andon_contracts.agree import minority
from andon_contracts.laws.law import Law, Observations, Seen, difference
from andon_contracts.observe import plain
from andon_contracts.violation import Finding
from andon_contracts.watch.check import LIVE, Check, Context, Cover, OptimizerProbe, Values, parameter_name
from andon_contracts.watch.model_probe import random_state
from andon_contracts.watch.values import text_digest

_DRAWING = 4
"""Forward passes are checked for random draws in the first updates: a model that draws does so from the start."""
_NAMED = 3

_TRAINING, _STILL_EVALUATING, _NEVER_TRAINING, _MODES = 0, 1, 2, 3


def _modes_agree(seen: Seen[object]) -> Finding | None:
    # Ranks with different modules, such as pipeline stages, cannot be compared.
    if "modes" not in seen.differing or "modules" in seen.differing:
        return None
    odd = seen.differing_tensors("modes")
    if not odd:
        what = "some modules are in training mode on some ranks and in evaluation mode on others"
        return difference(seen, "modes", what)
    trained = seen.details["modes"][odd[0]]
    named = [" and ".join(str(rank) for rank, each in enumerate(trained) if each == mode) for mode in (1, 0)]
    what = f"{odd[0]} is in training mode on rank {named[0]}, in evaluation mode on rank {named[1]}"
    others = f", and so {'is' if len(odd) == 2 else 'are'} {len(odd) - 1} more modules" * (len(odd) > 1)
    return Finding(what + others, seen.step, minority(trained), odd[0])


def _trains_in(mode: int, why: str) -> Callable[[Seen[object]], Finding | None]:
    def check(seen: Seen[object]) -> Finding | None:
        column = seen.column("evaluating")
        since = [each // _MODES for each in column if each % _MODES == mode]
        if not since:
            return None
        what = f"the model is in evaluation mode{why}, since step {min(since)}: dropout and batch statistics are off"
        ranks = [rank for rank, each in enumerate(column) if each]
        return Finding(what, seen.step, seen.unless_all(ranks), "mode of the model")

    return check


def _part_in(seen: Seen[object]) -> Finding | None:
    name = parameter_name(seen.names, max(seen.column("part left")))
    now = f"{name} was trained in training mode before, and is trained in evaluation mode now"
    what = f"{now}: its dropout and batch statistics are off. The rest of the model is in training mode"
    return Finding(what, seen.step, seen.ranks("part left"), name) if seen.any("part left") else None


def _joined(seen: Seen[object]) -> Finding | None:
    if not seen.any("alone"):
        return None
    what = "WORLD_SIZE is above 1, but this process made no process group: it trains alone"
    return Finding(what, seen.step, seen.ranks("alone"), "process group")


_NEVER = _trains_in(_NEVER_TRAINING, ", and was never in training mode")
_JOINED_AT_CLOSE = Law("ranks-joined/close", ("alone",), _joined)
_LOOP_LAWS = (
    Law("training-mode/forward", ("evaluating",), _trains_in(_STILL_EVALUATING, " after an evaluation")),
    Law("training-mode/never", ("evaluating",), _NEVER, suspicion=True),
    Law("training-mode/part", ("part left",), _part_in, suspicion=True),
    Law("ranks-joined/before", ("alone",), _joined, suspicion=True),
)


class Mode(Check):
    before_laws = (Law("modes-agree/before", ("modes", "modules"), _modes_agree, by_tensor=("modes",)),)

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._training: set[bool] = set()
        self._evaluating = self._since = 0
        self._trained = False
        self._trained_parts = bytes(len(context.subject.modules))  # 1 if the module was in training mode before
        self._seen: dict[OptimizerProbe, tuple[bytes, int, int]] = {}
        """Of each optimizer: the modes at its last update, the part left in evaluation mode, its updates so far so."""
        self._updates = 0
        self._joined = context.world > 1
        self._random: torch.Tensor | None = None
        self._drew = self._drawn = self._alike = 0
        """Digest of the random state from which this window drew, or 0. Updates that drew; those that drew the same."""
        self.draws = ""  # the modules that drew in the forward passes of the last update; see `Step.draws`

    def cover(self) -> Mapping[str, Cover]:
        return {"modes-agree": self.context.between_ranks(), "training-mode": LIVE, "ranks-joined": LIVE}

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if torch.is_grad_enabled():
            self._training.add(module.training)
            if self._updates < _DRAWING and not self._drew:
                self._random = self.random_state()

    def forwarded(self) -> None:
        before, self._random = self._random, None
        if before is not None and (after := self.random_state()) is not None:
            self._drew = 0 if torch.equal(before, after) else text_digest(before.tolist())

    def random_state(self) -> torch.Tensor | None:
        """Torch's random state on the device of the model; None while a graph is captured, or if it is not known."""
        gpu = self.context.subject.gpu()
        if gpu is not None and torch.cuda.is_current_stream_capturing():
            return None
        return random_state(gpu or torch.device("cpu"))

    def meanwhile(self, probe: OptimizerProbe) -> Values:
        drew, self._drew = self._drew, 0
        self.draws = self._sources_of_randomness() if drew else ""
        modules, part = self.context.subject.modules, 0
        modes = bytes([module.training for module in modules])
        if self._training:
            depends = any(map(_depends_on_mode, modules))
            self._since = self._since if self._evaluating else probe.updates + 1
            self._evaluating = self._evaluating + 1 if self._training == {False} and depends else 0
            self._trained = self._trained or True in self._training
            part = self._part_left(probe, modes)
        evaluating = (_STILL_EVALUATING if self._trained else _NEVER_TRAINING) + _MODES * self._since
        return {
            "modes": text_digest(modes),
            "modules": self.context.subject.module_names_digest,
            "evaluating": evaluating if self._evaluating > 1 else _TRAINING,
            "part left": part,
            "drew from": drew,
            "alone": int(self._updates > 0 and self._is_alone()),
        }

    def judge(self, probe: OptimizerProbe, said: Observations, aligned: Observations) -> None:
        inner, left = self.context.subject.inner, any(each.values["part left"] for each in said)
        drawn = [each.values["drew from"] for each in said] if self.context.ranks_have_own_rows else [0]
        self._drawn, self._alike = self._drawn + all(drawn), self._alike + (all(drawn) and len({*drawn}) == 1)
        names = [name for name, _ in inner.named_modules()] if left else ()
        self.context.verdicts.judge(_LOOP_LAWS, Seen(said, None, names), self.context.scene())

    def _part_left(self, probe: OptimizerProbe, modes: bytes) -> int:
        """The number of the module that is trained in evaluation mode in a second update, and was not before; or 0."""
        before, part, updates = self._seen.get(probe, (b"", 0, 0))
        if before != modes:
            part, updates = self._left_part(probe, modes), 0
            self._trained_parts = bytes(map(or_, self._trained_parts, modes))
        if part and updates == 1:
            # The loop may run the part without gradients, and train another one meanwhile.
            own = self.context.subject.modules[part].parameters()
            part *= any(id(p) in probe.held and p.grad is not None and bool(plain(p.grad).any()) for p in own)
        self._seen[probe] = modes, part, updates + 1
        return part if updates else 0

    def _left_part(self, probe: OptimizerProbe, modes: bytes) -> int:
        # A part has trained parameters besides those of its batch norms, which are often put into evaluation mode.
        for number, part in enumerate(self.context.subject.modules[: len(modes) * modes[0]]):
            if self._trained_parts[number] > modes[number]:
                within = list(part.modules())
                layers = [m for m in within if not isinstance(m, _BatchNorm | _DropoutNd)]
                trains = any(id(p) in probe.held for m in layers for p in m._parameters.values())
                if trains and not any(m.training for m in within) and any(map(_depends_on_mode, within)):
                    return number
        return 0

    def updated(self, probe: OptimizerProbe) -> None:
        self._training.clear()
        self._updates += 1

    def judge_close(self) -> None:
        """A process without a process group is reported as a violation only now: it may still make one before."""
        if self._updates > 1 and self._is_alone():
            self.judge_alone(_JOINED_AT_CLOSE, self.context.updates, {"alone": 1})

    def closing_lines(self) -> list[str]:
        what = f"in {self._alike} of {self._drawn} updates that were checked, all ranks drew the same masks or noise"
        return [f"  randomness: {what}, as from one seed"] * bool(self._alike)

    def _is_alone(self) -> bool:
        world_size = os.environ.get("WORLD_SIZE", "")
        # A script may destroy its process group before it ends.
        self._joined = self._joined or (dist.is_available() and dist.is_initialized())
        return not self._joined and world_size.isdecimal() and int(world_size) > 1

    def _sources_of_randomness(self) -> str:
        modules = self.context.subject.inner.named_modules()
        found = [f"{name or 'the model'} (p = {_drops(m):g})" for name, m in modules if m.training and _drops(m)]
        if not found:
            return "functional dropout or other noise"
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        return f"dropout in module{'s' * (len(found) > 1)} {', '.join(found[:_NAMED])}{more}"


def _depends_on_mode(module: nn.Module) -> bool:
    return bool(_drops(module)) or (isinstance(module, _BatchNorm) and bool(module.track_running_stats))


def _drops(module: nn.Module) -> float:
    if isinstance(module, _DropoutNd):
        return float(module.p)
    return float(module.dropout) if isinstance(module, nn.MultiheadAttention | nn.RNNBase) else 0.0
