"""The module that is watched, its wrappers and optimizers, hooks for its forward passes, and its random state."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from multiprocessing.util import sub_debug
from operator import attrgetter, eq, is_

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from andon_contracts.observe import norm_of, plain
from andon_contracts.watch.values import text_digest


class Change(IntEnum):
    """The code in the value `change`: what happened to a parameter. `text` is what a message says of it."""

    text: str

    def __new__(cls, code: int, text: str = "") -> Change:
        member = int.__new__(cls, code)
        member._value_ = code
        member.text = text
        return member

    REPLACED = 1, "replaced by another parameter"
    TOGGLED = 2, "frozen or unfrozen"
    ADDED = 3, "added, or another one was removed"
    MISSING = 4, "trainable but not in the optimizer"
    FOREIGN = 5, "in the optimizer but not a trainable parameter of the model"
    UNDECLARED = 6, "trainable, which was not declared"
    FROZEN = 7, "declared trainable but frozen"
    UNTIED = 8, "no longer tied to the tensor that it was declared to share"
    TOGGLED_BY_THE_LOOP = 9, "frozen or unfrozen"
    """Frozen, or unfrozen and in its optimizer: if all ranks do it alike, a loop may mean it (gradual unfreezing)."""


PARAMETER_BITS = 32


def change_of(change: Change, index: int) -> int:
    """A change and the index of the parameter, as one integer."""
    return change << PARAMETER_BITS | index


_modules_of, _parameters_of, _requires_grad = map(attrgetter, ("_modules", "_parameters", "requires_grad"))
_WRAPPERS = ("module", "_orig_mod", "_forward_module")


def unwrap(model: nn.Module) -> tuple[nn.Module, tuple[nn.Module, ...]]:
    """The innermost module of wrappers that only delegate, and the wrappers from the outside in."""
    wrappers: list[nn.Module] = []
    while True:
        wraps = type(model).__name__ in ("DistributedDataParallel", "DataParallel", "OptimizedModule", "_FabricModule")
        inner = next((model._modules[n] for n in _WRAPPERS if n in model._modules), None) if wraps else None
        if inner is None:
            return model, tuple(wrappers)
        wrappers.append(model)
        model = inner


class ModuleGroup(nn.Module):
    """Modules, inside their wrappers, and loose parameters that one optimizer trains and no module holds together."""

    def __init__(self, modules: Sequence[nn.Module], loose: Sequence[nn.Parameter]) -> None:
        super().__init__()
        for index, module in enumerate(modules):
            self.add_module(str(index), unwrap(module)[0])
        for index, parameter in enumerate(loose):
            self.register_parameter(f"loose{index}", parameter)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this rank holds only a part of the tensor (FSDP2, tensor parallel)."""
    return hasattr(tensor, "placements") and any(not p.is_replicate() for p in tensor.placements)


@dataclass(frozen=True)
class ParameterSlot:
    """A place in the model that holds a parameter."""

    owner: nn.Module
    attribute: str
    name: str
    parameter: nn.Parameter
    trainable: bool


