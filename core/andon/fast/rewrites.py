"""Rewrites of a traced graph for which torch's compiler generates slow kernels. The graph computes the same function.

Masks of dropout and rounding differ between a compiled pass and an eager one; see `CompiledPasses` for why that never
depends on the rank. Each rewrite was measured on an H200 with the reference job of docs/gpu.md.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, library, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from andon.fast.attention import causal_attention, supports

_SDPA: Any = nn.functional.scaled_dot_product_attention
_SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_LINEAR: Any = nn.functional.linear
_MOST_VALUES = 2**31
"""Numbers of 32 bits."""
_NORMS: tuple[Any, ...] = (nn.functional.rms_norm, nn.functional.layer_norm)
_BY_TOKEN: tuple[Any, ...] = (*_NORMS, _LINEAR, nn.functional.dropout, nn.functional.silu, nn.functional.gelu)
_BY_TOKEN += (nn.functional.relu, operator.add, operator.mul, torch.add, torch.mul, torch.rsqrt)
_BY_TOKEN += ("to", "float", "pow", "mean", "add", "mul", "rsqrt")
"""Functions, and methods by name, that take each token by itself."""
_SWITCHES = ("_set_grad_enabled", "_enter_inference_mode")
"""Functions of torch, by name since they are private, that switch gradients on or off in a graph."""
_SCORING: tuple[type, ...] = (nn.Linear, nn.Dropout, nn.Identity, nn.Tanh, nn.GELU, nn.ReLU, nn.Sequential)
_SCORING += (nn.ModuleDict, nn.ParameterDict)
"""Modules of a head that take each token by itself, or call only their children."""


def rewrite(module: GraphModule) -> None:
    """Rewrite, in place, `module` and the graphs that it calls: layers whose activations are computed again. The latter
    keep their dropout, which they draw again in the backward pass."""
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
    """`forward` of the backbone of `head`, with zeros for every token that the head does not read.

    A decoder's classification head reads the last real token of each row. By the zeros `skip_unread_tokens` finds what
    need not be computed, a thirtieth of a model of 36 layers. Returns `forward` if it is not known which tokens the
    head reads.
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
        chosen = last_real(ids, pad_id)  # first, so that all of the graph may use it
        output = forward(*args, **kwargs)
        hidden = getattr(output, "last_hidden_state", None)
        if hidden is not None and hidden.shape[:-1] == chosen.shape:  # the model added no tokens
            output.last_hidden_state = only_at(hidden, chosen)
        return output

    return reading


def last_real(ids: Tensor, pad_id: int) -> Tensor:
    """bool [rows, length]: True at each row's last token that is not padding, as transformers finds it."""
    places = torch.arange(ids.shape[1], device=ids.device, dtype=torch.int32)
    last = (places * (ids != pad_id)).argmax(-1)
    return places == last[:, None]


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def only_at(x: Tensor, chosen: Tensor) -> Tensor:
    """`x` [rows, length, size] at the places `chosen` [rows, length], and 0 elsewhere."""
    return torch.where(chosen[..., None], x, 0)


def picked(x: Tensor, chosen: Tensor) -> Tensor:
    """[rows, 1, size]: the `chosen` token of each row of `x`, in the type of `x`."""
    one: Tensor = only_at(x, chosen).sum(1, keepdim=True, dtype=x.dtype)  # autocast would sum in fp32
    return one


def skip_unread_tokens(graph: Graph) -> None:
    """Have what leads to `only_at` alone computed for the chosen tokens alone. A token is picked once, before its first
    use. So nothing changes if a value is written in place, or gradients are switched on or off on the way."""
    for end in calls_of(graph, only_at):
        order = list(graph.nodes)
        hidden, chosen = end.args
        # The nodes whose values are used for `end` alone and that take each token by itself.
        spared = dict[Node, None]()
        for node in reversed(order):
            mine = node is hidden or node.users
            if mine and all(user in spared or user is end for user in node.users) and _by_token(node):
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
    """Replace each call of dropout that draws by `hashed_dropout`, with keys from the stream that it would use. A hash
    is a dozen integer operations a value instead of Philox's hundred, and no mask in memory."""
    found = []
    for node in calls_of(graph, nn.functional.dropout):
        given = {"p": 0.5, "training": True, "inplace": False, **args_of(node, "input", "p", "training", "inplace")}
        draws = given["training"] is True and isinstance(given["p"], float) and 0 < given["p"] < 1
        if draws and not given["inplace"] and known(given["input"]) and value_of(given["input"]).numel() < _MOST_VALUES:
            found.append(node)
    if not found:
        return
    with graph.inserting_before(found[0]):
        device = value_of(args_of(found[0], "input")["input"]).device
        keys = graph.call_function(torch.ops.andon.drawn_keys.default, (len(found), device))
        own = [graph.call_function(torch.select, (keys, 0, place)) for place in range(len(found))]
    for node, key in zip(found, own, strict=True):
        given = args_of(node, "input", "p")  # only now: its input may be a dropout that was just replaced
        replace_node(node, hashed_dropout, given["input"], key, given.get("p", 0.5))


