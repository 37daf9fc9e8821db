"""A compiled backbone for training passes of known shapes, with rewrites of its traced graph.

A rewrite replaces a pattern for which torch's compiler generates slow kernels. Every other pass runs eagerly.

Compiled and eager kernels may round differently and draw other dropout masks. So only the batch's shape decides which
of them a pass uses, by a set of shapes that is fixed before the first step. The rank and earlier passes do not matter.
Each rewrite was measured on an H200 with the reference job of benchmarks/gpu_step.py.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import operator
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, library, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from andon.console.messages import InputError, Problem
from andon.fast.attention import causal_attention, supports
from andon.model.build import backbone_of, without_adapter
from andon.model.masks import Shape

_SDPA: Any = nn.functional.scaled_dot_product_attention
_SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_LINEAR: Any = nn.functional.linear
_MOST_VALUES = 2**31
"""Values that an int32 index can address."""
_NORMS: tuple[Any, ...] = (nn.functional.rms_norm, nn.functional.layer_norm)
_BY_TOKEN: tuple[Any, ...] = (*_NORMS, _LINEAR, nn.functional.dropout, nn.functional.silu, nn.functional.gelu)
_BY_TOKEN += (nn.functional.relu, operator.add, operator.mul, torch.add, torch.mul, torch.rsqrt)
_BY_TOKEN += ("to", "float", "pow", "mean", "add", "mul", "rsqrt")
"""Functions, and methods by name, that compute each token independently of the others."""
_SWITCHES = ("_set_grad_enabled", "_enter_inference_mode")
"""Names of torch's private functions that switch gradients on or off in a graph."""
_SCORING: tuple[type, ...] = (nn.Linear, nn.Dropout, nn.Identity, nn.Tanh, nn.GELU, nn.ReLU, nn.Sequential)
_SCORING += (nn.ModuleDict, nn.ParameterDict)
"""Modules of a head that compute each token independently, or only contain other modules."""


def rewrite(module: GraphModule) -> None:
    """Rewrite `module` and the graphs that it calls, in place. The latter are layers with activation checkpointing and
    keep their dropout, since the recomputation must draw the same mask again."""
    skip_unread_tokens(module.graph)
    replace_dropout(module.graph)
    for each in module.modules():
        if isinstance(each, GraphModule):
            fuse_adapter_products(each.graph)
            replace_rotate_half(each.graph)
            compute_waves_once(each.graph)
            replace_causal_attention(each.graph)
            each.recompile()


def reading_last_tokens(forward: Callable[..., Any], head: nn.Module) -> Callable[..., Any]:
    """Wrap `forward`, of the backbone of `head`, to return zeros for tokens that the head does not read.

    A decoder's classification head reads only the last real token of each row. From the zeros `skip_unread_tokens`
    derives what need not be computed: about a thirtieth of a model with 36 layers. Returns `forward` itself if the
    tokens that the head reads are unknown.
    """
    from transformers.modeling_layers import GenericForSequenceClassification as Known

    model: Any = head
    if not isinstance(head, Known) or type(head).forward is not Known.forward or "forward" in vars(head):
        return forward
    by_token = all(
        (type(each) in _SCORING or type(each).__module__.partition(".")[0] == "peft") and "forward" not in vars(each)
        for each in model.score.modules()
    )
    pad_id: int | None = model.config.get_text_config().pad_token_id
    if not by_token or pad_id is None:
        return forward

    def reading(*args: Any, **kwargs: Any) -> Any:
        ids = args[0] if args else kwargs.get("input_ids")
        if ids is None:
            return forward(*args, **kwargs)
        chosen = last_real(ids, pad_id)  # before the backbone, so that any node of the graph may use it
        output = forward(*args, **kwargs)
        hidden = getattr(output, "last_hidden_state", None)
        if hidden is not None and hidden.shape[:-1] == chosen.shape:  # the model added no tokens
            output.last_hidden_state = only_at(hidden, chosen)
        return output

    return reading


def last_real(ids: Tensor, pad_id: int) -> Tensor:
    """bool [rows, length]: True at each row's last token that is not padding, by transformers' rule."""
    places = torch.arange(ids.shape[1], device=ids.device, dtype=torch.int32)
    last = (places * (ids != pad_id)).argmax(-1)
    return places == last[:, None]


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def only_at(x: Tensor, chosen: Tensor) -> Tensor:
    """`x` [rows, length, size], with zeros except where `chosen` [rows, length] is True."""
    return torch.where(chosen[..., None], x, 0)