class ModelProbe:
    """A model and its optimizers as they were when the watch began."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        declared: Sequence[str] | None,
        tied: Sequence[tuple[str, str]],
        reducers: Sequence[DistributedDataParallel] = (),
    ) -> None:
        """declared: name patterns of the trainable parameters; tied: pairs of names that share a tensor; reducers: the
        wrappers of `model`, of its parts or of what holds it.
        """
        self.outer = model
        self.inner, wrapping = unwrap(model)
        self.wrappers = tuple(type(each).__name__ for each in wrapping)
        self.reducers = [WrapperProbe(each) for each in reducers]
        self.unused_expected = any(each.find_unused_parameters for each in reducers)
        compiled = self.wrappers.index("OptimizedModule") if "OptimizedModule" in self.wrappers else None
        in_place = getattr(self.inner, "_compiled_call_impl", None) is not None
        # Hooks inside of what is compiled do not run.
        self.hooked_module = self.inner if compiled is None else wrapping[compiled]
        self.compiled = compiled is not None or in_place
        within = () if compiled is None else self.wrappers[compiled:]
        self.forward_is_compiled = in_place or "DistributedDataParallel" in within
        self.buffer_scopes = _buffer_scopes(self.hooked_module, self.inner, reducers)
        self.modules = list(self.inner.modules())
        by_name = list(self.inner.named_modules())
        self.module_names_digest = text_digest([name for name, _ in by_name])
        """The digest of the modules' names, in order."""
        self.slots: list[ParameterSlot] = []
        for prefix, owner in by_name:
            for attribute, p in owner._parameters.items():
                if p is not None:
                    name = f"{prefix}.{attribute}" if prefix else attribute
                    self.slots.append(ParameterSlot(owner, attribute, name, p, p.requires_grad))
        self._owners = [slot.owner for slot in self.slots]
        self._attributes = [slot.attribute for slot in self.slots]
        self._held = [slot.parameter for slot in self.slots]
        self._trainable = [slot.trainable for slot in self.slots]
        self.names = tuple(slot.name for slot in self.slots)
        first = {id(slot.parameter): slot for slot in reversed(self.slots)}
        self.parameters = {slot.name: slot.parameter for slot in self.slots if first[id(slot.parameter)] is slot}
        self.trainable = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.frozen = {name: p for name, p in self.parameters.items() if not p.requires_grad}
        self._batch_norms = [(n, m) for n, m in by_name if isinstance(m, _BatchNorm) and m.track_running_stats]
        self.sharded = any(is_sharded(parameter) for parameter in self.parameters.values())
        meshes = [getattr(parameter, "device_mesh", None) for parameter in self.parameters.values()]
        fsdp = hasattr(self.inner, "set_requires_gradient_sync") and all(m is None or m.ndim == 1 for m in meshes)
        self.every_rank_has_rows = fsdp or not self.sharded
        """False if ranks share the rows of a batch, as they do under tensor parallelism."""
        self._optimizers = tuple(optimizers)
        self.extra_tensors = self._find_extra_tensors()
        """Optimizer tensors outside the model. Their updates are not checked."""
        self._groups = self._members()
        self._counts = self._sizes()
        self._declared = declared
        self._tied = tied

    def _members(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for each in self._optimizers for group in each.param_groups]

    def _sizes(self) -> list[int]:
        return [*map(len, map(_modules_of, self.modules)), *map(len, map(_parameters_of, self.modules))]

    def names_by_id(self) -> Mapping[int, str]:
        return {id(parameter): name for name, parameter in self.parameters.items()}

    def gpu(self) -> torch.device | None:
        """The GPU of the first parameter that is trained on a GPU, which computes the loop's updates; None: no GPU."""
        return next((parameter.device for parameter in self.trainable.values() if parameter.is_cuda), None)

    def accelerators(self) -> list[str]:
        used = {parameter.device for parameter in self.parameters.values() if parameter.device.type == "cuda"}
        return [torch.cuda.get_device_name(device) for device in used]

    def buffers(self) -> list[torch.Tensor]:
        return [b for module in self.modules for b in module._buffers.values() if b is not None]

    def buffers_by_name(self) -> dict[str, torch.Tensor]:
        """The buffers that are there now and are compared, by name."""
        if not self.reducers:
            return {name: b for name, b in self.inner.named_buffers() if not b.is_meta}
        held = {id(b) for scope in self.buffer_scopes for kept in scope.buffers() for b in kept}
        return {name: b for name, b in self.inner.named_buffers() if id(b) in held}

    def modes(self) -> bytes:
        return bytes([module.training for module in self.modules])

    def modes_by_name(self) -> dict[str, int]:
        """Whether each module is in training mode, by its name; the model's own is "the model"."""
        return {name or "the model": int(each.training) for name, each in self.inner.named_modules()}

    def batch_norm_in_training(self) -> int:
        """The number, from 1, of the first batch norm with running statistics that is in training mode; 0: none."""
        return next((number for number, (_, norm) in enumerate(self._batch_norms, 1) if norm.training), 0)

    def batch_norm_name(self, number: int) -> str:
        """The name of the batch norm that `batch_norm_in_training` numbered; "" for 0."""
        return self._batch_norms[number - 1][0] if number else ""

    def foreign_optimizers(self) -> list[int]:
        """The numbers, from 1, of the optimizers that hold parameters, but of another model than this one."""
        mine, beside = set(map(id, self.parameters.values())), set(map(id, self.extra_tensors))
        held = [set(map(id, _held_by([each]))) for each in self._optimizers]
        return [n for n, each in enumerate(held, 1) if each.isdisjoint(mine) and not each <= beside]

    def _find_extra_tensors(self) -> list[Tensor]:
        """The tensors of the optimizers that are not meant to be parameters of the model: those that are no
        `nn.Parameter` (a temperature, a latent), and those of the shape of a trained one in another precision, which
        are its master weights.
        """
        shaped = [p for p in self.parameters.values() if not isinstance(p, UninitializedParameter)]
        forms = {(tuple(p.shape), p.dtype) for p in shaped if p.requires_grad}
        shapes, mine = {shape for shape, _ in forms}, set(map(id, self.parameters.values()))
        others = (p for p in _held_by(self._optimizers) if id(p) not in mine)
        return [
            p
            for p in others
            if not isinstance(p, nn.Parameter)
            or (
                not isinstance(p, UninitializedParameter)
                and tuple(p.shape) in shapes
                and (tuple(p.shape), p.dtype) not in forms
            )
        ]

    def without_values(self) -> list[str]:
        """Messages about parameters that have no values to look at."""
        lazy = [name for name, p in self.parameters.items() if isinstance(p, UninitializedParameter)]
        meta = [name for name, p in self.parameters.items() if p.is_meta and name not in lazy]
        no_shape = "have no shape yet: call the lazy module once, before the watch is opened"
        no_values = "are on the meta device and have no values: load the model first"
        return [f"{_few(names)} {what}" for names, what in ((lazy, no_shape), (meta, no_values)) if names]

    def norm_share(self, tensors: Iterable[torch.Tensor], world: int) -> float:
        """The part of the 2-norm of `tensors` that this rank contributes, one of `world`; see `norm_of_all`."""
        if not self.sharded:
            return norm_of(tensors)
        by_pieces: dict[int, list[torch.Tensor]] = {}
        for tensor in tensors:
            pieces = 1
            for dimension, placement in enumerate(getattr(tensor, "placements", ())):
                pieces *= 1 if placement.is_replicate() else tensor.device_mesh.size(dimension)  # type: ignore[attr-defined]
            by_pieces.setdefault(pieces, []).append(tensor)
        return math.sqrt(sum(norm_of(each) ** 2 * n / world for n, each in by_pieces.items()))

    def norm_of_all(self, shares: Sequence[float]) -> float:
        """The 2-norm of tensors from every rank's `norm_share`: its own where each rank holds all of them."""
        return math.sqrt(sum(share**2 for share in shares)) if self.sharded else shares[0]

    def fault_at_start(self) -> int:
        """A `change_of` for the first disagreement of model, optimizers and what was declared; 0: none."""
        if self._declared is not None:
            for i, slot in enumerate(self.slots):
                if slot.trainable != any(fnmatch.fnmatchcase(slot.name, pattern) for pattern in self._declared):
                    return change_of(Change.UNDECLARED if slot.trainable else Change.FROZEN, i)
        held = {member for group in self._groups for member in group} | self._copies()
        missing = [i for i, s in enumerate(self.slots) if s.trainable and id(s.parameter) not in held]
        # Master weights beside the model may be one flat tensor, of which each rank holds its part.
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        sizes = {id(self._held[i]): self._held[i].numel() for i in missing}
        if sum(sizes.values()) > ranks * sum(each.numel() for each in self.extra_tensors):
            return change_of(Change.MISSING, missing[0])
        known = set(map(id, (*self._held, *self.extra_tensors)))
        if any(parameter.requires_grad and id(parameter) not in known for parameter in _held_by(self._optimizers)):
            return change_of(Change.FOREIGN, len(self.slots))
        by_name = dict(zip(self.names, self._held, strict=True))
        for one, other in self._tied:
            if by_name[one] is not by_name[other]:
                return change_of(Change.UNTIED, self.names.index(one))
        return 0

    def followers(self) -> dict[str, nn.Parameter]:
        """The frozen parameters of modules that are copies of what is trained: teachers, averages."""
        copies = self._copies()
        return {name: parameter for name, parameter in self.frozen.items() if id(parameter) in copies}

    def _copies(self) -> set[int]:
        """The parameters, by identity, of modules that no optimizer trains and that have the layout of a trained one,
        and its values, or half as many elements as all that is trained: layers that are made alike are not copies.
        """
        # An optimizer may be given the frozen ones as well, as MoCo's is, and leaves them as they are.
        held = {member for group in self._groups for member in group} - set(map(id, self.frozen.values()))
        trained: dict[object, list[nn.Module]] = {}
        others: list[nn.Module] = []
        whole = sum(p.numel() for p in self.parameters.values() if id(p) in held)
        for module in self.modules:
            ids = {id(p) for p in module.parameters()}
            if ids and ids.isdisjoint(held):
                others.append(module)
            elif ids:
                trained.setdefault(_layout(module), []).append(module)
        found: set[int] = set()
        for module in others:
            size = sum(p.numel() for p in module.parameters())
            if any(2 * size >= whole or _same_values(module, each) for each in trained.get(_layout(module), ())):
                found |= {id(p) for p in module.parameters()}
        return found

    def change(self, stepping: torch.optim.Optimizer | None = None) -> int:
        """A `change_of` for the first thing that is not as it was at the start; 0: nothing changed.

        stepping: the optimizer that makes an update. What only other optimizers hold may be frozen meanwhile, as loops
        do with adversaries.
        """
        now = list(map(dict.get, map(_parameters_of, self._owners), self._attributes))
        if not all(map(is_, now, self._held)):
            # Pruning gives a parameter another name in its module.
            renamed = [any(slot.parameter is each for each in slot.owner._parameters.values()) for slot in self.slots]
            now = [was if p is None and same else p for p, was, same in zip(now, self._held, renamed, strict=True)]
            if not all(map(is_, now, self._held)):
                return change_of(Change.REPLACED, list(map(is_, now, self._held)).index(False))
        if self._sizes() != self._counts:
            return change_of(Change.ADDED, len(self.slots))
        trainable = list(map(_requires_grad, now))
        if trainable != self._trainable and stepping is not None:
            others = [each for each in self._optimizers if each is not stepping]
            waiting = set(map(id, _held_by(others))) - set(map(id, _held_by([stepping])))
            was = [slot.trainable and id(slot.parameter) in waiting for slot in self.slots]
            trainable = [now or before for now, before in zip(trainable, was, strict=True)]
        if trainable != self._trainable:
            # A loop may freeze parameters, or unfreeze those that its optimizers hold, but not inside a wrapper: that
            # reduces only what was trainable when it was made.
            held = set(map(id, _held_by(self._optimizers)))
            for index, (slot, thawed) in enumerate(zip(self.slots, trainable, strict=True)):
                this = frozenset({id(slot.parameter)})
                if thawed and not slot.trainable and (not this <= held or any(r.holds(this) for r in self.reducers)):
                    return change_of(Change.TOGGLED, index)
            return change_of(Change.TOGGLED_BY_THE_LOOP, list(map(eq, trainable, self._trainable)).index(False))
        if self._members() != self._groups:
            return change_of(Change.FOREIGN, len(self.slots))
        return 0

    def became(self) -> str:
        """What the loop made of the model since the start, as at the end of training, in words; "": nothing."""
        if self.change() or set(map(id, self.inner.parameters())) != set(map(id, self.parameters.values())):
            return "the model has other parameters now"
        if any(getattr(module, "merged", False) is True for module in self.inner.modules()):
            return "an adapter is merged into its base now"
        return ""