def hashed_dropout(x: Tensor, keys: Tensor, rate: float) -> Tensor:
    """`x` with each value 0 with probability `rate`, else divided by 1 - rate; what is not finite stays so.

    keys: int32 [2]. The mask is a function of keys, place in `x` and `rate`: a multiplicative hash of 32 bits with the
    mixing steps of MurmurHash3's finalizer (Appleby), which the keys enter at different depths. Two masks are
    permutations of each other only if their second keys are equal, one pair of draws in two thousand million.
    """
    place = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    bits = (place ^ keys[0]) * -1640531535
    bits = bits ^ ((bits >> 15) & 0x1FFFF)
    bits = (bits + keys[1]) * -2048144789
    bits = bits ^ ((bits >> 13) & 0x7FFFF)
    bits = bits * -1028477387
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    kept = (bits & 0x7FFFFFFF) >= round(rate * 2**31)
    return x * kept * (1 / (1 - rate))


@library.custom_op("andon::drawn_keys", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _drawn_keys(count: int, device: torch.device) -> Tensor:
    """int32 [count, 2] from the device's generator. A custom operation, since a fused kernel would draw a key for each
    of its values."""
    return torch.randint(_MOST_VALUES - 1, (count, 2), dtype=torch.int32, device=device)


@_drawn_keys.register_fake
def _keys_shape(count: int, device: torch.device) -> Tensor:
    return torch.empty((count, 2), dtype=torch.int32, device=device)


def fuse_adapter_products(graph: Graph) -> None:
    """Replace each `linear(x, weight) + scale * linear(narrow, low)` by `adapted_product`, if nothing else uses the
    first product, its weight is frozen, and both products have one shape and the type of the weight.

    Apart, the adapter's product is written, read and added, and the backward pass makes a scaled copy of the gradient.
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
        alike = value_of(base).shape == value_of(product).shape and len(types) == 1 and types.pop().is_floating_point
        if alike and unwritten(base, scaled, product, first[0], second[0]):
            replace_node(total, adapted_product, *first, *second, scale)


def _operands(node: Any) -> tuple[Node, ...]:
    """(input, weight) of a product without a bias that has a gradient if they have; empty for another node."""
    if not known(node) or node.target is not _LINEAR:
        return ()
    given = args_of(node, "input", "weight", "bias")
    x, weight = given["input"], given["weight"]
    if given.get("bias") is not None or not known(x, weight):
        return ()
    learns = value_of(x).requires_grad or value_of(weight).requires_grad
    plain = value_of(x).dim() > 1 and value_of(weight).dim() == 2 and value_of(node).numel() > 0
    return (x, weight) if plain and learns == value_of(node).requires_grad else ()


def adapted_product(x: Tensor, weight: Tensor, narrow: Tensor, low: Tensor, scale: float) -> Tensor:
    """[..., out]: x weight' + scale * narrow low', in the type of the weight. x: [..., in]. weight: [out, in], frozen.
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


def _keep_factors(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, weight, narrow, low, ctx.scale = inputs
    ctx.save_for_backward(weight, narrow, low)


def _product_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    weight, narrow, low = ctx.saved_tensors
    of_x = grad @ weight if ctx.needs_input_grad[0] else None
    of_low = (grad.flatten(0, -2).t() @ narrow.flatten(0, -2)) * ctx.scale
    return of_x, None, (grad @ low) * ctx.scale, of_low, None


_add_into.register_autograd(_product_gradient, setup_context=_keep_factors)


def replace_rotate_half(graph: Graph) -> None:
    """Replace `cat((-b, a))` of a tensor's halves a and b by `exchanged_halves`: one load instead of masked loads,
    forward and backward."""
    for node in calls_of(graph, torch.cat):
        given = args_of(node, "tensors", "dim")
        parts = given.get("tensors")
        if given.get("dim", 0) != -1 or not isinstance(parts, (list, tuple)) or len(parts) != 2 or not known(*parts):
            continue
        upper = _half_of(parts[0].args[0]) if parts[0].target is operator.neg else None
        lower = _half_of(parts[1])
        if upper is None or lower is None or upper[0] is not lower[0]:
            continue
        turned, size = upper[0], value_of(upper[0]).shape[-1]
        halves = (upper[1], lower[1]) == (slice(size // 2, None, None), slice(None, size // 2, None))
        learn = {value_of(each).requires_grad for each in (turned, *parts)}
        if halves and size % 2 == 0 and len(learn) == 1 and unwritten(turned, *parts):
            replace_node(node, exchanged_halves, turned)


def _half_of(node: Any) -> tuple[Node, slice] | None:
    """(tensor, slice) if `node` is `tensor[..., slice]`."""
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
    """Have cosines and sines computed once. Each layer's kernels would compute them anew, which takes longer than what
    those kernels read and write."""
    waves = [node for name in ("cos", "sin") for node in graph.find_nodes(op="call_method", target=name)]
    waves += [node for each in (torch.cos, torch.sin) for node in graph.find_nodes(op="call_function", target=each)]
    for node in waves:
        if known(node) and not value_of(node).requires_grad:
            with graph.inserting_after(node):
                kept = graph.call_function(torch.ops.andon.kept.default, (node,))
            kept.meta = dict(node.meta)
            for user in [user for user in node.users if user is not kept]:
                user.replace_input_with(node, kept)


@library.custom_op("andon::kept", mutates_args=())
def _kept(x: Tensor) -> Tensor:
    """`x` in its own memory; a compiler does not look into this operation."""
    return x.clone()


@_kept.register_fake
def _kept_shape(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def replace_causal_attention(graph: Graph) -> None:
    """Replace causal attention that has no mask and no dropout by `causal_attention`, if that supports it."""
    for node in calls_of(graph, _SDPA):
        given = args_of(node, *_SDPA_ARGUMENTS)
        parts = [given[name] for name in _SDPA_ARGUMENTS[:3]]
        plain = given.get("attn_mask") is None and given.get("dropout_p", 0.0) == 0.0 and known(*parts)
        if not plain or given.get("is_causal") is not True or not supports(*(value_of(part) for part in parts)):
            continue
        scale = given.get("scale")
        if scale is None:
            scale = value_of(parts[0]).shape[-1] ** -0.5
        if isinstance(scale, (int, float)) and value_of(node).dtype == value_of(parts[0]).dtype:
            replace_node(node, causal_attention, *parts, float(scale))


# Nodes: the value that a node was traced with, and its replacement.


def value_of(node: Node) -> Tensor:
    """The tensor without memory that dynamo traced `node` with, a `known` one."""
    value: Tensor = node.meta["example_value"]
    return value


def known(*nodes: Any) -> bool:
    """Whether dynamo traced all of `nodes` as plain tensors: not as numbers, lists or tensor subclasses."""
    values = [node.meta.get("example_value") if isinstance(node, Node) else None for node in nodes]
    return all(isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value) for value in values)


def unwritten(*nodes: Node) -> bool:
    """Whether nothing wrote into the values of `nodes`, all `known`, or into what shares their memory. Only then may
    they be read at another place."""
    return all(not value_of(node).is_inference() and value_of(node)._version == 0 for node in nodes)


def calls_of(graph: Graph, target: Callable[..., Any]) -> list[Node]:
    """The nodes that are calls of the function `target` and `known`."""
    return [node for node in graph.find_nodes(op="call_function", target=target) if known(node)]


def args_of(node: Node, *names: str) -> dict[str, Any]:
    """The arguments of the call `node` by name. names: of the function's parameters, in order."""
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def replace_node(node: Node, function: Callable[..., Tensor], *args: Any) -> None:
    """Put `function(*args)`, which has the same value, in the place of `node`."""
    with node.graph.inserting_before(node):
        new = node.graph.call_function(function, args)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
