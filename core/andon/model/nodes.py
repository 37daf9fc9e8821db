"""Nodes of a traced graph: the value that one was traced with, and another in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node


def value_of(node: Node) -> torch.Tensor:
    """The tensor without memory that dynamo traced `node` with."""
    value: torch.Tensor = node.meta["example_value"]
    return value


def replace_node(node: Node, function: Callable[..., torch.Tensor], *args: Any) -> None:
    """Put `function(*args)` in the place of `node`, whose value it gives."""
    with node.graph.inserting_before(node):
        new = node.graph.call_function(function, args)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
