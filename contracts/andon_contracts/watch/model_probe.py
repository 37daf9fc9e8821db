"""The watched module, its wrappers and optimizers, hooks for its forward passes, and its random state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import sub_debug
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from andon_contracts.observe import plain
from andon_contracts.watch.values import is_flattened, text_digest

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
    """Modules without their wrappers, and loose parameters, that one optimizer trains and no module contains."""

    def __init__(self, modules: Sequence[nn.Module], loose: Sequence[nn.Parameter]) -> None:
        super().__init__()
        for index, module in enumerate(modules):
            self.add_module(str(index), unwrap(module)[0])
        for index, parameter in enumerate(loose):
            self.register_parameter(f"loose{index}", parameter)


@dataclass(frozen=True)
class Shard:
    """The part of a parameter that a rank holds: its number, of how many, and how many ranks hold the same part."""

    number: int
    parts: int
    copies: int


def _shard_of(tensor: Any) -> Shard | None:
    """The part of a DTensor that this rank holds (FSDP2, tensor parallel); None if it holds all of the tensor."""
    number, parts = 0, 1
    for dimension, place in enumerate(getattr(tensor, "placements", ())):
        if not place.is_replicate():
            size = tensor.device_mesh.size(dimension)
            number, parts = number * size + tensor.device_mesh.get_coordinate()[dimension], parts * size
    return Shard(number, parts, tensor.device_mesh.size() // parts) if parts > 1 else None


def parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    return [parameter for each in optimizers for group in each.param_groups for parameter in group["params"]]


@dataclass(frozen=True)
class ParameterSlot:
    """An attribute of a module that holds a parameter, as it was when the watch began."""

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
        reducers: Sequence[DistributedDataParallel] = (),
    ) -> None:
        """reducers: the DDP wrappers of `model`, of its parts or of a module that contains it."""
        self.outer = model
        self.inner, wrappers = unwrap(model)
        self.optimizers = tuple(optimizers)
        self.reducers = [WrapperProbe(each) for each in reducers]
        self.unused_expected = any(each.find_unused_parameters for each in reducers)
        names = [type(each).__name__ for each in wrappers]
        compiled = names.index("OptimizedModule") if "OptimizedModule" in names else None
        in_place = getattr(self.inner, "_compiled_call_impl", None) is not None
        # Hooks inside a compiled module do not run.
        self.hooked_module = self.inner if compiled is None else wrappers[compiled]
        self.compiled = compiled is not None or in_place
        self.forward_is_compiled = in_place or (compiled is not None and "DistributedDataParallel" in names[compiled:])
        self.modules = list(self.inner.modules())
        # With `broadcast_buffers=False` each rank has buffers of its own on purpose.
        broadcasting = [each for each in reducers if each.broadcast_buffers]
        scopes: dict[nn.Module, BufferScope] = {}
        for innermost, around in map(unwrap, broadcasting):
            called = next((each for each in around if type(each).__name__ == "OptimizedModule"), innermost)
            if innermost in self.modules:
                hooked = self.hooked_module if innermost is self.inner else called
                scopes.setdefault(innermost, BufferScope(hooked, innermost))
        if not scopes and (broadcasting or not reducers):
            scopes = {self.inner: BufferScope(self.hooked_module, self.inner)}
        self.buffer_scopes = list(scopes.values())
        fully_sharded = [module for module in self.modules if hasattr(module, "set_requires_gradient_sync")]
        for module in fully_sharded:
            # After an evaluation, FSDP2's root has whole parameters, whose memory it will free.
            module.reshard()  # type: ignore[operator]
        by_name = list(self.inner.named_modules())
        self.module_names_digest = text_digest([name for name, _ in by_name])
        self.slots = [
            ParameterSlot(owner, attribute, f"{prefix}.{attribute}" if prefix else attribute, p, p.requires_grad)
            for prefix, owner in by_name
            for attribute, p in owner._parameters.items()
            if p is not None
        ]
        self.names = tuple(slot.name for slot in self.slots)
        first = {id(slot.parameter): slot for slot in reversed(self.slots)}
        self.parameters = {slot.name: slot.parameter for slot in self.slots if first[id(slot.parameter)] is slot}
        self.trainable = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.frozen = {name: p for name, p in self.parameters.items() if not p.requires_grad}
        shards = [(id(parameter), _shard_of(parameter)) for parameter in self.parameters.values()]
        flat = self._flat_shards()
        self.shards = {key: shard for key, shard in shards if shard is not None} | flat
        """By `id`, the parameters of which this rank holds a part."""
        self.sharded = bool(self.shards)
        # FSDP2 shards over the last dimension of its mesh. If other dimensions replicate, all ranks have own rows.
        places = [getattr(parameter, "placements", ()) for parameter in self.parameters.values()]
        fsdp = bool(flat or fully_sharded)
        only_data = fsdp and all(place.is_replicate() for each in places for place in each[:-1])
        self.every_rank_has_rows = only_data or not self.sharded
        """False if ranks share the rows of a batch, as they do under tensor parallelism."""
        shards_of = [p for p in self.trainable.values() if only_data and id(p) in self.shards]
        self.even = {id(p) for p in shards_of if p.numel() == plain(p).numel() * self.shards[id(p)].parts}
        """By `id`, trained shards of equal size on all ranks. A loop may skip a shard that is empty on its rank."""
        self.extra_tensors = self._extra_tensors()  # of optimizers, outside the model; updates not checked

    def _flat_shards(self) -> dict[int, Shard]:
        found: dict[int, Shard] = {}
        for module in self.modules:  # a nested wrapper comes after the outer one, and manages its own parameters
            strategy = getattr(getattr(module, "sharding_strategy", None), "name", None)
            group = getattr(module, "process_group", None)
            if isinstance(group, dist.ProcessGroup) and strategy is not None:
                size = 1 if strategy == "NO_SHARD" else group.size()
                shard = Shard(dist.get_rank(group), size, dist.get_world_size() // size)
                found |= {id(p): shard for p in module.parameters() if is_flattened(p)}
        return {key: shard for key, shard in found.items() if shard.parts > 1}

    def names_by_id(self) -> Mapping[int, str]:
        return {id(parameter): name for name, parameter in self.parameters.items()}

    def gpu(self) -> torch.device | None:
        """The GPU that computes the updates: that of the first parameter trained on a GPU. None without a GPU."""
        return next((parameter.device for parameter in self.trainable.values() if parameter.is_cuda), None)

    def accelerators(self) -> list[str]:
        used = {parameter.device for parameter in self.parameters.values() if parameter.device.type == "cuda"}
        return [torch.cuda.get_device_name(device) for device in used]

    def buffers_by_name(self) -> dict[str, torch.Tensor]:
        """By name, the buffers that the model has now and that ranks compare."""
        if not self.reducers:
            return {name: b for name, b in self.inner.named_buffers() if not b.is_meta}
        compared = {id(b) for scope in self.buffer_scopes for buffers in scope.buffers() for b in buffers}
        return {name: b for name, b in self.inner.named_buffers() if id(b) in compared}

    def buffers(self) -> list[torch.Tensor]:
        return [b for module in self.modules for b in module._buffers.values() if b is not None]

    def foreign_optimizers(self) -> list[int]:
        """The numbers, from 1, of the optimizers that hold only parameters of another model."""
        mine, extra = set(map(id, self.parameters.values())), set(map(id, self.extra_tensors))
        held = [set(map(id, parameters_of([each]))) for each in self.optimizers]
        foreign = [number for number, ids in enumerate(held, 1) if ids.isdisjoint(mine) and not ids <= extra]
        # If the only optimizer was made before the model was sharded, it holds the parameters of then: a finding.
        return [] if self.sharded and len(self.optimizers) == 1 else foreign

    def _extra_tensors(self) -> list[Tensor]:
        """Tensors of the optimizers that are not parameters of the model on purpose: plain tensors (a temperature, a
        latent), and master weights, which have the shape of a trained parameter and another dtype.
        """
        trained = [p for p in self.trainable.values() if not isinstance(p, UninitializedParameter)]
        forms, shapes = {(p.shape, p.dtype) for p in trained}, {p.shape for p in trained}
        mine = set(map(id, self.parameters.values()))
        known = [p for p in parameters_of(self.optimizers) if not isinstance(p, UninitializedParameter)]
        others = [p for p in known if id(p) not in mine]
        masters = {id(p) for p in others if p.shape in shapes and (p.shape, p.dtype) not in forms}
        return [p for p in others if not isinstance(p, nn.Parameter) or id(p) in masters]

    def without_values(self) -> list[str]:
        lazy = [name for name, p in self.parameters.items() if isinstance(p, UninitializedParameter)]
        meta = [name for name, p in self.parameters.items() if p.is_meta and name not in lazy]
        problems = (
            (lazy, "have no shape yet: call the lazy module once, before the watch is opened"),
            (meta, "are on the meta device and have no values: load the model first"),
        )
        more = [f" and {len(names) - 3} more parameters" * (len(names) > 3) for names, _ in problems]
        return [f"{', '.join(n[:3])}{m} {what}" for (n, what), m in zip(problems, more, strict=True) if n]

    def held_whole(self, world: int) -> frozenset[int]:
        """By `id`, the parameters that each of `world` data-parallel ranks holds whole beside shards of others."""
        over_all = self.sharded and all(shard.parts * shard.copies == world for shard in self.shards.values())
        known = over_all and self.every_rank_has_rows
        return frozenset(map(id, self.parameters.values())) - self.shards.keys() if known else frozenset()


class WrapperProbe:
    """A DDP wrapper, and whether it reduces the gradients of the current accumulation window."""

    def __init__(self, module: DistributedDataParallel) -> None:
        self.module = module
        self._parameters = {id(p) for p in module.parameters()}
        self.new_window()

    def new_window(self) -> None:
        self._called = self._sync_enabled = False

    def holds(self, members: frozenset[int]) -> bool:
        return not self._parameters.isdisjoint(members)

    def forward(self) -> None:
        if torch.is_grad_enabled():
            self._called = True
            self._sync_enabled |= bool(self.module.require_backward_grad_sync)

    @property
    def reduces(self) -> bool:
        """Whether DDP must have reduced the gradients of this window. A loop that bypasses the wrapper is at fault.

        A watch that opens just before an update did not see the forward passes of its first window. Then the present
        state of the wrapper decides.
        """
        sync = self._sync_enabled or (not self._called and bool(self.module.require_backward_grad_sync))
        return not getattr(self.module, "_comm_hooks", ()) and sync


@dataclass(frozen=True)
class BufferScope:
    """A module whose buffers are compared at its forward passes: the module in a wrapper, or an unwrapped model."""

    hooked_module: nn.Module
    inner: nn.Module

    def buffers(self) -> tuple[list[Tensor], list[Tensor]]:
        """The buffers that a checkpoint contains, and the others, in the order of the modules."""
        persistent: list[Tensor] = []
        caches: list[Tensor] = []
        for module in self.inner.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    (caches if name in module._non_persistent_buffers_set else persistent).append(buffer)
        return persistent, caches


class ForwardHook:
    """A hook before or after a forward pass that calls `see`. arguments: pass on the arguments that torch gives it.

    A model is copied and saved with its hooks. The hook of a copy is a function of the standard library that ignores
    its arguments: copies are not watched, and a model that was saved whole loads without this package.
    """

    def __init__(self, see: Callable[..., None], *, arguments: bool = False) -> None:
        self._see = see
        self._arguments = arguments

    def __call__(self, *from_torch: object) -> None:
        if not torch.compiler.is_compiling() and not torch._C._is_tracing():
            self._see(*(from_torch if self._arguments else ()))

    def __reduce__(self) -> tuple[type[partial[None]], tuple[Callable[..., None]]]:
        return partial, (sub_debug,)


# For `torch.load(weights_only=True)` of such a file. A bound method would need `getattr`, which allows a file too much.
torch.serialization.add_safe_globals([partial, sub_debug])


def random_state(device: torch.device) -> Tensor | None:
    """The random state from which a model on `device` draws, as int64 words; None for other devices than CPU, CUDA."""
    if device.type not in ("cpu", "cuda"):
        return None
    gpu = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return torch.cat([*gpu, torch.get_rng_state()]).view(torch.int64)


def restore_random(state: Tensor, device: torch.device) -> None:
    words = state.contiguous().view(torch.uint8)
    size = torch.get_rng_state().numel()
    # A clone, because a generator reads the memory of a tensor from the beginning of its storage.
    torch.set_rng_state(words[-size:].clone())
    if device.type == "cuda":
        torch.cuda.set_rng_state(words[:-size].clone(), device)