def picked(x: Tensor, chosen: Tensor) -> Tensor:
    """[rows, 1, size], in the dtype of `x`: of each row the one token at which `chosen` [rows, length] is True."""
    token: Tensor = only_at(x, chosen).sum(1, keepdim=True, dtype=x.dtype)  # autocast would sum in fp32
    return token


def skip_unread_tokens(graph: Graph) -> None:
    """Compute nodes that are used only for `only_at` for the chosen tokens only. Inputs are picked once, before their
    first use. Nothing changes if a value is written in place, or if gradients are switched on or off between them."""
    for end in calls_of(graph, only_at):
        order = list(graph.nodes)
        hidden, chosen = end.args
        # Nodes that are used only for `end` and compute each token independently.
        spared = dict[Node, None]()
        for node in reversed(order):
            leads_to_end = node is hidden or node.users
            if leads_to_end and all(user in spared or user is end for user in node.users) and _by_token(node):
                spared[node] = None
        spared = dict.fromkeys(reversed(spared))
        between = order[order.index(next(iter(spared))) : order.index(end)] if spared else []
        if any(getattr(node.target, "__name__", "") in _SWITCHES for node in between):
            continue
        read = dict.fromkeys(each for node in spared for each in node.all_input_nodes if each not in spared)
        sources = [each for each in read if known(each) and value_of(each).dim() == 3]  # rows, tokens, values
        for source in sources if unwritten(*spared, *sources) else ():
            with graph.inserting_before(next(node for node in order if node in source.users and node in spared)):
                new = graph.call_function(picked, (source, chosen))
            new.meta = dict(source.meta)
            for user in [user for user in source.users if user in spared]:
                user.replace_input_with(source, new)


def _by_token(node: Node) -> bool:
    if node.op not in ("call_function", "call_method") or node.target not in _BY_TOKEN:
        return False
    if not known(node) or value_of(node).dim() != 3:
        return False
    if node.target == "mean":
        return args_of(node, "self", "dim").get("dim") in (-1, [-1], (-1,))
    return node.target not in _NORMS or len(args_of(node, "input", "normalized_shape")["normalized_shape"]) == 1


def replace_dropout(graph: Graph) -> None:
    """Replace each active dropout by `hashed_dropout`, with keys from the device's generator. The hash takes a dozen
    integer operations per value, Philox a hundred, and it needs no mask in memory."""
    dropouts = []
    for node in calls_of(graph, nn.functional.dropout):
        args = {"p": 0.5, "training": True, "inplace": False, **args_of(node, "input", "p", "training", "inplace")}
        draws = args["training"] is True and isinstance(args["p"], float) and 0 < args["p"] < 1
        if draws and not args["inplace"] and known(args["input"]) and value_of(args["input"]).numel() < _MOST_VALUES:
            dropouts.append(node)
    if not dropouts:
        return
    with graph.inserting_before(dropouts[0]):
        device = value_of(args_of(dropouts[0], "input")["input"]).device
        keys = graph.call_function(torch.ops.andon.drawn_keys.default, (len(dropouts), device))
        own = [graph.call_function(torch.select, (keys, 0, place)) for place in range(len(dropouts))]
    for node, key in zip(dropouts, own, strict=True):
        args = args_of(node, "input", "p")  # read now: its input may be a dropout that was just replaced
        replace_node(node, hashed_dropout, args["input"], key, args.get("p", 0.5))


def hashed_dropout(x: Tensor, keys: Tensor, rate: float) -> Tensor:
    """Dropout: each value is 0 with probability `rate`, else divided by 1 - rate. Non-finite values stay non-finite.

    keys: int32 [2]. The mask is a function of keys, index in `x` and `rate`: a 32-bit multiplicative hash with the
    mixing steps of MurmurHash3's finalizer (Appleby), which the keys enter at different depths. Two masks are
    permutations of each other only if their second keys are equal, with probability 2^-31.
    """
    place = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    bits = (place ^ keys[0]) * -1640531535
    bits = bits ^ ((bits >> 15) & 0x1FFFF)
    bits = (bits + keys[1]) * -2048144789
    bits = bits ^ ((bits >> 13) & 0x7FFFF)
    bits = bits * -1028477387
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    keep = (bits & 0x7FFFFFFF) >= round(rate * 2**31)
    return x * keep * (1 / (1 - rate))


