"""The work behind the last attention, done for the tokens that a classifier's head reads and for no other.

A decoder's head reads one token of each row, the last real one. What is computed of the other tokens after the last
layer's attention is never used; it is a thirtieth of a model of 36 layers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from andon.model.nodes import value_of

_BY_TOKEN: tuple[Any, ...] = (
    torch._C._nn.linear,
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
_DIMENSIONS = 3


def reading_last_tokens(forward: Callable[..., Any], head: nn.Module) -> Callable[..., Any]:
    """`forward` of the backbone of `head`, giving zeros for every token but those that the head reads.

    What a graph that is traced of it computes for them is left out by `leave_out`. Returns `forward` itself where it is
    not known which tokens the head reads.
    """
    from transformers.modeling_layers import GenericForSequenceClassification

    config: Any = getattr(head, "config", None)
    pad_id: int | None = getattr(config, "pad_token_id", None)
    known = isinstance(head, GenericForSequenceClassification)
    if not known or pad_id is None or type(head).forward is not GenericForSequenceClassification.forward:
        return forward

    def reading(*args: Any, **kwargs: Any) -> Any:
        chosen = last_real(args[0] if args else kwargs["input_ids"], pad_id)  # first, for use anywhere in the graph
        output = forward(*args, **kwargs)
        output.last_hidden_state = only_at(output.last_hidden_state, chosen)
        return output

    return reading


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
    """[rows, 1, size]: the one token of each row of `x` that is `chosen`, to the bit."""
    one: torch.Tensor = only_at(x, chosen).sum(1, keepdim=True)
    return one


def leave_out(graph: Graph) -> None:
    """Have what only leads to `only_at` computed for the chosen tokens alone."""
    for end in graph.find_nodes(op="call_function", target=only_at):
        hidden, chosen = end.args
        spared = _leading_to(end, hidden)
        for node in spared:
            for source in node.all_input_nodes:
                if source not in spared and value_of(source).dim() == _DIMENSIONS:
                    _pick(source, spared, chosen)


def _leading_to(end: Node, last: Node) -> dict[Node, None]:
    """The nodes, in order, whose values are used for `end` alone and that take each token by itself."""
    found: dict[Node, None] = {}
    for node in reversed(list(end.graph.nodes)):
        mine = node is last or node.users
        if mine and all(user in found or user is end for user in node.users) and _by_token(node):
            found[node] = None
    return dict.fromkeys(reversed(found))


def _by_token(node: Node) -> bool:
    known = node.target in (_BY_TOKEN if node.op == "call_function" else _BY_TOKEN_METHODS)
    if not known or node.op not in ("call_function", "call_method") or value_of(node).dim() != _DIMENSIONS:
        return False
    dims = node.args[1] if node.target == "mean" and len(node.args) > 1 else node.kwargs.get("dim", -1)
    return dims in (-1, [-1], (-1,)) or node.target != "mean"


def _pick(source: Node, spared: dict[Node, None], chosen: Any) -> None:
    graph = source.graph
    first = next(node for node in graph.nodes if node in source.users and node in spared)
    with graph.inserting_before(first):
        new = graph.call_function(picked, (source, chosen))
    new.meta = dict(source.meta)
    for user in [user for user in source.users if user in spared]:
        user.replace_input_with(source, new)
