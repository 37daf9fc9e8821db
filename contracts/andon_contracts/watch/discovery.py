"""Finds what an optimizer trains in a process that does not say it: its modules, and their other optimizers.

Objects are found through the garbage collector, once for each optimizer that makes its first update. So nothing of
torch is replaced for it. The order in which objects are found does not affect the answer, so that ranks agree.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from andon_contracts.watch.model_probe import ModuleGroup, unwrap

Kind = TypeVar("Kind")


def members(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of `optimizer`, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def optimizer_of(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer | None:
    """The living optimizer that holds the earliest of `parameters`. If several do, the one that holds most of them.

    None if nothing tells two of them apart: the first update shows which one the loop uses.
    """
    place = {id(parameter): index for index, parameter in enumerate(parameters)}
    found = _alike([each for each in _optimizers() if _places(each, place)], place)
    return found[0][0] if found and len(found[0]) == 1 else None


def trained_by(optimizer: torch.optim.Optimizer) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """The outermost module that holds what `optimizer` trains, and all optimizers that share in its parameters.

    If no single module holds all of it, or none holds a parameter, a `ModuleGroup` of what does. Raises `ValueError` if
    several modules hold it and nothing that all processes see tells them apart.
    """
    wanted = members(optimizer)
    left = {id(parameter): index for index, parameter in enumerate(wanted)}
    roots, chosen = _roots(left), list[nn.Module]()
    while roots:
        chosen.append(_best(roots, left))
        held = {id(parameter) for parameter in chosen[-1].parameters()}
        left = {key: index for key, index in left.items() if key not in held}
        roots = [root for root in roots if any(id(parameter) in left for parameter in root.parameters())]
    loose = [p for p in wanted if id(p) in left and isinstance(p, nn.Parameter)]
    model = chosen[0] if len(chosen) == 1 and not loose else ModuleGroup(chosen, loose)

    place = {id(parameter): index for index, parameter in enumerate(model.parameters())}
    found, taken = [optimizer], set(map(id, wanted))
    others = [each for each in _optimizers() if each is not optimizer and _places(each, place)]
    for alike in _alike(others, place):
        mine = set(map(id, members(alike[0])))
        # Of two that nothing tells apart the script has thrown one away. The first update shows which.
        if len(alike) == 1 and not mine & taken:
            found.append(alike[0])
            taken |= mine
    return model, sorted(found, key=lambda each: min(_places(each, place), default=len(place)))


def outermost(model: nn.Module) -> nn.Module:
    """The outermost module that holds `model`. If there are several, the one that reduces its gradients.

    Raises `ValueError` if several do and nothing tells them apart.
    """
    held = {id(parameter): index for index, parameter in enumerate(model.parameters())}
    roots = _roots(held)
    return _best(roots, held) if roots else model


def reducers_of(model: nn.Module) -> list[DistributedDataParallel]:
    """The wrappers that reduce gradients of parameters of `model`: in it in order, then those around it or its parts.

    If a module has several wrappers, all of them: the loop may call any.
    """
    inside = [each for each in model.modules() if isinstance(each, DistributedDataParallel)]
    known, held = set(map(id, inside)), {id(parameter) for parameter in model.parameters()}
    around = [each for each in _living(DistributedDataParallel) if id(each) not in known and "_modules" in vars(each)]
    mine = [each for each in around if any(id(parameter) in held for parameter in each.parameters())]
    place = {id(module): index for index, module in enumerate(model.modules())}
    return inside + sorted(mine, key=lambda each: place.get(id(unwrap(each)[0]), len(place)))


def _alike(optimizers: Iterable[torch.optim.Optimizer], place: Mapping[int, int]) -> list[list[torch.optim.Optimizer]]:
    """`optimizers` in an order that all ranks agree on; optimizers that nothing tells apart share a list."""

    def order(optimizer: torch.optim.Optimizer) -> tuple[int, int, list[int], str, int]:
        held = sorted(_places(optimizer, place))
        return held[0], -len(held), held, type(optimizer).__qualname__, len(optimizer.state)

    return [list(group) for _, group in itertools.groupby(sorted(optimizers, key=order), key=order)]


def _places(optimizer: torch.optim.Optimizer, place: Mapping[int, int]) -> list[int]:
    return [place[id(p)] for p in members(optimizer) if id(p) in place]


def _optimizers() -> list[torch.optim.Optimizer]:
    # A wrapper that only forwards `param_groups` of another optimizer lacks the attribute.
    return [each for each in _living(torch.optim.Optimizer) if "param_groups" in vars(each)]


def _living(kind: type[Kind]) -> list[Kind]:
    # `type` instead of `isinstance`, because a proxy may run any code for `__class__`. There may be a million objects,
    # so every type is checked once.
    objects = gc.get_objects()
    wanted = {each for each in set(map(type, objects)) if issubclass(each, kind)}
    return [each for each in objects if type(each) in wanted] if wanted else []


def _best(roots: Sequence[nn.Module], left: Mapping[int, int]) -> nn.Module:
    """The root that is most likely the model of the parameters `left`, from identity to place.

    It holds most of them, reduces their gradients and holds little else. Then its first parameter decides, then the
    names and types of its modules. Raises `ValueError` if several remain that do not wrap one module.
    """

    def merit(root: nn.Module) -> tuple[int, bool, int, int, str, int]:
        held = {id(parameter) for parameter in root.parameters()}
        wrappers = unwrap(root)[1]
        reduces = any(isinstance(wrapper, DistributedDataParallel) for wrapper in wrappers)
        mine = [left[key] for key in held if key in left]
        return len(mine), reduces, -len(held), len(wrappers), type(root).__qualname__, -min(mine, default=len(left))

    def shape(root: nn.Module) -> list[str]:
        modules = [f"{name} {type(each).__module__}.{type(each).__qualname__}" for name, each in root.named_modules()]
        buffers = [f"{name} {tuple(each.shape)}" for name, each in root.named_buffers()]
        return [*modules, *(name for name, _ in root.named_parameters()), *buffers]

    most = max(map(merit, roots))
    first = [root for root in roots if merit(root) == most]
    if len(first) > 1:
        least = min(map(shape, first))
        first = [root for root in first if shape(root) == least]
    if len({id(unwrap(root)[0]) for root in first}) > 1:
        kinds = f"{len(first)} modules {type(first[0]).__qualname__}"
        msg = f"{kinds} hold what the optimizer trains, and nothing tells them apart: say which one by andon.watch(...)"
        raise ValueError(msg)
    return first[0]


def _roots(wanted: Collection[int]) -> list[nn.Module]:
    """The modules that hold a parameter of these identities, at any depth, and lie in no other module."""
    modules = [each for each in _living(nn.Module) if "_modules" in vars(each) and not isinstance(each, ModuleGroup)]
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in module._modules.values():
            parents.setdefault(id(child), []).append(module)
    waiting = [m for m in modules if any(id(p) in wanted for p in vars(m).get("_parameters", {}).values())]
    seen: dict[int, nn.Module] = {}
    while waiting:
        module = waiting.pop()
        if id(module) not in seen:
            seen[id(module)] = module
            waiting.extend(parents.get(id(module), ()))
    return [module for key, module in seen.items() if key not in parents]