@library.custom_op("andon::drawn_keys", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _drawn_keys(count: int, device: torch.device) -> Tensor:
    """int32 [count, 2] from the device's generator. A custom operation, since a fused kernel would draw a new key for
    each value."""
    return torch.randint(_MOST_VALUES - 1, (count, 2), dtype=torch.int32, device=device)


@_drawn_keys.register_fake
def _keys_shape(count: int, device: torch.device) -> Tensor:
    return torch.empty((count, 2), dtype=torch.int32, device=device)


def fuse_adapter_products(graph: Graph) -> None:
    """Replace each `linear(x, weight) + scale * linear(narrow, low)` by `adapted_product`, if nothing else uses the
    first product, its weight is frozen, and both products have one shape and the type of the weight.

    Unfused, the adapter's product is written, read and added, and the backward pass copies the scaled gradient.
    """
    base: Any
    scaled: Any
    for total in calls_of(graph, operator.add):
        base, scaled = total.args
        if not known(base, scaled) or scaled.target is not operator.mul or len(base.users) > 1:
            continue
        product, scale = scaled.args
        first, second = _operands(base), _operands(product)
        if not first or not second or not isinstance(scale, float) or value_of(first[1]).requires_grad:
            continue
        types = {value_of(node).dtype for node in (base, scaled, product, total, first[1])}
        same = value_of(base).shape == value_of(product).shape and len(types) == 1 and types.pop().is_floating_point
        if same and unwritten(base, scaled, product, first[0], second[0]):
            replace_node(total, adapted_product, *first, *second, scale)


def _operands(node: Any) -> tuple[Node, ...]:
    """(input, weight) if `node` is a linear product without bias that requires a gradient as its operands do; or ()."""
    if not known(node) or node.target is not _LINEAR:
        return ()
    args = args_of(node, "input", "weight", "bias")
    x, weight = args["input"], args["weight"]
    if args.get("bias") is not None or not known(x, weight):
        return ()
    learning = value_of(x).requires_grad or value_of(weight).requires_grad
    plain = value_of(x).dim() > 1 and value_of(weight).dim() == 2 and value_of(node).numel() > 0
    return (x, weight) if plain and learning == value_of(node).requires_grad else ()


def adapted_product(x: Tensor, weight: Tensor, narrow: Tensor, low: Tensor, scale: float) -> Tensor:
    """[..., out]: x weight' + scale * narrow low', in the weight's type. x: [..., in]. weight: [out, in], frozen.
    narrow: [..., r]. low: [out, r]."""
    dtype = weight.dtype
    product: Tensor = torch.ops.andon.adapted_product(x.to(dtype), weight, narrow.to(dtype), low.to(dtype), scale)
    return product


@library.custom_op("andon::adapted_product", mutates_args=())
def _add_into(x: Tensor, weight: Tensor, narrow: Tensor, low: Tensor, scale: float) -> Tensor:
    product = nn.functional.linear(x.flatten(0, -2), weight)
    product.addmm_(narrow.flatten(0, -2), low.t(), alpha=scale)
    return product.view(*x.shape[:-1], -1)


@_add_into.register_fake
def _product_shape(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], len(weight)))


