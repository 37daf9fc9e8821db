"""The set of parameters: the same on all ranks, all of them in an optimizer, none replaced, added, frozen or untied."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from enum import Enum
from operator import attrgetter, eq, is_, or_

import torch
import torch.distributed as dist
from torch import nn

from andon_contracts.laws.law import LOCKSTEP, Law, Seen, difference
from andon_contracts.laws.update import REPLICAS
from andon_contracts.observe import Observer, plain
from andon_contracts.violation import Finding
from andon_contracts.watch.check import LIVE, Check, Context, Cover, OptimizerProbe, Values, none_has, parameter_name
from andon_contracts.watch.model_probe import ModelProbe, parameters_of
from andon_contracts.watch.values import trainable_layout_digest

_INDEX_BITS = 32
_DECLARED = "the model was frozen otherwise than trainable= declares, or a pattern matches too many or too few names"
_modules, _parameters, _requires_grad = map(attrgetter, ("_modules", "_parameters", "requires_grad"))


class Change(Enum):
    """What happened to a parameter: the code in the value `change`, and the wording in a message."""

    REPLACED = 1, "replaced by another parameter"
    UNFROZEN = 2, "trainable now, but was frozen when the watch opened"
    ADDED = 3, "new, or another parameter was removed"
    MISSING = 4, "trainable but not in the optimizer"
    FOREIGN = 5, "in the optimizer but not a trainable parameter of the model"
    UNDECLARED = 6, "trainable but not declared in trainable="
    FROZEN = 7, "declared trainable but frozen"
    UNTIED = 8, "no longer tied to the tensor that it was declared to share"
    FROZEN_BY_THE_LOOP = 9, "frozen now, but was trainable when the watch opened"
    UNFROZEN_BY_THE_LOOP = 10, UNFROZEN[1]
    """Unfrozen and in its optimizer. If all ranks freeze or unfreeze, the loop may intend it (gradual unfreezing)."""


def change_of(change: Change, index: int) -> int:
    return change.value[0] << _INDEX_BITS | index


def _same_toggle_on_all_ranks(seen: Seen[object]) -> bool:
    code = seen.column("change")[0] >> _INDEX_BITS
    return "change" not in seen.differing and code >= Change.FROZEN_BY_THE_LOOP.value[0]


def _first_change(seen: Seen[object]) -> Finding:
    first = next(value for value in seen.column("change") if value)
    change = next(each for each in Change if each.value[0] == first >> _INDEX_BITS)
    foreign = change is Change.FOREIGN  # its tensor is none of the model's, so it has no name
    tensor = "" if foreign else parameter_name(seen.names, first & ((1 << _INDEX_BITS) - 1))
    likely = _DECLARED if change in (Change.UNDECLARED, Change.FROZEN) else None
    what = f"{tensor or 'a tensor'} is {change.value[1]}"
    return Finding(what, seen.step, seen.ranks("change"), tensor, likely=likely)


def _parameters_kept(seen: Seen[object]) -> Finding | None:
    if seen.any("change") and not _same_toggle_on_all_ranks(seen):
        return _first_change(seen)
    if "layout" in seen.differing:
        return difference(seen, "layout", "the tensors differ in name, shape, dtype, order or requires_grad")
    return None


def _not_toggled(seen: Seen[object]) -> Finding | None:
    if not _same_toggle_on_all_ranks(seen):
        return None
    found = _first_change(seen)
    what = f"on all ranks, {found.seen}. The watch keeps its first set of parameters: open a new watch after a change"
    return Finding(what, found.step, (), found.tensor)


_PARAMETERS = Law("parameters-kept/before", ("change", "layout"), _parameters_kept, by_tensor=("layout",))
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
        self._groups, self._sizes, self._children = self._parameter_groups(), self._module_sizes(), self._submodules()

    def cover(self) -> Mapping[str, Cover]:
        why = "without trainable=: compared with the set at the start only"
        kept = LIVE if self.context.settings.trainable is not None else Cover("degraded", why)
        return {"parameters-kept": kept, "precision-sufficient": LIVE}

    def start(self, *, portable: bool) -> Values:
        subject = self.context.subject
        # Parameters that no probe trains may have a master weight.
        held = frozenset[int]().union(*(probe.held for probe in self.context.probes))
        whole = [p for p in subject.parameters.values() if id(p) in self.context.replicas.whole]
        low = (i for i, s in enumerate(subject.slots) if id(s.parameter) in held and s.parameter.element_size() < 4)
        return {
            "change": self._fault_at_start(),
            "layout": trainable_layout_digest(subject.parameters),
            "weights": Observer(portable=portable).look(list(subject.parameters.values())).digest,
            "whole weights": Observer(portable=portable).look(whole).digest,
            "imprecise": next(low, -1) + 1,
        }

    def meanwhile(self, probe: OptimizerProbe) -> Values:
        return {"change": self._change(probe.optimizer), "layout": probe.layout}

    def change_since_start(self) -> str:
        """Why frozen weights cannot be read at the close: parameters were replaced or an adapter merged; else ""."""
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

    def _submodules(self) -> list[list[nn.Module | None]]:
        return [list(each.values()) for each in map(_modules, self.context.subject.modules)]

    def _replaced_with_module(self) -> int | None:
        now = self._submodules()
        if now == self._children:
            return None
        # A module may be wrapped, as by `torch.compile`: its parameters are then still there.
        present = set(map(id, self.context.subject.inner.parameters()))
        gone = next((i for i, each in enumerate(self._at_start) if id(each) not in present), None)
        if gone is None:
            self._children = now
        return gone

    def _fault_at_start(self) -> int:
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
        """The first difference from the start, packed by `change_of`; 0 if nothing changed.

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
        gone = self._replaced_with_module()
        if gone is not None:
            return change_of(Change.REPLACED, gone)
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
                    return change_of(Change.UNFROZEN, index)
            index = list(map(eq, trainable, self._trainable)).index(False)
            change = Change.UNFROZEN_BY_THE_LOOP if trainable[index] else Change.FROZEN_BY_THE_LOOP
            return change_of(change, index)
        return 0 if self._parameter_groups() == self._groups else change_of(Change.FOREIGN, len(subject.slots))


def untrained_copies(subject: ModelProbe) -> set[int]:
    """The parameters, by `id`, of modules of the model that copy a trained module: teachers, averages of weights.

    Such a module has the layout of a trained one, and no optimizer trains it. Because layers of equal layout are not
    always copies, it must also have the values of that module, or at least half as many elements as all trained ones.
    """
    # An optimizer may also hold frozen parameters, as MoCo's does, and leave them unchanged.
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
