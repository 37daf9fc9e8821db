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

from andon.model.nodes import calls_of, given_to, known, unwritten, value_of

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
_DIMENSIONS = 3
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
        sources = list(dict.fromkeys(each for node in spared for each in _by_tokens(node) if each not in spared))
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


def _by_tokens(node: Node) -> list[Node]:
    """What `node` takes that has rows and tokens."""
    return [each for each in node.all_input_nodes if known(each) and value_of(each).dim() == _DIMENSIONS]


def _by_token(node: Node) -> bool:
    target = node.target in (_BY_TOKEN if node.op == "call_function" else _BY_TOKEN_METHODS)
    if not target or node.op not in ("call_function", "call_method"):
        return False
    if not known(node) or value_of(node).dim() != _DIMENSIONS:
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
