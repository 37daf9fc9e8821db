"""Finds what an optimizer trains in a process that does not declare it: its modules, and their other optimizers.

The garbage collector lists the objects, once for each optimizer that makes its first update. So nothing of torch is
patched for it. The order in which objects are listed does not affect the result, so that ranks agree.
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

    None if two of them cannot be distinguished: the first update shows which one the loop uses.
    """
    ranked = _ranked(_index(parameters))
    return ranked[0][0] if ranked and len(ranked[0]) == 1 else None


def trained_by(optimizer: torch.optim.Optimizer) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """The outermost module that holds what `optimizer` trains, and all optimizers that share in its parameters.

    If no single module holds all of it, or a parameter lies in no module, the model is a `ModuleGroup`. Raises
    `ValueError` if several modules hold it and nothing that all processes see distinguishes them.
    """
    wanted = members(optimizer)
    missing = _index(wanted)
    roots, chosen = _roots(missing), list[nn.Module]()
    while roots:
        chosen.append(_best(roots, missing))
        for parameter in chosen[-1].parameters():
            missing.pop(id(parameter), None)
        roots = [root for root in roots if any(id(parameter) in missing for parameter in root.parameters())]
    loose = [p for p in wanted if id(p) in missing and isinstance(p, nn.Parameter)]
    model = chosen[0] if len(chosen) == 1 and not loose else ModuleGroup(chosen, loose)

    index = _index(model.parameters())
    optimizers, taken = [optimizer], set(map(id, wanted))
    for group in _ranked(index, but=optimizer):
        own = set(map(id, members(group[0])))
        # If two cannot be distinguished, the script has dropped one of them. The first update shows which.
        if len(group) == 1 and not own & taken:
            optimizers.append(group[0])
            taken |= own
    return model, sorted(optimizers, key=lambda each: min(_positions(each, index), default=len(index)))


def outermost(model: nn.Module) -> nn.Module:
    """The outermost module that holds `model`. If there are several, the one that reduces its gradients.

    Raises `ValueError` if several remain that cannot be distinguished.
    """
    index = _index(model.parameters())
    roots = _roots(index)
    return _best(roots, index) if roots else model


def reducers_of(model: nn.Module) -> list[DistributedDataParallel]:
    """The wrappers that reduce gradients of parameters of `model`: in it in order, then those around it or its parts.

    If a module has several wrappers, all of them: the loop may call any.
    """
    inside = [each for each in model.modules() if isinstance(each, DistributedDataParallel)]
    known, held = set(map(id, inside)), _index(model.parameters())
    around = [each for each in _living(DistributedDataParallel) if id(each) not in known and "_modules" in vars(each)]
    around = [each for each in around if any(id(parameter) in held for parameter in each.parameters())]
    index = {id(module): position for position, module in enumerate(model.modules())}
    return inside + sorted(around, key=lambda each: index.get(id(unwrap(each)[0]), len(index)))


def _index(parameters: Iterable[torch.Tensor]) -> dict[int, int]:
    """From the identity of each parameter to its position."""
    return {id(parameter): position for position, parameter in enumerate(parameters)}


def _positions(optimizer: torch.optim.Optimizer, index: Mapping[int, int]) -> list[int]:
    return sorted(index[id(p)] for p in members(optimizer) if id(p) in index)


def _ranked(index: Mapping[int, int], but: object = None) -> list[list[torch.optim.Optimizer]]:
    """The living optimizers of these parameters, in an order that all ranks agree on.

    Optimizers that cannot be distinguished share a list.
    """

    def order(optimizer: torch.optim.Optimizer) -> tuple[int, int, list[int], str, int]:
        held = _positions(optimizer, index)
        return held[0], -len(held), held, type(optimizer).__qualname__, len(optimizer.state)

    # A wrapper that only forwards `param_groups` of another optimizer lacks the attribute.
    living = [each for each in _living(torch.optim.Optimizer) if "param_groups" in vars(each) and each is not but]
    holders = sorted((each for each in living if _positions(each, index)), key=order)
    return [list(group) for _, group in itertools.groupby(holders, key=order)]


def _living(kind: type[Kind]) -> list[Kind]:
    # `type` instead of `isinstance`, because a proxy may run any code for `__class__`. There may be a million objects,
    # so every type is checked once.
    objects = gc.get_objects()
    wanted = {each for each in set(map(type, objects)) if issubclass(each, kind)}
    return [each for each in objects if type(each) in wanted] if wanted else []


def _best(roots: Sequence[nn.Module], index: Mapping[int, int]) -> nn.Module:
    """The root that is most likely the model of the parameters in `index`.

    It holds most of them, reduces their gradients and holds few others. Then its first parameter decides, then the
    names and types of its modules. Raises `ValueError` if several remain that do not wrap one module.
    """

    def merit(root: nn.Module) -> tuple[int, bool, int, int, str, int]:
        held = {id(parameter) for parameter in root.parameters()}
        wrappers = unwrap(root)[1]
        reduces = any(isinstance(wrapper, DistributedDataParallel) for wrapper in wrappers)
        own = [index[key] for key in held if key in index]
        return len(own), reduces, -len(held), len(wrappers), type(root).__qualname__, -min(own, default=len(index))

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
    holders: dict[int, nn.Module] = {}
    while waiting:
        module = waiting.pop()
        if id(module) not in holders:
            holders[id(module)] = module
            waiting.extend(parents.get(id(module), ()))
    return [module for key, module in holders.items() if key not in parents]
