"""Bytes that compiled passes of a micro-batch need, read off the graphs that torch's compiler would turn into kernels.

What is kept for the backward pass is the compiler's own choice, so it is asked: everything but the making of kernels is
done, on tensors that have no memory. Only a few layers are traced, since all of them are alike.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from andon.fast.rewrites import given_to
from andon.model.build import backbone_of, vocabulary_head
from andon.model.compiled import rewriting_backend, traced
from andon.model.memory import rounded
from andon.model.memory_trace import batch_of, passing, traced_loss

_TRACED = (2, 3)
"""Layers that are traced; what a further one adds is the difference."""
_SDPA: Any = nn.functional.scaled_dot_product_attention
_ATTENTION_TAKES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_OWN_KERNEL = ("mm", "addmm", "bmm", "baddbmm", "convolution", "index_put", "embedding_dense_backward", "sort")
_GIVEN = ("primals", "tangents")
"""What torch's compiler calls the parameters and inputs of a graph, and the gradients that come to its backward one."""
_SAME_MEMORY = ("_unsafe_view", "reshape")


def compiled_activations(model: nn.Module, rows: int, length: int) -> int:
    """Bytes that a compiled forward and backward of `rows` rows of `length` tokens add to weights and flat buffers.

    model: hollow, with peft's wrapper or without.
    """
    count = len(_layers_of(model))
    few = [layers for layers in _TRACED if layers < count]
    if len(few) < len(_TRACED):
        return _most(model, _traced(model, rows, length))
    found = []
    for layers in few:
        with shortened(model, layers):
            found.append(_traced(model, rows, length))
    less, more = found
    further = count - few[-1]
    peak, held = more.peak + further * (more.peak - less.peak), more.held + further * (more.held - less.held)
    return _most(model, _Passes(peak, held, more.hidden))


class _Passes(NamedTuple):
    """Bytes of compiled passes. peak: the most, forward or backward. held: what they keep from the one for the other.
    hidden: what they give."""

    peak: int
    held: int
    hidden: torch.Tensor


def _most(model: nn.Module, passes: _Passes) -> int:
    """The most bytes at once with the loss, which is not compiled: next tokens need room while all else is held."""
    if vocabulary_head(model) is None:
        return passes.peak
    return max(passes.peak, passes.held + traced_loss(model, passes.hidden, "cuda"))


def _layers_of(model: nn.Module) -> nn.ModuleList:
    """The longest list of modules, which is that of the layers."""
    lists = [module for module in backbone_of(model).modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=nn.ModuleList())


@contextmanager
def shortened(model: nn.Module, layers: int) -> Iterator[None]:
    """Inside, `model` has only its first `layers` layers."""
    whole = _layers_of(model)
    kept = dict(whole._modules)
    for name in list(kept)[layers:]:
        del whole._modules[name]
    try:
        yield
    finally:
        whole._modules.update(kept)


def _traced(model: nn.Module, rows: int, length: int) -> _Passes:
    peaks: list[int] = []
    held: list[int] = []

    def weigh(graph: torch.fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
        peaks.append(peak_of(graph))
        held.append(_kept_by(graph))

        def run(given: list[Any]) -> Any:
            return graph(*given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    compile_as_on_gpu = rewriting_backend({}, inner_compile=weigh)

    def backend(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        drop_nothing_in_attention(module)
        return compile_as_on_gpu(module, inputs)

    torch._dynamo.reset()
    passes = traced(model, backend)
    try:
        with passing(model, batch_of(model, rows, length), "cuda") as given:
            hidden = passes(**given)[0]
        hidden.sum().backward()
    finally:
        torch._dynamo.reset()
    return _Passes(max(peaks), max(held), hidden.detach())


def _kept_by(graph: torch.fx.GraphModule) -> int:
    """Bytes that a graph takes of what another one made: what was kept for the backward one."""
    nodes = graph.graph.find_nodes(op="placeholder")
    return sum(_bytes_of(node.meta.get("val")) for node in nodes if not str(node.target).startswith(_GIVEN))


def drop_nothing_in_attention(module: torch.fx.GraphModule) -> None:
    """Have attention traced without dropout, which kernels of GPUs draw again backward; a CPU's keep every weight."""
    for each in module.modules():
        if isinstance(each, torch.fx.GraphModule):
            for node in each.graph.find_nodes(op="call_function", target=_SDPA):
                given = given_to(node, *_ATTENTION_TAKES)
                node.args, node.kwargs = (), {**given, "dropout_p": 0.0}
            each.recompile()


def peak_of(module: torch.fx.GraphModule) -> int:
    """The most bytes alive at once while the graph runs as kernels: its inputs count, but for parameters.

    A tensor has memory where a kernel of its own makes it or takes it, or the caller; what lies between is fused.
    """
    nodes = list(module.graph.nodes)
    stored = {node for node in nodes if _has_memory(node)}
    order = _when_made(nodes, stored)
    last: dict[Any, int] = {}
    for node in reversed(nodes):
        ends = [order[user] if user in stored or user.op == "output" else last[user] for user in node.users]
        last[node] = max(ends, default=order[node])
    changes = [0] * (len(nodes) + 1)
    for node in stored:
        size = _bytes_of(node.meta.get("val"))
        changes[order[node]] += size
        changes[last[node] + 1] -= size
    most = alive = 0
    for change in changes:
        alive += change
        most = max(most, alive)
    return most


def _when_made(nodes: Sequence[Any], stored: set[Any]) -> dict[Any, int]:
    """When each is computed: in the order of the graph, but what is fused and only returned with what it is made of.

    In the graph the latter stands last; its kernel is that of the other uses of the same values.
    """
    order: dict[Any, int] = {}
    made: dict[Any, int] = {}
    for place, node in enumerate(nodes):
        given = max((made[each] for each in node.all_input_nodes), default=place)
        kept = node in stored and node.op != "placeholder" and not _runs_alone(node) and _only_returned(node)
        order[node] = given if kept else place
        made[node] = order[node] if node in stored else given
    return order


def _only_returned(node: Any) -> bool:
    return all(user.op == "output" or (_is_view(user) and _only_returned(user)) for user in node.users)


def _has_memory(node: Any) -> bool:
    if node.op == "placeholder":
        # A parameter, as the compiler names what the model is called with; the few rows of tokens go with them.
        return not str(node.target).startswith(_GIVEN[0])
    if node.op != "call_function" or _is_view(node):
        return False
    return _runs_alone(node) or any(_needs_memory(user) for user in node.users)


def _needs_memory(node: Any) -> bool:
    if node.op == "output" or _runs_alone(node):
        return True
    return _is_view(node) and any(_needs_memory(user) for user in node.users)


def _runs_alone(node: Any) -> bool:
    name = _name_of(node)
    return name in _OWN_KERNEL or "attention" in name or getattr(node.target, "namespace", "") == "andon"


def _is_view(node: Any) -> bool:
    if node.target is operator.getitem:
        return False
    return bool(getattr(node.target, "is_view", False)) or _name_of(node) in _SAME_MEMORY


def _name_of(node: Any) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return "" if packet is None else str(packet.__name__)


def _bytes_of(value: object) -> int:
    """Of a tensor; a state of random numbers, which alone has no known size, is small."""
    if not isinstance(value, torch.Tensor) or not isinstance(size := value.numel() * value.element_size(), int):
        return 0
    return rounded(size)