def _held_by(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    return [parameter for each in optimizers for group in each.param_groups for parameter in group["params"]]


def _layout(module: nn.Module) -> object:
    return tuple((name, tuple(p.shape)) for name, p in module.named_parameters())


def _same_values(one: nn.Module, other: nn.Module) -> bool:
    return all(
        a.device == b.device and a.dtype == b.dtype and not a.is_meta and torch.equal(plain(a), plain(b))
        for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )


class WrapperProbe:
    """A wrapper that reduces gradients when a backward pass ends: whether it does so in the present window."""

    def __init__(self, module: DistributedDataParallel) -> None:
        self.module = module
        self._parameters = {id(p) for p in module.parameters()}
        self.new_window()

    def new_window(self) -> None:
        self._called = self._sync_enabled = False

    def holds(self, members: frozenset[int]) -> bool:
        """Whether it has any of these parameters, which are given by identity."""
        return not self._parameters.isdisjoint(members)

    def forward(self) -> None:
        if torch.is_grad_enabled():
            self._called = True
            self._sync_enabled |= bool(self.module.require_backward_grad_sync)

    @property
    def reduces(self) -> bool:
        """Whether the gradients are to be those of all ranks. A reduction that bypasses the wrapper is a fault.

        The first window of a watch that opens with the update was not seen: there it is as the wrapper stands now.
        """
        asked = self._sync_enabled or (not self._called and bool(self.module.require_backward_grad_sync))
        return not getattr(self.module, "_comm_hooks", ()) and asked


@dataclass(frozen=True)
class BufferScope:
    """A module whose buffers are compared at each of its forward calls: it is in a wrapper, or in no wrapper at all."""

    hooked_module: nn.Module
    inner: nn.Module

    def buffers(self) -> tuple[list[Tensor], list[Tensor]]:
        """The buffers that a checkpoint contains, and the others, in the order of the modules."""
        kept: list[Tensor] = []
        caches: list[Tensor] = []
        for module in self.inner.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    (caches if name in module._non_persistent_buffers_set else kept).append(buffer)
        return kept, caches


def _buffer_scopes(
    called: nn.Module, inner: nn.Module, reducers: Sequence[DistributedDataParallel]
) -> list[BufferScope]:
    """Where buffers are compared. Outside of all wrappers nothing makes them equal: each rank has its own."""
    inside = set(map(id, inner.modules()))
    found: dict[int, BufferScope] = {}
    for each in reducers:
        # Told not to share buffers, a wrapper leaves each rank its own on purpose.
        if each.broadcast_buffers:
            innermost, wrapping = unwrap(each)
            compiled = next((w for w in wrapping if type(w).__name__ == "OptimizedModule"), innermost)
            at = called if innermost is inner else compiled
            if id(innermost) in inside or innermost is inner:
                found.setdefault(id(innermost), BufferScope(at, innermost))
    told_not_to = bool(reducers) and not any(each.broadcast_buffers for each in reducers)
    return list(found.values()) if found or told_not_to else [BufferScope(called, inner)]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more parameters" if len(names) > 3 else "")


def unknown_names(names: Iterable[str], known: Sequence[str]) -> list[str]:
    """Those of `names` (patterns) that match no known name."""
    return [name for name in names if not any(fnmatch.fnmatchcase(one, name) for one in known)]


class ForwardHook:
    """A hook before or after a forward pass, which calls `see`; arguments: with all that torch gives the hook.

    A model is copied and saved with its hooks. A copy's hook is a function of the standard library that ignores its
    arguments: copies are not watched, and a model that was saved whole loads without this package.
    """

    def __init__(self, see: Callable[..., None], *, arguments: bool = False) -> None:
        self._see = see
        self._arguments = arguments

    def __call__(self, *given: object) -> None:
        if not torch.compiler.is_compiling() and not torch._C._is_tracing():
            self._see(*(given if self._arguments else ()))

    def __reduce__(self) -> tuple[type[partial[None]], tuple[Callable[..., None]]]:
        return partial, (sub_debug,)


# For `torch.load(weights_only=True)` of such a file. `getattr`, as for a bound method, would allow a file too much.
torch.serialization.add_safe_globals([partial, sub_debug])


def random_state(device: torch.device) -> Tensor | None:
    """The random state from which a model on `device` draws, as int64 words; None for devices that are not known."""
    if device.type not in ("cpu", "cuda"):
        return None
    own = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return torch.cat([*own, torch.get_rng_state()]).view(torch.int64)


def restore_random(state: Tensor, device: torch.device) -> None:
    """Draw from the `state` that `random_state` gave."""
    found = state.contiguous().view(torch.uint8)
    size = torch.get_rng_state().numel()
    # Clones, because a generator reads the memory in which a tensor lies from its beginning.
    torch.set_rng_state(found[-size:].clone())
    if device.type == "cuda":
        torch.cuda.set_rng_state(found[:-size].clone(), device)


def mixes_rows(module: nn.Module) -> bool:
    """Whether a row's result depends on the rows beside it, as with batch statistics."""
    return any(isinstance(m, _BatchNorm) and m.training for m in module.modules())
