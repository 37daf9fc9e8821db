"""The model: all ranks have the same parameters, all of them in an optimizer, none replaced, added, frozen or untied.

The loop runs it in training mode, in the same modes on all ranks, together with the other processes.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Mapping
from enum import Enum
from operator import attrgetter, eq, is_, or_
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from andon_contracts.agree import minority
from andon_contracts.laws.law import LOCKSTEP, Law, Observations, Seen, difference
from andon_contracts.laws.update import REPLICAS
from andon_contracts.observe import Observer, plain
from andon_contracts.violation import Finding
from andon_contracts.watch.check import LIVE, Check, Context, Cover, OptimizerProbe, Values, none_has, parameter_name
from andon_contracts.watch.model_probe import ModelProbe, parameters_of, random_state
from andon_contracts.watch.values import CachedDigest, trainable_layout_digest

_INDEX_BITS = 32
_modules, _parameters, _requires_grad = map(attrgetter, ("_modules", "_parameters", "requires_grad"))


class Change(Enum):
    """What happened to a parameter: the code in the value `change`, and the wording in a message."""

    REPLACED = 1, "replaced by another parameter"
    TOGGLED = 2, "frozen or unfrozen"
    ADDED = 3, "added, or another one was removed"
    MISSING = 4, "trainable but not in the optimizer"
    FOREIGN = 5, "in the optimizer but not a trainable parameter of the model"
    UNDECLARED = 6, "trainable, which was not declared"
    FROZEN = 7, "declared trainable but frozen"
    UNTIED = 8, "no longer tied to the tensor that it was declared to share"
    TOGGLED_BY_THE_LOOP = 9, "frozen or unfrozen"
    """Frozen, or unfrozen and in its optimizer: if all ranks do so, the loop may intend it (gradual unfreezing)."""


def change_of(change: Change, index: int) -> int:
    return change.value[0] << _INDEX_BITS | index


def _same_toggle_on_all_ranks(seen: Seen[object]) -> bool:
    code = seen.column("change")[0] >> _INDEX_BITS
    return "change" not in seen.differing and code == Change.TOGGLED_BY_THE_LOOP.value[0]


def _first_change(seen: Seen[object]) -> Finding:
    first = next(value for value in seen.column("change") if value)
    tensor = parameter_name(seen.names, first & ((1 << _INDEX_BITS) - 1))
    text = next(each.value[1] for each in Change if each.value[0] == first >> _INDEX_BITS)
    return Finding(f"{tensor} is {text}", seen.step, seen.ranks("change"), tensor)


def _parameters_kept(seen: Seen[object]) -> Finding | None:
    if seen.any("change") and not _same_toggle_on_all_ranks(seen):
        return _first_change(seen)
    if "layout" in seen.differing:
        return difference(seen, "layout", "the tensors differ in name, shape, dtype, order or in which are trained")
    return None


def _not_toggled(seen: Seen[object]) -> Finding | None:
    if not _same_toggle_on_all_ranks(seen):
        return None
    found = _first_change(seen)
    what = f"{found.seen}, on all ranks alike; this watch sees what was trained when it was opened, a new one the rest"
    return Finding(what, found.step, (), found.tensor)


_PARAMETERS = Law("parameters-kept/before", ("change", "layout"), _parameters_kept, look=("layout",))
_TOGGLED = Law("parameters-kept/alike", ("change",), _not_toggled, suspicion=True)

_IMPRECISE = "is trained in 16 bits: an update below half a unit in the last place is lost"
_PRECISION = none_has("precision-sufficient/start", "imprecise", _IMPRECISE, suspicion=True)
START = (LOCKSTEP, _PARAMETERS, REPLICAS, _PRECISION)
"""Judged when the watch opens: the parameters and their values."""


class Structure(Check):
    before_laws = (_PARAMETERS, _TOGGLED)

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        slots = context.subject.slots
        self._owners = [slot.owner for slot in slots]
        self._attributes = [slot.attribute for slot in slots]
        self._at_start = [slot.parameter for slot in slots]
        self._trainable = [slot.trainable for slot in slots]
        self._groups = self._parameter_groups()
        self._sizes = self._module_sizes()

    def cover(self) -> Mapping[str, Cover]:
        why = "trainable= declares nothing: held to the set of the start only"
        kept = LIVE if self.context.settings.trainable is not None else Cover("degraded", why)
        return {"parameters-kept": kept, "precision-sufficient": LIVE}

    def start(self, *, portable: bool) -> Values:
        subject = self.context.subject
        # Parameters that no probe trains may have a master weight.
        held = frozenset[int]().union(*(probe.held for probe in self.context.probes))
        low = (i for i, s in enumerate(subject.slots) if id(s.parameter) in held and s.parameter.element_size() < 4)
        return {
            "change": self._fault_at_start(),
            "layout": trainable_layout_digest(subject.parameters),
            "weights": Observer(portable=portable).look(list(subject.parameters.values())).digest,
            "imprecise": next(low, -1) + 1,
        }

    def meanwhile(self, probe: OptimizerProbe) -> Values:
        return {"change": self._change(probe.optimizer), "layout": probe.layout}

    def change_since_start(self) -> str:
        """The end of the sentence "not read, because ..." if the loop changed the model, as at the end of training."""
        subject = self.context.subject
        if self._change() or set(map(id, subject.inner.parameters())) != set(map(id, subject.parameters.values())):
            return "the model has other parameters now"
        if any(getattr(module, "merged", False) is True for module in subject.inner.modules()):
            return "an adapter is merged into its base now"
        return ""

    def _parameter_groups(self) -> list[list[int]]:
        optimizers = self.context.subject.optimizers
        return [list(map(id, group["params"])) for each in optimizers for group in each.param_groups]

    def _module_sizes(self) -> list[int]:
        modules = self.context.subject.modules
        return [*map(len, map(_modules, modules)), *map(len, map(_parameters, modules))]

    def _fault_at_start(self) -> int:
        """A `change_of` for the first disagreement of model, optimizers and declarations; 0 if they agree."""
        subject, declared = self.context.subject, self.context.settings.trainable
        slots = subject.slots
        if declared is not None:
            for i, slot in enumerate(slots):
                if slot.trainable != any(fnmatch.fnmatchcase(slot.name, pattern) for pattern in declared):
                    return change_of(Change.UNDECLARED if slot.trainable else Change.FROZEN, i)
        held = {member for group in self._groups for member in group} | untrained_copies(subject)
        missing = [i for i, slot in enumerate(slots) if slot.trainable and id(slot.parameter) not in held]
        # Master weights outside the model may be one flat tensor, of which each rank has its part.
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        sizes = {id(slots[i].parameter): slots[i].parameter.numel() for i in missing}
        if sum(sizes.values()) > ranks * sum(each.numel() for each in subject.extra_tensors):
            return change_of(Change.MISSING, missing[0])
        known = set(map(id, (*self._at_start, *subject.extra_tensors)))
        if any(p.requires_grad and id(p) not in known for p in parameters_of(subject.optimizers)):
            return change_of(Change.FOREIGN, len(slots))
        by_name = dict(zip(subject.names, self._at_start, strict=True))
        for one, other in self.context.settings.tied:
            if by_name[one] is not by_name[other]:
                return change_of(Change.UNTIED, subject.names.index(one))
        return 0

    def _change(self, stepping: torch.optim.Optimizer | None = None) -> int:
        """A `change_of` for the first difference from the start; 0 if nothing changed.

        stepping: the optimizer that makes an update. Parameters that only other optimizers hold may be frozen
        meanwhile, as adversarial loops do.
        """
        subject = self.context.subject
        now = list(map(dict.get, map(_parameters, self._owners), self._attributes))
        if not all(map(is_, now, self._at_start)):
            for index, (slot, parameter) in enumerate(zip(subject.slots, now, strict=True)):
                # Pruning gives a parameter another name in its module.
                same_owner = slot.owner._parameters.values() if parameter is None else ()
                if parameter is not slot.parameter and not any(slot.parameter is each for each in same_owner):
                    return change_of(Change.REPLACED, index)
        if self._module_sizes() != self._sizes:
            return change_of(Change.ADDED, len(subject.slots))
        trainable = list(map(_requires_grad, self._at_start))
        if trainable != self._trainable and stepping is not None:
            others = parameters_of(each for each in subject.optimizers if each is not stepping)
            waiting = set(map(id, others)) - set(map(id, parameters_of([stepping])))
            was = [slot.trainable and id(slot.parameter) in waiting for slot in subject.slots]
            trainable = list(map(or_, trainable, was))
        if trainable != self._trainable:
            # A loop may freeze parameters, or unfreeze those that its optimizers hold. Under a wrapper it may not
            # unfreeze any: a wrapper reduces only the parameters that were trainable when it was made.
            held = set(map(id, parameters_of(subject.optimizers)))
            for index, (slot, trained) in enumerate(zip(subject.slots, trainable, strict=True)):
                this = frozenset({id(slot.parameter)})
                fixed = not this <= held or any(wrapper.holds(this) for wrapper in subject.reducers)
                if trained and not slot.trainable and fixed:
                    return change_of(Change.TOGGLED, index)
            return change_of(Change.TOGGLED_BY_THE_LOOP, list(map(eq, trainable, self._trainable)).index(False))
        same_groups = self._parameter_groups() == self._groups
        return 0 if same_groups else change_of(Change.FOREIGN, len(subject.slots))


def untrained_copies(subject: ModelProbe) -> set[int]:
    """The parameters, by `id`, of modules of the model that copy a trained module: teachers, averages of weights.

    Such a module has the layout of a trained one, and no optimizer trains it. Layers of equal layout are not always
    copies: it also has the values of that module, or half as many elements as all that is trained.
    """
    # An optimizer may also hold frozen parameters, as MoCo's does, and leaves them unchanged.
    held = set(map(id, parameters_of(subject.optimizers))) - set(map(id, subject.frozen.values()))
    trained: dict[object, list[nn.Module]] = {}
    others: list[nn.Module] = []
    for module in subject.modules:
        ids = {id(p) for p in module.parameters()}
        if ids and ids.isdisjoint(held):
            others.append(module)
        elif ids:
            trained.setdefault(_layout(module), []).append(module)
    total = sum(p.numel() for p in subject.parameters.values() if id(p) in held)
    copies: set[int] = set()
    for module in others:
        members = {id(p): p.numel() for p in module.parameters()}
        large = 2 * sum(members.values()) >= total
        if any(large or _same_values(module, each) for each in trained.get(_layout(module), ())):
            copies |= members.keys()
    return copies


def _layout(module: nn.Module) -> object:
    return tuple((name, p.shape) for name, p in module.named_parameters())


def _same_values(one: nn.Module, other: nn.Module) -> bool:
    return all(
        a.device == b.device and a.dtype == b.dtype and not a.is_meta and torch.equal(plain(a), plain(b))
        for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )


_DRAWING = 4
"""Forward passes are checked for random draws in the first updates: a model that draws does so from the start."""
_NAMED = 3


_TRAINING, _STILL_EVALUATING, _NEVER_TRAINING = 0, 1, 2


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


def _trains_in(mode: int, since: str) -> Callable[[Seen[object]], Finding | None]:
    def check(seen: Seen[object]) -> Finding | None:
        column = seen.column("evaluating")
        if mode not in column:
            return None
        what = f"the model is trained in evaluation mode{since}: its dropout and its batch statistics are off"
        ranks = [rank for rank, each in enumerate(column) if each]
        return Finding(what, seen.step, seen.unless_all(ranks), "mode of the model")

    return check


def _joined(seen: Seen[object]) -> Finding | None:
    if not seen.any("alone"):
        return None
    what = "WORLD_SIZE says that there are several processes, and this one made no process group: it trains by itself"
    return Finding(what, seen.step, seen.ranks("alone"), "process group")


_NEVER = _trains_in(_NEVER_TRAINING, ", and has never been in training mode")
_JOINED_AT_CLOSE = Law("ranks-joined/close", ("alone",), _joined)
_LOOP_LAWS = (
    Law("training-mode/forward", ("evaluating",), _trains_in(_STILL_EVALUATING, " since an evaluation")),
    Law("training-mode/never", ("evaluating",), _NEVER, suspicion=True),
    Law("ranks-joined/before", ("alone",), _joined, suspicion=True),
)


class Mode(Check):
    before_laws = (Law("modes-agree/before", ("modes", "modules"), _modes_agree, look=("modes",)),)

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._modes = CachedDigest()
        self._training: set[bool] = set()
        self._evaluating = 0
        self._trained = False
        self._updates = 0
        self._joined = context.world > 1
        self._random: torch.Tensor | None = None
        self._drew = False
        self.draws = ""
        """The modules that drew random numbers in the forward passes of the last update. See `Step.draws`."""

    def cover(self) -> Mapping[str, Cover]:
        return {"modes-agree": self.context.between_ranks(), "training-mode": LIVE, "ranks-joined": LIVE}

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if torch.is_grad_enabled():
            self._training.add(module.training)
            if self._updates < _DRAWING and not self._drew:
                self._random = self._random_state()

    def forwarded(self) -> None:
        before, self._random = self._random, None
        if before is not None and (after := self._random_state()) is not None:
            self._drew = not torch.equal(before, after)

    def _random_state(self) -> torch.Tensor | None:
        gpu = self.context.subject.gpu()
        if gpu is not None and torch.cuda.is_current_stream_capturing():
            return None
        return random_state(gpu or torch.device("cpu"))

    def meanwhile(self, probe: OptimizerProbe) -> Values:
        self.draws, self._drew = self._sources_of_randomness() if self._drew else "", False
        modules = self.context.subject.modules
        if self._training:
            depends = any(_drops(m) or (isinstance(m, _BatchNorm) and m.track_running_stats) for m in modules)
            self._evaluating = self._evaluating + 1 if self._training == {False} and depends else 0
            self._trained = self._trained or True in self._training
        evaluating = _STILL_EVALUATING if self._trained else _NEVER_TRAINING
        return {
            "modes": self._modes.digest(bytes([module.training for module in modules])),
            "modules": self.context.subject.module_names_digest,
            "evaluating": evaluating if self._evaluating > 1 else _TRAINING,
            "alone": int(self._updates > 0 and self._is_alone()),
        }

    def judge(self, probe: OptimizerProbe, said: Observations, aligned: Observations) -> None:
        self.context.verdicts.judge(_LOOP_LAWS, Seen(said, None), self.context.scene())

    def updated(self, probe: OptimizerProbe) -> None:
        self._training.clear()
        self._updates += 1

    def judge_close(self) -> None:
        """Only the end can tell that a process never joined the others."""
        if self._updates > 1 and self._is_alone():
            self.judge_alone(_JOINED_AT_CLOSE, self._updates, {"alone": 1})

    def _is_alone(self) -> bool:
        """Whether a launcher started several processes and this one made no process group with the others."""
        world_size = os.environ.get("WORLD_SIZE", "")
        # A script may take its group down before it ends.
        self._joined = self._joined or (dist.is_available() and dist.is_initialized())
        return not self._joined and world_size.isdecimal() and int(world_size) > 1

    def _sources_of_randomness(self) -> str:
        modules = self.context.subject.inner.named_modules()
        found = [f"{name or 'the model'} (p = {_drops(m):g})" for name, m in modules if m.training and _drops(m)]
        if not found:
            return "functional dropout or other noise"
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        return f"dropout in module{'s' * (len(found) > 1)} {', '.join(found[:_NAMED])}{more}"


def _drops(module: nn.Module) -> float:
    """The dropout probability of a module; 0 if it drops nothing."""
    if isinstance(module, _DropoutNd):
        return float(module.p)
    return float(module.dropout) if isinstance(module, nn.MultiheadAttention | nn.RNNBase) else 0.0
