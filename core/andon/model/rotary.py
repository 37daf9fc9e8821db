"""Rotary positions as a compiler can make good kernels of them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import library
from torch.fx import Graph, Node

from andon.model.nodes import calls_of, given_to, known, replace_node, unwritten, value_of


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
    """What `node`, a concatenation, turns by exchanging its halves; None: it does something else."""
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
