"""A compiled backbone for training passes of known shapes; every other pass runs eagerly.

Compiled and eager kernels may round differently. So only the batch's shape decides which of them a pass uses, by a set
of shapes that is fixed before the first step. The rank and earlier passes do not matter.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from andon.console.problems import InputError, Problem
from andon.fast.rewrites import reading_last_tokens, rewrite
from andon.model.batches import Shape
from andon.model.build import backbone_of, without_adapter

MODES = {"off": None, "kernels": "default", "graphs": "reduce-overhead"}
"""torch's names for the values of `training.compile`: none, fused kernels, and fused kernels in CUDA graphs."""
_SILENCING = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "TORCHDYNAMO_SUPPRESS_ERRORS")


@dataclass
class CompiledPasses:
    """A backbone's forward. seen: shapes that ran compiled. eager: the number of training passes that ran eagerly."""

    eagerly: Callable[..., Any]
    compiled: Callable[..., Any]
    shapes: frozenset[Shape]
    graphs: bool
    seen: set[Shape] = field(default_factory=set)
    eager: int = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ids = args[0] if args else kwargs.get("input_ids")
        if ids is None or not torch.is_grad_enabled():
            return self.eagerly(*args, **kwargs)
        shape = (ids.shape[0], ids.shape[1])
        if shape not in self.shapes:
            self.eager += 1
            return self.eagerly(*args, **kwargs)
        self.seen.add(shape)
        if self.graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return self.compiled(*args, **kwargs)


def compile_backbone(model: nn.Module, mode: str, shapes: Collection[Shape]) -> CompiledPasses:
    """Replace the forward of `model`'s backbone; each of `shapes` is compiled at its first pass. mode: of `MODES`, not
    off. Raises `InputError` for environment variables that silently disable compilation."""
    silent = [name for name in _SILENCING if os.environ.get(name, "0") not in ("", "0")]
    if silent:
        what = "would have a model that is to be compiled run eagerly; unset it"
        raise InputError(Problem(name, what) for name in silent)
    backbone, backend = backbone_of(model), rewriting_backend(torch._inductor.list_mode_options(MODES[mode]))
    compiled = traced(model, backend, **_room_for(len(shapes)))
    passes = CompiledPasses(backbone.forward, compiled, frozenset(shapes), graphs=mode == "graphs")
    backbone.forward = passes
    return passes


def traced(model: nn.Module, backend: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    """The compiled forward of `model`'s backbone, traced at its first call. backend, more: for `torch.compile`."""
    forward = reading_last_tokens(backbone_of(model).forward, without_adapter(model))
    return torch.compile(forward, dynamic=False, backend=backend, **more)


def rewriting_backend(options: dict[str, Any], **more: Any) -> Callable[..., Any]:
    """A backend for `torch.compile`: inductor with `options`, after `rewrite` of the graph.

    The options disable autotuning, which may change bits. They are passed as patches, so that they reach the backward
    graph: autograd compiles it on another thread, without this thread's configuration. Keys of torch's compilation
    cache are the graph, torch's version, the device, and the code of Andon's functions in the graph.
    """
    options = {**options, "deterministic": True}

    def backend(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        rewrite(module)
        # torch does not cache graphs that call unknown functions, so ours are declared with a digest for the cache key.
        graphs = [each.graph for each in module.modules() if isinstance(each, torch.fx.GraphModule)]
        called = [node.target for graph in graphs for node in graph.nodes if node.op == "call_function"]
        functions = [each for each in called if inspect.isfunction(each)]
        own = {f"{each.__module__}.{each.__name__}" for each in functions if each.__module__.startswith("andon.")}
        known = dict.fromkeys(["andon", *sorted(own)], _code_of_rewrites())
        patches = {**options, "unsafe_marked_cacheable_functions": known}
        return compile_fx(module, inputs, config_patches=patches, **more)

    return backend


@functools.cache
def _code_of_rewrites() -> str:
    root = Path(__file__).parents[1]
    files = [path for package in ("fast", "model") for path in sorted((root / package).glob("*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _room_for(graphs: int) -> dict[str, Any]:
    """Arguments of `torch.compile` that raise its recompilation limit. torch 2.11 has one limit per process, which is
    raised here; later versions have an argument."""
    parameters = inspect.signature(torch.compile).parameters
    if {"recompile_limit", "isolate_recompiles"} <= parameters.keys():
        return {"recompile_limit": 2 * graphs, "isolate_recompiles": True}
    import torch._dynamo.config as tracing

    tracing.cache_size_limit += 2 * graphs
    tracing.accumulated_cache_size_limit += 2 * graphs
    return {}
