"""`andon.assert_same`: any tree of tensors and values is equal on all ranks, or who differs where."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from andon_contracts.act import Scene, violation
from andon_contracts.agree import GroupGather
from andon_contracts.digest import tensor_digest
from andon_contracts.judge import minority
from andon_contracts.own_group import own_group
from andon_contracts.violation import Finding
from andon_contracts.watch.exchange import WIDTH, Exchange
from andon_contracts.watch.reading import plain, text_digest
from andon_contracts.watch.values import value_digest


def assert_same(
    tree: Any, *, group: dist.ProcessGroup | None = None, timeout: datetime.timedelta = datetime.timedelta(minutes=30)
) -> None:
    """Every rank has the same `tree`, to the bit. Collective.

    tree: tensors, modules, optimizers (anything with a `state_dict`), mappings, sequences and plain values, nested.
    Raises `Violation` of `trees-agree` on every rank, naming leaf, ranks in the minority and first differing element,
    and `ValueError` on every rank where any rank's tree holds what cannot be compared.
    """
    leaves: dict[str, Any] = {}
    _flatten(tree, "tree", leaves)
    exchange = Exchange(GroupGather(own_group(group, timeout), WIDTH))
    try:
        _compare(leaves, exchange)
    finally:
        exchange.close()


def _flatten(tree: Any, name: str, into: dict[str, Any]) -> None:
    if isinstance(tree, nn.Module | torch.optim.Optimizer):
        tree = tree.state_dict()
    if isinstance(tree, Mapping):
        into[f"{name} (keys)"] = list(tree)
        for key, value in tree.items():
            _flatten(value, f"{name}[{key!r}]", into)
    elif isinstance(tree, list | tuple):
        into[f"{name} (length)"] = len(tree)
        for index, value in enumerate(tree):
            _flatten(value, f"{name}[{index}]", into)
    else:
        into[name] = tree


def _digests(leaves: Mapping[str, Any]) -> tuple[dict[str, int], str]:
    """The digest of each leaf, and what cannot be compared; "" where all can."""
    try:
        return {
            name: tensor_digest(plain(leaf))
            if isinstance(leaf, Tensor) and not leaf.is_meta
            else text_digest(type(leaf).__name__, value_digest(leaf, name))
            for name, leaf in leaves.items()
        }, ""
    except ValueError as error:
        return {}, str(error)


def _compare(leaves: Mapping[str, Any], exchange: Exchange) -> None:
    digests, problem = _digests(leaves)
    told = {"problem": int(bool(problem)), "names": text_digest(list(leaves)), "leaves": text_digest(digests)}
    whole = exchange(0, "tree", told)
    foreign = [str(o.rank) for o in whole if o.values["problem"]]
    if foreign:
        other = f"the tree of rank {', '.join(foreign)} holds what cannot be compared; its own message says what"
        raise ValueError(f"andon.assert_same: {problem or other}")
    names, values = ([o.values[key] for o in whole] for key in ("names", "leaves"))
    scene = Scene(exchange.world_size)
    if len(set(names)) > 1:
        finding = Finding("the trees have different leaves", ranks=minority(names), tensor="tree")
        raise violation("trees-agree", finding, scene)
    if len(set(values)) == 1:
        return
    spread = exchange.spread(0, "leaves", digests)
    odd = [name for name, found in spread.items() if len(set(found)) > 1]
    leaf = leaves[odd[0]]
    shapes = exchange(0, "shape", {"layout": text_digest(str(getattr(leaf, "dtype", "")), getattr(leaf, "shape", ()))})
    alike = isinstance(leaf, Tensor) and len({o.values["layout"] for o in shapes}) == 1
    element = exchange.first_difference(0, leaf) if alike else None
    shown = "" if element is None else str(element)
    if not shown:
        shown = f"here: {leaf if not isinstance(leaf, Tensor) else (tuple(leaf.shape), leaf.dtype)}"
    details = tuple((name, " ".join(f"{d % (1 << 64):016x}" for d in spread[name])) for name in odd)
    finding = Finding(
        f"{len(odd)} of {len(leaves)} leaves differ", ranks=minority(spread[odd[0]]), tensor=odd[0], details=details
    )
    raise violation("trees-agree", finding, Scene(exchange.world_size, element=shown, tensors=len(leaves)))
