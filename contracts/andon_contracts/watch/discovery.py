"""What an optimizer trains, found in a process that says nothing: its modules, and the other optimizers of these.

Objects are found through the garbage collector, once for each optimizer that makes its first update: nothing of torch
is replaced for it, and the order in which they are found has no part in the answer, so that ranks agree.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from andon_contracts.watch.model_probe import Several, unwrap

Kind = TypeVar("Kind")


def members(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of `optimizer`, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def optimizer_of(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer | None:
    """The living optimizer that holds the first of `parameters` that any holds, and of several such the largest.

    None where nothing tells two of them apart: the one that makes an update is known then.
    """
    place = {id(parameter): index for index, parameter in enumerate(parameters)}
    found = _alike([each for each in _optimizers() if _places(each, place)], place)
    return found[0][0] if found and len(found[0]) == 1 else None


def trained_by(optimizer: torch.optim.Optimizer) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """The outermost module that holds what `optimizer` trains, and all optimizers that share in its parameters.

    Where no single module holds all of it, or none holds a parameter, a `Several` of what does. Raises `ValueError`
    where several modules hold it and nothing that is alike in all processes tells them apart.
    """
    wanted = members(optimizer)
    model = _model_of(wanted)
    place = {id(parameter): index for index, parameter in enumerate(model.parameters())}
    found, taken = [optimizer], set(map(id, wanted))
    others = [each for each in _optimizers() if each is not optimizer and _places(each, place)]
    for alike in _alike(others, place):
        mine = set(map(id, members(alike[0])))
        # Of two that nothing tells apart, one was thrown away: which one, its first update says.
        if len(alike) == 1 and not mine & taken:
            found.append(alike[0])
            taken |= mine
    return model, sorted(found, key=lambda each: min(_places(each, place), default=len(place)))


def outermost(model: nn.Module) -> nn.Module:
    """The outermost module that holds `model`, the one that reduces its gradients where there is one.

    Raises `ValueError` where several do and nothing tells them apart.
    """
    held = {id(parameter): index for index, parameter in enumerate(model.parameters())}
    roots = _roots(set(held))
    return _best(roots, held) if roots else model


def reducers_of(model: nn.Module) -> list[DistributedDataParallel]:
    """The wrappers that reduce gradients of parameters of `model`: in it in order, then those around it or its parts.

    Of several wrappers of one module, each: the loop calls one of them.
    """
    inside = [each for each in model.modules() if isinstance(each, DistributedDataParallel)]
    known, held = set(map(id, inside)), {id(parameter) for parameter in model.parameters()}
    around = [each for each in _living(DistributedDataParallel) if id(each) not in known and "_modules" in vars(each)]
    mine = [each for each in around if any(id(parameter) in held for parameter in each.parameters())]
    place = {id(module): index for index, module in enumerate(model.modules())}
    return inside + sorted(mine, key=lambda each: place.get(id(unwrap(each)[0]), len(place)))


def _order(optimizer: torch.optim.Optimizer, place: Mapping[int, int]) -> tuple[int, int, list[int], str, int]:
    """The first parameter comes first, then who holds more; then what else tells optimizers of the same ones apart."""
    held = sorted(_places(optimizer, place))
    return held[0], -len(held), held, type(optimizer).__qualname__, len(optimizer.state)


def _alike(optimizers: Iterable[torch.optim.Optimizer], place: Mapping[int, int]) -> list[list[torch.optim.Optimizer]]:
    """`optimizers` in order; those that nothing tells apart together."""
    keyed = sorted(((_order(each, place), each) for each in optimizers), key=lambda pair: pair[0])
    return [[each for _, each in pairs] for _, pairs in itertools.groupby(keyed, key=lambda pair: pair[0])]


def _places(optimizer: torch.optim.Optimizer, place: Mapping[int, int]) -> list[int]:
    return [place[id(p)] for p in members(optimizer) if id(p) in place]


def _optimizers() -> list[torch.optim.Optimizer]:
    # A wrapper that only hands on the groups of another has none of its own.
    return [each for each in _living(torch.optim.Optimizer) if "param_groups" in vars(each)]


def _living(kind: type[Kind]) -> list[Kind]:
    # The type, not isinstance: a proxy may do anything when it is asked for its class. Each type is asked once: there
    # may be a million objects.
    objects = gc.get_objects()
    wanted = {each for each in set(map(type, objects)) if issubclass(each, kind)}
    return [each for each in objects if type(each) in wanted] if wanted else []


def _model_of(wanted: Sequence[torch.Tensor]) -> nn.Module:
    left = {id(parameter): index for index, parameter in enumerate(wanted)}
    roots = _roots(set(left))
    chosen: list[nn.Module] = []
    while roots:
        best = _best(roots, left)
        held = {id(parameter) for parameter in best.parameters()}
        chosen.append(best)
        left = {key: index for key, index in left.items() if key not in held}
        roots = [root for root in roots if any(id(parameter) in left for parameter in root.parameters())]
    loose = [p for p in wanted if id(p) in left and isinstance(p, nn.Parameter)]
    return chosen[0] if len(chosen) == 1 and not loose else Several(chosen, loose)


def _merit(root: nn.Module, left: Mapping[int, int]) -> tuple[int, bool, int, int, str, int]:
    """How well `root` stands for a model: it holds much of what is left, reduces it, and holds little else.

    left: the places of the parameters; of modules that hold different ones, that of the first one comes first.
    """
    held = {id(parameter) for parameter in root.parameters()}
    wrappers = unwrap(root)[1]
    reduces = any(isinstance(wrapper, DistributedDataParallel) for wrapper in wrappers)
    mine = held & set(left)
    first = min((left[key] for key in mine), default=len(left))
    return len(mine), reduces, -len(held), len(wrappers), type(root).__qualname__, -first


def _best(roots: Sequence[nn.Module], left: Mapping[int, int]) -> nn.Module:
    """The root of most merit, and of several such the one whose modules and names come first.

    Raises `ValueError` where that leaves several that are not wrappers of one.
    """
    most = max(_merit(root, left) for root in roots)
    first = [root for root in roots if _merit(root, left) == most]
    if len(first) > 1:
        shapes = [_shape(root) for root in first]
        first = [root for root, shape in zip(first, shapes, strict=True) if shape == min(shapes)]
    if len({id(unwrap(root)[0]) for root in first}) > 1:
        kinds = f"{len(first)} modules {type(first[0]).__qualname__}"
        msg = f"{kinds} hold what the optimizer trains, and nothing tells them apart: say which one by andon.watch(...)"
        raise ValueError(msg)
    return first[0]


def _shape(root: nn.Module) -> list[str]:
    """What a module is made of, by names and types: alike in every process that made it alike."""
    modules = [f"{name} {type(each).__module__}.{type(each).__qualname__}" for name, each in root.named_modules()]
    buffers = [f"{name} {tuple(each.shape)}" for name, each in root.named_buffers()]
    return [*modules, *(name for name, _ in root.named_parameters()), *buffers]


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
