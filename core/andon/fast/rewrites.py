"""A traced graph with the parts replaced that torch's compiler makes slow kernels of; it computes the same function.

Which masks are drawn and how values round is another matter for a compiled pass than for an eager one, as it was
before; see `CompiledPasses` for why that never depends on who computes it. Each rewriting was measured on an H200 with
the reference job of docs/gpu.md.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import library, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from andon.fast.attention import causal_attention, supports

_SDPA: Any = nn.functional.scaled_dot_product_attention
_SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_LINEAR: Any = nn.functional.linear
_MOST_VALUES = 2**31
"""Places that 32 bits count."""
_BY_TOKEN: tuple[Any, ...] = (
    nn.functional.linear,
    nn.functional.dropout,
    nn.functional.silu,
    nn.functional.gelu,
    nn.functional.relu,
    nn.functional.rms_norm,
    nn.functional.layer_norm,
    operator.add,
    operator.mul,
    torch.add,
    torch.mul,
    torch.rsqrt,
)
_BY_TOKEN_METHODS = ("to", "float", "pow", "mean", "add", "mul", "rsqrt")
_NORMS = (nn.functional.rms_norm, nn.functional.layer_norm)
_SWITCHES = ("_set_grad_enabled", "_enter_inference_mode")
"""Functions of torch, by name since none of them is public, that switch gradients on or off in a graph."""
_SCORING = (
    nn.Linear,
    nn.Dropout,
    nn.Identity,
    nn.Tanh,
    nn.GELU,
    nn.ReLU,
    nn.Sequential,
    nn.ModuleDict,
    nn.ParameterDict,
)


def rewrite(module: GraphModule) -> None:
    """Rewrite, in place, `module` and the graphs that it calls, which are layers whose activations are computed again.

    Dropout stays what it is in the latter: what they draw is drawn again in the backward pass by their own means.
    """
    leave_out(module.graph)
    drop_by_hash(module.graph)
    for each in module.modules():
        if isinstance(each, GraphModule):
            add_in_place(each.graph)
            exchange_halves(each.graph)
            keep_waves(each.graph)
            replace_causal_attention(each.graph)
            each.recompile()


# The tokens that no head reads: the work behind the last attention is done for those that one reads, and for no other.
# A decoder's head reads one token of each row, the last real one. What is computed of the other tokens after the last
# layer's attention is never used; it is a thirtieth of a model of 36 layers.


def reading_last_tokens(forward: Callable[..., Any], head: nn.Module) -> Callable[..., Any]:
    """`forward` of the backbone of `head`, giving zeros for every token but those that the head reads.

    What a graph that is traced of it computes for them is left out by `leave_out`. Returns `forward` itself where it is
    not known which tokens the head reads.
    """
    config: Any = getattr(head, "config", None)
    pad_id: int | None = config.get_text_config().pad_token_id if _reads_last_tokens(head) else None
    if pad_id is None:
        return forward

    def reading(*args: Any, **kwargs: Any) -> Any:
        ids = args[0] if args else kwargs.get("input_ids")
        if ids is None:
            return forward(*args, **kwargs)
        chosen = last_real(ids, pad_id)  # first, for use anywhere in the graph
        output = forward(*args, **kwargs)
        hidden = getattr(output, "last_hidden_state", None)
        if hidden is not None and hidden.shape[:-1] == chosen.shape:  # not with tokens that the model adds
            output.last_hidden_state = only_at(hidden, chosen)
        return output

    return reading


def _reads_last_tokens(head: Any) -> bool:
    """Whether `head` scores each token by itself and then takes the score of the last real one."""
    from transformers.modeling_layers import GenericForSequenceClassification as Known

    if not isinstance(head, Known) or type(head).forward is not Known.forward or "forward" in vars(head):
        return False
    return all(_scores_by_token(module) for module in head.score.modules())


def _scores_by_token(module: nn.Module) -> bool:
    """Whether `module` takes each token by itself, or calls only modules that are asked in turn."""
    known_kind = type(module) in _SCORING or type(module).__module__.partition(".")[0] == "peft"
    return known_kind and "forward" not in vars(module)


def last_real(ids: torch.Tensor, pad_id: int) -> torch.Tensor:
    """bool [rows, length]: True at each row's last token that is not padding, as transformers finds it."""
    places = torch.arange(ids.shape[1], device=ids.device, dtype=torch.int32)
    last = (places * (ids != pad_id)).argmax(-1)
    return places == last[:, None]


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def only_at(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """`x` [rows, length, size] where `chosen` [rows, length] says, and 0 elsewhere."""
    return torch.where(chosen[..., None], x, 0)


def picked(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """[rows, 1, size]: the one token of each row of `x` that is `chosen`, as it is, in the type of `x`."""
    one: torch.Tensor = only_at(x, chosen).sum(1, keepdim=True, dtype=x.dtype)  # autocast would sum in fp32
    return one


def leave_out(graph: Graph) -> None:
    """Have what only leads to `only_at` computed for the chosen tokens alone.

    Not where something is written in place, or where gradients are switched on or off on the way: a token is picked
    once, before its first use.
    """
    for end in calls_of(graph, only_at):
        hidden, chosen = end.args
        spared = _leading_to(end, hidden)
        read = dict.fromkeys(each for node in spared for each in node.all_input_nodes if each not in spared)
        sources = [each for each in read if known(each) and value_of(each).dim() == 3]  # rows, tokens, values
        if unwritten(*spared, *sources) and not _switches(graph, spared, end):
            for source in sources:
                _pick(source, spared, chosen)


def _leading_to(end: Node, last: Any) -> dict[Node, None]:
    """The nodes, in order, whose values are used for `end` alone and that take each token by itself."""
    found: dict[Node, None] = {}
    for node in reversed(list(end.graph.nodes)):
        mine = node is last or node.users
        if mine and all(user in found or user is end for user in node.users) and _by_token(node):
            found[node] = None
    return dict.fromkeys(reversed(found))


def _by_token(node: Node) -> bool:
    target = node.target in (_BY_TOKEN if node.op == "call_function" else _BY_TOKEN_METHODS)
    if not target or node.op not in ("call_function", "call_method"):
        return False
    if not known(node) or value_of(node).dim() != 3:
        return False
    if node.target == "mean":
        return given_to(node, "self", "dim").get("dim") in (-1, [-1], (-1,))
    return node.target not in _NORMS or len(given_to(node, "input", "normalized_shape")["normalized_shape"]) == 1


def _switches(graph: Graph, spared: dict[Node, None], end: Node) -> bool:
    """Whether gradients are switched on or off between the first of `spared` and `end`."""
    order = list(graph.nodes)
    between = order[order.index(next(iter(spared))) : order.index(end)] if spared else []
    return any(getattr(node.target, "__name__", "") in _SWITCHES for node in between)


def _pick(source: Node, spared: dict[Node, None], chosen: Any) -> None:
    graph = source.graph
    first = next(node for node in graph.nodes if node in source.users and node in spared)
    with graph.inserting_before(first):
        new = graph.call_function(picked, (source, chosen))
    new.meta = dict(source.meta)
    for user in [user for user in source.users if user in spared]:
        user.replace_input_with(source, new)


# Dropout by a hash: a dozen integer operations a value in the place of Philox's hundred, and no mask in memory.


def drop_by_hash(graph: Graph) -> None:
    """Replace each call of dropout that draws by `hashed_dropout`, with keys from the stream that it would use."""
    found = [node for node in calls_of(graph, nn.functional.dropout) if _draws(node)]
    if not found:
        return
    with graph.inserting_before(found[0]):
        device = value_of(_dropped(found[0])[0]).device
        keys = graph.call_function(torch.ops.andon.drawn_keys.default, (len(found), device))
        own = [graph.call_function(torch.select, (keys, 0, place)) for place in range(len(found))]
    for node, key in zip(found, own, strict=True):
        x, rate = _dropped(node)  # not before: it may be a dropout that was replaced meanwhile
        replace_node(node, hashed_dropout, x, key, rate)


def _dropped(node: Node) -> tuple[Any, Any]:
    """The tensor that a call of dropout drops values of, and its rate."""
    given = given_to(node, "input", "p")
    return given["input"], given.get("p", 0.5)


def _draws(node: Node) -> bool:
    """Whether a call of dropout draws, writes nothing in place, and has no more values than can be counted."""
    given = given_to(node, "input", "p", "training", "inplace")
    x, rate = _dropped(node)
    draws = given.get("training", True) is True and isinstance(rate, float) and 0 < rate < 1
    return draws and not given.get("inplace", False) and known(x) and value_of(x).numel() < _MOST_VALUES


def hashed_dropout(x: torch.Tensor, keys: torch.Tensor, rate: float) -> torch.Tensor:
    """`x` with each value 0 with probability `rate`, else divided by 1 - rate; what is not finite stays so.

    keys: int32 [2]. The mask is a function of keys, of the place in `x` and of `rate`: a multiplicative hash of 32 bits
    with the mixing steps of MurmurHash3's finalizer (Appleby), into which the keys enter at different depths. Masks are
    each other's with places exchanged only where the second keys are equal, one pair of draws in two thousand million.
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


@library.custom_op(
    "andon::drawn_keys",
    mutates_args=(),
    schema="(int count, Device device) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
def _drawn_keys(count: int, device: torch.device) -> torch.Tensor:
    """int32 [count, 2] from the device's generator. An operation of its own: a kernel that used one would draw it anew
    for each of its values."""
    return torch.randint(_MOST_VALUES - 1, (count, 2), dtype=torch.int32, device=device)


@_drawn_keys.register_fake
def _keys_shape(count: int, device: torch.device) -> torch.Tensor:
    return torch.empty((count, 2), dtype=torch.int32, device=device)


# A frozen product with what an adapter adds to it, as one operation: the sum is made where the product already is. Made
# apart, the adapter's product is written, read and added, and backward a scaled copy of the gradient is made.


def add_in_place(graph: Graph) -> None:
    """Replace each `linear(x, weight) + scale * linear(narrow, low)` by `adapted_product`, where nothing else uses the
    first product, its weight is frozen, and both are computed when they are added, for the same gradients."""
    for total in calls_of(graph, operator.add):
        found = _adapted(total)
        if found is not None:
            replace_node(total, adapted_product, *found)


def _adapted(total: Node) -> tuple[Any, ...] | None:
    """The arguments of `adapted_product` that give `total`; None: it is another sum."""
    base: Any
    scaled: Any
    base, scaled = total.args
    if not known(base, scaled) or scaled.target is not operator.mul:
        return None
    product, scale = scaled.args
    if not known(product) or not isinstance(scale, float) or len(base.users) > 1:
        return None
    first, second = _operands(base), _operands(product)
    if first is None or second is None or value_of(first[1]).requires_grad:
        return None
    same = _alike(total, base, scaled, product, first[1]) and unwritten(base, scaled, product, first[0], second[0])
    return (*first, *second, scale) if same else None


def _alike(total: Any, base: Any, scaled: Any, product: Any, weight: Node) -> bool:
    """Whether the products are of one shape and of the type of `weight`."""
    shapes = {value_of(node).shape for node in (base, product)}
    types = {value_of(node).dtype for node in (base, scaled, product, total, weight)}
    return len(shapes) == len(types) == 1 and types.pop().is_floating_point


def _operands(node: Any) -> tuple[Node, Node] | None:
    """(input, weight) of `node`, a product without a bias that has a gradient if those have; None: it is none."""
    if node.target is not _LINEAR:
        return None
    given = given_to(node, "input", "weight", "bias")
    x, weight = given["input"], given["weight"]
    if given.get("bias") is not None or not known(x, weight):
        return None
    learns = value_of(x).requires_grad or value_of(weight).requires_grad
    plain = value_of(x).dim() > 1 and value_of(weight).dim() == 2 and value_of(node).numel() > 0
    return (x, weight) if plain and learns == value_of(node).requires_grad else None


def adapted_product(
    x: torch.Tensor, weight: torch.Tensor, narrow: torch.Tensor, low: torch.Tensor, scale: float
) -> torch.Tensor:
    """x weight' + scale * narrow low', in the type of the weight. x: [..., in]. weight: [out, in], frozen. narrow:
    [..., r]. low: [out, r]. Returns [..., out]."""
    dtype = weight.dtype
    product: torch.Tensor = torch.ops.andon.adapted_product(x.to(dtype), weight, narrow.to(dtype), low.to(dtype), scale)
    return product


@library.custom_op(
    "andon::adapted_product",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor narrow, Tensor low, float scale) -> Tensor",
)
def _add_into(
    x: torch.Tensor, weight: torch.Tensor, narrow: torch.Tensor, low: torch.Tensor, scale: float
) -> torch.Tensor:
    product = nn.functional.linear(x.flatten(0, -2), weight)
    product.addmm_(narrow.flatten(0, -2), low.t(), alpha=scale)
    return product.view(*x.shape[:-1], -1)


@_add_into.register_fake
def _product_shape(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], len(weight)))


def _keep_factors(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, weight, narrow, low, ctx.scale = inputs
    ctx.save_for_backward(weight, narrow, low)


def _product_gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    weight, narrow, low = ctx.saved_tensors
    of_x = grad @ weight if ctx.needs_input_grad[0] else None
    of_low = (grad.flatten(0, -2).t() @ narrow.flatten(0, -2)) * ctx.scale
    return of_x, None, (grad @ low) * ctx.scale, of_low, None


_add_into.register_autograd(_product_gradient, setup_context=_keep_factors)


# Rotary positions as a compiler can make good kernels of them.


def exchange_halves(graph: Graph) -> None:
    """Replace `cat((-b, a))` of a tensor's halves a and b by `exchanged_halves`, whose gradient is one too: a load in
    the place of masked ones, forward and backward."""
    for node in calls_of(graph, torch.cat):
        turned = _turned(node)
        if turned is not None:
            replace_node(node, exchanged_halves, turned)


def exchanged_halves(x: torch.Tensor) -> torch.Tensor:
    """(-b, a) for the halves (a, b) of the last dimension."""
    half = x.shape[-1] // 2
    other = x.view(*x.shape[:-1], 2, half).flip(-2).flatten(-2)
    return torch.where(torch.arange(2 * half, device=x.device) < half, -other, other)


def keep_waves(graph: Graph) -> None:
    """Have cosines and sines computed once: else each layer's kernels compute them anew, which takes longer than all
    that those kernels read and write."""
    waves = [node for name in ("cos", "sin") for node in graph.find_nodes(op="call_method", target=name)]
    waves += [node for each in (torch.cos, torch.sin) for node in graph.find_nodes(op="call_function", target=each)]
    for node in waves:
        if known(node) and not value_of(node).requires_grad:
            with graph.inserting_after(node):
                kept = graph.call_function(torch.ops.andon.kept.default, (node,))
            kept.meta = dict(node.meta)
            for user in [user for user in node.users if user is not kept]:
                user.replace_input_with(node, kept)


@library.custom_op("andon::kept", mutates_args=(), schema="(Tensor x) -> Tensor")
def _kept(x: torch.Tensor) -> torch.Tensor:
    """`x` in memory of its own; a compiler does not look into this operation."""
    return x.clone()


@_kept.register_fake
def _kept_shape(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _turned(node: Node) -> Node | None:
    """The tensor whose halves `node`, a concatenation, exchanges; None: it does something else."""
    given = given_to(node, "tensors", "dim")
    parts = given.get("tensors")
    if given.get("dim", 0) != -1 or not isinstance(parts, (list, tuple)) or len(parts) != 2 or not known(*parts):
        return None
    if parts[0].target is not operator.neg:
        return None
    upper, lower = _half_of(parts[0].args[0]), _half_of(parts[1])
    if upper is None or lower is None or upper[0] is not lower[0]:
        return None
    turned, size = upper[0], value_of(upper[0]).shape[-1]
    halves = (upper[1], lower[1]) == (slice(size // 2, None, None), slice(None, size // 2, None))
    learn = {value_of(each).requires_grad for each in (turned, *parts)}
    return turned if halves and size % 2 == 0 and len(learn) == 1 and unwritten(turned, *parts) else None


def _half_of(node: Any) -> tuple[Node, slice] | None:
    """The tensor of which `node` is `tensor[..., slice]`, and the slice."""
    if not known(node) or node.target is not operator.getitem:
        return None
    whole, index = node.args
    if not known(whole) or not isinstance(index, tuple) or len(index) != 2 or index[0] is not Ellipsis:
        return None
    return (whole, index[1]) if isinstance(index[1], slice) else None


# Causal attention by kernels of our own.


def replace_causal_attention(graph: Graph) -> None:
    """Replace causal attention that has no mask and no dropout by `causal_attention`, where that takes it."""
    for node in calls_of(graph, _SDPA):
        given = given_to(node, *_SDPA_ARGUMENTS)
        parts = [given[name] for name in _SDPA_ARGUMENTS[:3]]
        plain = given.get("attn_mask") is None and given.get("dropout_p", 0.0) == 0.0 and known(*parts)
        if not plain or given.get("is_causal") is not True or not supports(*(value_of(part) for part in parts)):
            continue
        scale = given.get("scale")
        if scale is None:
            scale = value_of(parts[0]).shape[-1] ** -0.5
        if isinstance(scale, (int, float)) and value_of(node).dtype == value_of(parts[0]).dtype:
            replace_node(node, causal_attention, *parts, float(scale))


# Nodes: the value that one was traced with, what is known of it, and another in its place.


def value_of(node: Node) -> torch.Tensor:
    """The tensor without memory that dynamo traced `node` with. For nodes that are `known`."""
    value: torch.Tensor = node.meta["example_value"]
    return value


def known(*nodes: Any) -> bool:
    """Whether all of `nodes` are nodes of which dynamo traced that they are plain tensors.

    Numbers, lists, and tensors that stand for others are not, nor what another tracer put into a graph.
    """
    values = [node.meta.get("example_value") if isinstance(node, Node) else None for node in nodes]
    return all(isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass(value) for value in values)


def unwritten(*nodes: Node) -> bool:
    """Whether nothing wrote into the values of `nodes`, which are `known`, or into what shares their memory.

    Only then is a value that is read at another place the same one. Values that were made by writing do not count.
    """
    return all(not value_of(node).is_inference() and value_of(node)._version == 0 for node in nodes)


def calls_of(graph: Graph, target: Callable[..., Any]) -> list[Node]:
    """The nodes that are calls of the function `target` and `known`."""
    return [node for node in graph.find_nodes(op="call_function", target=target) if known(node)]


def given_to(node: Node, *names: str) -> dict[str, Any]:
    """The arguments of the call `node` by name; names: those of the function's arguments, in its order."""
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def replace_node(node: Node, function: Callable[..., torch.Tensor], *args: Any) -> None:
    """Put `function(*args)` in the place of `node`, whose value it gives."""
    with node.graph.inserting_before(node):
        new = node.graph.call_function(function, args)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
