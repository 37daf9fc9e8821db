"""Nodes of a traced graph: the value that one was traced with, what is known of it, and another in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def value_of(node: Node) -> torch.Tensor:
    """The tensor without memory that dynamo traced `node` with. For nodes that are `known`."""
    value: torch.Tensor = node.meta["example_value"]
    return value


def known(*nodes: Any) -> bool:
    """Whether all of `nodes` are nodes of which dynamo traced that they are plain tensors.

    Numbers, lists, and tensors that stand for others are not, nor what another tracer put into a graph.
    """
    return all(isinstance(node, Node) and _plain(node.meta.get("example_value")) for node in nodes)


def _plain(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass(value)


def unwritten(*nodes: Node) -> bool:
    """Whether nothing wrote into the values of `nodes`, which are `known`, or into what shares their memory.

    Only then is a value that is read at another place the same one. Values that were made by writing do not count.
    """
    return all(not value_of(node).is_inference() and value_of(node)._version == 0 for node in nodes)


def calls_of(graph: Graph, target: Callable[..., Any]) -> list[Node]:
    """The nodes that are calls of the function `target` and `known`."""
    return [node for node in graph.find_nodes(op="call_function", target=target) if known(node)]


def given_to(node: Node, *names: str) -> dict[str, Any]:
    """What the call `node` was given, by name; names: those of the function's arguments, in its order."""
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def replace_node(node: Node, function: Callable[..., torch.Tensor], *args: Any) -> None:
    """Put `function(*args)` in the place of `node`, whose value it gives."""
    with node.graph.inserting_before(node):
        new = node.graph.call_function(function, args)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