def _save_factors(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, weight, narrow, low, ctx.scale = inputs
    ctx.save_for_backward(weight, narrow, low)


def _product_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    weight, narrow, low = ctx.saved_tensors
    of_x = grad @ weight if ctx.needs_input_grad[0] else None
    of_low = (grad.flatten(0, -2).t() @ narrow.flatten(0, -2)) * ctx.scale
    return of_x, None, (grad @ low) * ctx.scale, of_low, None


_add_into.register_autograd(_product_gradient, setup_context=_save_factors)


def replace_rotate_half(graph: Graph) -> None:
    """Replace `cat((-b, a))` of a tensor's halves a and b, as in rotary positions, by `exchanged_halves`: one load
    instead of masked loads, forward and backward."""
    for node in calls_of(graph, torch.cat):
        args = args_of(node, "tensors", "dim")
        parts = args.get("tensors")
        if args.get("dim", 0) != -1 or not isinstance(parts, (list, tuple)) or len(parts) != 2 or not known(*parts):
            continue
        upper = _half_of(parts[0].args[0]) if parts[0].target is operator.neg else None
        lower = _half_of(parts[1])
        if upper is None or lower is None or upper[0] is not lower[0]:
            continue
        whole, size = upper[0], value_of(upper[0]).shape[-1]
        halves = (upper[1], lower[1]) == (slice(size // 2, None, None), slice(None, size // 2, None))
        learn = {value_of(each).requires_grad for each in (whole, *parts)}
        if halves and size % 2 == 0 and len(learn) == 1 and unwritten(whole, *parts):
            replace_node(node, exchanged_halves, whole)


def _half_of(node: Any) -> tuple[Node, slice] | None:
    if not known(node) or node.target is not operator.getitem:
        return None
    whole, index = node.args
    if not known(whole) or not isinstance(index, tuple) or len(index) != 2 or index[0] is not Ellipsis:
        return None
    return (whole, index[1]) if isinstance(index[1], slice) else None


def exchanged_halves(x: Tensor) -> Tensor:
    """(-b, a) for the halves (a, b) of the last dimension."""
    half = x.shape[-1] // 2
    other = x.view(*x.shape[:-1], 2, half).flip(-2).flatten(-2)
    return torch.where(torch.arange(2 * half, device=x.device) < half, -other, other)


def compute_waves_once(graph: Graph) -> None:
    """Compute cosines and sines once. The compiler would fuse them into each layer's kernels, where recomputing them
    takes longer than the kernel's loads and stores."""
    waves = [node for name in ("cos", "sin") for node in graph.find_nodes(op="call_method", target=name)]
    waves += [node for each in (torch.cos, torch.sin) for node in graph.find_nodes(op="call_function", target=each)]
    for node in waves:
        if known(node) and not value_of(node).requires_grad:
            with graph.inserting_after(node):
                stored = graph.call_function(torch.ops.andon.kept.default, (node,))
            stored.meta = dict(node.meta)
            for user in [user for user in node.users if user is not stored]:
                user.replace_input_with(node, stored)


@library.custom_op("andon::kept", mutates_args=())
def _kept(x: Tensor) -> Tensor:
    return x.clone()


@_kept.register_fake
def _kept_shape(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def replace_causal_attention(graph: Graph) -> None:
    """Replace causal attention without mask and dropout by `causal_attention`, if that supports its tensors."""
    for node in calls_of(graph, _SDPA):
        args = args_of(node, *_SDPA_ARGUMENTS)
        parts = [args[name] for name in _SDPA_ARGUMENTS[:3]]
        plain = args.get("attn_mask") is None and args.get("dropout_p", 0.0) == 0.0 and known(*parts)
        if not plain or args.get("is_causal") is not True or not supports(*(value_of(part) for part in parts)):
            continue
        scale = args.get("scale")
        if scale is None:
            scale = value_of(parts[0]).shape[-1] ** -0.5
        if isinstance(scale, (int, float)) and value_of(node).dtype == value_of(parts[0]).dtype:
            replace_node(node, causal_attention, *parts, float(scale))


# Helpers for nodes: the tensors that they were traced with, their arguments, and their replacement.


def value_of(node: Node) -> Tensor:
    """The fake tensor with which dynamo traced `node`, which must be `known`."""
    value: Tensor = node.meta["example_value"]
    return value


def known(*nodes: Any) -> bool:
    """Whether dynamo traced all of `nodes` as plain tensors, not as numbers, lists or tensor subclasses."""
    values = [node.meta.get("example_value") if isinstance(node, Node) else None for node in nodes]
    return all(isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value) for value in values)


def unwritten(*nodes: Node) -> bool:
    """Whether the values of `nodes`, all `known`, and tensors that share their memory are never written in place. Only
    then may reads of them move."""
    return all(not value_of(node).is_inference() and value_of(node)._version == 0 for node in nodes)


def calls_of(graph: Graph, target: Callable[..., Any]) -> list[Node]:
    """The `known` nodes that call the function `target`."""
    return [node for node in graph.find_nodes(op="call_function", target=target) if known(node)]


def args_of(node: Node, *names: str) -> dict[str, Any]:
    """The arguments of the call `node` by name. names: the function's parameters, in order."""
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def replace_node(node: Node, function: Callable[..., Tensor], *args: Any) -> None:
    """Replace `node` by the call `function(*args)`, which must have the same value."""
    with node.graph.inserting_before(node):
        new = node.graph.call_function(function, args)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


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
    """Arguments of `torch.compile` that raise its recompilation limit; torch 2.11's, one per process, is set here."""
    parameters = inspect.signature(torch.compile).parameters
    if {"recompile_limit", "isolate_recompiles"} <= parameters.keys():
        return {"recompile_limit": 2 * graphs, "isolate_recompiles": True}
    import torch._dynamo.config as tracing

    tracing.cache_size_limit += 2 * graphs
    tracing.accumulated_cache_size_limit += 2 * graphs
    return {}
