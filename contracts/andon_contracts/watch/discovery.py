"""What an optimizer trains, found in a process that says nothing: its modules, and the other optimizers of these.

Objects are found through the garbage collector, once for each optimizer that makes its first update: nothing of torch
is replaced for it, and the order in which they are found has no part in the answer, so that ranks agree.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from andon_contracts.watch.subject import Several, unwrap

Kind = TypeVar("Kind")


def members(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of `optimizer`, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def optimizer_of(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer | None:
    """The living optimizer that holds the first of `parameters` that any holds, and of several such the largest."""
    place = {id(parameter): index for index, parameter in enumerate(parameters)}
    found = [each for each in _optimizers() if _places(each, place)]
    return min(found, key=lambda each: _order(each, place), default=None)


def trained_by(optimizer: torch.optim.Optimizer) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """The outermost module that holds what `optimizer` trains, and all optimizers that share in its parameters.

    Where no single module holds all of it, or none holds a parameter, a `Several` of what does.
    """
    wanted = members(optimizer)
    model = _model_of(wanted)
    place = {id(parameter): index for index, parameter in enumerate(model.parameters())}
    found, taken = [optimizer], set(map(id, wanted))
    others = [each for each in _optimizers() if each is not optimizer and _places(each, place)]
    for each in sorted(others, key=lambda each: _order(each, place)):
        mine = set(map(id, members(each)))
        if not mine & taken:
            found.append(each)
            taken |= mine
    return model, sorted(found, key=lambda each: min(_places(each, place), default=len(place)))


def outermost(model: nn.Module) -> nn.Module:
    """The outermost module that holds `model`, the one that reduces its gradients where there is one."""
    held = {id(parameter) for parameter in model.parameters()}
    return max(_roots(held), key=lambda root: _merit(root, held), default=model)


def _order(optimizer: torch.optim.Optimizer, place: Mapping[int, int]) -> tuple[int, int, list[int], str, int]:
    """The first parameter comes first, then who holds more; then what else tells optimizers of the same ones apart."""
    held = sorted(_places(optimizer, place))
    return held[0], -len(held), held, type(optimizer).__qualname__, len(optimizer.state)


def _places(optimizer: torch.optim.Optimizer, place: Mapping[int, int]) -> list[int]:
    return [place[id(p)] for p in members(optimizer) if id(p) in place]


def _optimizers() -> list[torch.optim.Optimizer]:
    # A wrapper that only hands on the groups of another has none of its own.
    return [each for each in _living(torch.optim.Optimizer) if "param_groups" in vars(each)]


def _living(kind: type[Kind]) -> list[Kind]:
    # The type, not isinstance: a proxy may do anything when it is asked for its class.
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def _model_of(wanted: Sequence[torch.Tensor]) -> nn.Module:
    left = {id(parameter) for parameter in wanted}
    roots = _roots(left)
    chosen: list[nn.Module] = []
    while roots and left:
        best = max(roots, key=lambda root: _merit(root, left))
        held = {id(parameter) for parameter in best.parameters()}
        if not held & left:
            break
        chosen.append(best)
        left -= held
    loose = [p for p in wanted if id(p) in left and isinstance(p, nn.Parameter)]
    return chosen[0] if len(chosen) == 1 and not loose else Several(chosen, loose)


def _merit(root: nn.Module, left: set[int]) -> tuple[int, bool, int, int, str]:
    """How well `root` stands for a model: it holds much of what is left, reduces it, and holds little else."""
    held = {id(parameter) for parameter in root.parameters()}
    wrappers = unwrap(root)[1]
    reduces = any(isinstance(wrapper, DistributedDataParallel) for wrapper in wrappers)
    return len(held & left), reduces, -len(held), len(wrappers), type(root).__qualname__


def _roots(wanted: set[int]) -> list[nn.Module]:
    """The modules that hold one of `wanted`, at any depth, and lie in no other module."""
    modules = [each for each in _living(nn.Module) if "_modules" in vars(each) and not isinstance(each, Several)]
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
