"""Dropout by a hash: a dozen integer operations a value in the place of Philox's hundred, and no mask in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import library, nn
from torch.fx import Graph, Node

from andon.model.nodes import calls_of, given_to, known, replace_node, value_of

_MOST = 2**31
"""Places that 32 bits count."""


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
    """What a call of dropout drops values of, and its rate."""
    given = given_to(node, "input", "p")
    return given["input"], given.get("p", 0.5)


def _draws(node: Node) -> bool:
    """Whether a call of dropout draws, writes nothing in place, and has no more values than can be counted."""
    given = given_to(node, "input", "p", "training", "inplace")
    x, rate = _dropped(node)
    draws = given.get("training", True) is True and isinstance(rate, float) and 0 < rate < 1
    return draws and not given.get("inplace", False) and known(x) and value_of(x).numel() < _MOST


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
    return torch.randint(_MOST - 1, (count, 2), dtype=torch.int32, device=device)


@_drawn_keys.register_fake
def _keys_shape(count: int, device: torch.device) -> torch.Tensor:
    return torch.empty((count, 2), dtype=torch.int32, device=device)
