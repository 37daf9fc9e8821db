"""`andon.assert_same`: any tree of tensors and values is equal on all ranks, or who differs where."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from andon_contracts.act import Scene, violation
from andon_contracts.agree import GroupGather, own_group
from andon_contracts.digest import tensor_digest
from andon_contracts.laws.law import Judgement, Seen
from andon_contracts.laws.loop import PLACES, TREE
from andon_contracts.observe import plain
from andon_contracts.watch.exchange import WIDTH, Exchange, by_rank
from andon_contracts.watch.values import text_digest, value_digest

_LEAF = "leaf"
_SHOWN, _BEFORE, _MOST = 60, 20, 1 << 16
"""Characters of a value that are shown, those of them before the first difference, and those that are compared."""


def assert_same(
    tree: Any, *, group: dist.ProcessGroup | None = None, timeout: datetime.timedelta = datetime.timedelta(minutes=30)
) -> None:
    """Every rank has the same `tree`, to the bit. Collective.

    tree: tensors, modules, optimizers (anything with a `state_dict`), mappings, sequences and plain values, nested.
    Raises `Violation` of `trees-agree` on every rank, naming leaf, ranks in the minority and first differing element
    (of values: what each rank has; of leaves that not every rank has: which rank does),
    and `ValueError` on every rank where any rank's tree holds what cannot be compared.
    """
    leaves: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    _flatten(tree, "tree", leaves, kinds)
    exchange = Exchange(GroupGather(own_group(group, timeout), WIDTH))
    try:
        _compare(leaves, kinds, exchange)
    finally:
        exchange.close()


def _flatten(tree: Any, name: str, leaves: dict[str, Any], kinds: dict[str, str]) -> None:
    """The leaves of `tree`, and what stands at each place of it, both by the path that leads there."""
    if isinstance(tree, nn.Module | torch.optim.Optimizer):
        tree = tree.state_dict()
    if isinstance(tree, Mapping):
        kinds[name] = "mapping"
        for key, value in tree.items():
            _flatten(value, f"{name}[{key!r}]", leaves, kinds)
    elif isinstance(tree, list | tuple):
        kinds[name] = "sequence"
        for index, value in enumerate(tree):
            _flatten(value, f"{name}[{index}]", leaves, kinds)
    else:
        kinds[name] = _LEAF
        leaves[name] = tree


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


def _compare(leaves: Mapping[str, Any], kinds: Mapping[str, str], exchange: Exchange) -> None:
    digests, problem = _digests(leaves)
    told = {"problem": int(bool(problem)), "places": text_digest(list(kinds.items())), "leaves": text_digest(digests)}
    whole = exchange(0, "tree", told)
    foreign = [str(o.rank) for o in whole if o.values["problem"]]
    if foreign:
        other = f"the tree of rank {', '.join(foreign)} holds what cannot be compared; its own message says what"
        raise ValueError(f"andon.assert_same: {problem or other}")
    judgement = Judgement(TREE, Seen(whole, None))
    law = judgement.first
    if law is None:
        return
    looked: Mapping[str, Sequence[int]]
    if law is PLACES:
        looked, element = _places(kinds, exchange)
    else:
        looked = exchange.spread(0, "leaves", digests)
        odd = next(name for name, found in looked.items() if len(set(found)) > 1)
        element = _difference(leaves[odd], exchange)
    judgement.seen = replace(judgement.seen, details={law.reads[0]: looked})
    found = judgement.violation(law)
    tensors = 0 if law is PLACES else len(leaves)
    raise violation(found.clause, found.finding, Scene(exchange.world_size, element=element, tensors=tensors))


def _places(kinds: Mapping[str, str], exchange: Exchange) -> tuple[dict[str, list[int]], str]:
    """What stands at the first place that not all ranks' trees have alike, as digests by rank, and in words; where they
    have all places alike they have them in another order, which is said of the whole tree."""
    held: list[dict[str, str]] = [dict(json.loads(text)) for text in exchange.texts(0, json.dumps([*kinds.items()]))]
    places = dict.fromkeys(place for one in held for place in one)
    columns = {place: [one.get(place, "nothing") for one in held] for place in places}
    odd = {place: column for place, column in columns.items() if len(set(column)) > 1}
    if odd:
        first, column = next(iter(odd.items()))
        shown = by_rank([f"a {kind}" if kind != "nothing" else kind for kind in column])
        seen = f"{shown}; {len(odd) - 1} more places" if len(odd) > 1 else shown
    else:
        orders = [list(one) for one in held]
        column = next(list(here) for here in zip(*orders, strict=True) if len(set(here)) > 1)
        first, seen = "tree", f"the same leaves in another order: {by_rank(column)}"
    return {first: [text_digest(kind) for kind in column]}, seen


def _difference(leaf: Any, exchange: Exchange) -> str:
    """The first element in which a tensor differs, or what each rank has; "" where that looks the same."""
    is_tensor = isinstance(leaf, Tensor)
    texts = exchange.texts(0, f"{leaf.dtype} {tuple(leaf.shape)}" if is_tensor else repr(leaf)[:_MOST])
    if len(set(texts)) > 1:
        return by_rank(_around_difference(texts))
    return exchange.first_difference(0, leaf) if is_tensor else ""


def _around_difference(texts: Sequence[str]) -> list[str]:
    """Short texts as they are; of long ones what stands around the first place at which they differ."""
    if max(map(len, texts)) <= _SHOWN:
        return list(texts)
    columns = enumerate(zip(*texts, strict=False))
    same = next((place for place, here in columns if len(set(here)) > 1), min(map(len, texts)))
    start = max(0, same - _BEFORE)
    ends = ["..." if len(text) > start + _SHOWN else "" for text in texts]
    begin = "..." if start else ""
    return [f"{begin}{text[start : start + _SHOWN]}{end}" for text, end in zip(texts, ends, strict=True)]
