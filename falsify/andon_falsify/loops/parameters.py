"""The model inside its wrappers, copies of its tensors by name, and torch's clipping before it changes gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from andon_falsify.loops.sightings import Group
from andon_falsify.subjects.trace import digest

_WRAPPERS = ("module", "_forward_module", "_original_module", "_orig_mod")
_DELEGATES = ("DistributedDataParallel", "DataParallel", "OptimizedModule", "_FabricModule", "FullyShardedDataParallel")


def unwrapped(model: nn.Module) -> nn.Module:
    """The innermost module of wrappers that only delegate."""
    while type(model).__name__ in _DELEGATES:
        inner = next((model._modules[name] for name in _WRAPPERS if name in model._modules), None)
        if inner is None:
            break
        model = inner
    return model


def whole(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor on the CPU. Collective if `tensor` is sharded."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().cpu().clone()


def is_sharded(model: nn.Module) -> bool:
    """Whether this rank holds only a part of some parameter."""
    return any(not place.is_replicate() for each in model.parameters() for place in getattr(each, "placements", ()))


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that train, by name, in the model's order."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def copied(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: whole(parameter) for name, parameter in parameters.items()}


def constant(model: nn.Module) -> dict[str, Tensor]:
    """Copies of what training must not change: parameters that do not train, and buffers except running statistics."""
    frozen = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return copied(frozen) | buffers(model, running=False)


def buffers(model: nn.Module, *, running: bool) -> dict[str, Tensor]:
    """Copies of the buffers of modules that keep running statistics, or of all other modules."""
    return {
        name: whole(buffer)
        for prefix, module in model.named_modules()
        if hasattr(module, "running_mean") == running
        for name, buffer in module.named_buffers(prefix, recurse=False)
    }


def gradients(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in parameters.items() if p.grad is not None}


def groups_of(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> tuple[Group, ...]:
    names = {id(parameter): name for name, parameter in parameters.items()}
    return tuple(
        Group(
            tuple(names[id(p)] for p in group["params"] if id(p) in names),
            plain_values({key: value for key, value in group.items() if key != "params"}),
        )
        for group in optimizer.param_groups
    )


def optimizer_digest(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> str:
    """A digest of the tensors in the optimizer's state of `parameters`."""
    state = {
        f"{name}/{key}": whole(value).reshape(-1)
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }
    return digest(state)


def plain_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of an optimizer as numbers, texts, tuples of these, or else their `repr`."""

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.item() if value.numel() == 1 else value.tolist()
        if isinstance(value, list | tuple):
            return tuple(map(plain, value))
        return value if isinstance(value, bool | int | float | str | None) else repr(value)

    return {name: plain(value) for name, value in settings.items()}


@contextmanager
def clipping_seen(seen: Callable[[float | None], None]) -> Iterator[None]:
    """Inside, `seen` is called before gradients are clipped: with their norm, or None if they are clipped by value.

    It replaces the part of `clip_grad_norm_` that scales, so that calls of a name that was imported earlier count too.
    """

    def by_norm(parameters: Any, max_norm: float, total_norm: Tensor, *_: Any, **__: Any) -> None:
        seen(float(total_norm.full_tensor() if hasattr(total_norm, "full_tensor") else total_norm))

    def by_value(*_: Any, **__: Any) -> None:
        seen(None)

    homes: list[tuple[Any, str, Callable[..., None]]] = [
        (clip_grad, "_clip_grads_with_norm_", by_norm),
        (torch.nn.utils, "clip_grads_with_norm_", by_norm),
        (clip_grad, "clip_grad_value_", by_value),
        (torch.nn.utils, "clip_grad_value_", by_value),
    ]
    with ExitStack() as stack:
        for home, name, first in homes:
            stack.callback(setattr, home, name, getattr(home, name))
            setattr(home, name, _preceded(getattr(home, name), first))
        yield


def _preceded(original: Callable[..., Any], first: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(*args: Any, **kwargs: Any) -> Any:
        first(*args, **kwargs)
        return original(*args, **kwargs)

    return clip


def only_shrunk(given: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> bool:
    """Whether `given` may be the result of clipping `before`: no element grew or changed its sign.

    True also if something in `before` is not finite, because clipping can make anything of that.
    """
    if given.keys() != before.keys():
        return False
    pairs = [(given[name], held) for name, held in before.items()]
    if not all(bool(held.isfinite().all()) for _, held in pairs):
        return True
    return all(bool(((new * old >= 0) & (new.abs() <= old.abs() * (1 + 1e-5))).all()) for new, old in pairs)
